"""Operator norms: never below the dense truth, close to it, and right when the estimate behind them is wrong."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipcert.errors import InputError
from lipcert.norms import (
    Draw,
    Ledger,
    _conv,
    _dense,
    _scale,
    _verify,
    conv_norm,
    conv_transpose_norm,
    dense_norm,
    explicit_norm,
    explicit_row_norms,
    lanczos_error,
    lanczos_norm,
    row_norms,
    row_norms_by_adjoint,
    start_vectors,
)
from lipcert.numerics import Upper

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
TRUTH = 1e-13  # relative accuracy granted to the dense singular value decomposition itself


@pytest.fixture(autouse=True)
def computed_each_time(monkeypatch):
    """Norms are not kept, so that a test sees what it patches."""
    monkeypatch.setattr(_scale, "_KEPT", 0)


def drawn(delta: float, seed: int = 0) -> Draw:
    """Start vectors for a norm by itself."""
    return Ledger(delta, seed=seed).draw("test", delta=delta)


def random_tensor(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def top(matrix):
    wide = matrix.to(torch.complex128 if matrix.is_complex() else torch.float64)
    return float(torch.linalg.svdvals(wide).max())


def operator(function, channels, size):
    """The matrix of a linear function of one image, column by column."""
    basis = torch.eye(channels * math.prod(size), dtype=torch.float64).reshape(-1, channels, *size)
    return function(basis).flatten(1).T


def conv_operator(weight, size, *, stride, pads, dilation, groups, identity=0.0):
    flat = [pad for pair in reversed(pads) for pad in pair]
    convolution = CONVOLUTIONS[len(size)]

    def apply(x):
        y = convolution(F.pad(x, flat), weight.double(), stride=stride, dilation=dilation, groups=groups)
        return y + identity * x if identity else y

    return operator(apply, weight.shape[1] * groups, size)


def assert_tight(bound, exact, loose):
    assert isinstance(bound, Upper)
    assert exact * (1 - TRUTH) <= float(bound) <= exact * (1 + loose)


# Dense ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    batch=st.lists(st.integers(1, 3), max_size=2),
    dtype=st.sampled_from(
        [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
    ),
    seed=st.integers(0, 2**16),
)
def test_dense_norm_is_at_least_the_top_singular_value_and_close(rows, columns, batch, dtype, seed):
    weight = random_tensor(*batch, rows, columns, seed=seed)
    weight = (weight + 1j * weight.flip(-1) ** 2 if dtype.is_complex else weight).to(dtype)
    assert_tight(dense_norm(weight), top(weight), 2e-5)


@pytest.mark.parametrize("shape", [(300, 300), (150, 700), (700, 150), (3, 200, 160)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_dense_norm_of_matrices_larger_than_a_panel(shape, dtype):
    weight = random_tensor(*shape).to(dtype)
    if dtype.is_complex:
        weight = weight + 1j * random_tensor(*shape, seed=1)
    assert_tight(dense_norm(weight), top(weight), 2e-5)


def orthogonal(size, seed):
    return torch.linalg.qr(random_tensor(size, size, seed=seed))[0]


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(150),
        torch.cat([torch.full((40,), 3.0), torch.linspace(0, 1, 110)]),
        3 - torch.arange(150) * 1e-9,
        3 - torch.arange(150) * 1e-4,
        torch.cat([torch.tensor([1.0]), torch.zeros(149)]),
        torch.logspace(0, -200, 150, dtype=torch.float64),
        torch.cat([torch.tensor([1.0 + 1e-7]), torch.ones(149)]),
    ],
    ids=["identity", "repeated", "cluster", "dense edge", "rank one", "graded", "nearly equal"],
)
@pytest.mark.parametrize("size_of_truth", [1.0, 1e-200, 1e200, 5e-310])
def test_dense_norm_on_difficult_spectra_and_scales(values, size_of_truth):
    weight = orthogonal(150, 1) @ torch.diag(values.double()) @ orthogonal(150, 2)
    exact = top(weight)
    bound = dense_norm(weight * size_of_truth)
    assert exact * (1 - 1e-12) <= float(bound / size_of_truth) <= exact * (1 + 1e-4)


@pytest.mark.parametrize("size", [65, 200, 500])
def test_dense_norm_when_the_krylov_space_is_exhausted_at_once(size):
    assert_tight(dense_norm(torch.eye(size)), 1.0, 2e-5)
    blocks = torch.diag(torch.tensor([2.0, 1.0, 0.5]).repeat(size))
    assert_tight(dense_norm(blocks), 2.0, 2e-5)


def test_dense_norm_near_the_ends_of_float64():
    largest = torch.finfo(torch.float64).max
    assert_tight(dense_norm(torch.full((3, 2), largest, dtype=torch.float64)) / largest, math.sqrt(6), 1e-5)
    assert_tight(dense_norm(torch.full((4, 4), 5e-324, dtype=torch.float64)) / 5e-324, 4.0, 1e-5)


def test_dense_norm_when_the_start_vector_misses_the_top_singular_vector():
    size = 200
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden = random_tensor(size, seed=5)
    hidden -= start * (start @ hidden) / (start @ start)
    hidden /= torch.linalg.vector_norm(hidden)
    rest = random_tensor(size, size, seed=6)
    rest -= torch.outer(rest @ hidden, hidden)
    rest -= torch.outer(hidden, hidden @ rest)
    weight = rest / top(rest) + 1.5 * torch.outer(hidden, hidden)
    assert_tight(dense_norm(weight), top(weight), 1e-4)


@pytest.mark.parametrize("estimate", [1e-6, 0.5, 0.999, 0.0, 1e3, math.inf])
def test_a_wrong_estimate_never_gives_a_wrong_bound(monkeypatch, estimate):
    weight = random_tensor(90, 130)
    kernel = random_tensor(5, 4, 3, 3)
    exact = top(weight)
    exact_conv = top(conv_operator(kernel, (6, 6), stride=1, pads=[(1, 1)] * 2, dilation=1, groups=1))
    honest = _verify.estimate_largest
    calls = []

    def wrong(gram):
        calls.append(gram)
        return honest(gram) * estimate

    monkeypatch.setattr(_verify, "estimate_largest", wrong)
    monkeypatch.setattr(_conv, "estimate_largest", wrong)
    assert float(dense_norm(weight)) >= exact
    assert float(conv_norm(kernel, (6, 6), padding=1)) >= exact_conv
    assert calls
    if estimate < 1:
        assert float(dense_norm(weight)) <= exact * (1 + 1e-4)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999, 1.001, 2.0])
def test_a_norm_above_its_limit_is_given_up_not_lowered(share):
    matrices = random_tensor(6, 30, 40)
    grams, exact = matrices @ matrices.mT, top(matrices)
    for estimate in (0.0, 0.5 * exact**2, 2 * exact**2):
        bound = float(_verify.largest_norm(grams.split(2), 0.0, estimate, share * exact**2))
        assert bound >= exact * (1 - TRUTH)
        assert share < 1 or estimate > exact**2 or bound < exact * (1 + 1e-4)


@pytest.mark.parametrize("size", [9, 28])
def test_all_grids_of_frequencies_bound_the_norm(monkeypatch, size):
    """A flat spectrum, whose estimates are poor: grids that are given up leave a bound that is nearly the smallest."""
    kernel = random_tensor(12, 12, 3, 3)
    quick = float(conv_norm(kernel, (size, size), padding=1))
    monkeypatch.setattr(_conv, "_WORSE", 1.0)
    assert top_of_convolution(kernel, size) <= quick <= float(conv_norm(kernel, (size, size), padding=1)) * (1 + 1e-3)


def top_of_convolution(kernel, size):
    """A lower estimate of the norm, by power iteration."""
    x = random_tensor(1, kernel.shape[1], size, size)
    for _ in range(100):
        y = F.conv2d(x / x.norm(), kernel, padding=1)
        x = F.conv_transpose2d(y, kernel, padding=1)
    return float(y.norm())


@pytest.mark.parametrize("relative", [0.5, 0.9, 0.999999, 1 - 1e-12, 1.0, 1 + 1e-12, 1 + 1e-6, 2.0])
@pytest.mark.parametrize("size", [2, 17, 100])
def test_verification_holds_for_every_threshold(size, relative):
    matrix = random_tensor(size, size, seed=size)
    gram = matrix @ matrix.mT
    largest = float(torch.linalg.eigvalsh(gram).max())
    bound = float(_verify._verify(gram[None], relative * largest))
    assert bound >= largest * (1 - TRUTH)
    if relative >= 1 + 1e-6:
        assert bound <= relative * largest * (1 + 1e-10)


def test_verification_survives_a_broken_factorisation(monkeypatch):
    def broken(matrices, *_args, **_kwargs):
        return torch.full_like(matrices, 0.125), torch.zeros(len(matrices), dtype=torch.int32)

    weight = random_tensor(40, 60)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", broken)
    exact, frobenius = top(weight), float(torch.linalg.matrix_norm(weight))
    assert exact <= float(dense_norm(weight)) <= frobenius * (1 + 1e-12)


def test_the_batch_gives_the_maximum_wherever_it_stands():
    weight = random_tensor(50, 6, 9)
    for place in range(0, 50, 7):
        raised = weight.clone()
        raised[place] *= 10
        assert_tight(dense_norm(raised), top(raised), 2e-5)


def test_chunks_give_the_same_bound(monkeypatch):
    weight = random_tensor(40, 12, 20)
    kernel = random_tensor(6, 6, 3, 3)
    together = float(dense_norm(weight)), float(conv_norm(kernel, (9, 9), padding=1))
    monkeypatch.setitem(_verify.CHUNK_BYTES, "cpu", 2**16)
    apart = float(dense_norm(weight)), float(conv_norm(kernel, (9, 9), padding=1))
    assert apart == pytest.approx(together, rel=2e-5)
    assert apart[0] >= top(weight) * (1 - TRUTH)


@settings(max_examples=30)
@given(size=st.integers(1, 20), identity=st.floats(-3, 3), seed=st.integers(0, 2**16))
def test_dense_identity(size, identity, seed):
    weight = random_tensor(size, size, seed=seed, dtype=torch.float32)
    assert_tight(
        dense_norm(weight, identity=identity),
        top(weight.double() + identity * torch.eye(size, dtype=torch.float64)),
        2e-5,
    )


def test_identity_that_cancels_the_weight():
    assert float(dense_norm(-torch.eye(5), identity=1.0)) == 0
    assert float(conv_norm(-torch.eye(3).reshape(3, 3, 1, 1), (4, 4), identity=1.0)) == 0
    off_by_little = -torch.eye(5, dtype=torch.float64) * (1 - 1e-12)
    assert_tight(dense_norm(off_by_little, identity=1.0), float(off_by_little[0, 0] + 1), 1e-3)


def test_zero_and_empty_weights():
    for shape in [(3, 4), (0, 4), (4, 0), (0, 3, 4)]:
        assert dense_norm(torch.zeros(shape)) == 0
    assert conv_norm(torch.zeros(3, 2, 3, 3), (5, 5), padding=1) == 0
    assert conv_norm(torch.zeros(0, 2, 3, 3), (5, 5)) == 0


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")])
def test_weights_that_are_not_finite(value, word):
    weight = torch.ones(4, 4)
    weight[2, 1] = value
    with pytest.raises(InputError, match=word):
        dense_norm(weight)
    with pytest.raises(InputError, match=word):
        dense_norm(weight, identity=1.0)
    with pytest.raises(InputError, match=word):
        conv_norm(weight.reshape(4, 1, 2, 2), (4, 4))


def test_arguments_that_cannot_be_used():
    with pytest.raises(InputError, match="out, in"):
        dense_norm(torch.ones(3))
    with pytest.raises(InputError, match="floating-point"):
        dense_norm(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="square"):
        dense_norm(torch.ones(3, 4), identity=1.0)
    kernel = torch.ones(4, 2, 3, 3)
    for wrong, word in [
        ({"input_size": (5,)}, "input sizes"),
        ({"input_size": (2, 5)}, "does not fit"),
        ({"groups": 3}, "3 groups"),
        ({"stride": 0}, "stride"),
        ({"dilation": (1, 1, 1)}, "dilation"),
        ({"padding": -1}, "padding"),
        ({"padding": "full"}, "padding"),
        ({"padding": (1, 1, 1)}, "padding"),
        ({"padding": "same", "stride": 2}, "stride 1"),
        ({"identity": 1.0}, "identity"),
    ]:
        with pytest.raises(InputError, match=word):
            conv_norm(kernel, **{"input_size": (5, 5), **wrong})
    with pytest.raises(InputError, match="identity"):
        conv_norm(torch.ones(2, 2, 3, 3), (5, 5), identity=1.0)
    with pytest.raises(InputError, match="empty output"):
        conv_transpose_norm(torch.ones(2, 2, 1, 1), (2, 2), padding=2)


# Convolutions --------------------------------------------------------------------------------------------------------


@st.composite
def configurations(draw):
    dimensions = draw(st.integers(1, 3))
    largest = {1: 12, 2: 6, 3: 4}[dimensions]

    def per_dimension(strategy):
        return tuple(draw(strategy) for _ in range(dimensions))

    groups = draw(st.integers(1, 3))
    size = per_dimension(st.integers(1, largest))
    kernel = per_dimension(st.integers(1, 4))
    dilation = per_dimension(st.integers(1, 3))
    pads = per_dimension(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    assume(all(n + sum(p) > d * (k - 1) for n, k, d, p in zip(size, kernel, dilation, pads, strict=True)))
    shape = (groups * draw(st.integers(1, 3)), draw(st.integers(1, 3)), *kernel)
    weight = random_tensor(
        *shape, seed=draw(st.integers(0, 2**16)), dtype=draw(st.sampled_from([torch.float32, torch.float64]))
    )
    return weight, size, {"stride": per_dimension(st.integers(1, 3)), "dilation": dilation, "groups": groups}, pads


@settings(max_examples=150)
@given(configurations())
def test_conv_norm_is_at_least_the_exact_norm(configuration):
    weight, size, numbers, pads = configuration
    exact = top(conv_operator(weight, size, pads=pads, **numbers))
    bound = conv_norm(weight, size, padding=pads, **numbers)
    assert float(bound) >= exact * (1 - TRUTH)
    assert float(bound) <= math.sqrt(weight[0, 0].numel()) * float(torch.linalg.vector_norm(weight)) * (1 + 1e-5)


@example(size=(2, 4), kernel=(3, 3), dilation=2, groups=2, channels=1, shift=3, identity=1.0, seed=0)
@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
    channels=st.integers(1, 3),
    shift=st.integers(0, 6),
    identity=st.floats(-2, 2),
    seed=st.integers(0, 2**16),
)
def test_conv_identity_with_every_alignment(size, kernel, dilation, groups, channels, shift, identity, seed):
    pads = [(min(shift, dilation * (k - 1)), dilation * (k - 1) - min(shift, dilation * (k - 1))) for k in kernel]
    weight = random_tensor(groups * channels, channels, *kernel, seed=seed)
    matrix = conv_operator(weight, size, stride=1, pads=pads, dilation=dilation, groups=groups, identity=identity)
    bound = conv_norm(weight, size, padding=tuple(pads), dilation=dilation, groups=groups, identity=identity)
    assert float(bound) >= top(matrix) * (1 - TRUTH)
    assert float(bound) <= float(conv_norm(weight, size, padding=tuple(pads), dilation=dilation, groups=groups)) + (
        abs(identity) + 1e-4
    )


@pytest.mark.parametrize(
    ("numbers", "loose"),
    [
        ({}, 0.10),
        ({"padding": 0}, 0.15),
        ({"stride": 2}, 0.15),
        ({"dilation": 2, "padding": 2}, 0.20),
        ({"groups": 2}, 0.10),
        ({"identity": 1.0}, 0.12),
        ({"padding": ((0, 2), (2, 0))}, 0.10),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_conv_norm_is_close_for_common_convolutions(numbers, loose, seed):
    numbers = {"stride": 1, "padding": 1, "dilation": 1, "groups": 1, **numbers}
    weight = random_tensor(4, 4 // numbers["groups"], 3, 3, seed=seed)
    padding = numbers.pop("padding")
    pads = padding if isinstance(padding, tuple) else ((padding, padding),) * 2
    matrix = conv_operator(weight, (12, 12), pads=pads, **numbers)
    assert_tight(conv_norm(weight, (12, 12), padding=padding, **numbers), top(matrix), loose)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("size", [(7,), (5, 6)])
def test_padding_that_repeats_entries_counts_each_copy(size, mode):
    weight = random_tensor(6, 2, *[3] * len(size))
    pads = ((2, 1), (1, 3))[: len(size)]
    around = [side for pair in reversed(pads) for side in pair]

    def convolve(x):
        return CONVOLUTIONS[len(size)](F.pad(x, around, mode), weight, None, 2, 0, 1, 2)

    truth = top(operator(convolve, 4, size))
    found = float(conv_norm(weight, size, stride=2, padding=pads, groups=2, mode=mode))
    assert truth * (1 - TRUTH) <= found <= 2 ** len(size) * truth


def test_padding_by_name_is_padding_by_number():
    weight = random_tensor(3, 3, 4, 3)
    same = conv_norm(weight, (7, 6), padding="same", dilation=2)
    assert same == conv_norm(weight, (7, 6), padding=((3, 3), (2, 2)), dilation=2)
    matrix = operator(lambda x: F.conv2d(x, weight, padding="same", dilation=2), 3, (7, 6))
    assert float(same) >= top(matrix) * (1 - TRUTH)
    assert conv_norm(weight, (7, 6), padding="valid") == conv_norm(weight, (7, 6))
    assert conv_norm(weight, (7, 6), padding=(2, 1)) == conv_norm(weight, (7, 6), padding=((2, 2), (1, 1)))


@pytest.mark.parametrize(
    ("kernel", "numbers"),
    [
        ((4, 4), {"stride": 4}),
        ((2, 3), {"stride": (3, 3), "padding": ((0, 1), (0, 2))}),
        ((1, 1), {}),
        ((1, 1), {"stride": 2, "groups": 2}),
        ((3, 3), {"stride": 3, "groups": 2}),
    ],
)
def test_patches_and_pointwise_convolutions_are_exact(kernel, numbers):
    groups = numbers.get("groups", 1)
    weight = random_tensor(8, 4 // groups, *kernel, dtype=torch.float32)
    matrix = operator(
        lambda x: F.conv2d(
            F.pad(x, [p for pair in reversed(numbers.get("padding", ())) for p in pair]),
            weight.double(),
            stride=numbers.get("stride", 1),
            groups=groups,
        ),
        4,
        (12, 12),
    )
    assert_tight(conv_norm(weight, (12, 12), **numbers), top(matrix), 2e-5)


def test_a_kernel_that_meets_one_pixel_only_is_exact():
    weight = random_tensor(5, 4, 3, 3)
    assert_tight(conv_norm(weight, (1, 1), padding=1), top(weight[:, :, 1, 1]), 2e-5)
    assert conv_norm(random_tensor(2, 2, 2), (1,), padding=1, dilation=2) == 0


def test_a_known_symbol():
    """The differences x[p + 1] − x[p] have the symbol e^{iω} − 1, which is 2 at ω = π.

    That is on the twisted torus if N is odd, and on the other if N is even. The second of the two has 2·cos(π/(2N)),
    which is the norm.
    """
    weight = torch.tensor([[[-1.0, 1.0]]])
    assert_tight(conv_norm(weight, (4,), padding=((0, 0),)), 2 * math.cos(math.pi / 8), 1e-5)
    assert_tight(conv_norm(weight, (5,), padding=((0, 0),)), 2 * math.cos(math.pi / 10), 1e-5)


@pytest.mark.parametrize("pads", [(1, 0), (0, 1)])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_torus_has_room_for_padding_on_either_side(pads, size):
    """Differences of an image padded on one side: 2·cos(π/(2n + 1)), more than the torus of side n has if n is odd."""
    weight = torch.tensor([[[-1.0, 1.0]]])
    exact = top(conv_operator(weight, (size,), stride=1, pads=[pads], dilation=1, groups=1))
    assert exact == pytest.approx(2 * math.cos(math.pi / (2 * size + 1)))
    assert float(conv_norm(weight, (size,), padding=(pads,))) >= exact * (1 - TRUTH)


def test_strides_take_the_polyphase_form():
    """Kernel of ones, size 2·k, stride k: every input is used twice, so the norm tends to √(2·2k), not to k·2."""
    weight = torch.ones(1, 1, 4)
    exact = top(conv_operator(weight, (200,), stride=2, pads=[(1, 1)], dilation=1, groups=1))
    assert_tight(conv_norm(weight, (200,), stride=2, padding=1), exact, 1e-3)
    assert float(conv_norm(weight, (200,), padding=1)) > 1.3 * exact


def test_the_coarse_grid_is_above_the_fine_one_by_its_factor_at_most(monkeypatch):
    seen = []
    for seed in range(4):
        weight = random_tensor(3, 3, 3, 3, seed=seed)
        fine = float(conv_norm(weight, (512, 512), padding=1))
        with monkeypatch.context() as patch:
            patch.setattr(_conv, "_EXPENSIVE", 0)
            coarse = float(conv_norm(weight, (512, 512), padding=1))
        assert fine * (1 - 1e-5) <= coarse <= fine * (1 + 1e-5) / math.cos(math.pi / 32) ** 2
        seen.append(coarse != fine)
    assert all(seen)


@pytest.mark.parametrize("side", [2, 3, 8, 16])
def test_the_correction_of_coarse_grids_is_attained(monkeypatch, side):
    """x[p] + R·x[p + 1] with a rotation by π/side has its maximum, 2, half-way between two grid points."""
    monkeypatch.setattr(_conv, "_EXPENSIVE", 0)
    monkeypatch.setattr(_conv, "_COARSE", side)
    cosine, sine = math.cos(math.pi / side), math.sin(math.pi / side)
    rotation = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)
    weight = torch.stack([torch.eye(2, dtype=torch.float64), rotation], dim=-1)
    assert_tight(conv_norm(weight, (600,)), 2.0, 2e-5)


@settings(max_examples=50)
@given(configuration=configurations(), extra=st.integers(0, 2))
def test_conv_transpose_norm_is_at_least_the_exact_norm(configuration, extra):
    weight, size, numbers, pads = configuration
    padding = tuple(left for left, _ in pads)
    extras = tuple(min(extra, max(s, d) - 1) for s, d in zip(numbers["stride"], numbers["dilation"], strict=True))
    kernel = weight.shape[2:]
    output = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(size, numbers["stride"], padding, numbers["dilation"], kernel, extras, strict=True)
    ]
    assume(min(output) > 0)
    matrix = operator(
        lambda x: TRANSPOSED[len(size)](x, weight.double(), padding=padding, output_padding=extras, **numbers),
        weight.shape[0],
        size,
    )
    bound = conv_transpose_norm(weight, size, padding=padding, output_padding=extras, **numbers)
    assert float(bound) >= top(matrix) * (1 - TRUTH)


def test_conv_transpose_norm_of_patches_is_exact():
    weight = random_tensor(6, 4, 2, 2)
    assert_tight(conv_transpose_norm(weight, (3, 3), stride=2), top(weight.flatten(1)), 2e-5)


@pytest.mark.parametrize("size", [3, 7, 16, 30])
def test_twisted_tori_give_the_norm_of_a_band(size: int) -> None:
    """The matrix with ones on three diagonals has the eigenvalues 1 + 2cos(πk/(n + 1))."""
    found = float(conv_norm(torch.ones(1, 1, 3), (size,), padding=1))
    exact = 1 + 2 * math.cos(math.pi / (size + 1))
    assert exact <= found <= exact * (1 + 1e-9)


@given(st.integers(0, 10**6), st.integers(2, 3), st.integers(2, 9), st.integers(1, 2))
def test_twisted_tori_are_above_the_norm(seed: int, kernel: int, size: int, dimensions: int) -> None:
    """Smooth kernels, for which the twist counts; at most as large as without, and above the explicit norm."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(2, 2, *[kernel] * dimensions, generator=generator, dtype=torch.float64)
    sides = (size,) * dimensions
    found = float(conv_norm(weight, sides, padding=kernel // 2))
    function = (F.conv1d, F.conv2d)[dimensions - 1]
    unit = torch.eye(2 * size**dimensions, dtype=torch.float64).unflatten(1, (2, *sides))
    exact = torch.linalg.matrix_norm(function(unit, weight, padding=kernel // 2).flatten(1), 2).item()
    assert exact <= found * (1 + 1e-12)
    assert found <= matrix_sum(weight)


@pytest.mark.parametrize("accuracy", [1.0, 0.9])
@pytest.mark.parametrize("size", [(6, 6), (5, 8)])
@pytest.mark.parametrize("seed", range(6))
def test_the_grid_of_the_smallest_maximum_counts(monkeypatch, seed, size, accuracy):
    """Peaks at three odd frequencies, about as high as each other, between the points of all four grids.

    The reference are singular values at all their points. Estimates that are far too low cost time alone.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = 0.01 * torch.randn(5, 4, 3, 3, generator=generator, dtype=torch.float64)
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).double()
    for height in (1.0, 1.0, 0.99):
        phase = places @ (2 * math.pi * torch.rand(2, generator=generator, dtype=torch.float64))
        outer = torch.randn(5, 1, generator=generator).double() @ torch.randn(1, 4, generator=generator).double()
        weight += height * outer[:, :, None, None] / outer.norm() * phase.cos().reshape(3, 3)
    maxima = []
    for twists in ((0, 0), (0, 1), (1, 0), (1, 1)):
        turns = [(torch.arange(n + 1).double() + twist / 2) / (n + 1) for n, twist in zip(size, twists, strict=True)]
        angles = 2 * math.pi * torch.cartesian_prod(*turns) @ places.mT
        waves = torch.polar(torch.ones_like(angles), angles)
        maxima.append(top(torch.einsum("pk,oik->poi", waves, weight.flatten(2).to(torch.complex128))))
    known = _conv.estimate_largest
    monkeypatch.setattr(_conv, "estimate_largest", lambda gram: known(gram) * accuracy)
    bound = float(conv_norm(weight, size, padding=1))
    assert bound >= top(conv_operator(weight, size, stride=1, pads=[(1, 1)] * 2, dilation=1, groups=1)) * (1 - TRUTH)
    assert min(maxima) * (1 - 1e-6) <= bound <= min(maxima) * (1 + 2e-5)
    monkeypatch.setattr(_conv, "_EXPENSIVE", 0)
    assert min(maxima) * (1 - 1e-6) <= float(conv_norm(weight, size, padding=1)) <= maxima[0] * (1 + 2e-5)


def matrix_sum(weight: Tensor) -> float:
    """The norm of the sum of all taps: that at frequency 0, which is the largest for weights that are not negative."""
    return torch.linalg.matrix_norm(weight.flatten(2).sum(2), 2).item() * (1 + 1e-9)


def test_lanczos_says_infinity_where_products_are_not_finite_and_zero_for_zero_alone() -> None:
    scales = torch.tensor([[float("nan")], [float("inf")], [1.0], [1e-200], [0.0]], dtype=torch.float64)
    bound = lanczos_norm(lambda v: scales * v, lambda u: scales * u, 5, 6, draw=drawn(1e-9))
    assert torch.isinf(bound[:2]).all()
    assert 1 <= bound[2] <= 1.1
    assert 1e-200 <= bound[3] < 1e-100
    assert bound[4] == 0


class WorstStart:
    """Start vectors with the smallest part along the first axis for which a Lanczos bound must hold."""

    def __init__(self, delta: float) -> None:
        self.delta = delta

    def normal(self, rows: int, size: int) -> Tensor:
        count, part = start_vectors(self.delta, size)
        assert rows == count
        assert part >= 2.0**-19
        vectors = random_tensor(rows, size, seed=3)
        vectors[:, 0] = 0
        vectors /= vectors.norm(dim=1, keepdim=True)
        vectors *= (1 - part**2) ** 0.5
        vectors[:, 0] = part
        return vectors


@settings(max_examples=60)
@given(
    size=st.integers(2, 60),
    steps=st.integers(1, 48),
    rest=st.sampled_from(["flat", "close", "spread", "zero"]),
    delta=st.sampled_from([1e-3, 1e-9, 1e-13]),
)
def test_lanczos_holds_whenever_the_start_vector_has_its_part(size: int, steps: int, rest: str, delta: float) -> None:
    """The failure probability is that of the start vectors alone, so with these the bound may never be too small."""
    place = torch.arange(size, dtype=torch.float64)
    values = {
        "flat": torch.ones(size).double(), "close": 1.5 - 1e-7 * place, "spread": 1 / (1 + place),
        "zero": torch.zeros(size).double(),
    }[rest]  # fmt: skip
    values[0] = 1.5
    draw: Any = WorstStart(delta)
    for together in (False, True):
        bound = lanczos_norm(
            lambda v: v * values, lambda u: u * values, 1, size, draw=draw, steps=steps, together=together
        )
        assert bound.item() >= 1.5


def test_lanczos_from_all_start_vectors_at_once_is_the_same_for_a_map_alone() -> None:
    """A map among others, with the maps in turn for the start vectors, counts as it does alone."""
    maps = random_tensor(3, 40, 30)
    maps[1] *= torch.logspace(0, -3, 30, dtype=torch.float64)
    maps[2] = 0

    def bound(some: Tensor, together: bool) -> Tensor:
        def product(v: Tensor) -> Tensor:
            return torch.einsum("nij,qnj->qni", some, v.unflatten(0, (-1, len(some)))).flatten(0, 1)

        def adjoint(u: Tensor) -> Tensor:
            return torch.einsum("nij,qni->qnj", some, u.unflatten(0, (-1, len(some)))).flatten(0, 1)

        return lanczos_norm(product, adjoint, len(some), 30, draw=drawn(1e-9), together=together)

    whole, exact = bound(maps, True), torch.linalg.matrix_norm(maps, 2)
    assert bool((exact <= whole).all())
    assert bool((whole <= exact * 1.06).all())
    for number in range(3):
        torch.testing.assert_close(bound(maps[number : number + 1], True)[0], whole[number], rtol=1e-12, atol=0)
    torch.testing.assert_close(bound(maps, False), whole, rtol=0.06, atol=0)


@pytest.mark.parametrize(("error", "hidden"), [(1e-12, False), (1e-7, False), (1e-6, False), (1e-5, True)])
def test_lanczos_covers_products_whose_errors_hide_the_top_vector(error: float, hidden: bool) -> None:
    """Errors that depend on the vector and point away from the top singular vector."""
    values = torch.ones(50, dtype=torch.float64)
    values[0] = 1.5

    def product(v: Tensor) -> Tensor:
        moved = v * values
        moved[:, 0] -= (v[:, 0] / 2).clamp(-error, error)
        return moved

    draw: Any = WorstStart(1e-9)
    bound = lanczos_norm(product, product, 1, 50, draw=draw).item()
    assert (bound < 1.5) == hidden
    assert bound + lanczos_error() * error >= 1.5


@settings(max_examples=30)
@given(rows=st.integers(1, 90), columns=st.integers(1, 90), seed=st.integers(0, 2**16))
def test_explicit_norm_is_the_norm_of_the_matrix(rows: int, columns: int, seed: int) -> None:
    maps = random_tensor(3, rows, columns, seed=seed)
    maps[1] *= 1e-3
    maps[2] = 0
    bound = explicit_norm(lambda v: torch.einsum("nij,knj->kni", maps, v), 3, columns)
    for matrix, found in zip(maps[:2], bound[:2], strict=True):
        assert top(matrix) * (1 - TRUTH) <= found <= top(matrix) * (1 + 2e-5)
    assert bound[2] == 0


def test_explicit_norm_says_infinity_where_products_are_not_finite() -> None:
    scales = torch.tensor([[float("nan")], [float("inf")], [1.0], [1e-200]], dtype=torch.float64)
    bound = explicit_norm(lambda v: scales * v, 4, 6)
    assert torch.isinf(bound[:2]).all()
    assert 1 <= bound[2] <= 1.1
    assert 1e-200 <= bound[3] < 1e-100


@settings(max_examples=30)
@given(rows=st.integers(1, 90), columns=st.integers(1, 90), seed=st.integers(0, 2**16))
def test_bounds_on_row_norms(rows: int, columns: int, seed: int) -> None:
    maps = random_tensor(2, rows, columns, seed=seed)
    maps[1, rows // 2] *= 30
    longest = maps.norm(dim=2)

    def product(v: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nij,knj->kni", maps, v)

    torch.testing.assert_close(explicit_row_norms(product, 2, columns), longest)
    from_rows = row_norms_by_adjoint(lambda u: torch.einsum("nij,kni->knj", maps, u), 2, rows)
    torch.testing.assert_close(from_rows, longest)
    assert bool((longest <= from_rows).all())
    bound = row_norms(lambda v: [product(v)], 2, columns, draw=drawn(1e-12, seed))
    assert bool((longest <= bound).all())
    assert bool((bound <= 2 * longest).all())


@settings(max_examples=25)
@given(blocks=st.integers(1, 5), block=st.integers(2, 7), columns=st.integers(1, 30), seed=st.integers(0, 2**16))
def test_norms_of_blocks_of_rows(blocks: int, block: int, columns: int, seed: int) -> None:
    """Exact where they are written out; else above the largest, by no more than rows and probes explain."""
    maps = random_tensor(2, blocks * block, columns, seed=seed)
    maps[1] *= torch.logspace(0, -6, columns, dtype=torch.float64)  # one long direction
    exact = torch.linalg.matrix_norm(maps.unflatten(1, (blocks, block)), 2)
    product = lambda v: torch.einsum("nij,knj->kni", maps, v)  # noqa: E731
    adjoint = lambda u: torch.einsum("nij,kni->knj", maps, u)  # noqa: E731
    rows = blocks * block
    for found in (
        explicit_row_norms(product, 2, columns, block=block),
        row_norms_by_adjoint(adjoint, 2, rows, block=block),
    ):
        assert bool((found >= exact).all())
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-100)
    both = row_norms(lambda v: [product(v), product(v)], 2, columns, (block, 1), draw=drawn(1e-12, seed))
    for bound, norms in zip(both.split((blocks, rows), 1), (exact, maps.norm(dim=2)), strict=True):
        assert bool((bound >= norms).all())
        assert bool((bound <= 2.5 * norms).all())


def test_norms_of_blocks_fail_no_more_often_than_they_say() -> None:
    """With as large a failure probability as one in five, of matrices with two equal directions."""
    maps = torch.eye(6, dtype=torch.float64)[None].expand(400, 6, 6) * torch.tensor([1, 1, 0.1, 0.5, 0.5, 0.1]).double()
    failures = 0
    for seed in range(200):
        bound = row_norms(
            lambda v: [torch.einsum("nij,knj->kni", maps[:1], v)], 1, 6, (3,), draw=drawn(0.2, seed), probes=4
        )
        failures += bound.amax().item() < 1
    assert failures <= 0.2 * 200


def test_blocks_say_infinity_where_products_are_not_finite() -> None:
    scales = torch.tensor([1.0, math.inf, math.nan], dtype=torch.float64)[:, None]
    for found in (
        row_norms(lambda v: [scales * v], 3, 6, (3,), draw=drawn(1e-9)),
        explicit_row_norms(lambda v: scales * v, 3, 6, block=2),
        row_norms_by_adjoint(lambda v: scales * v, 3, 6, block=3),
    ):
        assert bool(found[0].isfinite().all())
        assert bool(found[1:].isinf().all())


def test_row_norms_fail_no_more_often_than_they_say() -> None:
    """With few probes and a large δ failures can be counted: at most δ of them, and not none at all."""
    maps = torch.ones(1, 1, 4, dtype=torch.float64)
    bounds = [
        row_norms(lambda v: [torch.einsum("nij,knj->kni", maps, v)], 1, 4, draw=drawn(0.2, seed), probes=4)
        for seed in range(2000)
    ]
    failures = sum(float(bound) < 2 for bound in bounds)
    assert 20 <= failures <= 400


def test_row_norms_take_more_products_where_they_are_too_few() -> None:
    """Fewer would divide rounding errors by a number for which nothing is proved."""
    rows = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    few, enough = (row_norms(lambda v: [rows * v], 1, 3, draw=drawn(1e-100), probes=probes) for probes in (128, 512))
    assert torch.equal(few, enough)
    assert bool(((enough >= rows) & (enough <= 8**0.5 * rows)).all())


def test_row_norms_say_infinity_where_products_are_not_finite() -> None:
    scales = torch.tensor([[float("nan")], [float("inf")], [1.0]], dtype=torch.float64)
    for bound in (
        row_norms(lambda v: [scales * v], 3, 6, draw=drawn(1e-9)),
        explicit_row_norms(lambda v: scales * v, 3, 6),
        row_norms_by_adjoint(lambda v: scales * v, 3, 6),
    ):
        assert torch.isinf(bound[:2]).all()
        assert bool(((bound[2] >= 1) & (bound[2] <= 2)).all())


def test_the_norm_of_the_same_weight_is_computed_once(monkeypatch):
    """A change in place is another weight, and so is another size of the image."""
    monkeypatch.setattr(_scale, "_KEPT", 10)
    asked, eigenvalues = [], _verify._bound_eigenvalues

    def counted(*args):
        asked.append(1)
        return eigenvalues(*args)

    monkeypatch.setattr(_verify, "_bound_eigenvalues", counted)
    weight = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(77), dtype=torch.float64)
    first = conv_norm(weight, (6, 6), padding=1)
    count = len(asked)
    assert count > 0
    assert conv_norm(weight.clone(), (6, 6), padding=1) == first
    assert len(asked) == count
    weight[0, 0, 0, 0] += 5
    assert conv_norm(weight, (6, 6), padding=1) > first
    assert conv_norm(weight, (9, 9), padding=1) != conv_norm(weight, (6, 6), padding=1)
    assert len(asked) > count


def test_conjugated_matrices_are_hashed():
    matrices = torch.randn(1, 4, 3, dtype=torch.complex128)
    exact = torch.linalg.matrix_norm(matrices, 2).item()
    assert float(_dense.matrices_norm(matrices.conj())) == pytest.approx(exact, rel=1e-4)
