"""The contract of the remainder rules: no deviation, however chosen, leaves the linearisation by more than they say."""

import functools
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import strategies as st
from modules import Function
from rule_attacks import Linearised, against, answers, norms, repeated
from scipy.optimize import minimize_scalar
from torch import nn

from lipcert.bounds import NoAnswer, Remainder, remainder_of
from lipcert.bounds._piecewise import beyond
from lipcert.bounds._registry import RULES, key_of
from lipcert.bounds._remainder import Smooth
from lipcert.bounds.rules.activation import ACTIVATIONS, Gelu
from lipcert.bounds.rules.attention import _SOFTMAX_CURVATURE, _SPREAD, _SPREAD_FURTHER, _grown, _odds
from lipcert.graph import Node, capture, evaluate, needed
from lipcert.numerics import at_most
from lipcert.surgery import (
    ClippedReLU,
    GroupLayerProject,
    GroupSmoothProject,
    LayerProject,
    RmsLayerProject,
    RmsSmoothProject,
    SmoothProject,
)

REMAINDERS = answers("remainder")
RADII = [1e-6, 1e-3, 0.1, 1.0, 10.0]
POINTS = 6


def seeded(*shape, scale=1.0, seed=5):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projection(kind, radius, **kwargs):
    module = kind(6, radius, dtype=torch.float64, **kwargs)
    module.weight.data = seeded(6)
    return module


def clipped():
    module = ClippedReLU(0.7)
    return module.double()


def recurrent(result, *, biased=True, both=False, batch_first=True, gain=1.0):
    """A layer of LSTM cells on 3 channels with 2 hidden units that starts away from 0, and one of its results."""
    ways = 1 + both
    shapes = [(8, 3), (8, 2), (8,), (8,)] if biased else [(8, 3), (8, 2)]
    weights = [seeded(*shape, scale=gain, seed=11 + i) for i, shape in enumerate(shapes * ways)]

    def layer(x):
        count = len(x) if batch_first else x.shape[1]
        state = (seeded(ways, count, 2, seed=2), seeded(ways, count, 2, seed=4))
        return torch.lstm(x, state, weights, biased, 1, 0.0, False, both, batch_first)[result]

    return layer


def halves(x):
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


# Functions of the table of activations, whose remainder follows from a bound on their second derivative.
SMOOTH = {key_of(function): function for function, phi in ACTIVATIONS.items() if phi.curvature is not None}

# key of the rule -> functions and shapes of their input
CASES = {
    **{key: [(function, (1, 5))] for key, function in SMOOTH.items()},
    "log_sigmoid": [
        (F.logsigmoid, (1, 5)),
        (lambda x: F.logsigmoid(9 * x), (1, 5)),
        (lambda x: F.logsigmoid(x + 30), (1, 3)),
    ],
    "square": [(torch.square, (1, 5))],
    "gelu": [(F.gelu, (1, 5)), (lambda x: F.gelu(x, approximate="tanh"), (1, 5))],
    "relu": [(F.relu, (1, 9))],
    "leaky_relu": [(lambda x: F.leaky_relu(x, 0.2), (1, 9)), (lambda x: F.leaky_relu(x, 3.0), (1, 9))],
    "prelu": [
        (lambda x: F.prelu(x, torch.tensor([0.2, -0.5, 1.0]).double()), (1, 3, 2)),
        (lambda x: F.prelu(x, torch.tensor([3.0, 0.1]).double()), (1, 2, 3)),
        (lambda x: F.prelu(x, torch.tensor([2.0]).double()), (1, 7)),
    ],
    "max_pool2d": [
        (lambda x: F.max_pool2d(x, 2), (1, 2, 4, 4)),
        (lambda x: F.max_pool2d(x, 3, 1, 1), (1, 1, 4, 5)),
        (lambda x: F.max_pool2d(x, (3, 2), (2, 1), dilation=(1, 2)), (1, 1, 5, 5)),
        (lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), (1, 1, 4, 6)),
        (lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), (1, 1, 4, 5)),
    ],
    "adaptive_max_pool2d": [
        (lambda x: F.adaptive_max_pool2d(x, 1), (1, 2, 3, 3)),
        (lambda x: F.adaptive_max_pool2d(x, (2, 3)), (1, 1, 5, 4)),
        (lambda x: F.adaptive_max_pool2d(x, 3), (1, 1, 2, 2)),
    ],
    "softmax": [
        (lambda x: x.softmax(-1), (1, 2, 3, 4)),
        (lambda x: x.softmax(1), (1, 2, 3)),
        (lambda x: F.softmax(x, 1), (1, 9)),
    ],
    "matmul": [
        (lambda x: torch.matmul(*halves(x)), (1, 2, 3, 6)),
        (lambda x: halves(x)[0] @ halves(x)[1].mT, (1, 2, 3, 8)),
        (lambda x: x @ x.mT, (1, 3, 2)),
        (lambda x: x @ x[:, :1].mT, (1, 2, 3, 2)),
    ],
    "mul": [
        (lambda x: torch.mul(*halves(x)), (1, 6)),
        (lambda x: halves(x)[0] * halves(x)[1][:, :1], (1, 3, 4)),
        (lambda x: x * x, (1, 4)),
    ],
    "layer_norm": [
        (lambda x: F.layer_norm(x, (6,), seeded(6), seeded(6), 1e-2), (1, 3, 6)),
        (lambda x: F.layer_norm(x, (6,), eps=1e-6), (1, 2, 6)),
    ],
    SmoothProject: [
        (projection(SmoothProject, 1.0), (1, 3, 6)),
        (projection(SmoothProject, 0.3, channels_first=True), (1, 6, 2)),
    ],
    LayerProject: [(projection(LayerProject, 1.0), (1, 3, 6)), (projection(LayerProject, 3.0), (1, 2, 6))],
    RmsSmoothProject: [
        (projection(RmsSmoothProject, 0.7, bias=False), (1, 3, 6)),
        (projection(RmsSmoothProject, 2.0, channels_first=True), (1, 6, 2)),
    ],
    RmsLayerProject: [(projection(RmsLayerProject, 1.0), (1, 3, 6))],
    GroupSmoothProject: [(projection(GroupSmoothProject, 1.0, groups=2), (1, 6, 1, 3))],
    GroupLayerProject: [
        (projection(GroupLayerProject, 2.0, groups=3), (1, 6, 2)),
        (projection(GroupLayerProject, 3.0, groups=1), (1, 6, 2, 1)),
    ],
    ClippedReLU: [(clipped(), (1, 9))],
    "hardtanh": [(F.hardtanh, (1, 9)), (lambda x: F.hardtanh(x, -0.2, 3.0), (1, 9))],
    "clamp": [
        (lambda x: x.clamp(-0.5, 0.7), (1, 9)),
        (lambda x: x.clamp(max=seeded(3, 1, seed=4)), (1, 3, 4)),
        (lambda x: torch.clamp(x, min=torch.tensor(-math.inf)), (1, 4)),
    ],
    "abs": [(torch.abs, (1, 9))],
    "hardsigmoid": [(F.hardsigmoid, (1, 9)), (lambda x: F.hardsigmoid(x + 3), (1, 9))],
    "hardswish": [
        (F.hardswish, (1, 9)),
        (lambda x: F.hardswish(x + 3), (1, 3)),
        (lambda x: F.hardswish(x - 6), (1, 3)),
    ],
    "amax": [
        (lambda x: x.amax((2, 3), keepdim=True), (1, 2, 2, 3)),
        (lambda x: x.max(1).values, (1, 4, 3)),
    ],
    "amin": [(lambda x: x.min(-1, keepdim=True)[0], (1, 3, 4)), (lambda x: x.amin(1), (1, 1, 4))],
    "max": [(lambda x: seeded(4, seed=6).expand(1, 4).max(x), (1, 4))],
    "min": [(lambda x: x.min(seeded(4, seed=6)), (1, 4))],
    "maximum": [(lambda x: torch.maximum(*halves(x)), (1, 8)), (lambda x: torch.maximum(x, seeded(3, 1)), (1, 3, 2))],
    "minimum": [(lambda x: torch.minimum(*halves(x)), (1, 8))],
    "div": [
        (lambda x: torch.div(halves(x)[0], halves(x)[1] + 15), (1, 3, 4)),
        (lambda x: halves(x)[0] / (15 - halves(x)[1][:, :1]), (1, 3, 4)),
        (lambda x: halves(x)[0][:, :1, :1] / (15 + halves(x)[1]), (1, 3, 4)),
        (lambda x: seeded(3, 1) / (x - 15), (1, 3, 2)),
        (lambda x: x / (x + 15), (1, 5)),
    ],
    "pow": [
        (lambda x: x**3, (1, 4)),
        (lambda x: x.pow(2), (1, 4)),
        (lambda x: x**1, (1, 4)),
        (lambda x: (x + 15) ** 1.5, (1, 4)),
        (lambda x: (x + 15) ** -2, (1, 4)),
    ],
    "sqrt": [(lambda x: torch.sqrt(x + 15), (1, 4))],
    "rsqrt": [(lambda x: torch.rsqrt(x + 15), (1, 4))],
    "var": [
        (lambda x: x.var((2, 3), unbiased=False, keepdim=True), (1, 2, 2, 3)),
        (lambda x: torch.var(x, dim=-1), (1, 2, 3)),
    ],
    "norm": [
        (lambda x: x.norm(p=2, dim=(2, 3), keepdim=True), (1, 2, 2, 3)),
        (lambda x: x.norm(dim=-1), (1, 3, 2)),
    ],
    "conv2d": [
        (lambda x: F.conv2d(x[:, :, :3], x[:, :, 3:].reshape(2, 2, 2, 2), padding=1), (1, 2, 5, 4)),
        (lambda x: F.conv2d(x[:, :, :3], x[:, :1, 3:].reshape(2, 1, 2, 2), None, 2, 0, 1, 2), (1, 2, 5, 4)),
    ],
    "conv1d": [(lambda x: F.conv1d(x[:, :, :4], x[:, :, 4:]), (1, 2, 6))],
    "conv3d": [(lambda x: F.conv3d(x[:, :, :, :, :2], x[:, :, :1, :1, 2:]), (1, 1, 2, 2, 3))],
    "group_norm": [
        (lambda x: F.group_norm(x, 2, seeded(4), seeded(4, seed=9), 1e-2), (1, 4, 1, 2)),
        (lambda x: F.group_norm(x, 1, eps=1e-3), (1, 3, 2)),
    ],
    "rms_norm": [(lambda x: F.rms_norm(x, (4,), seeded(4), 1e-2), (1, 3, 4)), (lambda x: F.rms_norm(x, (4,)), (1, 4))],
    "normalize": [
        (lambda x: F.normalize(x, dim=-1, eps=0.5), (1, 2, 3)),
        (lambda x: F.normalize(x, dim=1, eps=1e-6), (1, 3, 2)),
    ],
}
CASES |= {
    "lstm": [
        (recurrent(0), (1, 4, 3)),
        (recurrent(0, biased=False, both=True, gain=3.0), (2, 3, 3)),
        (recurrent(0, batch_first=False, gain=0.5), (5, 1, 3)),
    ],
    "lstm_last_hidden": [(recurrent(1, both=True), (1, 3, 3))],
    "lstm_last_cell": [(recurrent(2), (1, 4, 3))],
}
# Rules that say nothing where a deviation may reach the place at which the function ends.
LOCAL = {"div", "pow", "sqrt", "rsqrt"}
NAMED = [(key, index) for key, cases in CASES.items() for index in range(len(cases))]


def overrides(rule, name):
    return inspect.getattr_static(rule, name) is not inspect.getattr_static(Remainder, name)


def test_every_rule_has_a_case():
    assert set(REMAINDERS) == set(CASES)


class Site(Linearised):
    """One nonlinear operation at POINTS nominal points."""

    def __init__(self, key, index):
        function, shape = CASES[key][index]
        module = function if isinstance(function, nn.Module) else Function(function)
        module.eval()
        graph = needed(capture(module, seeded(*shape), whole=lambda part: type(part) in REMAINDERS))
        found = [node for node in graph.nodes if node is not graph.input and remainder_of(node) is not None]
        assert [node.op for node in found] == [key]
        scales = torch.tensor([0.0, 1e-3, 0.3, 1.0, 1.0, 4.0], dtype=torch.float64)
        inputs = scales.reshape(-1, *[1] * len(shape)) * seeded(POINTS, *shape, seed=7)
        super().__init__(found[0], [evaluate(graph.nodes, {graph.input: x}) for x in inputs])


site_at = functools.cache(Site)  # of which every test asks the same


@pytest.mark.parametrize(("key", "index"), NAMED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_remainder_in_norm(key, index):
    site = site_at(key, index)
    for rho in RADII:
        site.check_norm(rho)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("key", "index"), NAMED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_remainder_against_a_direction(key, index):
    site = site_at(key, index)
    plain = seeded(*site.result.shape, seed=3)
    sparse = torch.where(plain.abs() > 1, plain, 0.0)
    for g in (plain, -plain, sparse, plain.abs(), -plain.abs()):
        site.check_against(g, RADII[::2])


BLOCKWISE = [(k, i) for k, i in NAMED if REMAINDERS[k].entrywise or overrides(REMAINDERS[k], "block")]


def cut_to(most, block=1):
    """Shortens every block of entries of deviations to a length of ``most``."""

    def cut(deltas):
        if block == 1:
            return [delta.clamp(-most, most) for delta in deltas]
        parts = [delta.reshape(len(delta), -1, block) for delta in deltas]
        shares = [(most / part.norm(dim=2, keepdim=True).clamp_min(1e-300)).clamp_max(1) for part in parts]
        return [(p * share).reshape(d.shape) for p, share, d in zip(parts, shares, deltas, strict=True)]

    return cut


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("key", "index"), BLOCKWISE, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_rules_with_a_bound_on_entries_or_blocks(key, index, share):
    """No deviation of norm at most ρ whose entries, or rows, are all at most p leaves the linearisation by more."""
    site = site_at(key, index)
    block = site.rule.block(site.node)
    if not block:
        pytest.skip("its rows do not lie one behind the other")
    g = seeded(*site.result.shape, seed=3)
    answer = site.rule.against(g)
    for rho in RADII:
        peak = share * rho
        given = [torch.full((POINTS,), value, dtype=torch.float64) for value in (rho, peak)]
        norm, inner = site.rule.norm(given), answer(given)
        assert bool((norm <= site.rule.norm(given[:1]) * (1 + 1e-12)).all())
        assert bool((inner <= answer(given[:1]) * (1 + 1e-12)).all())
        slack = 1e-14 * (site.size + rho) * (1 + g.flatten(1).norm(dim=1))
        for objective, bound in ((norms, norm), (against(g), inner)):
            for rest, _ in site.ascent(objective, [rho], 4, cut_to(peak, block)):
                found = objective(rest).reshape(-1, POINTS)
                assert bool(((found <= bound * (1 + 1e-9) + slack) | bound.isinf()).all()), (rho, found, bound)


def test_rows_of_softmax_that_move_little_leave_little():
    """Sixteen rows that share a deviation leave a quarter of what one row may, and no less than what is met."""
    operand = Node("input", lambda: None, (), {}, "", (1, 16, 8))
    node = Node("softmax", torch.softmax, (operand, -1), {}, "", (1, 16, 8))
    nominal = seeded(1, 1, 16, 8, seed=1)
    rule = REMAINDERS["softmax"](node, [nominal], nominal.softmax(-1))
    rho = torch.full((1,), 0.4, dtype=torch.float64)
    assert rule.block(node) == 8
    assert rule.norm([rho, rho / 4]).item() < 0.26 * rule.norm([rho]).item()
    g = seeded(1, 1, 16, 8, seed=2)
    assert rule.against(g)([rho, rho / 4]).item() < 0.9 * rule.against(g)([rho]).item()


QUADRATIC = {*SMOOTH, "log_sigmoid", "square", "gelu", "pow", "sqrt", "rsqrt"}
RADIAL = {"layer_norm", "rms_norm", "group_norm", SmoothProject, RmsSmoothProject, GroupSmoothProject}
BENT = {"relu", "leaky_relu", "prelu"}
CONTRACTED = QUADRATIC | RADIAL | BENT | {"softmax", "matmul"}


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("key", "index"), NAMED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_remainder_by_contracted_forms(key, index):
    """−⟨g, R⟩ is within what the ‖Mδ‖ of the deviation itself allow, also where ascent makes it large."""
    site = site_at(key, index)
    plain = seeded(*site.result.shape, seed=3)
    for number, g in enumerate((plain, -plain, plain.abs(), site.result, -site.result)):
        for rho in RADII:
            radii = site.radii(rho)
            given = site.per_operand(radii)
            likely = None if number % 2 else rho / 3 * seeded(*site.nominal[0].shape, seed=4)
            answer = site.rule.contracted(g, given, likely)
            assert (answer is not None) == (key in CONTRACTED)
            if answer is None:
                return
            assert (answer.linear is not None) == (key in BENT)
            slack = 1e-14 * (site.size + rho) * (1 + g.flatten(1).norm(dim=1))
            halves_of = [part / 2 for part in site.starts(radii)]
            for rest, parts in (*site.ascent(against(g), radii, 4), (site.remainder(halves_of), halves_of)):
                moved = [part.reshape(-1, POINTS, *part.shape[1:]) for part in parts]
                for number, left in enumerate(against(g)(rest).reshape(-1, POINTS)):
                    own = [moved[site.positions[form.operand]][number] for form in answer.forms]
                    sizes = [norms(form(part)) for form, part in zip(answer.forms, own, strict=True)]
                    for form, part, size in zip(answer.forms, own, sizes, strict=True):
                        assert bool((size <= form.norm * norms(part) * (1 + 1e-9)).all())
                        assert bool((form.norm <= form.size * (1 + 1e-9)).all())
                    bound = answer.bound(given, sizes).nan_to_num(nan=math.inf)
                    if answer.linear is not None:
                        bound = bound + (answer.linear * moved[0][number]).flatten(1).sum(1)
                    assert bool(((left <= bound * (1 + 1e-9) + slack) | bound.isinf()).all()), (rho, left, bound)


@pytest.mark.parametrize("key", [SmoothProject, RmsSmoothProject])
def test_contracted_forms_are_sharp_for_small_deviations(key):
    """Along the direction in which M is largest, the second derivative takes that much."""
    site = Site(key, 0)
    g, rho = seeded(*site.result.shape, seed=3), 1e-4
    answer = site.rule.contracted(g, site.per_operand([rho]))
    found = site.worst(against(g), [rho], 60)
    most = answer.bound(site.per_operand([rho]), [form.norm * rho for form in answer.forms])
    assert bool((found <= most * (1 + 1e-6)).all())
    assert bool((found[2:] > 0.2 * most[2:]).all())  # of points that are not next to 0, where curvature vanishes


KINKED_ENTRIES = BENT | {"abs", "clamp", "hardtanh", "hardsigmoid", ClippedReLU}
SUMMED = [(key, index) for key, index in NAMED if key in QUADRATIC | KINKED_ENTRIES | {"hardswish"}]


@pytest.mark.parametrize("key", ["leaky_relu", "relu"])
def test_secants_are_exact_at_the_likely_deviation(key):
    """Entry by entry, the bound is what is lost where the entry has passed its kink as it is likely to."""
    site = Site(key, 0)
    z = site.nominal[0]
    g = -torch.ones_like(site.result)
    likely = -z - 0.7 * torch.where(z > 0, 1.0, -1.0)  # 0.7 beyond the kink
    rest = site.remainder([likely])
    answer = site.rule.contracted(g, [norms(likely), likely.abs().amax(dim=(1, 2)) * 1.001], likely)
    bound = answer.bound([], [norms(answer.forms[0](likely))]) + (answer.linear * likely).flatten(1).sum(1)
    lost = rest.flatten(1).sum(1)
    assert bool((bound >= lost * (1 - 1e-12)).all())
    assert bool((bound <= lost * 1.2)[:5].all()), (bound, lost)  # the last lies far from its kinks


@pytest.mark.parametrize("key", sorted(key for key in REMAINDERS if isinstance(key, str) and REMAINDERS[key].nonsmooth))
def test_rules_with_kinks_say_where_the_jacobian_may_jump(key):
    _jumps(Site(key, 0).rule)


@pytest.mark.parametrize("key", [LayerProject, RmsLayerProject, GroupLayerProject, ClippedReLU])
def test_modules_with_kinks_say_where_the_jacobian_may_jump(key):
    _jumps(Site(key, 0).rule)


def test_hardswish_says_where_the_jacobian_may_jump():
    _jumps(Site("hardswish", 1).rule)


def _jumps(rule):
    nothing, much = (torch.full((POINTS,), noise, dtype=torch.float64) for noise in (0.0, 10.0))
    assert not rule.uncertain(nothing).any() or hasattr(rule, "lost")  # projections have errors of their own
    assert rule.uncertain(much)[2:].all()


def test_kinks_at_a_distance_of_minus_0():
    """Windows whose entries are −0 have it."""
    weight, most = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[1.0]], dtype=torch.float64)
    found = beyond(weight, torch.tensor([[-0.0, 0.5]], dtype=torch.float64), torch.ones(1, dtype=torch.float64), most)
    assert found.item() >= 1.0


@pytest.mark.parametrize("offset", [0.0, 1e-17, -1e-17, 1e-15])
def test_secants_hold_with_either_slope_next_to_a_kink(offset):
    """The gradient may be computed from values that lie on the other side of a kink by a rounding error."""
    z = torch.full((40, 6), offset, dtype=torch.float64)
    rule = REMAINDERS["relu"](Node("relu", torch.relu, (None,), {}, "", (6,)), [z], torch.relu(z))
    g = -seeded(40, 6, seed=1).abs()
    most = seeded(40, 6, seed=2).abs() + 0.1
    rho = [most.norm(dim=1), most]
    for likely in (None, most / 2, -most / 2):
        answer = rule.contracted(g, rho, likely)
        for seed in range(30):
            delta = most * seeded(40, 6, seed=10 + seed).clamp(-1, 1)
            bound = answer.bound(rho, [norms(answer.forms[0](delta))]) + (answer.linear * delta).sum(1)
            for slope in (0.0, 1.0):
                rest = torch.relu(z + delta) - torch.relu(z) - slope * delta
                assert bool((-(g * rest).sum(1) <= bound + 1e-13).all())


@drawn(
    entries=st.lists(st.tuples(*[st.floats(0, 3)] * 3), min_size=1, max_size=6),
    rho=st.floats(0.01, 5),
    seed=st.integers(0, 99),
)
def test_what_lies_beyond_kinks(entries, rho, seed):
    """No deviation exceeds the bound, and the bound is at most 20 % above the least that duality gives."""
    weight, distance, most = (torch.tensor([values], dtype=torch.float64) for values in zip(*entries, strict=True))
    bound = beyond(weight, distance, torch.tensor([rho], dtype=torch.float64), most).item()

    def dual(exponent):
        multiplier = math.exp(exponent)
        tau = torch.minimum(weight / (2 * multiplier), most)
        return multiplier * rho**2 + (weight * (tau - distance) - multiplier * tau**2).clamp_min(0).sum().item()

    least = min(minimize_scalar(dual, bounds=(low, low + 8), method="bounded").fun for low in (-16, -8, 0, 8))
    least = min(least, (weight * (most - distance).clamp_min(0)).sum().item())
    assert bound <= 1.2 * least + 1e-9
    for number in range(40):
        tau = most * seeded(1, len(entries), seed=100 * seed + number).abs().clamp_max(1)
        tau = tau * min(1.0, rho / max(1e-12, tau.norm().item()))
        assert (weight * (tau - distance).clamp_min(0)).sum().item() <= bound + 1e-12


def test_rules_declare_their_optional_answers():
    assert {key for key, _ in NAMED if REMAINDERS[key].sums} == {key for key, _ in SUMMED}
    assert {key for key, _ in NAMED if REMAINDERS[key].contracts} == CONTRACTED


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("key", "index"), SUMMED)
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_the_total_of_a_remainder_by_weights(key, index, share):
    """Σ w_i |R_i| of no deviation of norm at most ρ with entries of at most p is larger, ascent included."""
    site = site_at(key, index)
    plain = seeded(*site.result.shape, seed=3)
    for weight in (torch.where(plain > 0, plain, 0.0), torch.ones_like(plain)):
        flat = weight.flatten(1)
        for rho in RADII[::2]:
            peak = share * rho
            given = [torch.full((POINTS,), value, dtype=torch.float64) for value in (rho, peak)]
            bound = at_most(site.rule.total(flat, given))
            smooth = not site.rule.nonsmooth
            slack = 1e-14 * (site.size + rho) * (1 + flat.norm(dim=1))
            summed = lambda rest, weight=weight: (rest.abs() * repeated(weight, rest)).flatten(1).sum(1)  # noqa: E731
            for rest, (delta,) in site.ascent(summed, [rho], 3, cut_to(peak)):
                found = summed(rest).reshape(-1, POINTS)
                assert bool((found <= bound * (1 + 1e-9) + slack).all()), (rho, found, bound)
                sizes = norms(delta * repeated(weight, delta).sqrt()).reshape(-1, POINTS)
                for size, one in zip(sizes, found, strict=True) if smooth else ():
                    known = site.rule.total(flat, given, size)
                    assert bool((one <= known * (1 + 1e-9) + slack).all()), (rho, one, known)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("key", "index"), NAMED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_rules_increase_with_rho(key, index):
    site = site_at(key, index)
    against = site.rule.against(seeded(*site.result.shape, seed=3))
    grid = torch.logspace(-7, 2, 60, dtype=torch.float64)
    for answer in (site.rule.norm, against):
        values = torch.stack([answer([rho.expand(POINTS)] * len(site.positions)) for rho in grid])
        assert bool(torch.isfinite(values if key not in LOCAL else values[grid < 5]).all())
        assert bool((values[1:] >= values[:-1] * (1 - 1e-12)).all())


@pytest.mark.parametrize(("key", "index"), NAMED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_products_with_the_jacobian_as_the_certificates_take_them(key, index):
    """J v by differentiating Jᵀ w once more, through vmap: some operations of torch cannot."""
    site = site_at(key, index)

    def one(*operands):
        return evaluate((site.node,), dict(zip(site.distinct, operands, strict=True)))[site.node]

    points = [(value + 0.01).requires_grad_() for value in site.nominal]
    result = torch.vmap(one)(*points)
    weight = torch.zeros_like(result, requires_grad=True)
    pulled = torch.autograd.grad(result, points, weight, create_graph=True)
    moved = tuple(seeded(*value.shape, seed=8) for value in site.nominal)
    (product,) = torch.autograd.grad(pulled, weight, moved)
    base = tuple(value + 0.01 for value in site.nominal)
    _, expected = torch.func.jvp(torch.vmap(one), base, moved)
    torch.testing.assert_close(product, expected)


# Constants -----------------------------------------------------------------------------------------------------------

GRID = torch.linspace(-12, 12, 2_400_001, dtype=torch.float64)


def second_derivative(function):
    t = GRID.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(t).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    return second


@pytest.mark.parametrize(
    ("key", "function"),
    [
        *SMOOTH.items(),
        ("log_sigmoid", F.logsigmoid),
        ("gelu", F.gelu),
    ],
)
def test_curvature_is_the_supremum_rounded_up(key, function):
    curve = second_derivative(function)
    largest, least = curve.abs().max().item(), -curve.min().item()
    assert largest <= REMAINDERS[key].curvature <= largest * (1 + 1e-4)
    assert least <= REMAINDERS[key].downward
    if least < largest * (1 - 1e-4):
        assert REMAINDERS[key].downward <= least * (1 + 1e-4)


def envelope(approximate):
    node = Node("gelu", torch.nn.functional.gelu, (None,), {"approximate": approximate}, "")
    rule = Gelu(node, [torch.zeros(1, 1, dtype=torch.float64)], torch.zeros(1, 1))
    return rule.envelope(GRID.abs())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_envelope(approximate):
    bound = envelope(approximate)
    curve = second_derivative(lambda t: F.gelu(t, approximate=approximate))
    assert bool((curve.abs() <= bound + 1e-15).all())
    falling = bound[GRID >= 0]
    assert bool((falling[1:] <= falling[:-1]).all())


@pytest.mark.parametrize("z", [0.0, 1e-3, -0.4, 2.0, -7.0, 40.0, 300.0])
@pytest.mark.parametrize("peak", [1e-5, 1e-2, 0.6, 3.0, 17.0, 900.0])
def test_log_sigmoid_remainder_over_the_square_of_the_deviation(z, peak):
    """κ is the supremum of −R/δ² over |δ| ≤ p: nothing on a fine grid is above it, and something comes near."""
    point = torch.tensor([[z]], dtype=torch.float64)
    rho = [torch.tensor([peak], dtype=torch.float64)] * 2
    kappa = REMAINDERS["log_sigmoid"](Node("", F.logsigmoid, (None,), {}, ""), [point], point)._local(rho).item() / 2
    least = 0.05 * min(peak, max(1.0, abs(z)))  # the difference below cancels for smaller deviations
    steps = torch.cat([sign * torch.linspace(least, peak, 400_001, dtype=torch.float64) for sign in (1, -1)])
    lost = F.logsigmoid(point[0]) + torch.sigmoid(-point[0]) * steps - F.logsigmoid(point[0] + steps)
    noise = 1e-14 * (1 + abs(z)) / least**2
    attained = (lost / steps.square()).max().item()
    assert attained <= kappa * (1 + 1e-9) + noise
    assert kappa <= attained * 1.03 + noise + 1e-10


def test_entrywise_rules_are_all_checked():
    entrywise = {key for key, rule in REMAINDERS.items() if issubclass(rule, Smooth)}
    checked_here = {*SMOOTH, "log_sigmoid", "gelu", "square"}
    assert entrywise == checked_here | {"hardswish", "pow", "sqrt", "rsqrt"}  # whose second derivatives are powers


def test_third_moment_behind_the_softmax_constant():
    q = torch.linspace(0, 1, 1_000_001, dtype=torch.float64)
    largest = 2 * math.sqrt(2) * (q * (1 - q) * (1 - 2 * q)).max().item()
    assert largest == pytest.approx(math.sqrt(2 / 27), rel=1e-9)
    assert largest <= _SOFTMAX_CURVATURE <= largest * (1 + 1e-5)


def cumulants(p, c, w):
    """E[(c − E c) X²] and E[(c − E c)(X³ − 3 Var(w) X)] for X = w − E w: derivatives of Σ c_j softmax_j along w."""
    x = w - (p * w).sum(-1, keepdim=True)
    variance = (p * x.square()).sum(-1, keepdim=True)
    c = c - (p * c).sum(-1, keepdim=True)
    return (p * c * x.square()).sum(-1), (p * c * (x**3 - 3 * variance * x)).sum(-1)


def test_range_of_a_direction_behind_the_softmax_constants():
    """Ascent over probabilities, directions of range 1 and unit deviations; two entries attain the first constant."""
    for place, most in enumerate((_SPREAD, _SPREAD_FURTHER)):
        given = [seeded(300, 5, seed=seed).requires_grad_() for seed in (1, 2, 3)]
        optimizer, largest = torch.optim.Adam(given, lr=0.05), 0.0
        for _ in range(300):
            logits, c, w = given
            c = (c - c.amin(1, keepdim=True)) / (c.amax(1, keepdim=True) - c.amin(1, keepdim=True))
            found = cumulants(logits.softmax(1), c, w / w.norm(dim=1, keepdim=True))[place].abs()
            largest = max(largest, found.max().item())
            optimizer.zero_grad()
            (-found.sum()).backward()
            optimizer.step()
        assert 0.45 * most < largest <= most
    q = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:, None]
    two, half = torch.cat((q, 1 - q), 1), math.sqrt(0.5)
    found = cumulants(two, torch.tensor([1.0, 0.0]).double(), torch.tensor([half, -half]).double())[0].max().item()
    assert _SPREAD * (1 - 1e-5) < found <= _SPREAD


@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("r", [1e-3, 0.3, 1.0, 3.0, 1e3])
def test_entries_of_softmax_grow_no_further(scale, r):
    """No deviation of norm r makes an entry larger; for two entries the bound is attained."""
    for n in (1, 2, 5):
        a = seeded(20, n, scale=scale)
        bound = _grown(torch.full((20,), r, dtype=torch.float64), *_odds(a.softmax(1), 1))[:, 0]
        assert bool((bound <= 1).all())
        largest = torch.zeros(20, dtype=torch.float64)
        for entry in range(n):
            w = torch.nn.functional.one_hot(torch.tensor(entry), n).double().expand(20, n)
            for _ in range(100):
                p = (a + r * w).softmax(1)
                largest = torch.maximum(largest, p.amax(1))
                step = -p
                step[:, entry] += 1  # the gradient of the logarithm of the entry
                w = step / step.norm(dim=1, keepdim=True).clamp_min(1e-300)
        assert bool((largest <= bound * (1 + 1e-12)).all())
        if n == 2:
            assert bool((largest >= bound * (1 - 1e-6)).all())


# What looks affine and is not ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda x: torch.div(x, 2, rounding_mode="floor"), "rounds"),
        (lambda x: x.to(torch.int64), "rounds"),
        (lambda x: F.batch_norm(x, None, None, training=True), "statistics"),
        (lambda x: F.batch_norm(x, None, None, None, None, True), "statistics"),
        (lambda x: x ** seeded(4), "one number"),
        (lambda x: 2**x, "one number"),
        (lambda x: x.max(), "of all entries"),
        (lambda x: F.conv2d(x[:, None], seeded(1, 1, 2, 2), x[0, 0, :1]), "a bias"),
        (torch.exp, ""),
    ],
)
def test_no_rule(function, word):
    graph = needed(capture(Function(function).eval(), torch.rand(1, 3, 4, dtype=torch.float64) + 1))
    values = evaluate(graph.nodes, {graph.input: torch.rand(1, 3, 4, dtype=torch.float64)})

    def make_all():
        for node in graph.nodes[1:]:
            if (rule := remainder_of(node)) is not None:
                rule(node, [values[operand][None] for operand in node.operands], values[node])

    with pytest.raises(NoAnswer, match=word):
        make_all()


def test_a_projection_just_outside_its_ball_has_the_gain_of_all_terms_of_its_jacobian():
    """|J| of a long centred token at the sphere is larger than for √(‖c‖² + R²) in place of max(‖c‖, R)."""
    token = torch.cat([torch.zeros(128), torch.linspace(-1, 1, 128)]).double()
    token = (token - token.mean()) / (token - token.mean()).norm() * (1 + 1e-9)
    project = LayerProject(256, 1.0, bias=False).double().eval()
    node = capture(project, token[None], whole=lambda part: part is project).output
    dense = torch.autograd.functional.jacobian(project, token[None]).reshape(256, 256)
    values = {node.operands[0]: token[None, None], node: project(token[None])[None]}
    answer = RULES[LayerProject].jacobian
    assert torch.linalg.matrix_norm(dense.abs(), 2) <= answer.bounds(node, 0, values)[0].item() * (1 + 1e-9)
    assert torch.linalg.matrix_norm(dense, 2) <= answer.norm(node, 0, values).item() * (1 + 1e-9)
