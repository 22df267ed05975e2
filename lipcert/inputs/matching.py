"""Copies stored weights into a network: by their names, or as timm's own filter for checkpoints says."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.errors import LoadError, as_given, counted
from lipcert.inputs.files import File, listing
from lipcert.inputs.recorded import pair_of
from lipcert.model import unusable

# Tensors that tools add to a state dict and that no network reads.
_ADDED = ("total_ops", "total_params", "n_averaged", "_extra_state")
_UNUSED = "num_batches_tracked"  # of batch normalisation, in training alone
# Names that tell that the stored weights are not those of the network, and what to do.
_DERIVED = (
    (r"lora_|\.base_layer\.", "holds LoRA adapters; merge them first by merge_and_unload() of peft, and save that"),
    (
        r"_packed_params|zero_point|absmax|quant_map|(weight|input)_scale|scale_(weight|input)|\.q(weight|zeros)|"
        r"weight\._(data|scale)|\.SCB$|\.W_q$",
        "holds quantised weights with their scales; give those that they were made of",
    ),
)
# Names of tensors that timm's networks do not have, and what to do.
_FOREIGN = (
    (r"\.parametrizations\.|weight_(g|v|orig|mask)$", "remove weight norm, spectral norm, pruning or the like first"),
    (r"\.aux_bn\.", "its split batch normalisation is for training alone; save it without tensors of aux_bn"),
    (r"(^|[._])reparam", "its branches were fused, as by reparameterize_model; give the weights from before that"),
)
_MADE = "build the network with them in Python, and give lipcert.load the module"
_FILTERS = ("checkpoint_filter_fn", "_filter_fn", "_filter_torchvision_pretrained")  # of timm, for names of others
# What has as many entries as an image has channels, and is not in front of a network.
_BESIDE = re.compile(
    r"(?:^|[._])(?:criterion|loss|metrics?|acc|accuracy|confmat|queue|temperature|class_weights?|teacher|momentum|ema"
    r"|target)(?:[._]|$)"
)
_REALS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))  # of 8 bits are scaled elsewhere


def load_weights(
    net: nn.Module, state: Mapping[str, Tensor], *, file: File, name: str, new_head: bool = False, channels: int = 0
) -> dict[str, list[float]]:
    """Copies a state dict into a network, by names, up to a prefix that they share; else as timm's own filter says.

    With ``new_head`` a classifier that is missing, or for another number of classes, is set to zero, and a warning says
    so. From zero, the first updates train it alone: a random one, with large gradients, destroys what the other layers
    have learned (Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, appendix B.1.1). Returns ``mean``
    and ``std``, if the file has a normaliser besides the network. With ``channels``, the number of those of an image,
    other tensors that may change pixels before the network are refused.
    """
    tensors = net.state_dict()
    plain = {key.replace(".module.", "."): key for key in state}  # without DataParallel around parts
    if len(plain) == len(state) and plain.keys() != state.keys() and not any(".module." in key for key in tensors):
        state = {key: state[stored] for key, stored in plain.items()}
    for pattern, problem in _DERIVED:
        if any(re.search(pattern, key) for key in state if key not in tensors):
            raise LoadError(f"{file} {problem}")
    heads_at = getattr(net, "pretrained_cfg", {}).get("classifier") or ()
    places = tuple(f"{place}." for place in ([heads_at] if isinstance(heads_at, str) else heads_at))
    needed = [key for key in tensors if not key.endswith(_UNUSED) and not key.startswith(places)]
    prefix = _prefix(state, needed, file)
    found = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    outside = [key for key in state if not key.startswith(prefix)]
    if not _fits(found, state, tensors):
        renamed = _by_timm(net, {key: state[place] for key, place in found.items()})
        if renamed is not None:
            filtered, how = renamed
            warnings.warn(f"{file}: {how}", stacklevel=2)
            pixels_of = {key: state[key] for key in outside}
            state, found = {**filtered, **pixels_of}, {key: key for key in filtered}
    difference = _Difference(tensors, state, found, outside, places)
    if difference.reasons(prefix) and not (difference.only_heads and new_head):
        reasons = "; ".join(difference.reasons(prefix))
        raise LoadError(f"{file} does not fit {name}: {reasons}; {difference.remedy()}")
    heads, shapes = difference.heads, difference.shapes
    with torch.no_grad():
        for key, value in tensors.items():  # one by one, so that not all tensors of the file are in memory at once
            if key in heads:
                value.zero_()
            elif key in found:
                value.copy_(state[found[key]])
    for key in sorted(key for key in heads if key.endswith("weight")):
        what = f"is for {shapes[key][0][0]} classes" if key in shapes else "is missing"
        warnings.warn(f"{file}: {key} {what}, and the model has {len(tensors[key])}: it starts at zero", stacklevel=2)
    check_finite(net, str(file))
    return _normaliser(state, outside, prefix, file, channels)


@dataclass
class _Difference:
    """The differences between stored tensors and those of a network, of which each is ``found`` under another name."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    found: Mapping[str, str]
    outside: list[str]
    places: tuple[str, ...]

    def __post_init__(self) -> None:
        tensors, state, found = self.tensors, self.state, self.found
        counted = [key for key in tensors if not key.endswith(_UNUSED)]
        self.extra = [key for key in found if key not in tensors and key.rpartition(".")[2] not in _ADDED]
        self.missing = [key for key in counted if key not in found]
        self.shapes = {k: (tuple(state[found[k]].shape), tuple(tensors[k].shape)) for k in tensors if k in found}
        self.other = [key for key, (stored, built) in self.shapes.items() if stored != built]
        self.kinds = [
            f"{key} holds {state[found[key]].dtype} and not numbers like the model's {tensors[key].dtype}"
            for key in counted
            if key in found and (state[found[key]].dtype in _REALS) != tensors[key].is_floating_point()
        ]
        # Classifiers that are missing, or for another number of classes.
        resized = [key for key in self.other if self.shapes[key][0][1:] == self.shapes[key][1][1:]]
        self.heads = {key for key in (*resized, *self.missing) if key.startswith(self.places)}

    @property
    def only_heads(self) -> bool:
        """Whether nothing differs but classifiers."""
        return bool(self.heads) and self.heads == {*self.other, *self.missing} and not (self.extra or self.kinds)

    def reasons(self, prefix: str) -> list[str]:
        """Why the tensors do not fit; none where they do."""
        shapes = [
            f"{key} is {self.shapes[key][0]} in the file and {self.shapes[key][1]} in the model" for key in self.other
        ]
        first = [_listed("missing", self.missing), _listed("too many", self.extra), *shapes[:1], *self.kinds[:1]]
        reasons = [*filter(None, first)]
        return [*reasons, _listed(f"outside {prefix}", self.outside)] if reasons and self.outside else reasons

    def remedy(self) -> str:
        """What to do about tensors that do not fit."""
        tensors, found, extra, missing, heads = self.tensors, self.found, self.extra, self.missing, self.heads
        classifier = [key for key in extra or heads if key.startswith(self.places) and key in found]
        built_without = extra == classifier and not any(key.startswith(self.places) for key in tensors)
        if classifier and (built_without or (self.only_heads and not missing)):
            count = len(self.state[found[classifier[0]]])
            return "give " + as_given(f"num_classes={count}", f"--model-args num_classes={count}")
        if self.only_heads:
            shapes = Counter(self.state[key].shape for key in self.outside)
            if not Counter(tensors[key].shape for key in heads) - shapes:
                return "its classifier has another name than the model's: rename it"
            train = "train one by finetune, with " + as_given("num_classes=N", "--model-args num_classes=N")
            if any(self.state[key].dim() == 2 for key in self.outside):
                return f"if the other tensors are its classifier, {_MADE}; if it has none, {train}"
            return f"it is a backbone without a classifier; {train}"
        for names, text in _FOREIGN:
            if any(re.search(names, key) for key in extra):
                return text
        if 4 * len(found.keys() & tensors.keys()) < len(tensors):
            return "its names are those of another network or library; give its timm name, or lipcert.load its module"
        if classifier and {*missing} <= heads:
            return f"its classifier has other layers: {_MADE}; or save it without them, and train one by finetune"
        if missing and {*missing} <= heads:
            return "it has no classifier; save it without those that are too many, and train one by finetune"
        if self.kinds:
            return "quantised weights are not read; give those that they were made of"
        first = next((self.shapes[key] for key in self.other), ((), ()))
        if len(self.other) == 1 and not (missing or extra) and first[1][1:] == (3, *first[0][2:]):
            return "give " + as_given(f"in_chans={first[0][1]}", f"--model-args in_chans={first[0][1]}")
        return "give the timm name and arguments it was made with"


def _fits(found: Mapping[str, str], state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    """Whether all tensors have names of the network, and positions their size."""
    known = all(key in tensors or key.rpartition(".")[2] in _ADDED for key in found)
    positions = [key for key in tensors if key in found and _is_position(key)]
    return known and all(state[found[key]].shape == tensors[key].shape for key in positions)


def _is_position(key: str) -> bool:
    """Whether timm resizes a tensor of this name to another size of images."""
    return any(word in key for word in ("pos_embed", "rel_pos", "relative_position"))


def _prefix(state: Mapping[str, Tensor], needed: list[str], file: File) -> str:
    """The prefix below which the file has all tensors of the network; "" where there is none."""
    if not needed or all(key in state for key in needed):
        return ""
    first = needed[0]
    prefixes = [key[: -len(first)] for key in state if key.endswith(f".{first}")]
    fitting = [prefix for prefix in prefixes if all(prefix + key in state for key in needed)]
    fitting.sort(key=len)
    for other in fitting[1:]:
        if any(not torch.equal(state[fitting[0] + key], state[other + key]) for key in needed):
            raise LoadError(f"{file} holds several networks, under {fitting[0]} and {other}; save that of one of them")
    return fitting[0] if fitting else ""


def _by_timm(net: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str] | None:
    """The state dict by timm's filter, of the same numbers but for resized positions, and what it did; or None."""
    module = sys.modules[type(net).__module__]
    rename: Any = next((value for name in _FILTERS if (value := getattr(module, name, None)) is not None), None)
    try:
        more = [net][: len(inspect.signature(rename).parameters) - 1]
        renamed = rename(dict(state), *more)
        turned = rename(dict(reversed([*state.items()])), *more)  # some filters go by the order, which may be another
    except Exception:  # none, or for another kind of checkpoint
        return None
    same = renamed.keys() == turned.keys() and all(torch.equal(value, turned[key]) for key, value in renamed.items())
    if not same or not renamed or not renamed.keys() <= net.state_dict().keys():
        return None

    def numbers(tensors: Mapping[str, Tensor], *positions: bool) -> Counter[int]:
        counted = (value for key, value in tensors.items() if _is_position(key) in positions)
        return Counter(value.numel() for value in counted if value.any())  # a bias that a filter adds is zero

    if numbers(renamed, False) - numbers(state, False):
        return None
    did = [] if renamed.keys() <= state.keys() else ["its names are not timm's, and timm's filter knows them"]
    if numbers(renamed, True) - numbers(state, True, False):
        did.append("timm's filter resized its position embeddings to the model's size of images")
    if len(renamed) < len(state):
        did.append(f"{len(state) - len(renamed)} tensors are left out")
    return renamed, "; ".join(did)


def _normaliser(
    state: Mapping[str, Tensor], outside: Sequence[str], prefix: str, file: File, channels: int
) -> dict[str, list[float]]:
    """Mean and standard deviation of a module that normalises pixels; says which tensors outside are left out."""
    pixels: dict[str, list[float]] = {}
    used = pair_of([key for key in outside if state[key].numel() in (1, 3)]) or ()
    if used:
        pixels = {name: state[key].flatten().tolist() for name, key in zip(("mean", "std"), used, strict=True)}
        numbers = "; ".join(f"{key} {', '.join(f'{x:.6g}' for x in value)}" for key, value in pixels.items())
        warnings.warn(f"{file}: the normalisation is that of {' and '.join(used)} in it: {numbers}", stacklevel=3)
    unread = [key for key in outside if key not in used and key.rpartition(".")[2] not in _ADDED]
    inside = {key.removeprefix(prefix) for key in state if key.startswith(prefix)} - {"weight", "bias"}
    for key in unread if channels and not used else ():
        if any(key.endswith(f".{name}") for name in inside):
            continue  # of another such network, as a teacher
        weight = re.sub("bias$", "weight", key)  # a bias is told by its weight
        value = state[weight if weight in state else key]
        from_pixels = value.numel() == channels or (value.dim() > 1 and value.shape[1] == channels)
        if from_pixels and value.is_floating_point() and not _BESIDE.search(key):
            raise LoadError(
                f"{file}: {key}, outside {prefix}, may change pixels before the network; give the normalisation that "
                f"was used, {as_given('mean=')} and {as_given('std=')}, or the whole network as a module in Python"
            )
    if unread:
        warnings.warn(f"{file}: {_listed(f'outside {prefix} left out', unread)}", stacklevel=3)
    return pixels


def check_finite(net: nn.Module, origin: str) -> None:
    """Refuses weights that hold NaN or infinity; names the first tensor."""
    if (problem := unusable(net)) is not None:
        raise LoadError(f"{origin}: {problem}; a model with such weights cannot be certified")


def _listed(what: str, names: list[str]) -> str:
    """How many tensors are missing, for example, and the first ones; "" without any."""
    return f"{counted(len(names), 'tensor')} {what} ({listing(names)})" if names else ""
