"""Second moments of the inputs of a layer, which determine the constraint of CertViT.

For rows x_t (tokens, or unfolded patches of a convolution) and a change D of the weight matrix,
Σ_t ‖D x_t‖² = tr(D S Dᵀ) with S = Σ_t x_t x_tᵀ. S is an M × M matrix in float64 for any number of images. So one pass
with forward hooks is enough, and the moments of several processes are added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.inputs.processes import Processes
from lipcert.model import evaluating
from lipcert.norms import Geometry
from lipcert.surgery import L2Attention

_PANEL = 384  # columns
_CHUNK_BYTES = 64 << 20  # activations are converted to float64 in pieces of at most this size

BatchProgress = Callable[[int, int, int], object]
Holder = nn.Linear | nn.Conv2d | L2Attention


@dataclass
class Moments:
    """S = Σ_t x_t x_tᵀ of the inputs of one layer on a set of images.

    Attributes:
        name: the module path of the layer, for messages.
        second: (G, M, M) float64, symmetric; one matrix for each group of a grouped convolution, otherwise G = 1.
            M is in_features, or in_channels / groups · kernel height · kernel width.
        rows: the number of rows x_t, over all processes after :meth:`all_reduce`.
    """

    name: str
    second: Tensor
    rows: int = 0

    def add(self, rows: Tensor) -> None:
        """Adds the rows of a (G, T, M) stack."""
        if not torch.isfinite(rows).all():
            raise InputError(f"the inputs of layer {self.name} are NaN or infinite; check the weights and the images")
        groups, count, width = rows.shape
        for piece in rows.split(max(1, _CHUNK_BYTES // (8 * groups * width)), dim=1):
            x = piece.to(self.second.device, torch.float64)
            for start in range(0, width, _PANEL):  # the upper triangle of blocks; the lower one is copied from it
                stop = start + _PANEL
                product = x[:, :, start:stop].mT @ x[:, :, start:]
                self.second[:, start:stop, start:] += product
                self.second[:, stop:, start:stop] += product[:, :, _PANEL:].mT
        self.rows += count

    def require_rows(self) -> None:
        """Checks that at least one row was added."""
        if not self.rows:
            raise InputError(f"layer {self.name} saw no images; give at least one batch that is not empty")

    def all_reduce(self) -> None:
        """Adds the moments of all processes, in place: each calls it for the same layers in the same order."""
        processes = Processes.connected()
        processes.add_up(self.second)
        self.rows = sum(processes.gather(self.rows))

    @property
    def groups(self) -> int:
        return self.second.shape[0]

    @property
    def width(self) -> int:
        """M, the number of inputs to one output."""
        return self.second.shape[-1]

    def energy(self, matrix: Tensor) -> float:
        """tr(A S Aᵀ) = Σ_t ‖A x_t‖² for A of shape (O, M); with G groups, each block of O / G rows has its own S."""
        return energy(matrix.to(self.second).reshape(self.groups, -1, self.width), self.second)


def energy(matrix: Tensor, second: Tensor) -> float:
    """tr(A S Aᵀ), summed over a stack of matrices."""
    return max(0.0, float(((matrix @ second) * matrix).sum()))


def pooled(parts: Sequence[Moments]) -> Moments:
    """The moments of all rows of a layer, from those of disjoint parts."""
    if len(parts) == 1:
        return parts[0]
    total = sum((part.second for part in parts[1:]), parts[0].second)
    return Moments(parts[0].name, total, sum(part.rows for part in parts))


def stream(
    model: nn.Module,
    batches: Iterable[Tensor],
    layers: Mapping[str, Holder],
    *,
    max_bytes: int = 2 << 30,
    progress: BatchProgress | None = None,
) -> Iterator[dict[str, Moments]]:
    """Yields the moments of one group of layers after the other, each group from one pass over the images.

    A pass keeps at most ``max_bytes`` of moments on the device of the activations. A caller that drops each group after
    use never needs more memory. The model runs in evaluation mode without gradients. With torch.distributed
    initialised, each process passes its own share of the images, and all receive the sum.
    """
    groups = _grouped(layers, max_bytes)
    if len(groups) > 1 and iter(batches) is batches:
        raise InputError(
            f"the moments need {len(groups)} passes over the images but the batches can be read once only; "
            "give a list or a DataLoader, or raise max_bytes"
        )
    for number, group in enumerate(groups, start=1):
        collected = _one_pass(
            model, batches, group, None if progress is None else partial(progress, number, len(groups))
        )
        for name, moments in collected.items():
            if not moments.rows:
                raise InputError(f"the model never calls layer {name} on these images; leave it out")
        yield collected


def grouping(module: Holder) -> tuple[int, int]:
    """The number of groups of a layer, each with a matrix of its own, and the number of inputs of one."""
    if isinstance(module, L2Attention):
        return module.num_heads, module.dim
    return module.groups if isinstance(module, nn.Conv2d) else 1, module.weight[0].numel()


def _grouped(layers: Mapping[str, Holder], max_bytes: int) -> list[dict[str, Holder]]:
    groups: list[dict[str, Holder]] = []
    room = 0
    for name, module in layers.items():
        count, width = grouping(module)
        size = 8 * count * width * width
        if size > max_bytes:
            raise InputError(f"the moments of layer {name} alone need {size:,} bytes; raise max_bytes ({max_bytes:,})")
        if not groups or size > room:
            groups.append({})
            room = max_bytes
        groups[-1][name] = module
        room -= size
    return groups


def _empty(name: str, module: Holder) -> Moments:
    device = (module.q if isinstance(module, L2Attention) else module).weight.device
    groups, width = grouping(module)
    if isinstance(module, L2Attention):
        width = module.head_dim
    place = "cpu" if device.type == "mps" else device  # Apple's GPUs have no float64
    return Moments(name, torch.zeros(groups, width, width, dtype=torch.float64, device=place))


@contextlib.contextmanager
def _watching(layers: Mapping[str, Holder], see: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Calls ``see(path, rows)`` with the rows (G, T, M) that a layer multiplies, in parts, whenever it runs.

    The values of L2 attention multiply u = Σ_j P_ij y_j W_hᵀ/√d in head h. They are seen as v = Σ_j P_ij y_j, whose
    dimension is that of a head.
    """
    with contextlib.ExitStack() as stack:
        for name, module in layers.items():
            if isinstance(module, L2Attention):
                module.attend = _value_hook(name, module, see)  # type: ignore[method-assign]
                stack.callback(vars(module).pop, "attend")
            else:
                stack.enter_context(module.register_forward_hook(_hook(name, see)))
        yield


def _value_hook(name: str, module: L2Attention, see: Callable[[str, Tensor], object]) -> Callable[..., Tensor]:
    plain = module.attend

    def attend(x: Tensor, bias: Tensor | None = None) -> Tensor:
        size = max(1, _CHUNK_BYTES // (8 * module.num_heads * x.shape[1] * (x.shape[1] + module.head_dim)))
        each = bias is not None and bias.dim() == 4 and len(bias) == len(x)  # of the sets of tokens
        shifts = bias.split(size) if each and bias is not None else repeat(bias)
        for part, shift in zip(x.split(size), shifts, strict=False):
            see(name, module.mixed(part, shift).transpose(0, 1).flatten(1, 2))
        return plain(x, bias)

    return attend


def _hook(name: str, see: Callable[[str, Tensor], object]) -> Callable[..., None]:
    def show(module: nn.Linear | nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Linear):
            see(name, inputs[0].reshape(1, -1, module.in_features))
            return
        per_image = max(1, 8 * output[0, 0].numel() * module.weight[0].numel() * module.groups)
        for part in inputs[0].split(max(1, _CHUNK_BYTES // per_image)):
            see(name, _patches(module, part))

    return show


def _patches(module: nn.Conv2d, images: Tensor) -> Tensor:
    """The rows that a convolution's weight matrix multiplies: (N, C, H, W) → (G, N · positions, C / G · kh · kw)."""
    columns = F.unfold(Geometry.of_module(module).pad(images), module.kernel_size, module.dilation, 0, module.stride)
    count, _, positions = columns.shape
    split = columns.reshape(count, module.groups, -1, positions)
    return split.permute(1, 0, 3, 2).reshape(module.groups, count * positions, -1)


def _one_pass(
    model: nn.Module, batches: Iterable[Tensor], layers: dict[str, Holder], progress: Callable[[int], object] | None
) -> dict[str, Moments]:
    moments = {name: _empty(name, module) for name, module in layers.items()}
    processes = Processes.connected()
    images = 0
    watch = _watching(layers, lambda name, rows: moments[name].add(rows))
    with processes.together(), evaluating(model), torch.no_grad(), watch:
        for batch in batches:
            if not len(batch):
                continue
            model(batch)
            images += len(batch)
            if progress is not None:
                progress(images)
    if not sum(processes.gather(images)):
        raise InputError("no images to collect moments from; give batches of at least as many images as mini-batches")
    for name, module in layers.items():
        if isinstance(module, L2Attention):
            # u = v W_hᵀ/√d, see _watching.
            queries = module.q.weight.detach().unflatten(0, (module.num_heads, -1))
            factor = (queries * module.scale).to(moments[name].second)
            moments[name].second = factor.mT @ moments[name].second @ factor
        moments[name].all_reduce()
        moments[name].second = moments[name].second.cpu()
    return moments
