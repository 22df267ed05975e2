"""Jacobians as matrices: every norm from one is at least that of the dense Jacobian, and no start vector is drawn."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lipcert
from lipcert.bounds import Form, margins
from lipcert.certifier import Anchored
from lipcert.certifier.anchored.jacobians import Jacobians
from lipcert.certifier.anchored.matrices import Groups, JacobianMatrix, groups_of
from lipcert.certifier.anchored.network import Network
from lipcert.errors import UnsupportedOperation
from lipcert.norms import factor, verified_norms


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (40, 60), (100, 70), (130, 400)])
@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_loose_norms_are_close_upper_bounds(rows, columns, decay):
    matrices = seeded(4, rows, columns) * torch.logspace(0, -decay, columns, dtype=torch.float64)
    matrices[3, 5:] = 0  # Lanczos exhausts the space of a matrix of low rank
    matrices[1] *= 1e150
    matrices[2] *= 1e-150
    exact = torch.linalg.svdvals(matrices)[:, 0]
    found = verified_norms(matrices, loose=1e-3)
    assert bool((exact <= found).all())
    assert bool((found <= exact * 1.001).all())


def test_what_is_not_finite_has_no_norm():
    matrices = seeded(4, 60, 80)
    matrices[0, 3, 4], matrices[1, 0, 0], matrices[2] = math.nan, math.inf, 0.0
    for loose in (0.0, 1e-3):
        found = verified_norms(matrices, loose=loose)
        assert found[:2].isinf().all()
        assert found[2] == 0
        assert found[3].isfinite()


@pytest.mark.parametrize("scale", [1.0, 1e-140, 1e140])
def test_a_factor_has_a_gram_matrix_that_is_no_smaller(scale):
    """Integers and a matrix of low rank: its Gram matrix is exact, and a Cholesky factor of it does not exist."""
    matrices = (3 * seeded(4, 30, 200)).round()
    matrices[1, 10:] = matrices[1, :20].clone()
    found = factor(matrices * scale) / scale
    exact = matrices @ matrices.mT
    less = torch.linalg.eigvalsh(found @ found.mT - exact)[:, 0]
    assert bool((less >= 0).all())
    assert bool((found @ found.mT - exact).abs().amax() <= 1e-9 * exact.abs().amax())
    assert bool((factor(torch.zeros(1, 3, 4, dtype=torch.float64)).abs() < 1e-120).all())


def blocks(seed=0):
    """A matrix of 5 blocks of 3 × 4, with rows and columns in random order, at two images."""
    dense = torch.zeros(2, 15, 20, dtype=torch.float64)
    rows, columns = (torch.randperm(n, generator=torch.Generator().manual_seed(seed)) for n in (15, 20))
    for b in range(5):
        dense[:, rows[3 * b : 3 * b + 3, None], columns[4 * b : 4 * b + 4]] = seeded(2, 3, 4, seed=b)
    return dense


def found_groups(dense):
    rows, columns = dense[0].nonzero().unbind(1)
    return groups_of(rows, columns, tuple(dense.shape[1:]))


def test_blocks_are_found_and_used():
    dense = blocks()
    groups = found_groups(dense)
    assert groups is not None
    assert [part.shape for part in groups] == [(5, 3), (5, 4)]
    matrix, whole = JacobianMatrix.of(dense, groups), JacobianMatrix.of(dense, None)
    assert matrix.entries.shape == (2, 5, 3, 4)
    torch.testing.assert_close(matrix.dense(), dense, rtol=0, atol=0)
    torch.testing.assert_close(matrix.spectral_norm(), torch.linalg.matrix_norm(dense, 2))
    order, scale = torch.randperm(15), seeded(2, 15).abs()
    swapped = Groups(groups.columns, groups.rows)
    for one, other in (
        (matrix.row_norms(), dense.norm(dim=2)),
        (matrix.column_norms(), dense.norm(dim=1)),
        (matrix.column_norms(scale), (scale[:, :, None] * dense).norm(dim=1)),
        (whole.column_norms(scale), (scale[:, :, None] * dense).norm(dim=1)),
        (matrix.moved(order).dense(), dense[:, order]),
        (matrix.scaled(scale).dense(), scale[:, :, None] * dense),
        (matrix.block_norms(5), whole.block_norms(5)),
        (matrix.times(JacobianMatrix.of(dense.mT[:1], swapped)).dense(), dense @ dense.mT[:1]),
        (whole.times(JacobianMatrix.of(dense.mT[:1], None)).dense(), dense @ dense.mT[:1]),
        (matrix.columns_scaled(seeded(2, 20)).dense(), dense * seeded(2, 20)[:, None]),
        (matrix.plus(matrix).dense(), 2 * dense),
        (matrix.plus(JacobianMatrix.of(seeded(2, 15, 20), None)).dense(), dense + seeded(2, 15, 20)),
    ):
        torch.testing.assert_close(one, other)


def test_a_form_that_keeps_blocks_apart_has_a_matrix_of_blocks():
    """Rows of each of 5 blocks are mixed in other proportions; at one of the images an entry is outside of these."""
    dense = torch.block_diag(*seeded(5, 3, 4).unbind())[None].repeat(2, 1, 1)
    mix = seeded(2, 5, 2, 3, seed=1)
    form = Form(
        lambda d, m: torch.einsum("nbij,nbj->nbi", m, d.unflatten(1, (5, 3))).flatten(1),
        (mix,), torch.linalg.matrix_norm(mix, 2).amax(1), mix.flatten(1).norm(dim=1),
    )  # fmt: skip
    whole = torch.stack([torch.block_diag(*one.unbind()) for one in mix])
    for outside in (0.0, 5.0):
        dense[1, 0, 19] = outside
        matrix = JacobianMatrix.of(dense, None).formed(form, (15,))
        assert (matrix.groups is None) == bool(outside)
        torch.testing.assert_close(matrix.dense(), whole @ dense)
        exact = torch.linalg.matrix_norm(whole @ dense, 2)
        assert bool((exact <= matrix.spectral_norm() * (1 + 1e-14)).all())
        assert bool((matrix.spectral_norm() <= exact * 1.001).all())


@pytest.mark.parametrize("outer", [1, 3, 5])
def test_products_of_blocks_inside_blocks(outer):
    """15 blocks of 2 × 3, whose rows lie in 1, 3 or 5 blocks of the matrix before, in random order."""
    order = torch.randperm(30, generator=torch.Generator().manual_seed(4))
    first = torch.block_diag(*seeded(outer, 4, 30 // outer).unbind())[:, order]
    second = torch.block_diag(*seeded(15, 2, 3, seed=1).unbind())[order][:, torch.randperm(45)]
    one, other = (JacobianMatrix.of(m[None], found_groups(m[None])) for m in (first, second))
    product = one.times(other)
    torch.testing.assert_close(product.dense(), (first @ second)[None])
    assert product.entries.shape[1] == outer
    error = (product.dense()[0] - first @ second).norm()
    assert error <= product.error[0]
    swapped = JacobianMatrix.of(seeded(1, 3, 4 * outer), None)  # one block before several
    torch.testing.assert_close(swapped.times(one).dense()[0], swapped.dense()[0] @ first)


def test_an_image_whose_matrix_has_other_zeros_counts_in_full():
    dense = blocks()
    groups = found_groups(dense)
    outside = (dense[1] == 0).nonzero()[0]
    dense[1, outside[0], outside[1]] = 100.0
    matrix = JacobianMatrix.of(dense, groups)
    assert matrix.groups is None
    assert bool((matrix.spectral_norm() >= torch.linalg.matrix_norm(dense, 2)).all())


def test_groups_of_different_sizes_are_one_matrix():
    assert found_groups(torch.block_diag(torch.ones(2, 2), torch.ones(1, 2))[None]) is None
    assert found_groups(torch.ones(1, 3, 3)) is None
    assert found_groups(torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])) is None


class Sorted(nn.Module):
    """Smoothed pairs behind patches and behind a matrix, for an image and its mirror image: blocks of 2 × 2."""

    def __init__(self):
        super().__init__()
        self.patches, self.first, self.last = nn.Conv2d(2, 6, 4, stride=4), nn.Linear(24, 8), nn.Linear(8, 3)
        self.pairs, self.more = lipcert.surgery.SmoothMaxMin(0.3), lipcert.surgery.SmoothMaxMin(0.3, -1)

    def forward(self, x):
        x = self.pairs(self.patches(torch.cat((x, x.flip(-1))))).flatten(1)
        return self.last(self.more(self.first(x))).unflatten(0, (2, -1)).mean(0)


class Halves(nn.Module):
    """Patches and a perceptron for an image and its mirror image, averaged: Jacobians of two blocks each."""

    def __init__(self, normalised=False):
        super().__init__()
        self.patches = nn.Conv2d(2, 6, 4, stride=4)
        self.first, self.last = nn.Linear(24, 8), nn.Linear(8, 3)
        self.norm = lipcert.surgery.SmoothProject(24, radius=2.0) if normalised else nn.Identity()

    def forward(self, x):
        x = torch.cat((x, x.flip(-1)))
        x = self.norm(nn.functional.silu(self.patches(x)).flatten(1))
        x = self.last(nn.functional.gelu(self.first(x)))
        return x.unflatten(0, (2, -1)).mean(0)


class Stem(nn.Module):
    """Overlapping convolutions, an activation and patches, then tokens: each reads a window of 6 × 6 pixels."""

    def __init__(self, stride=4):
        super().__init__()
        self.first, self.patches = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 6, 4, stride=stride)
        self.norm, self.mix = lipcert.surgery.SmoothProject(6, radius=2.0), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.patches(nn.functional.gelu(self.first(x))).flatten(2).transpose(1, 2)
        x = x + nn.functional.silu(self.mix(self.norm(x)))
        return self.head(x.mean(1))


def vit(depth=1):
    model = lipcert.load(
        "vit_tiny_patch16_224", pretrained=False, mean=(0.5,), std=(0.5,), input_size=(1, 4, 8), img_size=(4, 8),
        in_chans=1, patch_size=4, embed_dim=8, depth=depth, num_heads=2, mlp_ratio=2.0, num_classes=3,
        class_token=False, global_pool="avg",
    )  # fmt: skip
    return lipcert.convert(model, norm="smooth")


BUILT = {
    "halves": lambda: lipcert.load(Halves(), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
    "projected": lambda: lipcert.load(Halves(True), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
    "sorted": lambda: lipcert.load(Sorted(), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
    "stem": lambda: lipcert.load(Stem(), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
    "vit": vit,
    "two stages": lambda: vit(2),
}


def built(name):
    torch.manual_seed(0)
    return BUILT[name]().double()


def jacobian(at, a, b, number):
    """G(a → b) at one image, by rows."""
    value = at.values[a][number : number + 1]
    rest = {node: known[number : number + 1] for node, known in at.values.items()}
    found = torch.autograd.functional.jacobian(lambda v: at.network.replay(a, v, [b], rest)[0], value, vectorize=True)
    return found.reshape(b.entries, a.entries)


@pytest.mark.parametrize("name", BUILT)
def test_every_norm_is_above_that_of_the_dense_jacobian(name):
    model = built(name)
    images = torch.rand(2, *model.input_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    method = Anchored(model)
    at = method(images).linearization
    norms, by = at.norms, method.finder.jacobians
    assert all(by.writes(a, b) for a, b in method.plan.pairs)
    for a, b in method.plan.pairs:
        matrix = norms.written.factor(a, b)
        for number in range(2):
            dense = jacobian(at, a, b, number)
            exact = torch.linalg.matrix_norm(dense, 2)
            one = matrix.only(torch.tensor([number]))
            assert exact <= norms.gains[a, b][number] * (1 + 1e-14)
            assert exact <= one.spectral_norm()[0] * (1 + 1e-12)
            assert one.spectral_norm()[0] <= exact * 1.001 + 1e-12
            assert bool((dense.norm(dim=1) <= one.row_norms()[0] * (1 + 1e-12) + 1e-14).all())
            direction = seeded(a.entries, seed=number)
            assert (dense @ direction).norm() <= norms.gains[a, b][number] * direction.norm()
            for form in (seeded(b.entries, b.entries, seed=7), seeded(2, b.entries, seed=8)):
                mapped = Form(
                    lambda d, m: (m @ d.flatten(1)[:, :, None])[:, :, 0],
                    (form[None],),
                    torch.linalg.matrix_norm(form, 2)[None],
                    form.norm()[None],
                )
                above = one.formed(mapped, b.shape).spectral_norm()[0]
                assert torch.linalg.matrix_norm(form @ dense, 2) <= above * (1 + 1e-12)
                assert above <= torch.linalg.matrix_norm(form @ dense, 2) * 1.001 + 1e-6


def test_one_bend_between_constant_matrices():
    """What is between the image and the second pairs is affine but for the first: a product of stored matrices."""
    method = Anchored(built("sorted"))
    images = torch.rand(2, 2, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    method(images)
    by, first, source = method.finder.jacobians, method.network.stages[0].start, method.network.source
    (u,) = method.network.operands(method.network.stages[-1].nonlinear[-1])
    assert by.bend(first, u) is method.network.stages[0].nonlinear[0]
    assert (source, u) in by.bent
    assert (source, u) not in by.bends([(source, u)])
    assert (first, u) in by.bends([(source, u)])


def test_a_path_that_autograd_does_not_see_is_refused():
    target = torch.ones(2, 3, dtype=torch.float64)
    source = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    method = Anchored(built("halves"))
    (u,) = method.network.operands(method.network.stages[-1].nonlinear[-1])
    for hidden in (target, (target * source.detach()).requires_grad_()):
        with pytest.raises(UnsupportedOperation, match="cannot be differentiated"):
            method.finder.jacobians._check_used(hidden, [source], u)
    method.finder.jacobians._check_used(target * source, [source], u)


@pytest.mark.parametrize("name", BUILT)
def test_rows_are_deterministic_and_no_attack_gets_inside(name):
    model = built(name)
    images = torch.rand(3, *model.input_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        predicted, gaps = margins(model(images))
    found = Anchored(model)(images)
    radius = found.radius(predicted, gaps)
    assert not found.norms.ledger.spent.any()
    assert bool((radius > 0).all())
    for sign in (1.0, -1.0):
        moved = images.clone()
        for _ in range(8):
            moved.requires_grad_()
            logits = model(moved)
            rest = torch.where(torch.nn.functional.one_hot(predicted, 3).bool(), -math.inf, logits).amax(1)
            margin = logits.gather(1, predicted[:, None])[:, 0] - rest
            assert bool((margin > 0).all())
            (slope,) = torch.autograd.grad(margin.sum(), moved)
            step = slope / slope.flatten(1).norm(dim=1)[:, None, None, None]
            moved = (images - sign * radius[:, None, None, None] * step).detach()


def test_behind_a_cut_the_matrix_up_to_it_counts():
    """The rows of values behind it are those from the cut, and every norm from the image is that of a product."""
    method = Anchored(built("two stages"))
    network, by = method.network, method.finder.jacobians
    *_, before, cut = (stage.start for stage in network.stages)
    behind = {network.operands(v)[0] for v in network.stages[-1].nonlinear if network.operands(v)[0] is not cut}
    assert behind
    assert all(by.through(network.source, u) is cut for u in behind)
    assert by.through(network.source, cut) is before
    method(torch.rand(2, *network.model.input_size, dtype=torch.float64))


def test_the_perturbed_value_counts_with_what_is_read_of_it():
    """Of 256 entries at two mirror images, patches read 48: the matrices have no more columns."""
    method = Anchored(built("halves"))
    images = torch.rand(1, 2, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    at = method(images).linearization
    (u,) = method.network.operands(method.network.stages[-1].nonlinear[-1])
    start = method.network.stages[0].start
    assert method.network.entrance(u) is start
    assert start.entries < method.network.source.entries
    assert method.finder.jacobians.through(method.network.source, u) is start
    assert at.norms.written.factor(method.network.source, u).entries[0].numel() <= u.entries * start.entries


class Affine(nn.Module):
    """An affine operation, an activation and a head."""

    def __init__(self, operation, entries):
        super().__init__()
        self.operation, self.head = operation, nn.Linear(entries, 3)

    def forward(self, x):
        return self.head(nn.functional.silu(self.operation(x)).flatten(1))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


AFFINE = {
    "patches": lambda: nn.Conv2d(2, 3, 4, stride=4),
    "many channels": lambda: nn.Conv2d(2, 40, 2, stride=2),
    "overlap": lambda: nn.Conv2d(2, 3, 3, padding=1),
    "gaps": lambda: nn.Conv2d(2, 3, 2, stride=3, dilation=2, padding=1),
    "groups": lambda: nn.Conv2d(2, 4, 3, groups=2, padding=1),
    "circular": lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    "reflected": lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
    "averages": lambda: nn.AvgPool2d(3, 2),
    "matrix": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 7)),
    "tokens": lambda: nn.Sequential(nn.Conv2d(2, 5, 4, stride=4), nn.Flatten(2), Function(lambda x: x.mT + 1)),
    "mixed tokens": lambda: nn.Sequential(
        nn.Conv2d(2, 5, 2, stride=2), nn.Flatten(2), nn.Linear(16, 12), Function(lambda x: x.mT)
    ),
    "masked": lambda: Function(lambda x: x * torch.eye(8) + x.roll(3, -1) * 2),
    "chosen": lambda: Function(lambda x: torch.cat((x[:, :, 1::3], x[..., [4, 2, 2], :].flip(-1)), 2)),
}


@pytest.mark.parametrize("name", AFFINE)
def test_entries_that_are_not_zero_are_all_there(name):
    """From products for many rows at once; as many as the rows that read the same columns."""
    torch.manual_seed(0)
    operation = AFFINE[name]()
    model = Affine(operation, operation(torch.rand(1, 2, 8, 8)).numel())
    network = Network(lipcert.load(model, mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)).double())
    by = Jacobians(network, tolerance=0.01, deterministic=False, seed=0, delta=1e-9)
    values = network.values(torch.rand(1, 1, 2, 8, 8, dtype=torch.float64))
    (u,) = network.operands(next(iter(network.rules)))
    dense = jacobian(SimpleNamespace(network=network, values=values), network.source, u, 0)
    row, column, value = by._filled(network.source, u, values)
    assert len({*zip(row.tolist(), column.tolist(), strict=True)}) == len(value) == int((dense != 0).sum())
    assert torch.allclose(value, dense[row, column], rtol=1e-13, atol=0)


@pytest.mark.usefixtures("without_matrices")
@pytest.mark.parametrize("place", [0, 1])
def test_a_convolution_of_zeros_in_the_stem(place):
    """The certificate is that without it."""
    model = built("stem")
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    nn.init.zeros_(convolutions[place].weight)
    method = Anchored(model)
    images = torch.rand(2, 2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    radius = method(images).radius(*margins(model(images)))
    assert bool((radius > 1e10).all()) == (place == 0)  # the logits are constant
