"""The bound for training: its value is near the certified one, and its gradient is that of its value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import lipcert
from lipcert.attacks import PGD
from lipcert.bounds import Bound, Estimate
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.networks._parts import NormalizedLinear
from lipcert.networks.liresnet import LinearResidual
from lipcert.numerics import Estimated, Estimator, Upper, estimating
from lipcert.surgery import ClippedMaxMin, ClippedReLU, L2Attention, LayerProject, MaxMin, SmoothProject
from lipcert.training import TrainingBound


class Residual(nn.Module):
    """x + s·Wx."""

    def __init__(self, inner: nn.Module, size: int):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.scale


class DotAttention(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.project, self.qkv = SmoothProject(dim), nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.project(x)).unsqueeze(1).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v).squeeze(1)


class Gate(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.value, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * self.gate(x).sigmoid()


class Tokens(nn.Module):
    """A 4×4 image as 4 tokens of width 6, the layers, and the mean of the tokens."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.embed, self.layers = nn.Conv2d(1, 6, 2, 2), nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.embed(x).flatten(2).transpose(1, 2)).mean(1)


def shaken(*layers: nn.Module) -> nn.Sequential:
    """A batch norm whose statistics and scales are no identity."""
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.running_mean, layer.running_var, layer.weight):
                tensor.data.uniform_(0.5, 2)
    return nn.Sequential(*layers)


def flat(*layers: nn.Module, features: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


# Linear operators that are certified exactly, up to 1e-4, and so have no looseness of their own.
EXACT: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)),
    "dense residual": lambda: flat(nn.Flatten(), Residual(nn.Linear(16, 16), 16), nn.ReLU(), features=16),
    "patches": lambda: flat(nn.Conv2d(1, 4, 2, 2), MaxMin(), features=16),
    "groups": lambda: flat(nn.Conv2d(1, 4, 2, 2), nn.Conv2d(4, 4, 1, groups=2), features=16),
    "batch norm": lambda: flat(shaken(nn.Conv2d(1, 4, 2, 2), nn.BatchNorm2d(4)), nn.ReLU(), features=16),
    "layer norm": lambda: Tokens(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)),
    "normalised head": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), MaxMin(), NormalizedLinear(6, 3)),
    "weight norm": lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(16, 5)), nn.ReLU(), nn.Linear(5, 3)),
    "orthogonal": lambda: nn.Sequential(
        nn.Flatten(), orthogonal(nn.Linear(16, 5), orthogonal_map="cayley"), nn.ReLU(), nn.Linear(5, 3)
    ),
    "spectral norm": lambda: nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(16, 5)), nn.Linear(5, 3)),
    "average": lambda: flat(nn.Conv2d(1, 4, 2, 2), nn.AvgPool2d(2), features=4),
    "projections": lambda: Tokens(LayerProject(6), nn.Linear(6, 6), SmoothProject(6), nn.Linear(6, 3)),
    "dot-product attention": lambda: Tokens(DotAttention(6), nn.Linear(6, 3)),
    "L2 attention": lambda: Tokens(L2Attention(6, 2), nn.Linear(6, 3)),
    "bounded L2 attention": lambda: Tokens(SmoothProject(6), L2Attention(6, 2), nn.Linear(6, 3)),
    "gate": lambda: nn.Sequential(nn.Flatten(), Gate(16), nn.Linear(16, 3)),
    "clipped": lambda: flat(nn.Conv2d(1, 4, 2, 2), ClippedReLU(), ClippedMaxMin(), features=16),
}
# Convolutions whose certified norm is that on a torus.
LOOSE: dict[str, Callable[[], nn.Module]] = {
    "stride and padding": lambda: flat(nn.Conv2d(1, 4, 3, 2, 1), MaxMin(), features=16),
    "dilation": lambda: flat(nn.Conv2d(1, 2, 3, padding=2, dilation=2), nn.ReLU(), features=32),
    "uneven padding": lambda: flat(nn.Conv2d(1, 2, 2, padding="same"), nn.ReLU(), features=32),
    "depthwise": lambda: flat(nn.Conv2d(1, 4, 2, 2), nn.Conv2d(4, 4, 3, padding=1, groups=4), features=16),
    "transposed": lambda: flat(nn.ConvTranspose2d(1, 2, 3, 2, 1), nn.ReLU(), features=98),
    "linear residual": lambda: flat(nn.Conv2d(1, 4, 2, 2), MaxMin(), LinearResidual(4, 2), MaxMin(), features=16),
}


def model_of(make: Callable[[], nn.Module]) -> lipcert.Model:
    torch.manual_seed(3)
    model = lipcert.load(make(), mean=(0.5,), std=(0.5,), input_size=(1, 4, 4)).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # scales that are all alike have no gradient of their maximum
            parameter.data.uniform_(0.5, 1.5)
    return model


def settled(model: lipcert.Model, steps: int = 80) -> TrainingBound:
    """Its power iterations have come to an end."""
    bound = TrainingBound(model)
    bound.estimator.steps = steps
    bound.step()
    return bound


def largest_margin(bound: TrainingBound) -> Tensor:
    """log of the sum of all K_yj, which depends on the head, too."""
    return bound.margins(torch.arange(3), 3).sum().log()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", [*EXACT, *LOOSE])
def test_the_estimate_is_near_the_certified_bound_and_below(name: str) -> None:
    bound = settled(model_of({**EXACT, **LOOSE}[name]))
    estimate, certified = bound.features.item(), bound.certified
    assert estimate <= certified * (1 + 1e-9)
    assert certified <= estimate * (1.001 if name in EXACT else 2.5)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", [*EXACT, *LOOSE])
def test_the_gradient_is_that_of_the_bound_for_every_parameter(name: str) -> None:
    """Against differences of the value, along each parameter's own gradient and along a random direction."""
    model = model_of({**EXACT, **LOOSE}[name])
    bound = settled(model)
    bound.estimator.steps = 20  # from where they have come to an end
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(largest_margin(bound), list(parameters.values()), allow_unused=True)
    touched = 0
    for (path, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        found = torch.zeros_like(parameter) if gradient is None else gradient
        random = torch.randn_like(parameter)
        for direction in (random, found):
            if direction.norm() < 1e-9:
                continue
            step = 1e-4 * (parameter.norm() + 0.1) / direction.norm()
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.add_(direction * step, alpha=sign)
                bound.step()
                values.append(largest_margin(bound).item())
                with torch.no_grad():
                    parameter.sub_(direction * step, alpha=sign)
            slope = (values[0] - values[1]) / (2 * step.item())
            size = (found.norm() * direction.norm()).item()
            assert abs((found * direction).sum().item() - slope) <= 0.01 * size + 3e-4 * direction.norm().item(), path
            touched += size > 0
    assert touched


def test_the_gradient_of_a_linear_residual_network_is_exact() -> None:
    """Cosine with the gradient of log ∏‖A‖ by the matrices of all operators, each by its definition."""
    arguments = {"img_size": 8, "width": 4, "depth": 2, "neck": 4, "num_features": 8}
    model = lipcert.load("liresnet_l6w64", pretrained=False, **arguments).double()
    assert model.net.head.weight.shape == (10, 8)
    net = model.net
    bound = settled(model, 500)

    def norm(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
        basis = torch.eye(torch.Size(shape).numel()).double().reshape(-1, *shape)
        matrix = (function(basis) - function(torch.zeros(1, *shape).double())).flatten(1)
        return torch.linalg.matrix_norm(matrix, 2)

    norms = [norm(lambda x: net.stem[0](x / 0.25), (3, 8, 8)), *(norm(net.blocks[i], (4, 4, 4)) for i in (0, 2))]
    norms += [norm(net.neck[0], (4, 4, 4)), norm(net.neck[3], (4,))]
    parameters = [p for p in model.parameters() if p.dim() > 1 or p is net.blocks[0].beta]
    wanted = torch.autograd.grad(torch.stack(norms).log().sum(), parameters, allow_unused=True)
    found = torch.autograd.grad(bound.features.log(), parameters, allow_unused=True)
    compared = 0
    for got, exact in zip(found, wanted, strict=True):
        if exact is not None:
            assert F.cosine_similarity(got.flatten(), exact.flatten(), 0) > 0.99
            compared += 1
    assert compared == 6


def test_weights_are_as_they_were_and_certificates_have_no_gradient() -> None:
    model = model_of(EXACT["dense"])
    before = copy.deepcopy(model.state_dict())
    settled(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert type(lipcert.bounds.analyze(model).output.lip) is Upper


def test_an_estimate_is_no_bound() -> None:
    number = Estimated(torch.tensor(2.0))
    assert isinstance(Bound.deterministic(number, "x"), Estimate)
    assert isinstance(Upper(3) * number + 1, Estimated)
    assert (number * 0) == 0
    assert not (number * lipcert.numerics.INFINITE).finite


def test_a_norm_of_zeros_and_a_vector_of_another_shape() -> None:
    estimator = Estimator(torch.float64)
    weight = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    with estimating(estimator):
        assert lipcert.norms.dense_norm(weight) == 0
    other = torch.diag(torch.tensor([3.0, 1.0, 0.5]).double()).requires_grad_()
    with estimating(estimator):
        assert float(lipcert.norms.dense_norm(other)) == pytest.approx(3.0, rel=1e-6)


def test_without_rows_every_pair_has_the_constant_of_the_logits() -> None:
    model = model_of(EXACT["dense"])
    bound = TrainingBound(model, rows=False)
    margins = bound.margins(torch.tensor([1]), 3)[0].tolist()
    assert margins[1] == 0
    assert margins[0] == margins[2] == pytest.approx(bound.features.item())
    assert bound.certified == pytest.approx(2**0.5 * lipcert.lipschitz(model).value)


def test_an_infinite_bound_says_which_operation() -> None:
    with pytest.raises(InputError, match=r"bound is inf, .*\(div at net: it divides by a value that may come"):
        TrainingBound(model_of(lambda: Function(lambda x: 1 / x.flatten(1)[:, :3])))
    with pytest.raises(UnsupportedOperation):
        TrainingBound(model_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), Function(torch.atan))))


@pytest.mark.parametrize("optimizer", ["nadam", "muon"])
@pytest.mark.parametrize("parametrised", [orthogonal, weight_norm, spectral_norm])
def test_parametrised_layers_train_and_certify(parametrised: Callable[[nn.Module], nn.Module], optimizer: str) -> None:
    """An update changes what the weight is computed from, and no radius is above that by the exact norms."""
    net = nn.Sequential(nn.Flatten(), parametrised(nn.Linear(16, 8)), nn.ReLU(), nn.Linear(8, 3))
    model = lipcert.load(net, mean=(0.5,), std=(0.25,), input_size=(1, 4, 4))
    images, labels = torch.rand(8, 1, 4, 4), torch.randint(3, (8,))
    before = [p.detach().clone() for p in model.parameters()]
    lipcert.finetune(model, [(images, labels)], 0.1, loss="emma", epochs=1, lr=0.05, optimizer=optimizer)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    result = lipcert.certify(model, images, labels, eps=0.1, method="gloro")
    with torch.no_grad():
        first, head = net[1].weight.double(), net[3].weight.double()
        logits = model(images).double()
        steepest = 4 * torch.linalg.matrix_norm(first, 2)  # the pixels are divided by a quarter
        best = logits.gather(1, result.predicted[:, None])
        slopes = steepest * (head[result.predicted][:, None] - head).norm(dim=2)
        exact = torch.where(slopes > 0, (best - logits) / slopes, torch.inf).amin(1)
    assert (result.radius <= exact * (1 + 1e-5)).all()
    assert (result.radius >= exact * 0.99).all()


def scales(weight: Tensor, q: Tensor) -> Tensor:
    """t_i = 1 / Σ_j |W Wᵀ|_ij e^(q_j − q_i): Wᵀ diag(t) W ≤ I (Araujo et al., ICLR 2023, arXiv 2303.03169)."""
    return 1 / ((weight @ weight.T).abs() * (q - q[:, None]).exp()).sum(1)


class SllScaled(nn.Module):
    """As a parametrisation: diag(√t) W, of norm at most 1."""

    def __init__(self, rows: int):
        super().__init__()
        self.q = nn.Parameter(torch.zeros(rows))

    def forward(self, weight: Tensor) -> Tensor:
        return scales(weight, self.q).sqrt()[:, None] * weight


class SllBlock(nn.Module):
    """x − 2 Wᵀ diag(t) ReLU(W x + b), the SDP-based Lipschitz layer, of constant at most 1."""

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, dim) / dim**0.5)
        self.bias, self.q = nn.Parameter(torch.zeros(inner)), nn.Parameter(torch.zeros(inner))

    def forward(self, x: Tensor) -> Tensor:
        inner = (x @ self.weight.T + self.bias).relu() * scales(self.weight, self.q)
        return x - 2 * inner @ self.weight


def scaled_linear() -> nn.Module:
    layer = nn.Linear(16, 12)
    register_parametrization(layer, "weight", SllScaled(12))
    return layer


@pytest.mark.thinned(2)
@pytest.mark.parametrize("loss", ["emma", "adversarial"])
@pytest.mark.parametrize("first", [scaled_linear, lambda: SllBlock(16, 8)], ids=["parametrised", "block"])
def test_sdp_based_lipschitz_layers_train_and_certify(first: Callable[[], nn.Module], loss: Any) -> None:
    """Weights, biases and q are trained, and an attack finds nothing inside a radius, which lipcert would refuse."""
    layer = first()
    net = nn.Sequential(nn.Flatten(), layer, nn.ReLU(), nn.Linear(12 if isinstance(layer, nn.Linear) else 16, 3))
    model = lipcert.load(net, mean=(0.5,), std=(0.25,), input_size=(1, 4, 4))
    images, labels = torch.rand(8, 1, 4, 4), torch.randint(3, (8,))
    before = [p.detach().clone() for p in model.parameters()]
    lipcert.finetune(model, [(images, labels)], 0.1, loss=loss, epochs=2, lr=0.05)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        jacobian = torch.autograd.functional.jacobian(layer, torch.randn(16))
    assert torch.linalg.matrix_norm(jacobian, 2) <= 1 + 1e-6
    gains = [entry.log10_gain for entry in lipcert.lipschitz(model).layers if entry.path.startswith("net.1")]
    if isinstance(layer, nn.Linear):
        assert gains
        assert max(gains) <= 1e-6
    for method in ("gloro", "anchored"):
        result = lipcert.certify(model, images, labels, eps=0.05, method=method, attack=PGD(steps=20, restarts=1))
        assert (result.radius > 0).all()
