"""lofast and what it shares with anchored: no attack gets past a bound, and the bounds stand in their order."""

import functools
import math
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from modules import orthogonal_vit, scaled_to, seeded
from torch import nn

import lipcert
from lipcert.bounds import Form, margins
from lipcert.certifier import Anchored, Certifier
from lipcert.certifier._lofast import Layers, LoFAST
from lipcert.certifier.anchored.jacobians import Jacobians
from lipcert.certifier.anchored.margin import AppliedForm, RivalMargin, change, curvature_norms, head_distances
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import Graph
from lipcert.norms import Ledger, lanczos_norm
from lipcert.roundoff import Chains

# Networks ------------------------------------------------------------------------------------------------------------

vit = functools.partial(orthogonal_vit, depth=2, num_classes=5, mlp_ratio=2.0)


LOOSE = 0.5  # of the norms: few iterations, bounds as true as with many


def images(count, seed=0, size=16):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def convolutional():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 5)
    )
    return lipcert.load(net.eval(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 16, 16)).double()


def perceptron():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))
    return lipcert.load(net.eval(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 16, 16)).double()


MODELS = {
    "dot product, smooth": lambda: vit(),
    "dot product, layer norm": lambda: vit(norm="keep"),
    "dot product, kinked": lambda: vit(norm="project"),
    "distance, smooth": lambda: vit(attention="l2"),
    "no class token": lambda: vit(class_token=False, global_pool="avg"),
    "convolutions": convolutional,
    "perceptron": perceptron,
}


def some_slow(names, *slow):
    """Parameters of a test, of which some are marked slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


WEIGHED = ["dot product, smooth", "no class token", "perceptron"]


class Certified(NamedTuple):
    """A certificate of two images, which several tests look at."""

    method: LoFAST
    anchor: Anchored
    predicted: torch.Tensor
    gaps: torch.Tensor
    radius: torch.Tensor


@functools.cache
def certified(name, kind):
    model, pixels = MODELS[name](), images(2)
    method = kind(model, tolerance=LOOSE)
    anchor, (predicted, gaps) = method(pixels), margins(model(pixels))
    torch.testing.assert_close(anchor.linearization.logits, model(pixels))
    return Certified(method, anchor, predicted, gaps, anchor.radius(predicted, gaps))


SMOOTH = "dot product, smooth"


def logits_from(method, anchor, moved):
    """Logits for a deviation of the source's value."""
    net, values = method.network, anchor.linearization.values
    (logits,) = net.graph.forward(net.source, values[net.source] + moved, [net.graph.output], values)
    return logits.reshape(len(moved), -1)


def moved_values(at, moved, targets):
    """The targets for a deviation of the source's value."""
    source = at.network.source
    return at.network.graph.forward(source, at.values[source] + moved, targets, at.values)


def worst_margin(method, anchor, predicted, radius, steps=12):
    """The smallest f_y − max_j f_j that random directions and gradient descent find inside the radius, shape (N,)."""
    shape = anchor.linearization.values[method.network.source].shape
    worst = torch.full((len(predicted),), torch.inf, dtype=torch.float64)
    for seed in range(3):
        delta = scaled_to(seeded(*shape, seed=seed), radius)
        for _ in range(steps):
            delta = delta.detach().requires_grad_()
            logits = logits_from(method, anchor, delta)
            rest = logits.scatter(1, predicted[:, None], -torch.inf).amax(1)
            margin = logits.gather(1, predicted[:, None])[:, 0] - rest
            worst = torch.minimum(worst, margin.detach())
            (gradient,) = torch.autograd.grad(margin.sum(), delta)
            delta = scaled_to(-gradient, radius)
    return worst


@pytest.mark.parametrize("name", some_slow(MODELS, "dot product, kinked", "dot product, layer norm", "no class token"))
def test_networks(name):
    """Replays as the model; nothing moves further than its ρ; no attack inside the radius; anchored ≥ lofast."""
    layered, anchored = certified(name, LoFAST), certified(name, Anchored)
    predicted, gaps = anchored[2:4]
    stages = Layers(anchored.anchor.linearization)
    both = anchored._replace(anchor=stages, radius=stages.radius(predicted, gaps))
    for method, anchor, _, _, radius in (layered, anchored, both):
        assert bool((radius > 0).all())
        assert bool((worst_margin(method, anchor, predicted, 0.999 * radius) > 0).all())
        check_deviations(method, anchor, radius)
    assert bool((anchored.radius >= both.radius * (1 - 1e-3)).all())
    assert bool((anchored.radius >= layered.radius * 0.4).all())  # each has norms within 50 % of what Lanczos has seen


def check_deviations(method, anchor, radius):
    """Values behind the source stay within ρ, for random deviations and for those that move the logits most."""
    nodes = list(method.network.rules)
    targets = [operand for node in nodes for operand in node.operands] + [method.network.graph.output]
    for scale in (0.1, 1.0, 10.0):
        eps = scale * radius
        found = anchor.deviations(eps)
        rho = [r for node in nodes for r in found.operands[node][: len(node.operands)]] + [found.logits]
        peaks = {
            node.operands[0]: (method.plan.block(node), found.operands[node][1])
            for node in nodes
            if method.plan.blockwise(node)
        }
        delta = scaled_to(seeded(*anchor.linearization.values[method.network.source].shape, seed=4), eps)
        for _ in range(4):
            delta = delta.detach().requires_grad_()
            values = moved_values(anchor.linearization, delta, targets)
            deviations = [v - anchor.linearization.values[t] for v, t in zip(values, targets, strict=True)]
            moved = [deviation.flatten(1).norm(dim=1) for deviation in deviations]
            for length, bound in zip(moved, rho, strict=True):
                assert bool((length.detach() <= bound * (1 + 1e-6) + 1e-12).all())
            for target, deviation in zip(targets, deviations, strict=True):
                if target in peaks:
                    block, bound = peaks[target]
                    sizes = deviation.detach().reshape(len(deviation), -1, block).norm(dim=2)
                    limits = bound if bound.dim() == 2 else bound[:, None]  # of every entry, or of any
                    assert bool((sizes <= limits * (1 + 1e-6) + 1e-12).all())
            (gradient,) = torch.autograd.grad(moved[-1].sum(), delta)
            delta = scaled_to(gradient, eps)


@pytest.mark.parametrize("method", [LoFAST, Anchored])
def test_margin_bound_stays_below_the_attacked_margin(method):
    certificate, anchor, predicted, gaps, radius = certified(SMOOTH, method)
    for fraction in (0.3, 1.0, 3.0):
        eps = fraction * radius
        at = anchor.linearization
        lower = (gaps - change(at, anchor.deviations(eps), head_distances(at, predicted))).amin(1)
        assert bool((lower <= worst_margin(certificate, anchor, predicted, eps)).all())


def test_blocks_chain():
    anchor = certified(SMOOTH, LoFAST).anchor
    eps = torch.full((2,), 0.01, dtype=torch.float64)
    blocks = anchor.deviations(eps).stages
    assert [block.stage.name for block in blocks] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1", "head"]
    for block, following in zip(blocks, blocks[1:], strict=False):
        jacobian = anchor.linearization.gain(block.stage.start, block.stage.end)
        assert torch.equal(block.end, following.start)
        torch.testing.assert_close(block.end, jacobian * block.start + block.remainder)
        assert bool((block.remainder > 0).all())
    assert torch.equal(blocks[-1].end, anchor.deviations(eps).logits)


def test_anchored_is_nowhere_weaker_at_any_eps():
    anchor = certified(SMOOTH, Anchored).anchor
    for eps in (1e-4, 1e-2, 0.1, 1.0, 10.0):
        at = torch.full((2,), eps, dtype=torch.float64)
        ours, theirs = anchor.deviations(at), Layers(anchor.linearization).deviations(at)
        assert bool((ours.logits <= theirs.logits * (1 + 1e-12)).all())
        assert bool((ours.features <= theirs.features * (1 + 1e-12)).all())
        for node, rho in ours.operands.items():
            for smaller, larger in zip(rho, theirs.operands[node], strict=True):
                assert bool((smaller <= larger * (1 + 1e-12)).all())


def test_far_away_everything_is_infinite_and_nothing_is_nan():
    for method in (LoFAST(perceptron(), tolerance=LOOSE), Anchored(convolutional(), tolerance=LOOSE)):
        for eps in (1e10, 1e200, torch.inf):
            found = method(images(1)).deviations(torch.full((1,), eps, dtype=torch.float64))
            assert not any(bool(rho.isnan().any()) for operands in found.operands.values() for rho in operands)
            assert not found.logits.isnan().any()
            assert not found.features.isnan().any()


def test_the_first_stage_bends_too():
    """The embedding ends in an operation that only rearranges: remainders behind it must count all the same."""
    for method, anchor, *_ in (certified(SMOOTH, LoFAST), certified(SMOOTH, Anchored)):
        found = anchor.deviations(torch.full((2,), 0.1, dtype=torch.float64))
        for node in method.network.stages[0].nonlinear:
            assert all(bool((rho > 0).all()) for rho in found.operands[node])


def test_deterministic_norms_are_below_the_probabilistic_ones():
    """Written out, a Jacobian's norm is exact: the bound of Lanczos is above it, by what it allows."""
    model = perceptron()
    pixels = images(2)
    predicted, gaps = margins(model(pixels))
    for method in (LoFAST, Anchored):
        sampled, exact = method(model, tolerance=LOOSE)(pixels), method(model, rigor="deterministic")(pixels)
        assert exact.linearization.finder.budget.delta == 0
        for norm, above in zip(every(exact, "norm"), every(sampled, "norm"), strict=True):
            assert bool((norm <= above * (1 + 3e-5)).all())
            assert bool((norm >= above / (1 + 2 * LOOSE)).all())
        for peak, above in zip(every(exact, "largest"), every(sampled, "largest"), strict=True):
            assert bool((peak <= above * (1 + 1e-9)).all())
        assert bool((exact.radius(predicted, gaps) >= sampled.radius(predicted, gaps) * (1 - 2e-3)).all())


def every(anchor, name):
    """The bounds of this name for all pairs that have one."""
    bounds = [getattr(norms, name) for norms in anchor.norms.pairs.values()]
    return [bound for bound in bounds if bound is not None]


def weights_of(norms):
    return [bound for found in norms.pairs.values() for bound in found.weighted.values()]


def test_columns_behind_activations(monkeypatch):
    """Those of the last matrix exactly; with random vectors, above these and not by much. They enlarge radii."""
    model, pixels = perceptron(), images(2)
    exact = Anchored(model)
    (gelu,) = (v for v in exact.network.rules if v.op == "gelu")
    anchor = exact(pixels)
    torch.testing.assert_close(
        anchor.norms.pairs[gelu, exact.network.graph.output].columns[0],
        model.net[5].weight.norm(dim=0),
        rtol=1e-8,
        atol=0,
    )
    predicted, gaps = margins(model(pixels))
    radius = exact(pixels).radius(predicted, gaps)
    for place in ("jacobians", "norms"):
        monkeypatch.setattr(f"lipcert.certifier.anchored.{place}.LONG", 0)
    sampled = Anchored(model)
    for above, below in zip(every(sampled(pixels), "columns"), every(anchor, "columns"), strict=True):
        assert bool((above >= below * (1 - 1e-9)).all())
        assert bool((above <= below * 1.5).all())
    (weighted,) = weights_of(exact(pixels).norms)
    moved = model.net[3].weight.norm(dim=0).sqrt()[:, None] * model.net[1].weight / 0.5
    below = torch.linalg.matrix_norm(moved.detach(), 2)
    assert bool(((weighted >= below) & (weighted <= 1.1 * below)).all())
    monkeypatch.setattr("lipcert.certifier.anchored.jacobians.FEW", 0)
    sampled = Anchored(model)
    first, second = (
        sampled(pixels).norms,
        sampled(pixels).norms,
    )  # the weighted norm is computed once, and fails for both
    (again,) = weights_of(second)
    assert bool(((again >= below) & (again <= 1.3 * below)).all())
    drawn = len([*sampled.plan.computed, *sampled.plan.weighted])
    assert torch.equal(first.ledger.spent, second.ledger.spent)
    assert bool((second.ledger.spent >= 0.99 * drawn * sampled.finder._charge).all())
    exact.plan.ahead.clear()
    exact.plan.weighted.clear()
    exact.plan.columns.clear()
    assert bool((exact(pixels).radius(predicted, gaps) < radius).all())


def test_columns_of_forms(monkeypatch):
    """Those of M times the matrix between two activations, for the form of a rule and one that mixes entries."""
    model, pixels = perceptron(), images(2)
    method = Anchored(model)
    tanh, gelu = method.network.rules
    anchor = method(pixels)
    at, weight = anchor.linearization, model.net[3].weight.detach()
    mixing, scale = seeded(2, 7, 16), seeded(2, 16).abs()
    mixed = Form(
        lambda d, m: torch.einsum("nij,nkj->nki", m, d),
        (mixing,),
        torch.linalg.matrix_norm(mixing, 2),
        mixing.flatten(1).norm(dim=1),
    )
    for form, matrix in ((Form.weights(scale[:, None]), scale.diag_embed()), (mixed, mixing)):
        found = method.finder.formed_columns(tanh, gelu.operands[0], at.values, form, anchor.norms)
        torch.testing.assert_close(found, (matrix @ weight).norm(dim=1), rtol=1e-8, atol=0)
        assert bool((found >= (matrix @ weight).norm(dim=1)).all())
    predicted, gaps = margins(model(pixels))
    radius = anchor.radius(predicted, gaps)
    monkeypatch.setattr("lipcert.certifier.anchored.norms.FORM_ROWS", 0)
    assert bool((method(pixels).radius(predicted, gaps) < radius).all())


def test_rows_of_linear_paths_are_exact():
    """Rows that are longer, and more, than what is written out for each image by itself."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(300, 400), nn.GELU(), nn.Linear(400, 3))
    model = lipcert.load(net, mean=(0.0,) * 3, std=(1.0,) * 3, input_size=(3, 10, 10)).double()
    method = Anchored(model)
    anchor = method(torch.rand(2, 3, 10, 10, dtype=torch.float64))
    (gelu,) = method.network.rules
    (operand,) = method.network.operands(gelu)
    longest = model.net[1].weight.norm(dim=1).amax().expand(2)
    torch.testing.assert_close(anchor.norms.pairs[method.network.source, operand].largest, longest, rtol=1e-8, atol=0)


def test_deterministic_norms_of_large_networks_are_refused(monkeypatch):
    monkeypatch.setattr("lipcert.certifier.anchored.jacobians._MOST", 100)
    with pytest.raises(InputError, match="rigor='probabilistic'"):
        Anchored(perceptron(), rigor="deterministic")
    with pytest.raises(InputError, match="probabilistic or deterministic"):
        Anchored(perceptron(), rigor="certain")


# Perturbations inside the network ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [LoFAST, Anchored])
@pytest.mark.parametrize(
    "at", some_slow(["patch_embed", "net.blocks.0.attn", "blocks.1.mlp.fc1", 0, 2], "patch_embed", 0)
)
def test_perturbed_inside(method, at):
    model = vit()
    pixels = images(2)
    certificate = method(model, at=at, tolerance=LOOSE)
    anchor = certificate(pixels)
    torch.testing.assert_close(anchor.linearization.logits, model(pixels))
    if isinstance(at, str):
        assert f"{certificate.network.source.path}.".startswith(f"net.{at.removeprefix('net.')}.")
    predicted, gaps = margins(anchor.linearization.logits)
    radius = anchor.radius(predicted, gaps)
    assert bool((radius > 0).all())
    assert bool((worst_margin(certificate, anchor, predicted, 0.999 * radius) > 0).all())
    check_deviations(certificate, anchor, radius)


def test_patch_embedding_is_the_module_s_own_output():
    model = vit()
    certificate = LoFAST(model, at="patch_embed")
    seen = []
    model.net.patch_embed.register_forward_hook(lambda module, given, result: seen.append(result))
    anchor = certificate(images(1))
    model(images(1))
    torch.testing.assert_close(anchor.linearization.values[certificate.network.source][:, 0], seen[-1])


class _Auxiliary(nn.Module):
    """Computes an auxiliary result, which is read elsewhere, after its output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return (hidden := self.first(x).tanh()), self.second(hidden)


class _Keeps(nn.Module):
    """Keeps a copy of its output for another part of the network."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x).tanh()
        self.kept = hidden.clone()
        return hidden


class _Reads(nn.Module):
    def __init__(self, block, kind):
        super().__init__()
        self.block, self.kind, self.head = block, kind, nn.Linear(4, 2)

    def forward(self, x):
        if self.kind == "gate":
            return self.head(self.block(x.flatten(1)) * x.flatten(1))
        if self.kind == "a copy is read":
            return self.head(self.block(x.flatten(1))) + self.head(self.block.kept)
        if self.kind == "two outputs":
            hidden, auxiliary = self.block(x.flatten(1))
            return self.head(hidden) + auxiliary
        if self.kind == "run twice":
            return self.head(self.block(self.block(x.flatten(1))))
        return self.head(self.block[0](x.flatten(1)) + self.block[1](x.flatten(1)).tanh())


def test_what_follows_may_write_to_the_output_of_a_place():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).eval()
    model = lipcert.load(net, mean=0.0, std=1.0, input_size=(1, 2, 2))
    assert lipcert.certify(model, torch.rand(2, 1, 2, 2), eps=0.01, at="1", method="anchored").radius.gt(0).all()


@pytest.mark.parametrize("kind", ["two outputs", "run twice", "never run itself", "a copy is read"])
def test_a_place_is_refused_whose_output_is_not_what_it_computes_last(kind):
    """The radius would be that of a perturbation of another value."""
    block = {"run twice": nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "two outputs": _Auxiliary()}
    block["a copy is read"] = _Keeps()
    net = _Reads(block.get(kind, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])), kind).eval()
    model = lipcert.load(net, mean=0.0, std=1.0, input_size=(1, 2, 2))
    with pytest.raises(InputError, match="runs once and returns the tensor that it computes last"):
        lipcert.certify(model, torch.rand(2, 1, 2, 2), eps=0.01, at="block", method="anchored")


def test_a_product_with_a_value_beside_the_place_is_refused_in_words():
    model = lipcert.load(_Reads(nn.Linear(4, 4), "gate").eval(), mean=0.0, std=1.0, input_size=(1, 2, 2))
    with pytest.raises(UnsupportedOperation, match=r"mul \(of a value that does not depend on the output that at="):
        lipcert.certify(model, torch.rand(2, 1, 2, 2), eps=0.01, at="block", method="anchored")


def test_places_have_the_names_of_the_users_network():
    """A wrapper of a user's may call its network ``net``, as lipcert's does."""
    inner = nn.Sequential(OrderedDict(flat=nn.Flatten(), layer=nn.Linear(4, 4), act=nn.Tanh()))
    net = nn.Sequential(OrderedDict(layer=nn.Tanh(), net=inner, head=nn.Linear(4, 2))).eval()
    network = LoFAST(lipcert.load(net, mean=0.0, std=1.0, input_size=(1, 2, 2)).double(), at="net.layer").network
    assert network.source.op == "linear"
    assert LoFAST(vit(), at="net.patch_embed").network.source is not None


def test_unknown_places_are_named():
    model = vit()
    with pytest.raises(InputError, match=r"blocks\.7.*patch_embed.*blocks\.0.*head"):
        LoFAST(model, at="blocks.7")
    with pytest.raises(InputError, match="no operation"):
        LoFAST(model, at="block")
    with pytest.raises(InputError, match="nothing follows"):
        LoFAST(model, at="head")
    with pytest.raises(InputError, match="stage 9"):
        LoFAST(model, at=9)


def test_operations_without_a_remainder_rule_are_named_before_anything_runs():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(x.flatten(1)[:, :4].sinh().exp())

    model = lipcert.load(Odd().eval(), mean=(0,), std=(1,), input_size=(1, 8, 8)).double()
    with pytest.raises(UnsupportedOperation, match=r"sinh.*; exp"):
        LoFAST(model, tolerance=LOOSE)


# The norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["clustered", "pair", "flat", "one", "decaying"])
@pytest.mark.parametrize("size", [1, 2, 3, 30])
def test_lanczos_is_never_below_the_norm(kind, size):
    """Also where the start vector has next to nothing along the top singular vector, as far as delta allows that."""
    generator = torch.Generator().manual_seed(size)
    q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    p = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    steps = torch.arange(size, dtype=torch.float64)
    values = {
        "clustered": 1 - 1e-6 * steps,
        "pair": torch.where(steps < 2, 1.0, 0.5).double(),
        "flat": torch.where(steps == 0, 1.0, 1 - 1e-3).double(),
        "one": torch.where(steps == 0, 1.0, 0.0).double(),
        "decaying": 2.0**-steps,
    }[kind]
    matrix = p @ torch.diag(values) @ q.T
    for limit in (4, 8, 48):
        for seed in range(20):  # one map at a time: all maps of a batch share the start vector
            draw = Ledger(1e-9, seed=seed).draw(limit, delta=1e-9)
            bound = lanczos_norm(lambda v: v @ matrix.T, lambda u: u @ matrix, 1, size, draw=draw, steps=limit)
            assert bound.item() >= 1
    assert bound.item() <= 1.06


def test_lanczos_covers_the_share_of_bad_starts_that_delta_allows():
    """With a large delta some bounds may fail, but no more of them than that; the top value hides from most starts."""
    size, trials, delta = 40, 1000, 0.2
    values = torch.ones(size, dtype=torch.float64)
    values[0] = 1.5
    failed = 0
    for seed in range(trials):
        draw = Ledger(delta, seed=seed).draw("start", delta=delta)
        bound = lanczos_norm(lambda v: v * values, lambda u: u * values, 1, size, draw=draw, steps=1)
        failed += bound.item() < 1.5
    chance = 4 * (delta * (1 - delta) * trials) ** 0.5  # four standard deviations of so many trials
    assert 0 < failed <= delta * trials + chance


# Curvature weighed by the gradient -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some_slow(WEIGHED, *WEIGHED[:2]))
def test_weighed_curvature(name):
    """What is weighed moves by no more than its bound, and the margin that is left is below what an attack leaves."""
    model = MODELS[name]()
    pixels = images(2)
    anchor = Anchored(model, tolerance=LOOSE)(pixels)
    method, rules = anchor.method, anchor.linearization.remainders
    nodes = [v for v in method.network.rules if rules[v].contracts]
    predicted, gaps = margins(model(pixels))
    rivals = gaps.argmin(1)
    toward = RivalMargin(anchor.linearization, rivals, predicted, gaps)
    eps = 1.5 * toward.radius()
    moved = anchor.deviations(eps).operands
    everyone = torch.ones(len(pixels), dtype=torch.bool)
    forms = {v: AppliedForm(rules[v].contracted(toward.at_nodes[v], moved[v]), everyone) for v in nodes}
    gains = curvature_norms(toward, forms, 0)
    assert set(gains) == set(nodes)
    found, left, plain = anchor.deviations(eps, gains), toward.bound(eps, gains, forms), toward.bound(eps)
    assert bool((left > plain).all())
    targets = [v.operands[forms[v][0].forms[0].operand] for v in nodes]
    for v in nodes:
        for form, size in zip(forms[v][0].forms, found.form_norms[v], strict=True):
            assert bool((size <= form.norm * moved[v][form.operand] * 1.1).all())
    for seed in range(3):
        delta = scaled_to(seeded(*anchor.linearization.values[method.network.source].shape, seed=seed), eps)
        for _ in range(6):
            delta = delta.detach().requires_grad_()
            values = moved_values(anchor.linearization, delta, targets)
            for v, u, value in zip(nodes, targets, values, strict=True):
                (form,) = forms[v][0].forms
                size = form(value - anchor.linearization.values[u]).detach().flatten(1).norm(dim=1)
                assert bool((size <= found.form_norms[v][0] * (1 + 1e-9)).all())
            logits = logits_from(method, anchor, delta)
            margin = (logits.gather(1, predicted[:, None]) - logits.gather(1, rivals[:, None]))[:, 0]
            assert bool((margin >= left - 1e-9).all())
            (gradient,) = torch.autograd.grad(margin.sum(), delta)
            delta = scaled_to(-gradient, eps)


@pytest.mark.slow
def test_weighing_enlarges_radii_of_each_image_by_itself():
    model = MODELS["no class token"]()
    pixels = images(2)
    predicted, gaps = margins(model(pixels))
    anchor = Anchored(model, tolerance=LOOSE)(pixels)
    radius = anchor.radius(predicted, gaps)
    nearest = gaps.topk(4, 1, largest=False).indices.unbind(1)
    plain = torch.stack([RivalMargin(anchor.linearization, j, predicted, gaps).radius() for j in nearest]).amin(0)
    assert bool((radius > 1.01 * plain).all())
    alone = Anchored(model, tolerance=LOOSE)(pixels[1:2]).radius(predicted[1:2], gaps[1:2])
    torch.testing.assert_close(alone, radius[1:2], rtol=1e-9, atol=0)


# Kinks ---------------------------------------------------------------------------------------------------------------


def relu_network(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1), nn.LeakyReLU(0.1), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(54, 16), nn.ReLU(), nn.Linear(16, 4))
    return lipcert.load(net, mean=(0.5,), std=(0.5,), input_size=(1, 6, 6)).double()


@pytest.mark.parametrize("at", [None, "2"])
def test_kinks_before_and_behind_what_is_perturbed(at):
    model = relu_network()
    images = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        predicted, gaps = margins(model(images))
        start = (images - 0.5) / 0.5 if at is None else model.net[:3]((images - 0.5) / 0.5)
        after = model.net if at is None else model.net[3:]
        torch.testing.assert_close(after(start), model(images))
    radius = Anchored(model, at=at)(images).radius(predicted, gaps) * (2 if at is None else 1)
    assert bool((radius > 0).all())
    for seed in range(200):
        moved = start + scaled_to(seeded(*start.shape, seed=seed), 1.0) * radius.reshape(-1, 1, 1, 1)
        assert bool((after(moved).argmax(1) == predicted).all())


# Paths that part and meet --------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Paths that part and meet: parts of a tuple, a value added to itself, a gate, values side by side."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        a, b = self.first(x).tanh().chunk(2, 1)
        a = a + a
        gate = b.mean((2, 3), keepdim=True).sigmoid()
        a = a * gate + gate
        b = b - self.second(b).sigmoid()
        side = torch.cat([a, b, a, torch.nn.functional.gelu(a + 0.5 * b)], 1)
        return self.head(side.mean((2, 3))).sigmoid() @ torch.tensor([[1.0, -2.0], [0.5, 1.0], [3.0, 0.1]]).to(x)


def branching(seed=0):
    torch.manual_seed(seed)
    return lipcert.load(Branching().eval(), mean=(0.2,), std=(0.5,), input_size=(1, 5, 5)).double()


class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 4) for width in (25, 29, 33))
        self.head = nn.Linear(37, 2)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers:
            x = torch.cat([x, torch.nn.functional.silu(layer(x))], 1)
        return self.head(x)


def dense(seed=0):
    torch.manual_seed(seed)
    return lipcert.load(Dense().eval(), mean=(0.2,), std=(0.5,), input_size=(1, 5, 5)).double()


class Overwriting(nn.Module):
    """Values without entries, and one of which nothing stays, as networks have that expect a class token."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(25, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x.flatten(1)).tanh()
        none, rest = x[:, :0], x[:, 0:]
        y = self.second(rest)
        y[:, 0:] = y[:, 0:] + 0.5 * rest
        return self.head(torch.cat([none, torch.nn.functional.gelu(y)], 1)).sigmoid()


def overwriting(seed=0):
    torch.manual_seed(seed)
    return lipcert.load(Overwriting().eval(), mean=(0.2,), std=(0.5,), input_size=(1, 5, 5)).double()


def small(count):
    return torch.rand(count, 1, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_what_is_empty_or_overwritten_moves_nothing():
    model, pixels = overwriting(), small(2)
    predicted, gaps = margins(model(pixels))
    for method in (LoFAST(model), Anchored(model)):
        anchor = method(pixels)
        radius = anchor.radius(predicted, gaps)
        assert bool((radius > 0).all())
        assert bool((worst_margin(method, anchor, predicted, 0.999 * radius) > 0).all())
        check_deviations(method, anchor, radius)


class CutOff(torch.autograd.Function):
    """x ↦ 2x, whose derivative is right and does not show that it depends on anything."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient.detach()


def test_a_derivative_that_is_cut_off_is_not_taken_for_none(monkeypatch):
    method = LoFAST(dense())
    monkeypatch.setattr(Graph, "forward", lambda self, a, source, *_: [CutOff.apply(source)])
    with pytest.raises(UnsupportedOperation, match="cannot be differentiated"):
        method(small(1))


class Entrywise(nn.Module):
    """Functions whose derivative torch computes anew in each product."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(25, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = torch.nn.functional.gelu(self.first(x.flatten(1)))
        return self.head(torch.nn.functional.silu(x).sin() + x.cos() + x.square() + x**3)


def test_products_are_those_of_the_jacobian():
    torch.manual_seed(0)
    model = lipcert.load(Entrywise().eval(), mean=(0.2,), std=(0.5,), input_size=(1, 5, 5)).double()
    network, images = Anchored(model).network, small(2)
    method = Jacobians(network, tolerance=0.1, deterministic=False, seed=0)
    values = network.values(images[:, None])
    exact = torch.stack([torch.autograd.functional.jacobian(model, one[None]).reshape(3, 25) for one in images])
    vectors = torch.randn(2, 25, dtype=torch.float64)
    product, adjoint = method.operator(network.source, network.graph.output, values, several=False)
    torch.testing.assert_close(product(vectors), torch.einsum("nij,nj->ni", exact, vectors))
    torch.testing.assert_close(adjoint(vectors[:, :3]), torch.einsum("nij,ni->nj", exact, vectors[:, :3]))


def test_one_way_alone_costs_nothing():
    """Where all ways lead through a value, and both norms are known, the product is what is taken."""
    method = Anchored(dense())
    nodes, chains = method.network.graph.nodes, Chains(method.network.graph, method.network.source)
    first = next(node for node in nodes if node.op == "linear")
    second = next(node for node in nodes if node.op == "silu")
    assert chains.on_every_path(first, second)
    assert not chains.on_every_path(second, method.network.graph.output)  # the image is beside it
    two, three = torch.full((1,), 2.0).double(), torch.full((1,), 3.0).double()
    links = {link: torch.full((1,), 1e6).double() for link in chains.unknown}
    known = {(method.network.source, first): two, (first, second): three}
    table = chains.table([method.network.source], known, links)
    assert 6.0 <= table[second].item() <= 6.0 * (1 + 1e-14)
    # Side by side: the root of the sum of squares, of the image's own norm and the branch.
    (side,) = (n for n in nodes if n.op == "cat" and second in n.operands)
    assert table[side].item() == pytest.approx(math.hypot(6.0, table[side.operands[0]].item()))


def test_small_products_do_not_vanish():
    method = Anchored(branching())
    chains = Chains(method.network.graph, method.network.source)
    tiny = {link: torch.full((1,), 1e-130, dtype=torch.float64) for link in chains.unknown}
    tiny[chains.links[method.network.graph.output][0]] = torch.tensor([1e300], dtype=torch.float64)
    assert chains.table([method.network.source], {}, tiny)[method.network.graph.output].item() > 0


def test_staged_leaves_out_a_network_that_takes_too_long(monkeypatch):
    model = branching()
    assert "anchored" in Certifier(model, 10.0).methods
    assert "per image, and the limit is 1e-09 s" in Certifier(model, 10.0, time=1e-9).skipped["anchored"]
    monkeypatch.setattr("lipcert.certifier._linearised.work_of_a_rival", lambda plan: 1e13)
    assert "per image, and the limit is 100 s" in Certifier(model, 10.0).skipped["anchored"]


def test_staged_examines_as_many_rivals_as_its_time_allows(no_triage, monkeypatch):
    """The others are bounded by the deviation of the logits, so that radii are at most as large."""
    model = branching()
    every = Certifier(model, 10.0)
    method = every.methods["anchored"]
    assert method.rivals > 10
    full = every.run(small(3)).radius
    examined = []
    made = RivalMargin.__init__

    def counted(self, at, rivals, *rest):
        examined.append(len(rivals))
        made(self, at, rivals, *rest)

    monkeypatch.setattr(RivalMargin, "__init__", counted)
    method.rivals = 1
    one = every.run(small(3)).radius
    assert sum(examined) <= 2 * 3  # with and without forms
    assert (one > 0).all()
    assert (one <= full).all()
