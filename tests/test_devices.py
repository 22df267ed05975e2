"""Models on another device: no tensor of the CPU meets theirs, and radii and weights are those of the CPU.

Where there is no GPU, a device is simulated: its tensors are wrappers around tensors of the CPU, and raise an error
where they meet one that is not on the device, as those of CUDA do.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commands import run
from modules import seeded
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lipcert
from lipcert.attacks import PGD
from lipcert.bounds._masked import Core
from lipcert.certifier import METHODS, Certifier
from lipcert.graph import Node, _intact
from lipcert.norms import (
    Ledger,
    explicit_norm,
    explicit_row_norms,
    lanczos_norm,
    row_norms,
    row_norms_by_adjoint,
)
from lipcert.numerics import as_assumed

# The simulated device goes by this name: autograd then works on it without further support.
ELSEWHERE = torch.device("meta")
# Operations whose index may be on the CPU.
_INDEXED = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")


class Elsewhere(Tensor):
    """A tensor on the simulated device; ``entries`` holds what is in it."""

    entries: Tensor

    @staticmethod
    def __new__(cls, entries: Tensor) -> Elsewhere:
        form = {"strides": entries.stride(), "storage_offset": entries.storage_offset(), "dtype": entries.dtype}
        made = Tensor._make_wrapper_subclass(cls, entries.shape, device=ELSEWHERE, **form)
        made.entries = entries
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _evaluate(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.entries.tolist()


class Machine(TorchDispatchMode):
    """While it lasts, what is made on the simulated device, or moved there, has entries."""

    __module__ = "lipcert.simulated"  # lipcert refuses modes that are not its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _evaluate(func, args, kwargs or {})


class Made(TorchFunctionMode):
    """While it lasts, tensors can be made of numbers there: torch leaves them empty, and asks no dispatcher."""

    __module__ = "lipcert.simulated"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == ELSEWHERE:
            return func(*args, **{**kwargs, "device": None}).to(ELSEWHERE)
        return func(*args, **kwargs)


def _evaluate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the entries, whose result is on the device that torch would put it on."""
    target, there, here = kwargs.get("device"), {}, []

    def entries(leaf: Any) -> Any:
        if isinstance(leaf, Elsewhere):
            there[id(leaf.entries)] = leaf
            return leaf.entries
        if isinstance(leaf, Tensor):
            here.append(leaf)
        return leaf

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return there[id(leaf)] if id(leaf) in there else Elsewhere(leaf)  # itself where it was written to

    if target == ELSEWHERE:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner = _leaves(entries, args), {key: _leaves(entries, value) for key, value in kwargs.items()}
    if there and here:
        _refuse_mixtures(func, args, here)
    result = func(*inner[0], **inner[1])
    stays = bool(there) if target is None else target == ELSEWHERE
    return _leaves(wrapped, result) if stays else result


def _leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    return type(tree)(_leaves(function, part) for part in tree) if type(tree) in (tuple, list) else function(tree)


def _refuse_mixtures(func: Any, args: Any, here: list[Tensor]) -> None:
    """Tensors of the CPU may only be copied, be an index, or be a single number that is read."""
    name = func.overloadpacket.__name__
    if name in ("copy_", "_to_copy"):
        return
    written = name.endswith("_") and here[0] is args[0]
    if name in _INDEXED and isinstance(args[0], Elsewhere):
        here = [leaf for leaf in args[2:] if isinstance(leaf, Tensor) and not isinstance(leaf, Elsewhere)]
    if written or any(tensor.dim() for tensor in here):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} found {ELSEWHERE} and cpu")


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    monkeypatch.setattr(_intact, "_PLAIN", (*_intact._PLAIN, Elsewhere))
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Made(), Machine():
            yield ELSEWHERE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def wrapped(net: nn.Module, side: int = 4) -> lipcert.Model:
    return lipcert.load(net.eval(), mean=(0.5,), std=(0.25,), input_size=(1, side, side))


def layers() -> lipcert.Model:
    torch.manual_seed(0)
    return wrapped(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.ReLU(), nn.Linear(3, 2), nn.GELU(), nn.Linear(2, 2))
    )


def convolutions() -> lipcert.Model:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 2, 3, stride=2, padding=1)
    return wrapped(
        nn.Sequential(conv, nn.BatchNorm2d(2), nn.Hardtanh(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(2, 3))
    )


class Function(nn.Module):
    """What stands between two linear layers on four tokens of width 3."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)
        self.register_buffer("ones", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x.flatten(1, 2))).mean(1))


def causal(net: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def masked(net: Any, x: Tensor) -> Tensor:
    seen = torch.ones(4, 4, dtype=torch.bool, device=x.device).tril()
    return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)


def padded(net: Any, x: Tensor) -> Tensor:
    return torch.tanh((F.pad(x.abs(), (1, 1), value=1.0) + net.ones)[..., 1:-1])


def shifted(net: Any, x: Tensor) -> Tensor:
    return torch.relu(x + torch.tensor(0.5))


def images_of(model: lipcert.Model, count: int = 1) -> Tensor:
    return torch.rand(count, *model.input_size, generator=torch.Generator().manual_seed(1))


def check(model: lipcert.Model, device: torch.device, **options: Any) -> None:
    """The radii on the device are positive, on the CPU, and those of the CPU."""
    images = images_of(model)
    here = lipcert.certify(model, images, eps=0.05, **options)
    model.to(device)
    there = lipcert.certify(model, images.to(device), eps=0.05, **options)
    assert (here.radius > 0).all()
    assert there.radius.device == there.margin.device == torch.device("cpu")
    torch.testing.assert_close(there.radius, here.radius, rtol=1e-6, atol=0)
    assert there.method == here.method


def test_the_device_refuses_what_cuda_refuses(device: torch.device) -> None:
    here, there = seeded(3, 3), seeded(3, 3).to(device)
    assert torch.equal((2 * there).to("cpu"), 2 * here)
    assert torch.equal((there * torch.tensor(2.0)).to("cpu"), 2 * here)
    assert torch.equal(there[torch.tensor([2, 0])].to("cpu"), here[[2, 0]])
    index = torch.zeros(3, 1, dtype=torch.int64)
    for mixture in (
        lambda: here + there,
        lambda: there + here[0],
        lambda: here @ there,
        lambda: torch.cat([here, there]),
        lambda: here[index.to(device)],
        lambda: there.gather(1, index),
        lambda: torch.where(here > 0, there, 0.0),
        lambda: here.clone().add_(there),
        lambda: torch.vmap(torch.add)(here, there),
        lambda: torch.autograd.grad(there.requires_grad_().square().sum(1), there, here[0]),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mixture()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS)
def test_radii_are_those_of_the_cpu(device: torch.device, method: str) -> None:
    check(layers(), device, method=method)


def test_radii_of_a_convolutional_network(device: torch.device) -> None:
    check(convolutions(), device, method="lofast")


@pytest.mark.parametrize("function", [causal, masked, padded, shifted])
def test_masks_and_constants_are_where_the_network_is(device: torch.device, function: Any) -> None:
    check(wrapped(Function(function)), device, method="lofast")


@pytest.mark.parametrize("options", [{"rigor": "deterministic"}, {"at": "net.1"}])
def test_options_of_the_linearised_methods(device: torch.device, options: dict[str, str]) -> None:
    check(layers(), device, method="lofast", **options)


def test_an_attack_inside(device: torch.device) -> None:
    check(layers(), device, method="gloro", attack=PGD(steps=3, restarts=2))


def test_norms_are_where_the_products_take_their_vectors(device: torch.device) -> None:
    maps = seeded(2, 6, 5)
    here, there = maps, maps.to(device)

    def products(maps: Tensor) -> tuple[Any, ...]:
        one = lambda v: torch.einsum("nij,nj->ni", maps, v)  # noqa: E731
        back = lambda u: torch.einsum("nij,ni->nj", maps, u)  # noqa: E731
        return one, back, torch.vmap(one), torch.vmap(back)

    def norms(maps: Tensor, **where: torch.device) -> list[Tensor]:
        one, back, several, several_back = products(maps)
        ledger = Ledger(1e-8, 2)
        return [
            lanczos_norm(one, back, 2, 5, draw=ledger.draw("norm", delta=1e-9), **where),
            explicit_norm(several, 2, 5, **where),
            explicit_row_norms(several, 2, 5, **where),
            row_norms_by_adjoint(several_back, 2, 6, **where),
            row_norms(lambda v: [several(v)], 2, 5, draw=ledger.draw("rows", delta=1e-9), **where),
        ]

    for expected, found in zip(norms(here), norms(there, device=device), strict=True):
        assert found.device.type == device.type
        torch.testing.assert_close(found.to("cpu"), expected, rtol=1e-9, atol=0)


def test_norms_of_a_large_matrix_between_weights(device: torch.device) -> None:
    x = Node("input", None, (), {}, "", (1, 300))
    node = Node("linear", F.linear, (x,), {}, "", (1, 257))
    weight, outer, inner = seeded(257, 300), seeded(2, 1, 257).abs(), seeded(2, 1, 300).abs()

    def found(where: torch.device) -> Tensor:
        core = Core(node, weight.to(where), None, F.linear, 300)
        return core.norms(outer.to(where), inner.to(where), Ledger(1e-9, 2).draw("norm", delta=1e-9))

    there = found(device)
    assert there.device.type == device.type
    torch.testing.assert_close(there.to("cpu"), found(torch.device("cpu")), rtol=1e-9, atol=0)


def test_a_normalisation_without_weights_is_replaced_on_its_device(device: torch.device) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(5, elementwise_affine=False)
    model = wrapped(nn.Sequential(nn.Flatten(), nn.Linear(16, 5), norm, nn.Linear(5, 3))).to(device)
    lipcert.convert(model, norm="smooth", images=images_of(model, 2))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {device.type}


@pytest.mark.parametrize(("make", "method"), [(layers, "lofast"), (convolutions, "gloro")])
def test_radii_of_the_deployed_network(device: torch.device, make: Callable[[], lipcert.Model], method: str) -> None:
    with as_assumed(device, "float32"):
        check(make(), device, method=method, dtype="float32")


class NoAutocast(contextlib.nullcontext):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()


@pytest.mark.parametrize("loss", ["adversarial", "ce", "trades", "emma"])
def test_training_gives_the_weights_of_the_cpu(
    device: torch.device, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == ELSEWHERE:  # for which torch has no autocast
        monkeypatch.setattr(torch, "autocast", NoAutocast)
    found = []
    for where in (torch.device("cpu"), device):
        model = layers().double().to(where)
        data = [(images_of(model, 4), torch.tensor([0, 1, 1, 0]))]
        lipcert.finetune(model, data, eps=0.05, loss=loss, epochs=2, max_norm=0.9)
        found.append(torch.cat([parameter.detach().to("cpu").flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"measure": "l1", "engine": "faithful"}], ids=["exact", "faithful"])
def test_lower_norms_give_the_weights_of_the_cpu(device: torch.device, options: dict[str, str]) -> None:
    found = []
    for where in (torch.device("cpu"), device):
        model = layers().double().to(where)
        images = images_of(model, 20).double()
        lipcert.constrain(model, images, error=0.2, layers=["1"], **options)
        found.append(model.net[1].weight.detach().to("cpu"))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


def test_the_command_computes_where_it_is_told(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = importlib.import_module("lipcert.results._certify"), []

    class Seen(Certifier):
        def __init__(self, model: lipcert.Model, *arguments: Any, **options: Any):
            seen.append(model.device.type)
            super().__init__(model, *arguments, **options)

    monkeypatch.setattr(module, "Certifier", Seen)
    command = ["certify", "--eps", "36/255", "--limit", "2", "--method", "gloro", "--json"]
    found = [run(*command, "--device", where) for where in ("cpu", device.type)]
    assert seen == ["cpu", device.type]
    here, there = ({**json.loads(result.stdout)["counts"], "seconds": None} for result in found)
    assert there.pop("median_radius") == pytest.approx(here.pop("median_radius"), rel=1e-12)
    assert there == here
    run(*command, "--device", "tpu9", code=2)
