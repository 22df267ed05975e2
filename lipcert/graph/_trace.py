"""The identity of a network's code, from a run on example images, and the kind of its outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from lipcert.errors import InputError
from lipcert.graph._operations import OF_CLASSES, OF_LABELS, PASSING, PRODUCTS, SQUASHING, canonical
from lipcert.graph._witness import examples
from lipcert.numerics import without_autocast

if TYPE_CHECKING:
    from lipcert.model import Model

ONE_LOGIT = "the one logit z counts as the two logits [0, z], for the labels 0 and 1"


class Trace(TorchFunctionMode):
    """Records the operations of a run: names, sizes, numbers, and tensors that are neither weights nor computed.

    Calls of torch's Python interface do not depend on the machine or the device, and neither does the digest: weights
    count by their numbers, and what the code computes by the operations that compute it.

    Attributes:
        digest: SHA-256 of the operations so far.
        squashed: the operation with a bounded range that was called since the last product with weights; "" for none.
    """

    def __init__(self, identified: Sequence[Tensor]):
        super().__init__()
        self.digest, self.squashed = hashlib.sha256(), ""
        self._known: dict[int, tuple[Any, str, int]] = {id(x): (x, "", number) for number, x in enumerate(identified)}
        self._count = len(identified)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(function) or getattr(function, "__qualname__", repr(type(function)))
        self.digest.update(f"{name}({self._described((args, kwargs))})\n".encode())
        result = function(*args, **kwargs)
        op = canonical(function)
        if op in PRODUCTS:
            self.squashed = ""
        elif op in SQUASHING:
            self.squashed = str(op)
        maker = self.maker(args[0]) if op in PASSING and args else op if isinstance(op, str) else name
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, Tensor):
                self._count += 1
                self._known[id(part)] = part, maker, self._count
        return result

    def maker(self, tensor: Any) -> str:
        """The name of the operation that computed a tensor, apart from those that only move entries."""
        return self._known.get(id(tensor), (None, ""))[1]

    def _described(self, tree: Any) -> str:
        if isinstance(tree, Tensor):
            known = self._known.get(id(tree))
            content = hashlib.sha256(_content(tree)).hexdigest() if known is None else known[2]
            return f"{tuple(tree.shape)} {tree.dtype} {content}"
        if isinstance(tree, np.ndarray):
            return f"{tree.shape} {tree.dtype} {hashlib.sha256(np.ascontiguousarray(tree).tobytes()).hexdigest()}"
        if isinstance(tree, (tuple, list)):
            return f"[{', '.join(map(self._described, tree))}]"
        if isinstance(tree, Mapping):
            return f"{{{', '.join(f'{key}: {self._described(tree[key])}' for key in sorted(tree, key=str))}}}"
        if isinstance(tree, torch.device):
            return "device"
        plain = (int, float, complex, str, bytes, slice, torch.dtype, torch.memory_format, type(None), type(Ellipsis))
        return repr(tree) if isinstance(tree, plain) else type(tree).__qualname__


def _content(tensor: Tensor) -> bytes:
    """The bytes of a tensor's entries; of tensors in other layouts, such as sparse ones, their text."""
    try:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError):
        return repr(tensor).encode()


@torch.no_grad()
def identity_of_code(model: Model) -> tuple[str, list[list[float]]]:
    """The identity of a model's code, weights aside: what it does on fixed example images."""
    start = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0))
    digest, logits = hashlib.sha256(), []
    for image in examples(start.to(model.device, model.dtype)):
        with without_autocast(model.device), _tracing(model, image) as trace:
            result = model(image)
        digest.update(trace.digest.digest())
        logits.append(result.flatten().tolist())
    return digest.hexdigest(), logits


@torch.no_grad()
def outputs_of(model: Model) -> int:
    """The number of outputs of a model's network."""
    image = torch.full((1, *model.input_size), 0.5, dtype=model.dtype, device=model.device)
    results: list[Any] = []

    def note(_module: Any, _images: Any, result: Any) -> None:
        results[:] = result, trace.squashed  # before the model's own operations

    with model.net.register_forward_hook(note), _tracing(model, image) as trace:
        model(image)
    result, squashed = results or (None, "")
    count = result.shape[1] if isinstance(result, Tensor) and result.dim() == 2 else 0
    last = trace.maker(result)
    ends = f"it ends in {last}" if last in OF_LABELS else ""
    if count == 1 and not ends and squashed:
        with torch.no_grad():
            outputs = torch.cat([model(each)[:, 1] for each in examples(image)])
        ends = "" if outputs.min() < 0 else f"never below 0 for the example images, computed by {squashed}"
    if count == 1 and (ends or last in OF_CLASSES):
        raise InputError(
            f"the network's one output is a probability ({ends or f'it ends in {last}'}), which is positive for both "
            "classes; let the network return the logit before it, which is positive for class 1 only"
        )
    if count > 1 and (why := ends or _multi_label_config(model.net)):
        raise InputError(
            f"the network's {count} outputs are labels of which several may hold at once ({why}), so there is no "
            "single class to certify; if the classes are mutually exclusive, let the network return logits, "
            "without a sigmoid"
        )
    return count


def _multi_label_config(net: Any) -> str:
    """Where a network's configuration says that its outputs are labels; empty if it does not."""
    for name in ("config", "pretrained_cfg", "default_cfg"):
        config = getattr(net, name, None)
        kind = config.get("problem_type") if isinstance(config, Mapping) else getattr(config, "problem_type", None)
        if kind == "multi_label_classification":
            return f"its {name} names the problem type {kind}"
    return ""


def _tracing(model: Model, image: Tensor) -> Trace:
    return Trace((image, model.mean, model.std, *model.parameters(), *model.buffers()))
