"""The modules of lipcert.surgery: what they compute, and that their constants are upper bounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import apply_rot_embed_cat
from timm.models import metaformer
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.numerics import Upper
from lipcert.surgery import (
    ClippedMaxMin,
    ClippedReLU,
    GroupLayerProject,
    GroupSmoothProject,
    L2Attention,
    L2RotaryAttention,
    L2SetAttention,
    L2WindowAttention,
    LayerProject,
    LipConv2d,
    LipLinear,
    MaxMin,
    RmsLayerProject,
    RmsSmoothProject,
    SmoothMaxMin,
    SmoothProject,
    swap,
)
from lipcert.surgery._distance import _Average, attention_gain
from lipcert.surgery._initial import calibrate_projection, heads_of
from lipcert.surgery._swap import plan
from lipcert.surgery._table import ATTENTIONS, class_name


def jacobian_norm(module: Callable[[Tensor], Tensor], x: Tensor, differentiable: bool = False) -> Tensor:
    """The exact spectral norm of the Jacobian for one sample x."""
    jacobian = torch.autograd.functional.jacobian(
        lambda z: module(z[None])[0], x, create_graph=differentiable, vectorize=True
    )
    return torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2)


def ratio(module: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """How much the module stretched the way from x to y."""
    with torch.no_grad():
        return float((module(x[None]) - module(y[None])).norm() / (x - y).norm())


def attack(module: Callable[[Tensor], Tensor], x: Tensor, steps: int = 30, rate: float = 0.1) -> float:
    """The largest Jacobian norm that gradient ascent from x meets."""
    x = x.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], rate)
    largest = 0.0
    for _ in range(steps):
        norm = jacobian_norm(module, x, differentiable=True)
        largest = max(largest, norm.item())
        optimizer.zero_grad()
        (-norm.log()).backward()
        optimizer.step()
    return largest


CONTRACT: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (LipLinear(7, 5), (7,)),
    "linear on tokens": (LipLinear(4, 6), (3, 4)),
    "conv": (LipConv2d(2, 3, 3, padding=1), (2, 6, 5)),
    "strided conv": (LipConv2d(2, 4, 3, stride=2, padding=1), (2, 7, 7)),
    "grouped dilated conv": (LipConv2d(4, 4, 3, dilation=2, groups=2), (4, 7, 7)),
    "same conv": (LipConv2d(2, 2, 4, padding="same"), (2, 6, 6)),
    "patches": (LipConv2d(3, 5, 4, stride=4), (3, 8, 8)),
    "project": (LayerProject(6, 1.5), (4, 6)),
    "smooth": (SmoothProject(6, 1.5), (4, 6)),
    "project channels first": (LayerProject(4, 0.7, channels_first=True), (4, 3, 3)),
    "smooth without bias": (SmoothProject(4, 0.7, bias=False, channels_first=True), (4, 3, 3)),
    "relu": (ClippedReLU(0.5), (3, 4, 4)),
    "relu by channel": (ClippedReLU(torch.tensor([0.1, 1.0, -0.2]).view(3, 1, 1)), (3, 4, 4)),
    "maxmin": (MaxMin(), (4, 3, 3)),
    "maxmin of tokens": (MaxMin(-1), (5, 8)),
    "smooth maxmin": (SmoothMaxMin(0.7), (4, 3, 3)),
    "smooth maxmin of tokens, steep": (SmoothMaxMin(0.01, -1), (5, 8)),
    "clipped maxmin": (ClippedMaxMin(0.4, torch.tensor([-0.3, 0.2]).view(2, 1, 1)), (4, 3, 3)),
    "attention": (L2Attention(6, 2), (5, 6)),
    "one token": (L2Attention(6, 3), (1, 6)),
    "narrow heads": (L2Attention(6, 2, head_dim=2, dim_out=4), (4, 6)),
    "window": (L2WindowAttention(6, 2, window_size=(2, 3)), (6, 6)),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str) -> None:
    """Bound ≥ exact Jacobian norms ≥ 0.999 of the ratios of small steps, and ≥ the ratios of large ones."""
    module, shape = CONTRACT[name]
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            if name not in ("relu", "relu by channel", "clipped maxmin"):
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    bound = module.lipschitz(shape)
    assert bound.rigor == "deterministic"
    assert bound.finite
    for scale in (0.01, 0.3, 1.0, 3.0, 30.0):
        x, y = scale * torch.randn(2, *shape, dtype=torch.float64)
        exact = float(jacobian_norm(module, x))
        assert exact <= bound.value * (1 + 1e-12)
        assert ratio(module, x, y) <= bound.value * (1 + 1e-12)
        assert ratio(module, x, x + 1e-6 * torch.randn_like(x)) <= exact * 1.001 + 1e-6


@pytest.mark.parametrize(
    "name", ["linear", "linear on tokens", "patches", "maxmin", "smooth maxmin", "clipped maxmin", "relu"]
)
def test_bound_is_reached(name: str) -> None:
    """Where the constant can be known exactly the bound is no more than 0.1 % above it."""
    module, shape = CONTRACT[name]
    x = 1e-3 * torch.rand(shape, dtype=torch.float64)
    assert float(jacobian_norm(module.double(), x)) >= module.lipschitz(shape).value * (1 - 1e-3)


@pytest.mark.parametrize("kind", [LayerProject, SmoothProject])
def test_projection_bound_is_reached(kind: type[LayerProject | SmoothProject]) -> None:
    module = kind(6, 2.0).double()
    with torch.no_grad():
        module.weight.fill_(-1.5)
    exact = float(jacobian_norm(module, 1e-4 * torch.randn(3, 6, dtype=torch.float64)))
    assert exact == pytest.approx(1.5, rel=1e-6)
    assert module.lipschitz((3, 6)).value == 1.5


def test_linear_keeps_keys_and_output() -> None:
    plain, ours = nn.Linear(5, 3), LipLinear(5, 3)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5)
    assert torch.equal(plain(x), ours(x))
    conv, lip_conv = nn.Conv2d(3, 4, 3, 2, 1), LipConv2d(3, 4, 3, 2, 1)
    lip_conv.load_state_dict(conv.state_dict())
    image = torch.randn(2, 3, 9, 9)
    assert torch.equal(conv(image), lip_conv(image))


tokens = st.integers(0, 2**31).map(
    lambda seed: torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
)
scales = st.sampled_from([1e-12, 1e-3, 1.0, 7.0, 1e6])


@settings(max_examples=60)
@given(tokens, scales, st.sampled_from([1e-3, 0.5, 2.0, 1e4]), st.sampled_from([LayerProject, SmoothProject]))
def test_projections(x: Tensor, scale: float, radius: float, kind: type[LayerProject | SmoothProject]) -> None:
    module: Any = kind(5, radius).double()
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-2, 1, 5))
        module.bias.copy_(torch.linspace(0, 1, 5))
    a, b = scale * x
    with torch.no_grad():
        outputs = module(torch.stack((a, b)))
    constant = module.lipschitz((3, 5)).value
    assert constant == 2
    assert (outputs[0] - outputs[1]).norm() <= constant * (a - b).norm() + 1e-12 * outputs.norm()
    assert outputs.norm(dim=-1).max() <= float(module.token_norm()) * (1 + 1e-12)
    shifted = module(torch.stack((a, b)) + 3 * scale)
    assert torch.allclose(shifted, outputs, rtol=1e-9, atol=1e-12)


def test_projections_by_hand() -> None:
    x = torch.tensor([[3.0, -3.0, 0.0, 0.0], [0.1, -0.1, 0.0, 0.0]], dtype=torch.float64)[None]
    project, smooth = LayerProject(4, 1.0).double(), SmoothProject(4, 1.0).double()
    root = math.sqrt(0.5)
    assert torch.allclose(project(x)[0, 0], torch.tensor([root, -root, 0, 0]).double())
    assert torch.equal(project(x)[0, 1], x[0, 1])
    assert torch.allclose(smooth(x)[0, 0], x[0, 0] / math.sqrt(19))
    first = LayerProject(4, 1.0, channels_first=True).double()
    assert torch.equal(first(x.transpose(1, 2)), project(x).transpose(1, 2))


def test_projection_has_a_gradient_at_zero() -> None:
    for kind in (LayerProject, SmoothProject):
        x = torch.zeros(1, 2, 4, requires_grad=True)
        kind(4)(x)[..., 0].sum().backward()
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


@settings(max_examples=60)
@given(tokens, scales)
def test_activations(x: Tensor, scale: float) -> None:
    x = scale * x.reshape(2, -1)[:, :8]
    for module in (ClippedReLU(0.3), MaxMin(-1), ClippedMaxMin(0.3, -0.2, dim=-1)):
        with torch.no_grad():
            a, b = module.double()(x)
        assert (a - b).norm() <= (x[0] - x[1]).norm() * (1 + 1e-12)
    with torch.no_grad():
        assert torch.equal(ClippedReLU(0.3).double()(x), x.clamp(0, float(torch.tensor(0.3))))
        paired = MaxMin(-1)(x)
        assert torch.equal(paired.sort(-1).values, x.sort(-1).values)
        assert bool((paired[:, :4] >= paired[:, 4:]).all())
        clipped = ClippedMaxMin(0.3, -0.2, dim=-1).double()(x)
        assert torch.equal(clipped[:, :4], paired[:, :4].clamp(max=float(torch.tensor(0.3))))
        assert torch.equal(clipped[:, 4:], paired[:, 4:].clamp(min=float(torch.tensor(-0.2))))


# L2 attention ------------------------------------------------------------------------------------------------


def plain_distance_attention(module: L2Attention, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Σ_j P_ij x_j A_h V_h written down head by head, with all pairwise distances."""
    d = module.head_dim
    heads = []
    for h in range(module.num_heads):
        rows = slice(h * d, (h + 1) * d)
        w, v = module.q.weight[rows].T, module.v_weight[rows].T
        y = x @ w
        logits = -(y[:, None] - y[None]).square().sum(-1) / math.sqrt(d)
        if bias is not None:
            logits = logits + bias[h]
        value = x @ (w @ w.T / math.sqrt(d)) @ v
        heads.append(logits.softmax(-1) @ value + module.v_bias[rows])  # type: ignore[index]
    return torch.cat(heads, -1) @ module.proj.weight.T + module.proj.bias


def test_attention_is_the_formula() -> None:
    module: Any = L2Attention(6, 2).double()
    nn.init.normal_(module.v_bias)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    expected = torch.stack([plain_distance_attention(module, one) for one in x])
    assert torch.allclose(module(x), expected, atol=1e-12)


def test_window_attention_is_the_formula_with_bias_and_mask() -> None:
    module: Any = L2WindowAttention(6, 2, window_size=(2, 3)).double()
    nn.init.normal_(module.v_bias)
    nn.init.normal_(module.relative_position_bias_table)
    mask = torch.zeros(2, 6, 6, dtype=torch.float64)
    mask[1, :3, 3:] = mask[1, 3:, :3] = -math.inf
    x = torch.randn(4, 6, 6, dtype=torch.float64)
    bias = module.position_bias()
    assert bias[1, 0, 5] == module.relative_position_bias_table[(0 - 1 + 1) * 5 + (0 - 2 + 2), 1]
    expected = torch.stack([plain_distance_attention(module, one, bias + mask[i % 2]) for i, one in enumerate(x)])
    assert torch.allclose(module(x, mask=mask), expected, atol=1e-12)


def kim_constant(tokens: int) -> float:
    """√N(4φ⁻¹(N − 1) + 1), arXiv 2006.04710, Theorem 3.2, for one head and norms of 1."""
    low, high = 0.0, 20.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.exp(middle + 1) < tokens - 1 else (low, middle)
    return math.sqrt(tokens) * (4 * low + 1)


def uniform_gain(tokens: int, reach: float = math.inf) -> float:
    return float(attention_gain(torch.ones(tokens - 1, 1), tokens - 1, tokens - 1, reach))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 10, 49, 197, 577, 785, 4097])
def test_gain_never_above_the_published_one(tokens: int) -> None:
    gain = uniform_gain(tokens)
    assert gain <= kim_constant(tokens)
    assert tokens < 100 or gain < kim_constant(tokens) / 5


def test_gain_of_close_tokens_is_that_of_averaging() -> None:
    assert 1 <= uniform_gain(197, 0.0) < 1.01
    gains = [uniform_gain(50, reach) for reach in (0.0, 0.01, 0.1, 1.0, 4.0, 100.0, math.inf)]
    assert gains == sorted(gains)


def distance_attention(y: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """The bare map of lipcert.surgery._distance with τ = 1, y of shape (1, N, d)."""
    return (-(y[:, :, None] - y[:, None]).square().sum(-1) + bias).softmax(-1) @ y


@pytest.mark.parametrize("reach", [math.inf, 3.0, 0.2])
@pytest.mark.parametrize("own", [False, True])
def test_suprema_of_weighted_averages(reach: float, own: bool) -> None:
    """No choice of the t exceeds V, and the choice in the proof comes within a millionth of it."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        weights = (2 * torch.randn(6, generator=generator, dtype=torch.float64)).exp()
        peak, a, slope = (0.1 + 2 * torch.rand(3, generator=generator, dtype=torch.float64)).tolist()
        peak, level, constant = peak + slope, 0.0 if own else float(weights[0]), 0.5 if own else 0.0
        total = float(weights.sum())
        arguments = torch.tensor([[level, peak, a, slope, constant]], dtype=torch.float64).unbind(1)
        value = float(_Average(total, total, reach).bound(torch.zeros(1, dtype=torch.float64), *arguments)[0])
        slopes, constants = torch.full((6,), slope, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        if not own:
            slopes[0], constants[0] = peak, a
        best = (1 + (value - constants) / slopes).clamp(0, reach)
        others = 6 * torch.rand(2000, 6, generator=generator, dtype=torch.float64)
        samples = torch.cat((best[None], others.clamp(max=reach)))
        decays = weights * (-samples).exp()
        averages = (constant + (decays * (slopes * samples + constants)).sum(1)) / (1 + decays.sum(1))
        assert float(averages.max()) <= value * (1 + 1e-9)
        assert float(averages[0]) >= value * (1 - 1e-6)


@pytest.mark.parametrize("theta", [0.2, 0.7, 2.0])
def test_steps_of_the_proof(theta: float) -> None:
    """The norms of both terms of the derivative against s_i and z_ik, at tokens of many scales."""
    for scale in (0.1, 0.5, 1.0, 2.0):
        y = scale * torch.randn(7, 3, dtype=torch.float64)
        squares = (y[:, None] - y[None]).square().sum(-1)
        share = (-squares).softmax(-1)
        far = (share * squares).sum(1)
        apart, centred = y[None] - y[:, None], y[None] - (share @ y)[:, None]
        eye = torch.eye(3, dtype=torch.float64)
        covariances = torch.einsum("ik,ikp,ikq->ipq", share, centred, centred)
        second = share[..., None, None] * (eye - 2 * centred[..., :, None] * apart[..., None, :])
        jacobian = second.clone()
        jacobian[range(7), range(7)] += 2 * covariances
        exact = torch.autograd.functional.jacobian(lambda z: distance_attention(z[None])[0], y)
        assert torch.allclose(jacobian, exact.permute(0, 2, 1, 3), atol=1e-12)
        assert bool((torch.linalg.matrix_norm(covariances, 2) <= far + 1e-12).all())
        z = (1 + 2 * theta * far[:, None]) * share * (1 + 2 / theta * squares)
        norm = torch.linalg.matrix_norm(second.permute(0, 2, 1, 3).reshape(21, 21), 2)
        assert norm <= z.sum(0).max().sqrt() * (1 + 1e-12)


@pytest.mark.parametrize(("tokens", "dim"), [(2, 1), (3, 1), (4, 3), (8, 1), (8, 4), (16, 3)])
def test_gain_survives_attack(tokens: int, dim: int) -> None:
    gain = uniform_gain(tokens)
    best = 0.0
    for scale in (0.3, 1.0, 2.0):
        start = scale * torch.randn(tokens, dim, dtype=torch.float64)
        best = max(best, attack(distance_attention, start))
    assert best <= gain
    assert best > 1  # the attack does something: averaging alone has norm 1


def test_gain_survives_hub() -> None:
    """One token amid many at the distance that makes s_i largest: the case that the growth with N comes from."""
    tokens = 24
    gain = uniform_gain(tokens)
    best = 0.0
    for radius in torch.linspace(0.1, 4, 20).double():
        y = torch.cat((torch.zeros(1, tokens - 1), radius * torch.eye(tokens - 1))).double()
        best = max(best, float(jacobian_norm(distance_attention, y)))
    assert 2 < best <= gain


def test_gain_with_reach_survives_attack() -> None:
    """On tokens within a ball of radius √T/2 all t are at most T."""
    for reach in (0.04, 0.5, 2.0):
        gain = uniform_gain(8, reach)
        radius = math.sqrt(reach) / 2
        best = 0.0
        for _ in range(10):
            y = nn.functional.normalize(torch.randn(8, 3, dtype=torch.float64), dim=-1) * radius
            best = max(best, float(jacobian_norm(distance_attention, y)))
            y[1:] = -y[:1]
            best = max(best, float(jacobian_norm(distance_attention, y)))
        assert 1 <= best <= gain
        assert gain < uniform_gain(8)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_gain_with_bias_survives_attack(spread: float) -> None:
    for tokens in (2, 4, 8):
        bias = spread * torch.randn(tokens, tokens, dtype=torch.float64)
        weights = (bias - bias.diagonal()[:, None]).exp().fill_diagonal_(0)
        totals = weights.sum(1)
        gain = float(attention_gain(weights, float(totals.min()), float(totals.max())))
        for scale in (0.3, 1.0):
            start = scale * torch.randn(tokens, 2, dtype=torch.float64)
            assert attack(partial(distance_attention, bias=bias), start, steps=20) <= gain


def test_huge_bias_gives_infinity() -> None:
    weights = torch.tensor([[0.0, 1e200], [1.0, 0.0]], dtype=torch.float64)
    assert attention_gain(weights, 1.0, 1e200) == Upper(math.inf)


def test_large_bias_stays_finite() -> None:
    weights = torch.tensor([[0.0, math.exp(80)], [1.0, 0.0]], dtype=torch.float64)
    assert 80 < float(attention_gain(weights, 1.0, math.exp(80))) < 1e4


@pytest.mark.parametrize("distance", [1.0, 10.0, 100.0, 1000.0])
def test_token_far_out_in_the_null_space(distance: float) -> None:
    """Values mixed by weights that do not see the distance: without A_h the ratio grows with it, here it does not."""
    module = L2Attention(4, 1, head_dim=2).double()
    with torch.no_grad():
        module.q.weight.copy_(torch.eye(2, 4))
        module.v_weight.copy_(torch.eye(4)[[2, 3]] + torch.eye(4)[[0, 1]])
        module.proj.weight.copy_(torch.eye(4, 2))
    x = torch.zeros(3, 4, dtype=torch.float64)
    x[0, 0], x[1, 2] = 0.8, distance
    exact = float(jacobian_norm(module, x))
    assert exact <= module.lipschitz((3, 4)).value

    def without_mixing(z: Tensor) -> Tensor:
        y = module.q(z)
        logits = -(y[:, :, None] - y[:, None]).square().sum(-1) / math.sqrt(2)
        return module.proj(logits.softmax(-1) @ (z @ module.v_weight.T))

    assert distance < 100 or float(jacobian_norm(without_mixing, x)) > 0.1 * distance


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_attention_survives_attack(scale: float) -> None:
    module = L2Attention(4, 2).double()
    with torch.no_grad():
        module.q.weight *= scale
    for tokens in (1, 2, 6):
        bound = module.lipschitz((tokens, 4)).value
        best = attack(module, torch.randn(tokens, 4, dtype=torch.float64))
        assert 0.05 * bound < best <= bound


def test_attention_below_the_published_bound_with_its_heads() -> None:
    """√N(4c + 1)·√(Σ‖W_h‖²‖M_h‖²)·‖W_O‖, M_h = W_hᵀV_h/√d, which is quadratic in W_h as A_h demands."""
    for heads in (1, 2, 4):
        module = L2Attention(8, heads).double().requires_grad_(False)
        with torch.no_grad():
            module.q.weight[: module.head_dim] *= 5
        queries = torch.linalg.matrix_norm(module.q.weight.unflatten(0, (heads, -1)), 2)
        mixing = torch.linalg.matrix_norm(module.mixing(), 2)
        output = torch.linalg.matrix_norm(module.proj.weight, 2)
        kim = kim_constant(17) * float((queries.square() * mixing.square()).sum().sqrt() * output)
        assert module.lipschitz((17, 8)).value < kim / 2


def test_attention_at_the_size_of_a_vit() -> None:
    module = L2Attention(24, 3).double()
    with torch.no_grad():
        module.q.weight *= 2
    bound = module.lipschitz((197, 24)).value
    x = torch.randn(197, 24, dtype=torch.float64)
    step = torch.randn_like(x)
    for _ in range(20):  # power iteration on the Jacobian: from below
        _, forward = torch.autograd.functional.jvp(lambda z: module(z[None])[0], x, step)
        _, step = torch.autograd.functional.vjp(lambda z: module(z[None])[0], x, forward)
        step = step / step.norm()
    _, forward = torch.autograd.functional.jvp(lambda z: module(z[None])[0], x, step)
    assert forward.norm() <= bound


def test_token_norm_lowers_the_bound_and_holds() -> None:
    module = L2Attention(6, 2).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    loose = module.lipschitz((5, 6)).value
    for radius in (0.01, 0.1, 1.0):
        bound = module.lipschitz((5, 6), token_norm=Upper(radius)).value
        inside = nn.functional.normalize(x, dim=-1) * radius
        assert float(jacobian_norm(module, inside)) <= bound <= loose
    assert module.lipschitz((5, 6), token_norm=Upper(0.01)).value < 0.7 * loose


@pytest.mark.parametrize("masked", [False, True])
def test_window_attention_survives_attack(masked: bool) -> None:
    module = L2WindowAttention(4, 2, window_size=(2, 2)).double()
    with torch.no_grad():
        module.q.weight *= 2
    nn.init.normal_(module.relative_position_bias_table, std=1.5)
    mask = torch.zeros(1, 4, 4, dtype=torch.float64)
    if masked:
        mask[0, 0, 1:] = mask[0, 1:, 0] = -math.inf
    bound = module.lipschitz((4, 4), mask=mask).value
    best = attack(lambda x: module(x, mask=mask), torch.randn(4, 4, dtype=torch.float64))
    assert 0.05 * bound < best <= bound
    open_bound = module.lipschitz((4, 4)).value
    assert bound < open_bound if masked else bound == open_bound


def test_window_mask_takes_the_worst_window() -> None:
    module = L2WindowAttention(4, 2, window_size=(1, 4))
    nn.init.normal_(module.relative_position_bias_table)
    masks = torch.zeros(2, 4, 4)
    masks[0, :2, 2:] = masks[0, 2:, :2] = -100.0
    assert module.lipschitz((4, 4), mask=masks).value == module.lipschitz((4, 4)).value
    assert module.lipschitz((4, 4), mask=masks[:1]).value < module.lipschitz((4, 4)).value
    raising = 3 * (1 - torch.eye(4))[None]
    assert module.lipschitz((4, 4), mask=raising).value > module.lipschitz((4, 4)).value


@pytest.mark.parametrize(
    "call",
    [
        lambda: LipLinear(3, 4).lipschitz((4,)),
        lambda: LipLinear(3, 4).lipschitz(()),
        lambda: LipConv2d(3, 4, 3).lipschitz((4, 8, 8)),
        lambda: LipConv2d(3, 4, 3).lipschitz((3, 8)),
        lambda: LipConv2d(3, 4, 3).lipschitz((3, 2, 2)),
        lambda: LayerProject(4, 0.0),
        lambda: SmoothProject(4, math.nan),
        lambda: LayerProject(4).lipschitz((5,)),
        lambda: LayerProject(4, channels_first=True).lipschitz((5, 4)),
        lambda: ClippedReLU(math.nan),
        lambda: ClippedReLU(torch.ones(4)).lipschitz((1,)),
        lambda: ClippedReLU(torch.ones(2, 4)).lipschitz((4,)),
        lambda: MaxMin().lipschitz((3, 4)),
        lambda: MaxMin(0).lipschitz((4, 4)),
        lambda: SmoothMaxMin().lipschitz((3, 4)),
        lambda: SmoothMaxMin(0.0),
        lambda: SmoothMaxMin(float("nan")),
        lambda: SmoothMaxMin(torch.ones(2)),
        lambda: SmoothMaxMin(None),
        lambda: ClippedMaxMin(torch.ones(4), dim=-1).lipschitz((4,)),
        lambda: L2Attention(4, 2).lipschitz((5, 6)),
        lambda: L2Attention(4, 2).lipschitz((0, 4)),
        lambda: L2Attention(4, 2)(torch.zeros(1, 3, 4), attn_mask=torch.zeros(3, 3)),
        lambda: L2Attention(4, 2)(torch.zeros(1, 3, 4), is_causal=True),
        lambda: L2WindowAttention(4, 2, window_size=(2, 2)).lipschitz((5, 4)),
        lambda: L2WindowAttention(4, 2, window_size=(2, 2)).lipschitz((4, 4), mask=torch.zeros(1, 5, 5)),
    ],
)
def test_bad_input_is_one_line(call: Callable[[], object]) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers(value: float) -> None:
    attention, project = L2Attention(4, 2), LayerProject(4)
    window = L2WindowAttention(4, 2, window_size=(2, 2))
    with torch.no_grad():
        attention.v_weight[0, 0] = value
        project.weight[0] = value
        window.relative_position_bias_table[0] = math.nan
    for call in (
        lambda: attention.lipschitz((3, 4)),
        lambda: project.lipschitz((4,)),
        lambda: window.lipschitz((4, 4)),
    ):
        with pytest.raises(InputError, match="NaN"):
            call()
    radius = SmoothProject(4)
    radius.radius.fill_(value)
    with pytest.raises(InputError, match="radius"):
        radius.token_norm()


# Attention of timm in other arrangements ------------------------------------------------------------------------------


def timm_attention() -> dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]]:
    """One small module of every class with an L2 form: the module, the shape of a sample, what its block passes on."""
    from timm import layers
    from timm.models import (
        beit,
        cait,
        convit,
        crossvit,
        davit,
        efficientformer,
        eva,
        fastvit,
        gcvit,
        hiera,
        hieradet_sam2,
        maxxvit,
        metaformer,
        nest,
        swin_transformer_v2,
        swin_transformer_v2_cr,
        tnt,
        twins,
        visformer,
        vision_transformer_relpos,
        vision_transformer_sam,
        volo,
    )

    torch.manual_seed(0)
    table: Any = partial(layers.RelPosBias, window_size=(2, 2))
    mlp: Any = partial(layers.RelPosMlp, window_size=(2, 2), hidden_dim=8)
    mask = torch.zeros(2, 4, 4, dtype=torch.float64)
    mask[1, :2, 2:] = mask[1, 2:, :2] = -100
    shared = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    angles = torch.randn(4, 2, dtype=torch.float64)
    pairs = torch.cat((angles.sin().repeat_interleave(2, -1), angles.cos().repeat_interleave(2, -1)), -1)
    halves = torch.cat((angles.sin().repeat(1, 2), angles.cos().repeat(1, 2)), -1)
    swin2 = swin_transformer_v2.WindowAttention
    return {
        "convit": (convit.MHSA(8, 2), (5, 8), {}),
        "beit": (beit.Attention(8, 2, qkv_bias=True, window_size=(2, 2)), (5, 8), {"shared_rel_pos_bias": shared}),
        "beit without bias": (beit.Attention(8, 2), (5, 8), {}),
        "cait": (cait.ClassAttn(8, 2, qkv_bias=True), (5, 8), {}),
        "crossvit": (crossvit.CrossAttention(8, 2), (5, 8), {}),
        "volo class": (volo.ClassAttention(8, 2), (5, 8), {}),
        "volo": (volo.Attention(8, 2), (2, 3, 8), {}),
        "davit": (davit.WindowAttention(8, (2, 2), 2), (4, 8), {}),
        "maxvit": (maxxvit.AttentionCl(8, dim_head=4, rel_pos_cls=table), (2, 2, 8), {}),
        "maxvit kinds first": (maxxvit.AttentionCl(8, dim_head=4, head_first=False), (2, 2, 8), {}),
        "maxvit 2d": (maxxvit.Attention2d(8, 12, dim_head=4, rel_pos_cls=mlp), (8, 2, 2), {}),
        "2d": (layers.Attention2d(8, num_heads=2), (8, 2, 2), {}),
        "swin v2": (swin2(8, (2, 2), 2), (4, 8), {"mask": mask}),
        "swin v2 cr": (swin_transformer_v2_cr.WindowMultiHeadAttention(8, 2, (2, 2)), (4, 8), {"mask": mask}),
        "relpos": (vision_transformer_relpos.RelPosAttention(8, 2, rel_pos_cls=mlp), (4, 8), {}),
        "gcvit": (gcvit.WindowAttentionGlobal(8, 2, (2, 2), use_global=False), (4, 8), {}),
        "hiera": (hiera.MaskUnitAttention(8, 8, 2, window_size=2, use_mask_unit_attn=True), (6, 8), {}),
        "hiera global": (hiera.MaskUnitAttention(8, 12, 2), (6, 8), {}),
        "hieradet": (hieradet_sam2.MultiScaleAttention(8, 12, 2), (2, 3, 8), {}),
        "sam": (vision_transformer_sam.Attention(8, 2), (2, 3, 8), {}),
        "metaformer": (metaformer.Attention(8, head_dim=4), (5, 8), {}),
        "nest": (nest.Attention(8, 2), (2, 3, 8), {}),
        "tnt": (tnt.Attention(8, 4, 2), (5, 8), {}),
        "twins": (twins.LocallyGroupedAttn(8, 2, ws=2), (6, 8), {"size": (2, 3)}),
        "visformer": (visformer.Attention(8, 2), (8, 2, 2), {}),
        "fastvit": (fastvit.Attention(8, head_dim=4), (8, 2, 2), {}),
        "efficientformer": (efficientformer.Attention(8, 2, 2, 3, resolution=2), (4, 8), {}),
        "eva": (eva.EvaAttention(8, 2, scale_norm=False), (5, 8), {"rope": pairs}),
        "eva halves": (
            eva.EvaAttention(8, 2, qkv_fused=False, scale_norm=False, rotate_half=True),
            (5, 8),
            {"rope": halves},
        ),
        "rope": (layers.AttentionRope(8, 2, num_prefix_tokens=0), (4, 8), {"rope": pairs}),
    }


TIMM_ATTENTION = timm_attention()


def replaced(name: str) -> tuple[Any, Any, tuple[int, ...], dict[str, Any]]:
    """The module of timm in float64, with random parameters and no biases of queries and keys; and what replaces it."""
    old, shape, given = TIMM_ATTENTION[name]
    old.double().eval()  # which returns nothing for EfficientFormer's
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in old.named_parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
            maps = ("q", "k", "qk", "kv", "wq", "wk", "qkv", "q_proj", "q_bias")
            if key.endswith("bias") and key.split(".")[0] in maps:
                parameter.zero_()
        if hasattr(old, "logit_scale"):
            old.logit_scale.fill_(-100)  # cosine attention by its bias alone, which the factors on channels cannot miss
    holder = nn.ModuleDict({"attn": old})
    swapped = swap(holder, attention="l2", norm="keep")
    assert [s.path for s in swapped][0] == "attn"
    return old, holder["attn"], shape, given


def test_every_class_in_the_table_is_tried() -> None:
    tried = {class_name(old) for old, _, _ in TIMM_ATTENTION.values()}
    elsewhere = {key for key, form in ATTENTIONS.items() if form.now in (L2Attention, L2WindowAttention)}
    assert tried | elsewhere == set(ATTENTIONS)


@pytest.mark.parametrize("name", TIMM_ATTENTION)
def test_packing_arrangement_and_bias_are_those_of_timm(name: str) -> None:
    """Dot-product attention put together from what the replacement has read is what timm's module computes."""
    old, new, shape, given = replaced(name)
    x = torch.randn(2, *shape, dtype=torch.float64)
    given = {} if "rope" in given else given
    with torch.no_grad():
        expected = old(x, **given)
        assert new(x, **given).shape == expected.shape
        heads = heads_of(old, ATTENTIONS[class_name(old)].packing, None)
        sets = new._sets(x, given.get("size")) if isinstance(new, L2SetAttention) else x
        q, k, v = (torch.einsum("ntc,hcd->nhtd", sets, part) for part in (heads.queries, heads.keys, heads.values))
        if heads.value_bias is not None:
            v = v + heads.value_bias.unflatten(0, (new.num_heads, 1, -1))
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        bias = new.position_bias() if isinstance(new, L2SetAttention) else None
        logits = logits if bias is None else logits + bias
        if "mask" in given:
            logits = logits + given["mask"].repeat(len(sets) // 2, 1, 1)[:, None]
        if "shared_rel_pos_bias" in given:
            logits = logits + given["shared_rel_pos_bias"]
        out = new.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        if isinstance(new, L2SetAttention):
            out = out[:, :1] if new.first else new._back(out, x, given.get("size"))
    assert torch.allclose(out, expected, atol=1e-10)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", TIMM_ATTENTION)
def test_contract_of_replaced_attention(name: str) -> None:
    """Bound ≥ Jacobian norms, also those that gradient ascent finds, for weights that tell tokens apart."""
    _, new, shape, given = replaced(name)
    new = copy.deepcopy(new).double()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(0.7 * torch.randn_like(parameter))
    facts = {"shared" if key.startswith("shared") else key: v for key, v in given.items() if key != "size"}
    bound = new.lipschitz(shape, **facts)
    assert bound.finite
    windows = 2 if "mask" in given else 1
    inputs = shape if windows == 1 else (windows, *shape)

    def run(x: Tensor) -> Tensor:
        flat = new(x.flatten(0, 1) if windows > 1 else x, **given)
        return flat.flatten()[None]

    found = 0.0
    for scale in (0.1, 0.5, 1.0, 3.0):
        x, y = scale * torch.randn(2, *inputs, dtype=torch.float64)
        found = max(found, float(jacobian_norm(run, x)), ratio(run, x, y))
        norm = Upper(float(_token_lengths(new, torch.stack((x, y))).max())) * (1 + 1e-12)
        near = new.lipschitz(shape, token_norm=norm, **facts)
        assert near.value <= bound.value * (1 + 1e-9)
        assert ratio(run, x, y) <= near.value * (1 + 1e-12)
        extra = {"rope": given["rope"]} if "rope" in given else {}
        assert float(_token_lengths(new, run_shaped(new, x, given, windows), True).max()) <= float(
            new.result_norm(norm, **extra)
        ) * (1 + 1e-12)
    found = max(found, attack(run, 0.5 * torch.randn(inputs, dtype=torch.float64), steps=6, rate=0.3))
    assert found <= bound.value * (1 + 1e-12)
    assert found >= 1e-3 * bound.value  # an attack that finds nothing, or a bound far above what there is, says little


def run_shaped(new: Any, x: Tensor, given: dict[str, Any], windows: int) -> Tensor:
    with torch.no_grad():
        return new(x if windows > 1 else x[None], **given)


def _token_lengths(module: Any, x: Tensor, result: bool = False) -> Tensor:
    first = getattr(module, "arrangement", "") == "channels"
    return torch.linalg.vector_norm(x, dim=-3 if first else -1)


def test_turning_is_timms_and_turns_back() -> None:
    for name in ("eva", "eva halves", "rope"):
        _, new, shape, given = replaced(name)
        y = torch.randn(2, 2, shape[0], 4, dtype=torch.float64)
        turned = new._turned(y, given["rope"], 1)
        front, rest = y[:, :, : new.prefix], y[:, :, new.prefix :]
        expected = torch.cat((front, apply_rot_embed_cat(rest, given["rope"], half=new.by_halves)), 2)
        assert torch.allclose(turned, expected, atol=1e-12)
        assert torch.allclose(new._turned(turned, given["rope"], -1), y, atol=1e-12)
        assert float(new._largest_turn(given["rope"])) == pytest.approx(1, abs=1e-4)
        assert float(new._largest_turn(3 * given["rope"])) == pytest.approx(3, abs=1e-3)


def test_rotary_values_that_are_not_turned_have_no_constant() -> None:
    """Far apart tokens whose turned forms meet would be averaged: the reason for turning the values."""
    _, new, _, given = replaced("rope")
    rope = given["rope"]

    def unturned(x: Tensor) -> Tensor:
        y = new.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        z = new._turned(y, rope, 1)
        logits = -(z[..., :, None, :] - z[..., None, :, :]).square().sum(-1) * new.scale
        return logits.softmax(-1) @ y

    near = 0.3 * torch.randn(1, 2, 4, 4, dtype=torch.float64)

    def gap(far: float, function: Callable[[Tensor], Tensor]) -> float:
        z = near + far
        y = new._turned(z, rope, -1).transpose(1, 2).flatten(2)
        x = torch.linalg.lstsq(new.q.weight, y[0].T).solution.T
        return float(jacobian_norm(function, x))

    with torch.no_grad():
        new.q.weight.copy_(torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0])
    assert gap(300.0, unturned) > 30 * gap(1.0, unturned)
    assert gap(300.0, partial(new, rope=rope)) <= new.lipschitz((4, 8), rope=rope).value


def test_masks_of_windows_are_not_taken_for_biases_of_heads() -> None:
    """Two heads and two windows: a mask belongs to windows."""
    _, new, _, given = replaced("swin v2")
    x = torch.randn(4, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        together = new(x, mask=given["mask"])
        alone = torch.cat([new(x[i : i + 1], mask=given["mask"][i % 2 : i % 2 + 1]) for i in range(4)])
    assert torch.allclose(together, alone, atol=1e-12)


def test_arrangements_that_are_not_there() -> None:
    module = L2SetAttention(8, 2, arrangement="windows", area=4)
    with pytest.raises(InputError, match="height"):
        module(torch.randn(1, 6, 8))
    with pytest.raises(InputError, match="dim 8"):
        L2SetAttention(8, 2, arrangement="channels").lipschitz((4, 8))
    with pytest.raises(InputError, match="no mask"):
        L2RotaryAttention(8, 2)(torch.randn(1, 3, 8), attn_mask=torch.zeros(3, 3))


# Projections in place of RMSNorm and GroupNorm ------------------------------------------------------------------------


@settings(max_examples=40)
@given(tokens, scales, st.sampled_from([0.5, 2.0, 1e4]), st.sampled_from([RmsLayerProject, RmsSmoothProject]))
def test_projections_without_centring(x: Tensor, scale: float, radius: float, kind: Any) -> None:
    module = kind(5, radius, bias=False).double()
    a, b = scale * x
    with torch.no_grad():
        outputs = module(torch.stack((a, b)))
    assert (outputs[0] - outputs[1]).norm() <= (a - b).norm() * (1 + 1e-12)
    assert outputs.norm(dim=-1).max() <= float(module.token_norm()) * (1 + 1e-12)
    ones = torch.full((1, 5), 0.1 * radius, dtype=torch.float64)
    assert module(ones).norm() > 0.05 * radius  # the mean stays


@settings(max_examples=40)
@given(tokens, scales, st.sampled_from([1, 3]), st.sampled_from([GroupLayerProject, GroupSmoothProject]))
def test_projections_of_groups(x: Tensor, scale: float, groups: int, kind: Any) -> None:
    module = kind(6, 0.7, groups=groups).double()
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-2, 1, 6))
        module.bias.copy_(torch.linspace(0, 1, 6))
    a, b = scale * torch.cat((x, x.flip(1)), 1).reshape(2, 6, 5, 1)
    with torch.no_grad():
        outputs = module(torch.stack((a, b)))
        apart = module(torch.stack((a, b))[:, :, :, :1])
    constant = module.lipschitz((6, 5, 1)).value
    assert constant == 2
    assert (outputs[0] - outputs[1]).norm() <= constant * (a - b).norm() + 1e-12 * outputs.norm()
    assert outputs.norm(dim=1).max() <= float(module.token_norm()) * (1 + 1e-12)
    assert apart.shape == (2, 6, 5, 1)
    plain = (outputs - module.bias.view(-1, 1, 1)) / module.weight.view(-1, 1, 1)
    assert plain.reshape(2, groups, -1).norm(dim=-1).max() <= 0.7 * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["project", "smooth"])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.RMSNorm(6), (3, 6)),
        (timm.layers.RmsNorm(6), (3, 6)),
        (timm.layers.RmsNorm2d(6), (6, 2, 2)),
        (nn.GroupNorm(1, 6), (6, 4, 4)),
        (nn.GroupNorm(3, 6), (6, 4, 4)),
        (timm.layers.GroupNorm1(6), (6, 4, 4)),
        (timm.layers.LayerNorm2d(6), (6, 2, 2)),
        (metaformer.LayerNormNoBias(6), (3, 6)),
        (metaformer.LayerNorm2dNoBias(6), (6, 2, 2)),
        (metaformer.GroupNorm1NoBias(6), (6, 4, 4)),
        (timm.layers.LayerNormAct(6, act_layer=nn.GELU), (3, 6)),
        (timm.layers.LayerNormAct2d(6), (6, 2, 2)),
        (timm.layers.RmsNormAct2d(6, act_layer=nn.SiLU), (6, 2, 2)),
        (timm.layers.GroupNormAct(6, 3, act_layer=nn.SiLU), (6, 4, 4)),
        (timm.layers.GroupNorm1Act(6, apply_act=False), (6, 4, 4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_projections_stand_for_their_normalisations(norm: Any, shape: tuple[int, ...], kind: Any) -> None:
    """On inputs of the typical length the projection computes what the normalisation does."""
    norm = copy.deepcopy(norm)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6))
    net = nn.Sequential(norm).eval()
    (edit,), kept = plan(net, attention="keep", norm=kind)
    assert kept == []
    new: Any = edit.new
    x = torch.randn(1, *shape)
    rows = new.rows(x)
    rows = rows / (rows - rows.mean(-1, keepdim=True) if new.centred else rows).norm(dim=-1, keepdim=True)
    x = rows.movedim(-1, 1) if new.channels_first and not hasattr(new, "groups") else rows.reshape(x.shape)
    calibrate_projection(new, norm, x)
    expected = norm(x)
    assert edit.apply().now == type(new).__name__
    assert not any(module.training for module in net.modules())
    assert torch.allclose(net(x), expected, atol=1e-3)
    edit.revert()
    assert net[0] is norm
    assert torch.equal(net(x), expected)


@pytest.mark.parametrize(
    "norm",
    [
        timm.layers.grn.GlobalResponseNorm(6),
        timm.layers.SimpleNorm2d(6),
        timm.layers.EvoNorm2dS0(8),
        timm.layers.filter_response_norm.FilterResponseNormTlu2d(6),
        nn.InstanceNorm2d(6),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_normalisations_without_a_projection_are_named(norm: nn.Module) -> None:
    edits, (kept,) = plan(nn.Sequential(norm), attention="keep", norm="smooth")
    assert edits == []
    assert (kept.path, kept.was) == ("0", type(norm).__name__)
    assert kept.reason == "no projection is known for this class"


def test_a_head_with_a_norm_inside_is_not_taken_for_one() -> None:
    head = timm.layers.ClNormMlpClassifierHead(6, 0)
    (edit,), kept = plan(nn.Sequential(head), attention="keep", norm="smooth")
    assert edit.path == "0.norm"
    assert kept == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arrangement": "windows", "area": 6}, "windows are squares of tokens, got area=6"),
        ({"arrangement": "windows"}, "no arrangement 'windows' with area=None"),
        ({"arrangement": "tokens", "area": 4}, "no arrangement 'tokens' with area=4"),
        ({"arrangement": "rings"}, "no arrangement 'rings'"),
    ],
)
def test_arrangements_of_sets_that_do_not_exist(settings, message):
    with pytest.raises(InputError, match=message):
        L2SetAttention(4, 1, **settings)
