"""The second look at a network: code that is no fixed sequence of operations is refused, and harmless code is not."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipcert
from lipcert.bounds import kept_whole
from lipcert.certifier import Certifier
from lipcert.errors import InputError, UnsupportedCode, UnsupportedOperation
from lipcert.graph import capture, confirm, examine, same_logits, same_operations, unchecked
from lipcert.surgery import ClippedReLU, L2Attention, L2SetAttention, LipLinear, MaxMin, SmoothProject

SIZE = (3, 8, 8)


class Code(nn.Module):
    """A network with a step of its own: ``step(features, image)``."""

    def __init__(self, step: Callable[[Tensor, Tensor], Any]):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.step = nn.Linear(192, 6), nn.Linear(6, 3), step
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(self.body(x.flatten(1)), x))


def loaded(net: nn.Module) -> lipcert.Model:
    return lipcert.load(net, mean=(0, 0, 0), std=(1, 1, 1), input_size=SIZE)


def caught(z: Tensor, x: Tensor) -> Tensor:
    try:
        return z * float(x.max())
    except Exception:
        return z


def raised(z: Tensor, x: Tensor) -> Tensor:
    try:
        torch.linalg.cholesky(torch.eye(3, dtype=z.dtype) * (x.amax() - 0.5))
    except Exception:
        return z
    return 2 * z


READERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nonzero": lambda z, x: z * (x > 0.5).nonzero().shape[0],
    "a mask": lambda z, x: z * x[x > 0.5].numel(),
    "masked_select": lambda z, x: z * torch.masked_select(x, x > 0.5).shape[0],
    "unique": lambda z, x: z * torch.unique(x.round()).numel(),
    "unique_consecutive": lambda z, x: z * torch.unique_consecutive(x.round()).numel(),
    "bincount": lambda z, x: z * torch.bincount((5 * x).long().flatten()).shape[0],
    "one_hot": lambda z, x: z * F.one_hot((5 * x).long().flatten()).shape[1],
    "argwhere": lambda z, x: z * torch.argwhere(x > 0.5).shape[0],
    "to_sparse": lambda z, x: z * (x > 0.5).float().to_sparse()._nnz(),
    "arange": lambda z, x: z * torch.arange((x > 0.5).nonzero().shape[0]).sum(),
    "repeat_interleave": lambda z, x: z * torch.repeat_interleave((x.flatten() > 0.5).long()).shape[0],
    "new_zeros": lambda z, x: z + z.new_zeros((x > 0.5).nonzero().shape[0] + 1).sum(),
    "full_like": lambda z, x: z * torch.full_like(z, x.max()),
    "new_full": lambda z, x: z * z.new_full((6,), x.max()),
    "full": lambda z, x: z * torch.full((6,), x.max()) if isinstance(x, Tensor) else z,
    "isinstance": lambda z, x: 2 * z if isinstance(x, Tensor) and x.max() > 0.5 else z,
    "a branch that no example takes": lambda z, x: 2 * z if torch.is_tensor(z) and z.abs().max() > 1e3 else z,
    "try": caught,
    "error": raised,
    "numpy": lambda z, x: z * float(x.numpy().max()) if isinstance(x, Tensor) else z,
    "tolist": lambda z, x: z * max(x.flatten().tolist()) if isinstance(x, Tensor) else z,
    "numpy, in a branch that no example takes": lambda z, x: (
        2 * z if isinstance(x, Tensor) and x.numpy().max() > 1e3 else z
    ),
    "tolist, likewise": lambda z, x: 2 * z if isinstance(x, Tensor) and max(x.flatten().tolist()) > 1e3 else z,
    "dlpack, likewise": lambda z, x: 2 * z if isinstance(x, Tensor) and np.from_dlpack(x).max() > 1e3 else z,
    "nonzero, likewise": lambda z, x: 2 * z if isinstance(x, Tensor) and len((x > 1e3).nonzero()) else z,
    "a mask, likewise": lambda z, x: 2 * z if isinstance(x, Tensor) and x[x > 1e3].numel() else z,
    "bincount with weights, likewise": lambda z, x: (
        2 * z
        if isinstance(x, Tensor) and len(torch.bincount((x > 1e3).long().flatten(), x.new_ones(x.numel()))) > 1
        else z
    ),
    "a mask of bytes, likewise": lambda z, x: 2 * z if isinstance(x, Tensor) and len(x[(x > 1e3).byte()]) else z,
    "text": lambda z, x: z * len(f"{x.flatten()[0]}") if isinstance(x, Tensor) else z,
    "allclose": lambda z, x: z if isinstance(x, Tensor) and torch.allclose(x, x.round()) else 2 * z,
    "equal": lambda z, x: z if isinstance(x, Tensor) and torch.equal(x, x.flip(-1)) else 2 * z,
    "in": lambda z, x: z if isinstance(x, Tensor) and 0.0 in x else 2 * z,
    "cond": lambda z, x: torch.cond(x.max() > 0.5, lambda a: a * 2, lambda a: a + 0, (z,)),
}


STRANGERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "another way for tensors": lambda z, x: 2 * z if isinstance(x, Tensor) else z,
    "vmap": lambda z, x: torch.vmap(torch.relu)(z),
    "func.grad": lambda z, x: torch.func.grad(lambda t: (t**2).sum())(z),
    "torch.tensor of parts": lambda z, x: torch.tensor([z[0, 0], z[0, 1]]).repeat(3)[None],
    "set_": lambda z, x: torch.zeros_like(z).set_(z),
    "a NumPy array": lambda z, x: z + np.ones(6, dtype=np.float32),
}
NOISES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rand_like": lambda z, x: z + 1e-9 * torch.rand_like(z),
    "item": lambda z, x: z + 1e-5 * torch.randn(1).item(),
    "python": lambda z, x: z + 1e-9 * random.random(),
    "dropout": lambda z, x: F.dropout(z, 0.1, training=True),
    "attention": lambda z, x: F.scaled_dot_product_attention(
        z[:, :, None], z[:, :, None], z[:, :, None], dropout_p=0.1
    )[..., 0],
}
TYPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "finfo": lambda z, x: z / (z.abs() + torch.finfo(z.dtype).eps),
    "a tensor of finfo": lambda z, x: z + torch.full((6,), torch.finfo(z.dtype).eps, dtype=z.dtype),
    "dtype": lambda z, x: 2 * z if z.dtype == torch.float32 else z,
    "element_size": lambda z, x: z * z.element_size(),
    "rms_norm": lambda z, x: F.rms_norm(z, (6,)),
    "a number a little off": lambda z, x: z + (0.1 if z.dtype == torch.float64 else 0.1000001),
    "another value": lambda z, x: (z.relu(), z.sigmoid())[z.dtype == torch.float64],
    "another operand": lambda z, x: z - x[:, 0, 0, :6] if z.dtype == torch.float64 else x[:, 0, 0, :6] - z,
    "another place": lambda z, x: z.sigmoid() ** 2 if z.dtype == torch.float64 else 2 ** z.sigmoid(),
    "another name": lambda z, x: z.clamp(min=0.0) if z.dtype == torch.float64 else z.clamp(max=0.0),
    "default type": lambda z, x: z.exp() if z.dtype == torch.get_default_dtype() else z,
}


@pytest.mark.parametrize("name", READERS)
def test_values_that_are_read_out_are_refused(name):
    with pytest.raises((UnsupportedOperation, InputError)):
        Certifier(loaded(Code(READERS[name])), 0.1)


@pytest.mark.parametrize("name", STRANGERS)
def test_code_that_tells_the_recorder_from_a_tensor_is_refused(name):
    with pytest.raises((UnsupportedCode, InputError)):
        Certifier(loaded(Code(STRANGERS[name])), 0.1)


class Masked(nn.Module):
    """A network with a class whose logit is very low, and with ``step`` on the features of a batch."""

    def __init__(self, step: Callable[[Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.step = nn.Linear(192, 2), step
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        z = self.step(self.body(x.flatten(1)))
        return torch.cat([z, z.new_full((len(z), 1), -1e9)], 1)


@pytest.mark.parametrize(
    "step",
    [lambda z: z - 0.4 * z.mean(0, keepdim=True), lambda z: 1.01 * z if isinstance(z, Tensor) else z],
    ids=["batch", "recorder"],
)
def test_a_masked_class_hides_no_difference_between_the_others(step):
    with pytest.raises((UnsupportedCode, InputError)):
        Certifier(loaded(Masked(step)), 0.1)
    assert Certifier(loaded(Masked(torch.tanh)), 0.1).bound.finite


@pytest.mark.parametrize("low", [-1e9, -math.inf, 0.0])
def test_logits_are_compared_by_their_range(low):
    logits = torch.tensor([[1.0, 0.5, low], [0.25, 2.0, low]], dtype=torch.float64)
    other = logits.clone()
    other[0, 1] += 1e-3
    assert same_logits(logits, logits.clone(), 1e-9)
    assert not same_logits(other, logits, 1e-9)
    assert not same_logits((other + 1e9)[:, :2], (logits + 1e9)[:, :2], 1e-9)


def test_a_finite_logit_is_not_minus_infinity():
    logits = torch.tensor([[1.0, 0.5, -math.inf]], dtype=torch.float64)
    assert same_logits(logits, logits.clone(), 1e-9)
    assert not same_logits(logits.nan_to_num(neginf=3.0), logits, 1e-9)
    assert not same_logits(logits, logits.nan_to_num(neginf=3.0), 1e-9)


def test_attention_with_a_scale_that_kernels_treat_differently_is_refused():
    def attend(z: Tensor, x: Tensor) -> Tensor:
        h = x.flatten(2)
        return z + F.scaled_dot_product_attention(h, h, h, is_causal=True, scale=-1.0).sum((1, 2))[:, None]

    with pytest.raises(UnsupportedOperation, match="a causal mask and a scale that is not positive"):
        Certifier(loaded(Code(attend)), 0.1)


@pytest.mark.parametrize("name", NOISES)
def test_noise_of_any_size_is_refused(name):
    with pytest.raises(UnsupportedCode):
        Certifier(loaded(Code(NOISES[name])), 0.1)


# Of bfloat16, the certificate's type, and float64 these two make the same network.
FLOAT32_ALONE = ("dtype", "default type")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in TYPES
        for dtype in ("real", "float32", "bfloat16")
        if name not in FLOAT32_ALONE or dtype != "bfloat16"
    ],
)
def test_code_that_depends_on_the_type_is_refused(name, dtype):
    with pytest.raises((UnsupportedCode, InputError), match=r"floating-point type|format|in float32|network computes"):
        Certifier(loaded(Code(TYPES[name])), 0.1, dtype=dtype)


MODES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad mode": lambda z, x: 2 * z if torch.is_grad_enabled() else z,
    "requires_grad": lambda z, x: 2 * z if x.requires_grad else z,
    "inference mode": lambda z, x: 2 * z if torch.is_inference_mode_enabled() else z,
}


class Positions(nn.Module):
    """As in BoTNet, a product with a parameter that torch folds into one matrix if it requires a gradient."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor if self.table.requires_grad else 1.0
        return factor * (x.flatten(1).reshape(-1, 2, 3, 2).transpose(1, 2) @ self.table).flatten(1)


def test_kernels_that_gradients_of_parameters_choose_are_no_other_network():
    model = lipcert.load(Positions(), mean=(0.0,), std=(1.0,), input_size=(1, 2, 6))
    assert Certifier(model, 0.1, "gloro").bound.value > 0
    assert model.net.table.requires_grad
    other = lipcert.load(Positions(2.0), mean=(0.0,), std=(1.0,), input_size=(1, 2, 6))
    with pytest.raises(UnsupportedCode, match="1.0 in place of 2.0"):
        Certifier(other, 0.1, "gloro")


@pytest.mark.parametrize("name", MODES)
def test_code_that_depends_on_gradients_being_wanted_is_refused(name):
    with pytest.raises(UnsupportedCode, match="gradients are enabled"):
        Certifier(loaded(Code(MODES[name])), 0.1)


def test_kernels_of_half_precision_that_depend_on_gradients_are_told_as_such():
    def half(z: Tensor, x: Tensor) -> Tensor:
        return z + 0.05 * (z.dtype == torch.bfloat16) * torch.is_grad_enabled()

    with pytest.raises(UnsupportedCode, match="or kernels of torch for bfloat16 that do, and not for float32"):
        Certifier(loaded(Code(half)), 0.1, dtype="bfloat16")


def under_autocast(z: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (z[:, :, None] @ z[:, None, :]).sum(2).to(z.dtype)


def with_fewer_bits(z: Tensor, x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("medium")
    try:
        return (z[:, :, None] @ z[:, None, :]).sum(2)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_network_that_changes_the_precision_of_products_is_refused():
    with pytest.raises(UnsupportedCode, match="precision of float32 products at net"):
        Certifier(loaded(Code(with_fewer_bits)), 0.1, dtype="float32")


CASTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "autocast": under_autocast,
    "float32 alone": lambda z, x: z.bfloat16().float() if z.dtype == torch.float32 else z + 0,
    "float64 alone": lambda z, x: z.double().float() if z.dtype == torch.float32 else z + 0,
}


@pytest.mark.parametrize("name", CASTS)
def test_a_network_that_computes_in_other_types_too_has_no_bound_on_its_rounding(name):
    with pytest.raises((UnsupportedCode, InputError), match="in float32"):
        Certifier(loaded(Code(CASTS[name])), 0.1, dtype="float32")


def test_a_refusal_is_one_line_that_says_what_differs():
    with pytest.raises(UnsupportedCode) as refused:
        Certifier(loaded(Code(TYPES["finfo"])), 0.1)
    assert "2.220446049250313e-16 in place of 1.1920928955078125e-07" in str(refused.value)
    assert "\n" not in str(refused.value)


class Stateful(Code):
    """Changes something at each call."""

    def __init__(self, change: Callable[[Any, Tensor, Tensor], Any]):
        super().__init__(lambda z, x: change(self, z, x))
        self.register_buffer("running", torch.zeros(6))
        self.calls, self.past = 0, None


def counts(net, z, x):
    net.calls += 1
    return z if net.calls < 1000 else 2 * z


def runs(net, z, x):
    net.running.mul_(0.9).add_(z[0].detach())
    return z - net.running


def delays(net, z, x):
    before, net.past = net.past, z.detach()
    return z if before is None else z + before


def caches(net, z, x):
    net.past = z.detach() if net.past is None else net.past
    return z + net.past


def scales(net, z, x, kept={}):  # noqa: B006
    kept.setdefault("size", z.detach().abs().max())
    return z / kept["size"]


def scales_by_a_number(net, z, x, kept={}):  # noqa: B006
    kept.setdefault("size", None)
    kept["size"] = kept["size"] or float(z.detach().abs().max())
    return z / kept["size"]


@pytest.mark.parametrize("change", [counts, runs, delays, caches, scales, scales_by_a_number])
def test_networks_with_a_memory_are_refused(change):
    with pytest.raises(UnsupportedCode):
        Certifier(loaded(Stateful(change)), 0.1)


def notes(net, z, x):
    net.past = z.detach()
    return z


def prepares(net, z, x):
    net.past = net.body.weight.norm() if net.past is None else net.past
    return z * net.past


@pytest.mark.parametrize("change", [notes, prepares])
def test_what_is_kept_and_harmless_is_taken(change):
    assert Certifier(loaded(Stateful(change)), 0.1).bound.value > 0


HARMLESS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a number of a template": lambda z, x: z * float(torch.ones_like(z).max()),
    "a constant mask": lambda z, x: z[:, torch.tensor([True, False, True, True, True, True])].repeat(1, 2)[:, :6],
    "a constant number": lambda z, x: z * float(torch.arange(4).max()),
    "unused places": lambda z, x: z + x.flatten(1).max(1, keepdim=True).values,
    "plus": lambda z, x: +z,
    "in place": lambda z, x: z.mul_(2).relu_(),
    "data": lambda z, x: z.data.relu(),
    "attention without dropout": lambda z, x: F.scaled_dot_product_attention(*3 * (z[:, :, None],))[..., 0],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_code_is_taken(name):
    assert Certifier(loaded(Code(HARMLESS[name])), 0.1).bound.value > 0


def test_an_operation_without_a_rule_is_refused_though_nothing_uses_it():
    def unused(z, x):
        torch.linalg.svdvals(x)
        return z

    with pytest.raises(UnsupportedOperation, match="linalg_svdvals.*not used"):
        lipcert.lipschitz(loaded(Code(unused)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_that_a_type_rounds_are_no_other_network(dtype):
    assert Certifier(loaded(Code(HARMLESS["plus"])), 0.1, "global", dtype=dtype).bound.value > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_torch_computes_in_float32_is_no_other_type_of_the_network(dtype):
    def normalised(z, x):
        return F.rms_norm(z, (6,), eps=1e-2)

    def cast(z, x):
        return F.rms_norm(z, (6,), eps=1e-2).float().relu().to(z.dtype)

    for code in (normalised, cast):  # each operation rounds in its own type
        assert Certifier(loaded(Code(code)), 0.1, "global", dtype=dtype).bound.value > 0


OWN = torch.Generator(), random.Random()
HELD = {"rng": np.random.default_rng(0)}
NUMPYS, OLD_NUMPYS, POOL = np.random.default_rng(0), np.random.RandomState(0), ThreadPoolExecutor(1)


@pytest.mark.parametrize(
    ("draw", "refused"),
    [
        (lambda: torch.rand((), generator=OWN[0]), True),
        (lambda: OWN[1].gauss(0, 1), True),
        (
            lambda: (random.getstate(), random.random(), random.setstate(_))[1] if (_ := random.getstate()) else None,
            True,
        ),
        (lambda: NUMPYS.random(), True),
        (lambda: HELD["rng"].random(), True),
        (SimpleNamespace(draw=NUMPYS.random).draw, True),
        (lambda: OLD_NUMPYS.rand(), True),
        (lambda: np.random.default_rng().random(), True),
        (lambda: random.SystemRandom().random(), True),
        (lambda: int.from_bytes(os.urandom(4), "big"), True),
        (lambda: POOL.submit(random.random).result(), True),
        (lambda: POOL.submit(lambda: float(torch.rand(()))).result(), True),
        (lambda: np.random.default_rng(0).random(), False),
        (lambda: torch.rand((), generator=torch.Generator().manual_seed(0)), False),
        (lambda: random.Random(0).gauss(0, 1), False),
    ],
)
def test_numbers_of_a_generator_are_constants_only_where_it_is_seeded(draw, refused):
    """Others may be drawn rarely, or put back: that two passes agree says nothing."""
    network = loaded(Code(lambda z, x: z + 1e-12 * draw()))
    if not refused:
        assert Certifier(network, 0.1).bound.value > 0
        return
    with pytest.raises(UnsupportedCode, match="draws random numbers"):
        Certifier(network, 0.1)


def test_dropout_that_stays_active_is_not_said_to_depend_on_gradients():
    with pytest.raises(UnsupportedCode, match="two results for one image.*draws random numbers") as raised:
        Certifier(loaded(Code(lambda z, x: F.dropout(z))), 0.1)
    assert "gradients" not in str(raised.value)


def test_the_first_image_to_be_certified_is_looked_at_too():
    certifier = Certifier(loaded(Code(lambda z, x: z.relu())), 0.1, "global")
    certifier.model.net.step = lambda z, x: 2 * z.relu()
    with pytest.raises(UnsupportedCode):
        certifier.run(torch.full((1, *SIZE), 0.25))


def test_weights_that_change_without_a_trace_make_another_network():
    """As averages of weights and optimisers write them."""
    model = loaded(Code(lambda z, x: z.relu()))
    before = lipcert.lipschitz(model).value
    model.net.head.weight.data.mul_(3.0)
    assert lipcert.lipschitz(model).value == pytest.approx(3 * before)


def test_a_graph_is_held_against_every_image_it_is_confirmed_on():
    net = Code(lambda z, x: z.relu()).double()
    graph = capture(net, torch.rand(1, *SIZE).double())
    confirm(net, graph, torch.rand(1, *SIZE).double(), real=True)
    other = copy.deepcopy(net)
    other.head.weight.data += 1
    with pytest.raises(UnsupportedCode):
        confirm(other, graph, torch.rand(1, *SIZE).double(), real=True)


def in_place(weight: Tensor) -> Tensor:
    weight = weight.clone()
    weight += 1e17
    return weight.sub_(1e17)


CANCELLING: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda w: (w + 1e17) - 1e17,
    "in place": in_place,
    "number": lambda w: w * float((w.sum() + 1e17) - 1e17 + 1),
    "mean": lambda w: w + 1e9 * ((w + 1e9).mean() - 1e9 - w.mean()),
    "view": lambda w: ((w.T + 1e17) - 1e17).T,
    "absorbed": lambda w: torch.cat([w, w + 1e17], 0)[len(w) :] - 1e17,
}


@pytest.mark.parametrize("name", CANCELLING)
def test_constants_in_which_large_numbers_cancel_are_refused(name):
    """In real arithmetic these are other weights, and so another network."""

    class Computed(Code):
        def forward(self, x):
            z = F.linear(x.flatten(1), CANCELLING[name](self.body.weight), self.body.bias)
            return self.head(z.relu())

    model = loaded(Computed(lambda z, x: z))
    with pytest.raises(UnsupportedCode, match="constants that change.*; large numbers may cancel"):
        Certifier(model, 0.1, "gloro")


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "standardized": lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True),
    "normalized": lambda w: w / torch.linalg.matrix_norm(w, 2),
    "orthogonal": lambda w: torch.linalg.matrix_exp(w[:, :6] - w[:, :6].T) @ w,
    "number": lambda w: w / float(w.norm()),
    "read in float32": lambda w: w.float().double(),
    "zeros": lambda w: w * 0,
    "integers": lambda w: w[torch.argsort(w.sum(1))],
}


@pytest.mark.parametrize("name", EXACT)
def test_constants_that_are_computed_accurately_are_taken(name):
    class Computed(Code):
        def forward(self, x):
            return self.head(F.linear(x.flatten(1), EXACT[name](self.body.weight), self.body.bias))

    net = Computed(lambda z, x: z).double()
    before = [parameter.clone() for parameter in net.parameters()]
    capture(net, torch.rand(1, *SIZE).double())
    assert all(map(torch.equal, before, net.parameters()))


def test_a_module_may_be_captured_with_one_image_after_the_other():
    net = Code(lambda z, x: z.relu())
    assert capture(net, torch.rand(1, *SIZE)).nodes
    assert capture(net, torch.rand(1, *SIZE)).nodes


def test_a_module_is_examined_again_once_it_has_changed():
    net, image = Code(lambda z, x: z.relu()), torch.rand(1, *SIZE)
    first = examine(net, image)
    assert examine(net, image) is first
    net.head.register_forward_hook(lambda module, given, made: made * (made.max().item() > 0))
    with pytest.raises(UnsupportedCode, match="at head"):
        capture(net, image)


@pytest.mark.parametrize(
    "name",
    [
        "test_vit",
        "test_vit4",
        "test_convnext",
        "test_efficientnet",
        "test_nfnet",
        "resnet18",
        "levit_128s",
        "xcit_nano_12_p8_224",
    ],
)
def test_networks_of_timm_pass_in_every_type(name):
    net = timm.create_model(name, pretrained=False).eval()
    image = torch.rand(1, 3, 224, 224) if "levit" in name else torch.rand(1, 3, 64, 64)
    double = capture(copy.deepcopy(net).double(), image.double())
    assert len(double.nodes) > 40
    same_operations(double, unchecked(net, image, lambda part: False), "in float32")


# Modules that are kept whole.


class Kept(nn.Module):
    """A network whose projection, attention and activation are kept whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.attn = nn.Conv2d(3, 16, 4, 4), SmoothProject(16), L2Attention(16, 2)
        self.act, self.head = MaxMin(-1), nn.Linear(16, 3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.act(tokens + self.attn(self.norm(tokens))).mean(1))


class Louder(L2Attention):
    def forward(self, x: Tensor) -> Tensor:
        return 50 * super().forward(x)


def louder(module, given, made):
    return 50 * made


TAMPERED: dict[str, Callable[[Kept], Any]] = {
    "hook": lambda n: n.attn.register_forward_hook(louder),
    "hook on a part": lambda n: n.attn.proj.register_forward_hook(louder),
    "hook before": lambda n: n.attn.register_forward_pre_hook(lambda module, given: (50 * given[0],)),
    "hook with keywords": lambda n: n.attn.register_forward_hook(lambda m, a, k, made: 50 * made, with_kwargs=True),
    "hook backward": lambda n: n.attn.register_full_backward_hook(lambda *given: None),
    "another part": lambda n: setattr(n.attn, "proj_drop", nn.Linear(16, 16)),
    "one more part": lambda n: setattr(n.attn, "extra", nn.Linear(16, 16)),
    "another class of a part": lambda n: setattr(n.attn, "proj", nn.Linear(16, 16)),
    "a method": lambda n: setattr(n.attn, "attend", lambda *given: 50 * L2Attention.attend(n.attn, *given)),
    "forward": lambda n: setattr(n.attn, "forward", lambda x: 50 * L2Attention.forward(n.attn, x)),
    "a method of a part": lambda n: setattr(n.attn.q, "forward", lambda x: 50 * LipLinear.forward(n.attn.q, x)),
    "class": lambda n: setattr(n.attn, "__class__", Louder),
    "weight_norm": lambda n: nn.utils.parametrizations.weight_norm(n.attn.proj),
    "spectral_norm": lambda n: nn.utils.parametrizations.spectral_norm(n.attn, "v_weight"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_modules_with_anything_else_in_them_are_not_kept_whole(name):
    net = Kept()
    assert kept_whole(net.attn)
    TAMPERED[name](net)
    net.eval()
    assert not kept_whole(net.attn)
    assert kept_whole(net.act)
    assert L2Attention not in {node.op for node in lipcert.bounds.analyze(loaded(net)).graph.nodes}


def test_a_hook_for_all_modules_leaves_none_whole():
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, made: 50 * made if isinstance(module, MaxMin) else None
    )
    try:
        assert not kept_whole(MaxMin())
        assert not kept_whole(ClippedReLU())
    finally:
        handle.remove()
    assert kept_whole(MaxMin())


def test_a_method_that_was_replaced_on_the_class_is_seen(monkeypatch):
    monkeypatch.setattr(MaxMin, "forward", lambda self, x: 50 * x)
    assert not kept_whole(MaxMin())


def test_a_bias_may_be_any_module():
    class Zero(nn.Module):
        def forward(self) -> Tensor:
            return torch.zeros(2, 4, 4)

    assert kept_whole(L2SetAttention(8, 2, bias=Zero()))


def test_torchscript_is_refused_and_compiled_modules_are_taken_for_what_they_were_made_of():
    with pytest.raises(InputError, match="TorchScript"):
        loaded(torch.jit.trace(Kept(), torch.rand(1, *SIZE), check_trace=False))
    pixels: Any = {"mean": (0, 0, 0), "std": (1, 1, 1), "input_size": SIZE}
    net, image = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), torch.rand(1, *SIZE)
    with pytest.raises(InputError, match="the module is TorchScript"):
        lipcert.certify(torch.jit.trace(net, image), image, eps=0.01, **pixels)
    traced = lipcert.certify(torch.fx.symbolic_trace(net), image, eps=0.01, **pixels)
    assert torch.equal(traced.radius, lipcert.certify(net, image, eps=0.01, **pixels).radius)
    net = Kept()
    net.embed = torch.jit.trace(net.embed, torch.rand(1, *SIZE))
    with pytest.raises(InputError, match="embed of the module is TorchScript"):
        loaded(net)
    net = Kept()
    assert loaded(torch.compile(net, backend="eager")).net is net


def test_modules_without_gradients_are_refused():
    with torch.inference_mode():
        net = Kept()
    with pytest.raises(InputError, match=r"made in torch.inference_mode\(\)"):
        loaded(net)
