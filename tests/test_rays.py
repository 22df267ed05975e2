"""Sectors of perturbations around the gradient of a margin: nothing moves further there than is said."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from modules import orthogonal_vit, seeded
from scipy.optimize import linprog
from torch import nn

import lipcert
from lipcert.bounds import RULES, margins
from lipcert.bounds._remainder import largest_share
from lipcert.certifier import Anchored
from lipcert.certifier.anchored.deviations import NORM
from lipcert.certifier.anchored.margin import AppliedForm, RivalMargin, _with_sectors, curvature_norms
from lipcert.certifier.anchored.network import Network
from lipcert.certifier.anchored.ray import SECTORS, sector
from lipcert.graph import Node
from lipcert.surgery import SmoothMaxMin


def loaded(*layers, size=8):
    torch.manual_seed(0)
    net = nn.Sequential(*[build() for build in layers]).eval()
    return lipcert.load(net, mean=(0.5,) * 3, std=(0.3,) * 3, input_size=(3, size, size)).double()


class Turned(nn.Module):
    """Activations that read their operand in another order than the layer before them computes it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(64, 12)
        self.last = nn.Linear(12, 4)

    def forward(self, x):
        x = F.gelu(self.first(x).flip(3).permute(0, 2, 3, 1)).flatten(1)
        return self.last(F.silu(self.second(x).reshape(-1, 3, 4).transpose(1, 2).roll(1, 1)).flatten(1))


MODELS = {
    "smooth vit": lambda: orthogonal_vit("smooth", mlp_ratio=2.0),
    "kinked vit": lambda: orthogonal_vit("project", mlp_ratio=2.0),
    "distances": lambda: orthogonal_vit("smooth", "l2", mlp_ratio=2.0),
    "turned": lambda: loaded(Turned),
    "relu": lambda: loaded(
        lambda: nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU, lambda: nn.Conv2d(6, 6, 3, 2, 1), nn.GELU, nn.Flatten,
        lambda: nn.Linear(24, 4),
    ),
    "maxmin": lambda: loaded(
        nn.Flatten, lambda: nn.Linear(192, 32), lambda: SmoothMaxMin(4.0), lambda: nn.Linear(32, 16),
        lambda: SmoothMaxMin(2.0), lambda: nn.Linear(16, 4),
    ),
}  # fmt: skip


def toward(model, count=2):
    side = model.input_size[1]
    pixels = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    anchor = Anchored(model)(pixels)
    with torch.no_grad():
        predicted, gaps = margins(model(pixels))
    return RivalMargin(anchor.linearization, gaps.argmin(1), predicted, gaps), predicted


def parts(one, eps, seed):
    """Perturbations with parts along and across the ray in the ratio of every sector, shape (N, sectors, source)."""
    ray, source = one.ray, one.at.network.source
    p = ray.tangents[source].flatten(1)[:, None]
    images, numbers = _with_sectors(torch.arange(len(eps)))
    cover = sector(ray, eps[images], numbers)
    along, across = (size.unflatten(0, (-1, SECTORS))[..., None] for size in (cover.along, cover.across))
    other = seeded(len(p), SECTORS, p.shape[2], seed=seed)
    other = other - (other * p).sum(2, keepdim=True) * p
    other = other / other.norm(dim=2, keepdim=True)
    # The innermost angle of a sector, or its outermost, with either sign of the part along the ray.
    sign = -1.0 if seed % 2 else 1.0
    if seed % 4 < 2:
        s, t = along, (eps[:, None, None].square() - along.square()).clamp_min(0).sqrt()
    else:
        s, t = (eps[:, None, None].square() - across.square()).clamp_min(0).sqrt(), across
    return sign * s * p, t, other


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", MODELS)
def test_no_perturbation_of_a_sector_passes_its_bounds(name):
    """Deviations of operands and of their entries, what forms make of them, and the margin, under ascent too."""
    one, predicted = toward(MODELS[name]())
    at = one.at
    network, source = at.network, at.network.source
    radius = one.radius()
    assert bool((radius > 0).all())
    for share, at.pieces in ((0.3, 1), (1.2, 4)):
        eps = share * radius
        moved = one.moved(eps)
        everyone = torch.ones(len(eps), dtype=torch.bool)
        answers = {v: at.remainders[v].contracted(g, moved[v]) for v, g in one.at_nodes.items()}
        forms = {v: AppliedForm(answer, everyone) for v, answer in answers.items() if answer is not None}
        at.norms.ledger = at.finder.ledger(len(eps))
        norms = curvature_norms(one, forms, 0)
        index, numbers = _with_sectors(torch.arange(len(eps)))
        wide, curved = one.only(index), {v: [form.only(index) for form in found] for v, found in norms.items()}
        reached = wide.at.propagate(eps[index], curved, sector=sector(wide.ray, eps[index], numbers))
        left = one._inside(eps[index], index, numbers, norms, forms).unflatten(0, (len(eps), -1))
        nodes = list(network.rules)
        targets = [u for v in nodes for u in v.operands]
        values = {node: value[index] for node, value in at.values.items()}
        for seed in range(4):
            along, length, other = parts(one, eps, seed)
            for _ in range(4):
                other = other.detach().requires_grad_()
                delta = (along + length * other).flatten(0, 1).unflatten(1, source.shape)
                assert bool((delta.flatten(1).norm(dim=1) <= eps[index] * (1 + 1e-6)).all())
                found = network.graph.forward(source, values[source] + delta, [*targets, network.graph.output], values)
                for target, value in zip(targets, found[:-1], strict=True):
                    deviation = (value - values[target]).detach()
                    for v in nodes:
                        for place, u in enumerate(v.operands):
                            if u is not target:
                                continue
                            bounds = reached.operands[v]
                            slack = 1e-12 * (1 + values[u].flatten(1).norm(dim=1))
                            size = deviation.flatten(1).norm(dim=1)
                            assert bool((size <= bounds[place] * (1 + 1e-9) + slack).all()), (v, u)
                            if v in at.plan.each and bounds[-1].dim() == 2:
                                entries = deviation.flatten(1).abs()
                                assert bool((entries <= bounds[-1] * (1 + 1e-9) + slack[:, None]).all()), v
                            applied = forms[v].answer.forms if v in forms else ()
                            for form, most in zip(applied, reached.form_norms.get(v, ()), strict=False):
                                if v.operands[form.operand] is u:
                                    shown = form.only(index)(deviation).flatten(1).norm(dim=1)
                                    assert bool((shown <= most * (1 + 1e-9) + slack).all()), v
                logits = found[-1].reshape(len(index), -1)
                y, j = predicted[index], one_rivals(one)[index]
                margin = (logits.gather(1, y[:, None]) - logits.gather(1, j[:, None]))[:, 0]
                assert bool((margin.detach() >= left.flatten() - 1e-9).all())
                (gradient,) = torch.autograd.grad(margin.sum(), other)
                p = one.ray.tangents[source].flatten(1)[:, None]
                gradient = gradient - (gradient * p).sum(2, keepdim=True) * p
                other = -gradient / gradient.norm(dim=2, keepdim=True).clamp_min(1e-300)


def one_rivals(one):
    logits = one.at.logits
    return logits.topk(2, 1).indices[:, 1]


@pytest.mark.parametrize("name", ["turned", "maxmin"])
def test_entries_are_bounded_by_their_own_rows(name):
    """Some entries get less than the largest, and each bound belongs to the entry that the operation reads there."""
    one, _ = toward(MODELS[name]())
    found = one.at.propagate(one.radius())
    assert one.at.plan.each
    for v in one.at.plan.each:
        assert found.operands[v][-1].shape == (2, v.operands[0].entries)
        assert bool((found.operands[v][-1].amin(1) < 0.9 * found.operands[v][-1].amax(1)).all())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", MODELS)
def test_products_with_all_jacobians_at_once(name):
    """G p of every value, against a difference quotient."""
    one, _ = toward(MODELS[name]())
    at, source = one.at, one.at.network.source
    step = 1e-6
    p = one.ray.tangents[source]
    for u, tangent in one.ray.tangents.items():
        if u is source:
            continue
        (ahead,), (behind,) = (at.network.graph.forward(source, at.values[source] + sign * step * p, [u], at.values)
                               for sign in (1, -1))  # fmt: skip
        torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("pieces", [1, 3, 4])
def test_sectors_cover_the_ball(pieces):
    eps, count = torch.tensor([0.3, 2.0], dtype=torch.float64), pieces * SECTORS
    cover = sector(None, eps.repeat_interleave(count), torch.arange(count).repeat(len(eps)), pieces)
    along, across = (size.unflatten(0, (-1, count)) for size in (cover.along, cover.across))
    for angle in torch.linspace(0, math.pi / 2, 10_001, dtype=torch.float64):
        s, t = eps * angle.cos(), eps * angle.sin()
        assert bool(((s[:, None] <= along) & (t[:, None] <= across)).any(1).all())
    assert bool((along.amax(1) >= eps).all())
    assert bool((across.amax(1) >= eps).all())


def test_rays_enlarge_radii():
    """Those without them are the same where no sector helps, and smaller where gradients are long."""
    one, _ = toward(MODELS["maxmin"]())
    wide = one.radius()
    one.ray = None
    assert bool((wide > 1.02 * one.radius()).all())


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_of_sectors_enlarge_radii(pieces):
    """Each piece lies in its sector, so its bounds are no larger."""
    one, _ = toward(MODELS["smooth vit"]())
    ray, (images, numbers) = one.ray, _with_sectors(torch.arange(2))
    eps = one.radius()
    whole = sector(ray, eps[images], numbers)
    for piece in range(pieces):
        part = sector(ray, eps[images], pieces * numbers + piece, pieces)
        assert bool((part.along <= whole.along).all() & (part.across <= whole.across).all())
    one.at.pieces = pieces
    assert bool((one.radius() > 1.001 * eps).all())


def test_where_there_is_no_direction_the_ball_counts():
    """A gradient of zero, or one too small to be divided by its norm."""
    model = MODELS["maxmin"]()
    model.net[-1].weight.data.mul_(0)
    model.net[-1].bias.data.copy_(torch.arange(4.0))
    one, _ = toward(model)
    assert not bool(one.ray.defined.any())
    assert bool((one.ray.size(one.at.network.graph.output, NORM) == math.inf).all())
    assert bool((one.bound(torch.ones(2, dtype=torch.float64)) > 0).all())


def test_cuts_that_save_no_norms_are_left_out():
    model = loaded(
        nn.Flatten, lambda: nn.Linear(192, 16), nn.GELU, lambda: nn.Linear(16, 16), nn.GELU, lambda: nn.Linear(16, 4)
    )
    apart, together = (Network(model, merged=merged).stages for merged in (False, True))
    assert [len(stage.nonlinear) for stage in apart] == [1, 1]
    assert [len(stage.nonlinear) for stage in together] == [2]
    assert (together[0].start.path, together[0].end.path) == (apart[0].start.path, apart[1].end.path)


# The share of bounded entries ----------------------------------------------------------------------------------------

sizes = st.floats(0, 4)


@settings(max_examples=150)
@given(pairs=st.lists(st.tuples(sizes, sizes), min_size=1, max_size=7), rho=st.floats(0, 6))
@example(pairs=[(1.96875, 1.0), (1.9699282682035641, 1.75)], rho=2.0)  # weights that halving does not tell apart
def test_largest_share_is_that_of_a_linear_program(pairs, rho):
    weights, most = (torch.tensor([values], dtype=torch.float64) for values in zip(*pairs, strict=True))
    found = largest_share(weights, torch.tensor([rho], dtype=torch.float64), most).item()
    answer = linprog(-weights[0].numpy(), A_ub=[[1.0] * len(pairs)], b_ub=[rho**2],
                     bounds=[(0, m**2) for m in most[0].tolist()])  # fmt: skip
    assert found >= -answer.fun * (1 - 1e-6) - 1e-5  # the solver keeps limits to 1e-7
    assert found <= -answer.fun * (1 + 2e-3) + 1e-5


def test_largest_share_without_limits():
    weights = torch.tensor([[1.0, 2.0, 0.0]] * 4, dtype=torch.float64)
    inf = math.inf
    most = torch.tensor([[1.0, 3.0, 1.0], [inf, 1.0, 1.0], [1.0, 1.0, inf], [inf, inf, inf]], dtype=torch.float64)
    rho = torch.tensor([inf, 2.0, 2.0, inf], dtype=torch.float64)
    found = largest_share(weights, rho, most).tolist()
    assert found[0] == pytest.approx(1 + 2 * 9)  # entries are limited, their norm is not
    assert found[1] == pytest.approx(2 + 3)
    assert found[2] == pytest.approx(2 + 1)
    assert found[3] == inf


FUNCTIONS = {"gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
             "log_sigmoid": F.logsigmoid, "square": torch.square, "hardswish": F.hardswish,
             "relu": torch.relu, "abs": torch.abs, "hardsigmoid": F.hardsigmoid}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_remainders_within_bounds_on_every_entry(name):
    """Norm, against a direction, weighed, and by the form: at the corners of the box, inside it, and on the sphere."""
    function, entries, points = FUNCTIONS[name], 7, 40
    z = 2 * seeded(points, entries)
    node = Node(name, function, (None,), {}, "", (entries,))
    rule = RULES[name].remainder(node, [z], function(z))
    point = z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(point).sum(), point)
    for scale in (0.05, 0.6, 4.0):
        most = scale * seeded(points, entries, seed=1).abs() * torch.logspace(-3, 0, entries, dtype=torch.float64)
        for share in (0.3, 1.0):
            rho = share * most.norm(dim=1)
            bounds = [rho, most]
            direction = seeded(points, entries, seed=2)
            weight = direction.abs()
            norm, against = rule.norm(bounds), rule.against(direction)(bounds)
            total = rule.total(weight, bounds)
            formed = rule.contracted(direction, bounds)
            for seed in range(60):
                pull = (
                    seeded(points, entries, seed=10 + seed).sign() if seed % 2 else seeded(points, entries, seed=seed)
                )
                delta = torch.minimum(pull.abs() * most, most) * pull.sign()
                delta = delta * (rho / delta.norm(dim=1)).clamp_max(1)[:, None]
                rest = function(z + delta) - function(z) - slope * delta
                slack = 1e-13 * (1 + z.norm(dim=1))
                assert bool((rest.norm(dim=1) <= norm + slack).all())
                assert bool((-(direction * rest).sum(1) <= against + slack).all())
                assert bool(((weight * rest.abs()).sum(1) <= total + slack).all())
                if formed is not None:
                    size = formed.forms[0](delta).norm(dim=1)
                    linear = 0.0 if formed.linear is None else (formed.linear * delta).sum(1)
                    bound = formed.bound(bounds, [size]) + linear
                    assert bool((-(direction * rest).sum(1) <= bound + slack).all())
