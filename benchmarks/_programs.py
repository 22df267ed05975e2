"""Forward functions drawn from torch's whole tensor API, with odd arguments, as source text that runs."""

# ruff: noqa: E501
from __future__ import annotations

import inspect
import itertools
import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_testing_overrides, resolve_name

from benchmarks._snippets import AFFINE, SNIPPETS

Size = tuple[int, int, int]

_LARGEST = 3000  # entries of a value
_TRIES = 8  # arguments for one function
# What is not an operation on values, or gives memory that nobody wrote, or leaves the process in another state.
_LEFT_OUT = re.compile(
    r"quantiz|q_|int_repr|dequant|fbgemm|cudnn|miopen|mkldnn|cuda|xpu|ipu|hpu|mtia|cpu$|dlpack|storage|share_memory|pin_"
    r"|resize|\.set_|set_data|data_ptr|empty|backward|grad|hook|record_stream|module_load|__repr__|__format__|__reduce"
    r"|__deepcopy__|__setstate__|__dir__|__hash__|names|rename|align|refine|nested|_force_|observer|from_file|init\."
    r"|has_names|ctc_loss|__array__|__array_wrap|^torch\.foreach|symint|pack_padded|embedding_bag|stft$|istft$|sparse_"
    r"|_like_|is_distributed|is_pinned|__delattr|__set__|fake_|hspmm|sspaddmm|__delitem|chalf|numpy_T|__contains__"
)


# Operations that certifiers have rules for as a rule, and their other names. Seeds mean the same whatever rules there are.
_LIKELY = re.compile(
    r"abs|adaptive_avg_pool1d|adaptive_avg_pool2d|adaptive_avg_pool3d|adaptive_max_pool1d|"
    r"adaptive_max_pool2d|adaptive_max_pool3d|add|addcmul|alpha_dropout|amax|amin|avg_pool1d|avg_pool2d|"
    r"avg_pool3d|batch_norm|bfloat16|bmm|broadcast_to|cat|chunk|clamp|clip|clone|concat|concatenate|"
    r"constant_pad_nd|contiguous|conv1d|conv2d|conv3d|conv_transpose1d|conv_transpose2d|conv_transpose3d|"
    r"detach|div|divide|double|dropout|dropout1d|dropout2d|dropout3d|einsum|elu|expand|expand_as|"
    r"feature_dropout|flatten|flip|float|fold|gelu|getitem|group_norm|half|hardtanh|iadd|imul|"
    r"index_select|interpolate|ipow|isub|itruediv|layer_norm|leaky_relu|linear|logsigmoid|lstm|matmul|"
    r"max|max_pool1d|max_pool2d|max_pool3d|maximum|mean|min|minimum|mish|movedim|mul|multiply|narrow|"
    r"neg|negative|norm|normalize|pad|permute|pow|ravel|relu|relu6|repeat|repeat_interleave|reshape|"
    r"reshape_as|rms_norm|roll|rsqrt|rsub|scaled_dot_product_attention|select|setitem|sigmoid|silu|"
    r"softmax|softplus|softsign|split|split_with_sizes|sqrt|square|squeeze|stack|sub|subtract|sum|"
    r"swapaxes|swapdims|t|tanh|tensor_split|tile|to|transpose|true_divide|truediv|type|type_as|unbind|"
    r"unflatten|unfold|unsqueeze|var|vector_norm|view|view_as"
)


class Drawn(nn.Module):
    """A network whose class is the text of a program: its tensors are parameters, and ``head`` gives the logits."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        for name, value in tensors.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))


@dataclass(frozen=True)
class Program:
    """A drawn program.

    Attributes:
        source: of a class ``Net``.
        tensors: its parameters, in float64.
        size: (C, H, W) of an image.
        stratum: "rules" where operations were drawn that have rules, "api" where they were drawn from all of torch.
        parts: names of what was drawn.
    """

    source: str
    tensors: dict[str, Tensor]
    size: Size
    stratum: str
    parts: tuple[str, ...]

    def build(self) -> nn.Module:
        """The network, in float32 and evaluation mode."""
        names = dict(_NAMES)
        exec(self.source, names)
        return names["Net"]({name: value.float() for name, value in self.tensors.items()}).eval()


_NAMES: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "Tensor": Tensor, "math": math, "Drawn": Drawn}


class Draft:
    """A program on its way: every line has run on real images before it is kept."""

    def __init__(self, rng: random.Random, seed: int, size: Size):
        self.rng = rng
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)
        self.net = Drawn({})
        self.tensors: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}
        self.lines: list[str] = []
        self.parts: list[str] = []
        self.count = 1 if rng.random() < 0.15 else 3
        images = torch.rand(self.count, *size, dtype=torch.float64, generator=self.generator)
        self.env: dict[str, Any] = {**_NAMES, "self": self.net, "x": images}
        self.t = "x"
        self.values = ["x"]

    @property
    def value(self) -> Tensor:
        """What the current variable holds."""
        return self.env[self.t]

    def parameter(self, *shape: int) -> str:
        """A new parameter; it stays if the line that uses it runs."""
        name = f"p{len(self.tensors) + len(self.pending)}"
        fan = shape[-1] if shape else 1
        value = torch.randn(shape, dtype=torch.float64, generator=self.generator) / max(1, fan) ** 0.5
        self.pending[name] = value * self.rng.choice((0.5, 1, 2))
        setattr(self.net, name, nn.Parameter(self.pending[name], requires_grad=False))
        return f"self.{name}"

    # What snippets ask for.

    def number(self) -> str:
        return self.rng.choice(("0.5", "2", "-1", "0.3", "3.0", "1e-3", "-0.7", "1", "0", "10.0"))

    def small(self) -> int:
        return self.rng.choice((1, 1, 2, 2, 3))

    def threshold(self) -> str:
        return f"{self.rng.uniform(0.1, 0.95):.2f}"

    def flag(self) -> str:
        return self.rng.choice(("True", "False"))

    def dim(self) -> int:
        """An axis, seldom the images' own, often counted from the end."""
        dims = self.value.dim()
        if dims == 0:
            return self.rng.choice((0, -1))
        axis = 0 if dims == 1 or self.rng.random() < 0.07 else self.rng.randrange(1, dims)
        return axis - dims if self.rng.random() < 0.6 else axis

    def dims(self) -> str:
        """One axis or several, as text."""
        axes = sorted({self.dim() for _ in range(self.small())})
        return self.rng.choice((f"{tuple(axes)}", f"{axes}", f"{axes[0]}"))

    def vector(self) -> str:
        """A parameter along the last axis."""
        return self.parameter(*self.value.shape[-1:])

    def matrix(self, rows: int | None = None) -> str:
        """A parameter for ``F.linear``."""
        return self.parameter(rows or self.rng.randint(1, 5), *self.value.shape[-1:])

    def like(self) -> str:
        """A parameter of the shape of one image's value."""
        return self.parameter(*self.value.shape[1:])

    def other(self) -> str:
        """Another value that depends on the image, broadcastable with some luck."""
        t = self.t
        return self.rng.choice((*self.values, t, f"{t}.flip(-1)", f"{t}[..., :1]", f"{t}.roll(1, -1)", f"{t}.detach()"))

    def operand(self) -> str:
        """Anything that can stand beside the current value."""
        choice = self.rng.random()
        if choice < 0.25:
            return self.number()
        if choice < 0.5:
            return self.rng.choice((self.vector, self.like, self.parameter))()
        if choice < 0.9:
            return self.other()
        t = self.t
        return self.rng.choice(
            (f"({t} > {self.threshold()})", f"torch.ones_like({t})", "torch.tensor(0.3)", "torch.arange(1, 3)[0]",
             f"torch.zeros({t}.shape[-1], dtype=torch.int64)", f"{t}.mean()", f"{t}.to(torch.int32)", f"({t},)")
        )  # fmt: skip

    # Lines.

    def run(self, text: str, part: str) -> bool:
        """Runs one statement or several; what it assigns to ``v`` becomes the current variable.

        Returns:
            Whether it ran and gave a tensor worth going on with.
        """
        name = f"t{len(self.values)}"
        text = re.sub(r"\bv\b", name, text)
        env = dict(self.env)
        saved = {key: env[key].clone() for key in self.values}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(text, env)
                text, value = _as_values(self.rng, text, name, env, self.t)
            fine = isinstance(value, Tensor) and value.numel() <= _LARGEST and not value.is_sparse
            fine = fine and value.is_floating_point() and (bool(value.isfinite().all()) or self.rng.random() < 0.02)
        except Exception:
            fine = False
        if not fine:
            self.env.update(saved)
            self.pending.clear()
            return False
        self.env[name] = value
        self.tensors.update(self.pending)
        self.pending.clear()
        self.lines += text.splitlines()
        self.values.append(name)
        self.t = name
        self.parts.append(part)
        return True


def _as_values(rng: random.Random, text: str, name: str, env: dict[str, Any], before: str) -> tuple[str, Any]:
    """Makes a tensor of floating type of what a line gave, by another line."""
    value = env[name]

    def more(line: str) -> Any:
        nonlocal text
        text += "\n" + line
        exec(line, env)
        return env[name]

    for _ in range(3):
        if isinstance(value, (tuple, list)) and value:
            value = more(f"{name} = {name}[{rng.randrange(len(value))}]")
        elif isinstance(value, (bool, int, float)):
            value = more(rng.choice((f"{name} = {before} * {name}", f"{name} = {before} + {name}")))
        elif isinstance(value, Tensor) and value.is_complex():
            line = rng.choice(
                (f"{name} = {name}.abs()", f"{name} = {name}.real", f"{name} = torch.view_as_real({name})")
            )
            value = more(line)
        elif isinstance(value, Tensor) and not value.is_floating_point():
            value = more(rng.choice((f"{name} = {name}.to(x.dtype)", f"{name} = {name} * {before}", f"{name} = {name} * 0.5",
                                     f"{name} = torch.where({name} > 0, {before}, 0.5)")))  # fmt: skip
        else:
            break
    return text, value


@cache
def _functions() -> tuple[dict[str, inspect.Signature], tuple[str, ...]]:
    """Signatures of torch's functions by the text that calls them, and which of them are likely to have rules."""
    found: dict[str, inspect.Signature] = {}
    ruled = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function, stub in get_testing_overrides().items():
            name = resolve_name(function)
            if name is None or _LEFT_OUT.search(name):
                continue
            bare = name.split(".")[-1]
            if name.startswith("torch.Tensor") and bare.startswith("_") and not bare.startswith("__"):
                continue
            if name.endswith(".__get__"):
                found[name] = inspect.Signature()
                continue
            try:
                found[name] = inspect.signature(stub)
            except (TypeError, ValueError):
                continue
            if _LIKELY.fullmatch(bare.strip("_")):
                ruled.append(name)
    return found, tuple(ruled)


def _call(draft: Draft, name: str, signature: inspect.Signature) -> str:
    """A line that calls a function with drawn arguments."""
    t, rng = draft.t, draft.rng
    bare = name.split(".")[-1]
    if name.endswith(".__get__"):
        return f"v = {t}.{name.split('.')[-2]}"
    given: list[str] = []
    first = True
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            if parameter.kind == parameter.VAR_POSITIONAL and first:
                given += [t, draft.other()]
                first = False
            continue
        if first:
            first = False
            given.append(f"[{t}, {draft.other()}]" if parameter.name in ("tensors", "inputs") else t)
            continue
        if parameter.name == "out":
            if rng.random() < 0.06:
                given.append(f"out={draft.other()}")
            continue
        if parameter.default is not parameter.empty and rng.random() < 0.55:
            continue
        value = _argument(draft, parameter.name, bare)
        if value is None:
            continue
        keyword = parameter.kind == parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
        given.append(f"{parameter.name}={value}" if keyword else value)
    if name.startswith("torch.Tensor."):
        target, arguments = given[0] if given else t, ", ".join(given[1:])
        if bare.endswith("_") and not bare.endswith("__") and rng.random() < 0.7:
            return f"v = {target} * 1\nv.{bare}({arguments})"
        return f"v = {target}.{bare}({arguments})"
    return f"v = {name.replace('torch.nn.functional', 'F')}({', '.join(given)})"


def _argument(draft: Draft, name: str, function: str) -> str | None:
    """A value for a parameter, by its name."""
    rng, value = draft.rng, draft.value
    shape = tuple(value.shape)
    last = shape[-1] if shape else 1
    channels = shape[1] if len(shape) > 1 else last

    def index(count: int | None = None) -> str:
        return f"torch.tensor({[rng.randrange(max(1, last)) for _ in range(count or rng.randint(1, 4))]})"

    def weight() -> str:
        if "conv" in function:
            kernel = [rng.choice((1, 2, 3)) for _ in range(int(re.sub(r"\D", "", function) or 2))]
            return draft.parameter(rng.randint(1, 4), channels, *kernel)
        if "norm" in function or function == "prelu":
            return draft.parameter(last if function in ("layer_norm", "rms_norm") else channels)
        return draft.matrix()

    def size() -> str:
        numbers = list(shape)
        kind = rng.random()
        if kind < 0.3:
            return str((*numbers[:1], -1))
        if kind < 0.6:
            return str(tuple([*numbers[:1], *rng.sample(numbers[1:], len(numbers[1:]))]))
        return str(tuple([rng.choice((1, 2, -1, n)) for n in numbers]))

    pair = rng.choice((1, 2, 3, (2, 1), (1, 2), (2, 2)))
    table: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("dim", "dim0", "dim1", "dim2", "axis", "axis0", "axis1", "dimension", "start_dim", "end_dim"),
                        lambda: draft.dims() if name == "dim" and rng.random() < 0.3 else draft.dim()),
        "dims": draft.dims, "names": draft.dims, "destination": draft.dim, "source": draft.operand,
        **dict.fromkeys(("keepdim", "inplace", "ceil_mode", "count_include_pad", "descending", "stable", "sorted", "upper",
                         "largest", "accumulate", "include_self", "unbiased", "transpose", "hermitian", "return_inverse",
                         "return_counts", "align_corners", "right", "full", "log_target", "left", "include_input",
                         "with_replacement", "non_blocking", "copy", "sparse_grad", "as_tuple", "swap"), draft.flag),
        **dict.fromkeys(("training", "train", "return_indices"), lambda: rng.choice(("False", "False", "True"))),
        "dtype": lambda: rng.choice(("torch.float32", "torch.float64", "torch.float64", "torch.float16", "torch.int64")),
        "kernel_size": lambda: pair, "stride": lambda: rng.choice((1, 2, pair)), "padding": lambda: rng.choice((0, 1, 1)),
        "dilation": lambda: rng.choice((1, 2)), "output_size": lambda: rng.choice((1, 2, 3, pair)),
        "groups": lambda: rng.choice((1, 1, channels)), "num_groups": lambda: rng.choice((1, channels)),
        "eps": lambda: rng.choice(("1e-5", "0.1", "0.0", "None")), "reduction": lambda: rng.choice(("'none'", "'sum'", "'mean'")),
        "p": lambda: rng.choice(("2", "1", "float('inf')", "0.5", "3", "'fro'")), "ord": lambda: rng.choice(("2", "1", "float('inf')", "0")),
        "n": lambda: rng.choice((1, 2, 3)), "k": lambda: rng.choice((1, 2, 0, -1)), "diagonal": lambda: rng.choice((0, 1, -1)),
        "offset": lambda: rng.choice((0, 1, -1)), "size": size, "shape": size, "reps": size, "repeats": lambda: rng.choice((2, (1, 2), "torch.tensor([2])")),
        "index": lambda: rng.choice((index(), index(), index(last), f"{draft.t}.argsort(-1)", "(..., 0)", f"{draft.t} > {draft.threshold()}", 0, -1, "slice(None, 1)", "None")),
        "indices": index, "mask": lambda: rng.choice((f"{draft.t} > {draft.threshold()}", f"{draft.like()} > 0", "torch.tensor(True)")),
        "condition": lambda: rng.choice((f"{draft.t} > {draft.threshold()}", f"{draft.like()} > 0")),
        "weight": weight, "bias": lambda: "None", "normalized_shape": lambda: f"({last},)",
        "running_mean": lambda: draft.parameter(channels), "running_var": lambda: f"{draft.parameter(channels)}.abs()",
        "momentum": lambda: 0.1, "use_input_stats": draft.flag, "size_average": lambda: "None", "out_dtype": lambda: "None",
        "split_size_or_sections": lambda: rng.choice((1, 2, max(1, last - 1))), "indices_or_sections": lambda: rng.choice((1, 2, (1,), "torch.tensor([1])")),
        "chunks": draft.small, "sections": draft.small, "shifts": lambda: rng.choice((1, -1, 2)), "start": lambda: 0,
        "length": lambda: rng.choice((1, max(0, last - 1), 0)), "step": draft.small, "pad": lambda: rng.choice(((1, 1), (0, 1, 1, 0), (-1, 0), (2, 0), (0, 0, 1, 1))),
        "mode": lambda: rng.choice(("'constant'", "'reflect'", "'replicate'", "'circular'", "'nearest'", "'bilinear'", "'bicubic'", "'linear'")),
        "value": draft.operand, "fill_value": draft.operand, "scale_factor": lambda: rng.choice((2, 0.5, (1, 2))),
        "memory_format": lambda: "torch.channels_last", "rounding_mode": lambda: rng.choice(("None", "'floor'", "'trunc'")),
        "norm_type": lambda: rng.choice((1, 2, 3.0)), "generator": lambda: None, "num_classes": lambda: rng.choice((-1, 4)),
        "reduce": lambda: rng.choice(("'sum'", "'mean'", "'amax'", "'prod'", "'amin'")), "q": lambda: rng.choice((0.5, 0.25)),
        "correction": lambda: rng.choice((0, 1)), "bins": lambda: 4, "norm": lambda: rng.choice(("'ortho'", "None")), "s": lambda: "None",
        "alpha": lambda: rng.choice((1, 0.5, -2)), "beta": lambda: rng.choice((1, 0.5, 0)), "approximate": lambda: rng.choice(("'none'", "'tanh'")),
        "min": lambda: rng.choice((draft.number(), "None", draft.operand())), "max": lambda: rng.choice((draft.number(), "None", draft.operand())),
        "equation": lambda: rng.choice(("'n...->n'", "'n...d->nd'")), "_stacklevel": lambda: None, "dropout_p": lambda: 0.0,
        "upscale_factor": lambda: 2, "downscale_factor": lambda: 2, "threshold": draft.threshold, "lambd": draft.threshold,
        "callable": lambda: "lambda a, *b: a * 2", "minlength": lambda: 4, "device": lambda: "'cpu'", "layout": lambda: None,
    }  # fmt: skip
    if name in table:
        found = table[name]()
        return None if found is None else str(found)
    return draft.operand() if rng.random() < 0.9 else rng.choice(("None", "True", "1", "(1, 1)"))


def draw(seed: int) -> Program:
    """The program of a seed.

    Raises:
        RuntimeError: no line ran in many tries, which no seed is known to do.
    """
    rng = random.Random(f"program {seed}")
    stratum = rng.choice(("rules", "rules", "api", "snippets"))
    size = rng.choice(_SIZES)
    draft = Draft(rng, seed, size)
    functions, ruled = _functions()
    everything = tuple(functions)
    wanted = rng.choice((1, 1, 2, 2, 3, 4))
    if rng.random() < 0.7:
        _snippet(draft, AFFINE)
    done = 0
    for _ in itertools.count():
        if done >= wanted or _ > 60:
            break
        if stratum == "snippets" or rng.random() < 0.15:
            done += _snippet(draft, SNIPPETS)
        else:
            name = rng.choice(everything if stratum == "api" else ruled)
            for _try in range(_TRIES):
                if draft.run(_call(draft, name, functions[name]), name):
                    done += 1
                    break
        if done < wanted and rng.random() < 0.15:
            _snippet(draft, AFFINE)
    return _finished(draft, stratum)


_SIZES: tuple[Size, ...] = ((1, 3, 3), (1, 4, 4), (2, 3, 3), (3, 3, 3), (1, 4, 6), (3, 4, 4), (2, 1, 5), (1, 8, 8))


def _snippet(draft: Draft, choices: Sequence[Callable[[Draft], str]]) -> bool:
    for _ in range(_TRIES):
        which = draft.rng.choice(choices)
        try:
            text = which(draft)
        except (IndexError, ZeroDivisionError):  # it asks for axes that this value lacks
            draft.pending.clear()
            continue
        if draft.run(text, f"snippet {choices.index(which)}" if choices is SNIPPETS else "affine"):
            return True
    return False


def _finished(draft: Draft, stratum: str) -> Program:
    """Puts the head on, with classes that are about equally likely."""
    rng = draft.rng
    text = f"u = {draft.t}.reshape(x.shape[0], -1)"
    if not (draft.value.dim() and draft.value.shape[0] == draft.count):
        text = rng.choice((f"u = x.flatten(1) * {draft.t}.sum()", f"u = x.flatten(1) + {draft.t}.sum()"))
    elif draft.value.numel() == 0 or rng.random() < 0.25:
        text += "\nu = torch.cat([u, x.flatten(1)], 1)"
    env = dict(draft.env)
    exec(text, env)
    draft.lines += text.splitlines()
    features, classes = env["u"].shape[1], rng.choice((3, 4))
    weight = torch.randn(classes, features, dtype=torch.float64, generator=draft.generator) / max(1, features) ** 0.5
    logits = F.linear(env["u"].double().nan_to_num(), weight)
    used = {name: value for name, value in draft.tensors.items() if any(f"self.{name}" in line for line in draft.lines)}
    tensors = {
        **used,
        "weight": weight,
        "bias": -logits.mean(0) + 0.02 * torch.randn(classes, generator=draft.generator),
    }
    lines = [*draft.lines, "return F.linear(u, self.weight, self.bias)"]
    body = "\n".join(f"        {line}" for line in lines)
    source = f"class Net(Drawn):\n    def forward(self, x):\n{body}\n"
    return Program(source, tensors, draft.size, stratum, tuple(draft.parts))
