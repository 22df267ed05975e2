"""Helpers that several test files share, as fixtures: the contract of a bound, and an attack on a certificate."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipcert.attacks import ATTACKS, PGD
from lipcert.bounds import Analysis, Value, analyze
from lipcert.certifier import _triage
from lipcert.cli import _print
from lipcert.graph import evaluate

sys.path.append(str(Path(__file__).parent.parent))  # benchmarks are no part of the package
sys.path.append(str(Path(__file__).parent))  # for tests/truth.py

# Tests run side by side; a thread each leaves the cores to them.
torch.set_num_threads(1)


settings.register_profile("lipcert", deadline=None)  # no test has a time limit
settings.load_profile("lipcert")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked ``thinned(n)``, all cases but every n-th by name are slow."""
    cases: Counter[str] = Counter()
    for item in sorted(items, key=lambda item: item.nodeid):
        mark, name = item.get_closest_marker("thinned"), item.nodeid.partition("[")[0]
        if mark is not None and cases[name] % mark.args[0]:
            item.add_marker(pytest.mark.slow)
        cases[name] += 1


@pytest.fixture(autouse=True)
def _own_process(tmp_path, monkeypatch):
    """Commands write into the working folder, and what one was told does not hold for the next test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_print, "imported", [])
    monkeypatch.setattr(_print, "quiet", False)


class Network(nn.Module):
    """A function of the pixels as a float64 module."""

    def __init__(self, forward: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = forward
        self.marker = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def images_of_the_box(size: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Points of the box: inside, corners, faces, and random ones scaled by powers of two."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(1, *size, generator=generator, dtype=torch.float64)

    inside = [uniform() for _ in range(4)]
    corners = [uniform().round() for _ in range(4)] + [torch.zeros(1, *size).double(), torch.ones(1, *size).double()]
    faces = [(2 * uniform() - 0.5).clamp(0, 1) for _ in range(2)]
    scaled = [uniform() * 2.0**-k for k in (2, 5, 9, 20)]
    return inside + corners + faces + scaled


def jacobian(function: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """The Jacobian as a matrix, by autograd."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full = torch.autograd.functional.jacobian(lambda x: function(x).flatten(), image, vectorize=True)
    return full.reshape(-1, image.numel())


def steepest(function: Callable[[Tensor], Tensor], image: Tensor, steps: int) -> float:
    """The largest Jacobian norm met by gradient ascent on it inside the box."""
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        return _ascend(function, image, steps)


def _ascend(function: Callable[[Tensor], Tensor], image: Tensor, steps: int) -> float:
    best = 0.0
    for step in range(steps + 1):
        u, s, vh = torch.linalg.svd(jacobian(function, image), full_matrices=False)
        best = max(best, s[0].item())
        if step == steps or not s[0] > 0:
            break
        point = image.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(point).flatten() @ u[:, 0], point, create_graph=True)
        if not first.requires_grad:
            break
        try:
            (second,) = torch.autograd.grad((first.flatten() * vh[0]).sum(), point, allow_unused=True)
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            break
        if second is None or not second.abs().max() > 0:
            break
        image = (image + 0.3 * 0.7**step * second / second.abs().max()).clamp(0, 1)
    return best


def check_facts(analysis: Analysis, images: list[Tensor]) -> None:
    """Magnitudes, row norms and matrix norms of every value of the network, against the values at the images."""
    runs = [evaluate(analysis.graph.nodes, {analysis.graph.input: image}) for image in images]
    slack = 1 + 1e-12
    for node in analysis.graph.nodes:
        value = analysis.values[node]
        if not isinstance(value, Value):
            continue
        tensors = torch.stack([values[node] for values in runs])
        if not tensors.numel() or not tensors.isfinite().all():
            continue  # a masked entry is -inf
        assert value.shape == tuple(tensors.shape[1:]), node
        assert tensors.abs().max() <= float(value.magnitude) * slack, node
        for axis in range(len(value.shape)):
            limit = float(value.row_norm(axis)) * slack
            assert torch.linalg.vector_norm(tensors, dim=axis + 1).max() <= limit, (node, axis)
            assert value.row_norm(axis) == value.row_norm(axis - len(value.shape)), (node, axis)
        if len(value.shape) >= 2:
            assert torch.linalg.matrix_norm(tensors, 2).max() <= float(value.matrix_norm()) * slack, node


def check_contract(
    forward: Callable[[Tensor], Tensor], size: tuple[int, ...], tight: float | None = None, ascent: int = 4
) -> Analysis:
    """Every bound of the network holds against dense truth; for linear ones the constant is also ``tight``."""
    network = Network(forward)
    analysis = analyze(network, size)
    lip = float(analysis.output.lip)
    images = images_of_the_box(size)
    with torch.no_grad():
        check_facts(analysis, images)
        results = [network(image) for image in images]
        for i in range(len(images)):
            moved = (results[i] - results[i - 1]).norm() / (images[i] - images[i - 1]).norm()
            assert lip == float("inf") or moved <= lip * (1 + 1e-9), "a sampled quotient exceeds the constant"
    starts = [images[0], images[1], images[5], images[10], images[13]]
    norms = [torch.linalg.matrix_norm(jacobian(network, start), 2).item() for start in starts]
    exact = max(norms)
    if tight is None and ascent:
        exact = max(exact, steepest(network, starts[norms.index(exact)], ascent))
    assert exact <= lip * (1 + 1e-12), "a Jacobian norm exceeds the constant"
    if tight is not None:
        assert lip <= tight * exact + 1e-300, "the constant of a linear operation is loose"
    return analysis


def attack(
    logits: Callable[[Tensor], Tensor],
    images: Tensor,
    radius: float | Tensor,
    steps: int = 30,
    starts: int = 2,
    seed: int = 0,
) -> bool:
    """Whether projected gradient descent finds another prediction within an ℓ2 ball of an image, or on its surface.

    The perturbed image need not stay in the box where the bound does not depend on it; here it is clamped, for what is
    certified are perturbations of images that stay images.
    """
    generator = torch.Generator().manual_seed(seed)
    predicted = logits(images).argmax(1)
    each = [-1, *[1] * (images.dim() - 1)]
    sizes = torch.as_tensor(radius, dtype=images.dtype).reshape(each)

    def length(delta: Tensor) -> Tensor:
        return delta.flatten(1).norm(dim=1).clamp_min(1e-300).reshape(each)

    def project(delta: Tensor) -> Tensor:
        delta = delta * (sizes / length(delta)).clamp(max=1)
        return (images + delta).clamp(0, 1) - images  # the images are in the box, so this does not lengthen delta

    for start in range(starts):
        delta = torch.zeros_like(images)
        if start:
            delta = project(torch.randn(images.shape, generator=generator, dtype=images.dtype) * sizes)
        for _ in range(steps):
            delta.requires_grad_()
            out = logits(images + delta)
            if (out.argmax(1) != predicted).any():
                return True
            others = out.scatter(1, predicted[:, None], -torch.inf)
            margin = out.gather(1, predicted[:, None]).squeeze(1) - others.amax(1)
            (slope,) = torch.autograd.grad(margin.sum(), delta)
            if not slope.norm() > 0:
                break
            delta = project(delta.detach() - 2.5 * sizes / steps * slope / length(slope))
        if (logits(images + delta.detach()).argmax(1) != predicted).any():
            return True
    return False


@pytest.fixture(name="check_contract", scope="session")
def _check_contract() -> Callable[..., Analysis]:
    return check_contract


@pytest.fixture(name="steepest", scope="session")
def _steepest() -> Callable[..., float]:
    return steepest


@pytest.fixture(name="attack", scope="session")
def _attack() -> Callable[..., bool]:
    return attack


@pytest.fixture(name="network", scope="session")
def _network() -> type[Network]:
    return Network


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a busy machine slows print none in between."""
    monkeypatch.setattr(_print, "_FIRST_PAUSE", 1e6)
    monkeypatch.setattr(_print, "_next_line", [1e9, 1e6])


@pytest.fixture
def short_attack(monkeypatch: pytest.MonkeyPatch) -> PGD:
    """What --attack runs, for tests of what is done with its results."""
    attack = PGD(steps=10, restarts=1)
    monkeypatch.setitem(ATTACKS, "pgd", lambda: attack)
    return attack


@pytest.fixture
def no_triage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged certification gives every image to every method, as if nothing ruled a certificate out."""
    monkeypatch.setattr(_triage.Screening, "ruled_out", property(lambda screening: torch.zeros_like(screening.broken)))
