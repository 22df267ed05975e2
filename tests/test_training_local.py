"""Local-Lip training: boxes, worst logits and norms between what moves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lipcert
from lipcert.errors import InputError
from lipcert.surgery import ClippedMaxMin, ClippedReLU, MaxMin
from lipcert.training import LocalBound, local_loss
from lipcert.training._local import reach


def network(activation: str) -> nn.Module:
    acts = {
        "relu": nn.ReLU,
        "clipped": lambda: ClippedReLU(0.3),
        "maxmin": MaxMin,
        "both": lambda: ClippedMaxMin(0.3, -0.3),
    }
    make = acts[activation]
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 1, 1), make(), nn.Conv2d(4, 6, 2, 2), make(), nn.Flatten(), nn.Linear(24, 8), make(),
        nn.Linear(8, 3),
    )  # fmt: skip


def lengths(images: Tensor) -> Tensor:
    return images.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)


def model_of(net: nn.Module, size: tuple[int, int, int] = (1, 4, 4)) -> lipcert.Model:
    return lipcert.load(net, mean=(0.5,) * size[0], std=(0.5,) * size[0], input_size=size).double()


def test_the_papers_toy_example() -> None:
    """Appendix A.1: the local constant is 1 where the global one is 9√3. Pixels are half of x, plus ½."""
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(3, 3, False), ClippedReLU(1.0), nn.Linear(3, 3, False), ClippedReLU(1.0),
        nn.Linear(3, 2, False),
    )  # fmt: skip
    with torch.no_grad():
        for layer in (net[1], net[3]):
            layer.weight.copy_(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
        net[5].weight.copy_(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    model = model_of(net, (3, 1, 1))
    image = torch.tensor([1.0, 0.0, 0.5]).double().view(1, 3, 1, 1)
    eps = 0.05
    logits, worst, _ = LocalBound(model).worst(image, torch.tensor([1]), eps)
    rise = (worst - logits)[0, 0].item()
    assert rise == pytest.approx(2 * eps, rel=1e-6)  # 2 is the constant of the normalisation
    assert lipcert.lipschitz(model).value == pytest.approx(2 * 9 * 3**0.5, rel=1e-4)
    constant, bound = LocalBound(model).measured(image, eps)
    assert constant == pytest.approx(4 / 6)  # the first two units of each layer
    assert bound == pytest.approx(2 * 3**0.5, rel=1e-6)


@pytest.mark.parametrize("activation", ["relu", "clipped", "maxmin", "both"])
@pytest.mark.parametrize("eps", [0.02, 0.3])
def test_no_attack_passes_the_worst_logits(activation: str, eps: float) -> None:
    """Projected gradient ascent on every f_j − f_y, from several starts, with power iteration at its end."""
    torch.manual_seed(1)
    model = model_of(network(activation))
    images, labels = torch.rand(6, 1, 4, 4).double(), torch.randint(3, (6,))
    bound = LocalBound(model)
    for _ in range(20):
        _, worst, _ = bound.worst(images, labels, eps)
    limit = worst - worst.gather(1, labels[:, None])
    best = torch.full_like(limit, -torch.inf)
    for target in range(3):
        for _ in range(3):
            delta = torch.randn_like(images)
            delta = delta * (eps / lengths(delta))
            for _ in range(30):
                moved = ((images + delta).clamp(0, 1)).requires_grad_()
                gaps = model(moved)
                gap = gaps[:, target] - gaps.gather(1, labels[:, None])[:, 0]
                best[:, target] = torch.maximum(best[:, target], gap.detach())
                (slope,) = torch.autograd.grad(gap.sum(), moved)
                delta = (moved.detach() - images) + 0.3 * eps * slope / lengths(slope)
                delta = delta * (eps / lengths(delta)).clamp(max=1)
    others = ~F.one_hot(labels, 3).bool()
    assert (best <= limit * (1 + 1e-6) + 1e-9)[others].all()
    with torch.no_grad():
        logits = model(images)
    gaps = logits - logits.gather(1, labels[:, None])
    assert (limit - gaps)[others].min() > 0


def defined(model: lipcert.Model, image: Tensor, label: Tensor, eps: float) -> tuple[Tensor, int]:
    """Worst logits by equations 3, 6, 9 and 21 to 24, every layer as a matrix, and how many boxes are tighter."""
    low, high = ((end - 0.5) / 0.5 for end in ((image - eps).clamp(0), (image + eps).clamp(max=1)))
    at, rho, moves, tighter = (image - 0.5) / 0.5, torch.tensor(eps / 0.5).double(), torch.ones(image.numel()), 0
    layers = list(model.net)
    for layer, follower in zip(layers[:-1], layers[1:], strict=True):
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            zero = layer(torch.zeros_like(at))
            basis = torch.eye(at.numel()).double().view(-1, *at.shape[1:])
            matrix = (layer(basis) - zero).flatten(1).T
            middle = layer((low + high) / 2)
            spread = (matrix.abs() @ ((high - low) / 2).flatten()).view_as(zero)
            at, ball = layer(at), (matrix.norm(dim=1) * rho).view_as(zero)
            tighter += int(((middle + spread < at + ball) | (middle - spread > at - ball)).sum())
            low, high = torch.maximum(middle - spread, at - ball), torch.minimum(middle + spread, at + ball)
            out = ((high > 0) & (low < getattr(follower, "threshold", torch.inf))).flatten().double()
            out = torch.ones_like(out) if isinstance(follower, MaxMin) else out
            rho = rho * torch.linalg.matrix_norm(out[:, None] * matrix * moves, 2)
            moves = out
        else:
            low, high, at = layer(low), layer(high), layer(at)
    head = layers[-1]
    rise = reach(head.weight - head.weight[label], (at - low), (high - at), rho[None])
    return head(at) + rise, tighter


@pytest.mark.parametrize("activation", ["relu", "clipped", "maxmin"])
@pytest.mark.parametrize("eps", [0.02, 0.1])
def test_worst_logits_and_gradients_are_those_of_the_equations(activation: str, eps: float) -> None:
    torch.manual_seed(1)
    model = model_of(network(activation))
    image, label = torch.rand(1, 1, 4, 4).double(), torch.tensor([1])
    image[0, 0, :2] = torch.tensor([0.0, 1.0, 0.0, 1.0])  # perturbations of these pixels have one sign
    bound = LocalBound(model)
    for _ in range(100):
        _, worst, _ = bound.worst(image, label, eps)
    expected, tighter = defined(model, image, label, eps)
    assert tighter
    assert torch.allclose(worst, expected, rtol=1e-5)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((worst - worst[0, 1]).sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad((expected - expected[0, 1]).sum(), parameters, allow_unused=True)
    for name, got, exact in zip(names, found, wanted, strict=True):
        if exact is not None and exact.norm() > 1e-9:
            assert got is not None, name
            assert F.cosine_similarity(got.flatten(), exact.flatten(), 0) > 0.99, name


def test_constant_units_move_nothing_and_vectors_outlast_them() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
    model = model_of(net)
    images, labels = torch.rand(5, 1, 4, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    bound = LocalBound(model)
    with torch.no_grad():
        bias = net[1].bias.clone()
        net[1].bias.fill_(-100)
    logits, worst, _ = bound.worst(images, labels, 0.1)
    assert torch.allclose(worst, logits, rtol=0, atol=1e-9)
    assert torch.isfinite(torch.autograd.grad(worst.sum(), net[1].weight)[0]).all()
    with torch.no_grad():
        net[1].bias.copy_(bias)
    logits, worst, _ = bound.worst(images, labels, 0.1)
    assert (worst - logits)[~F.one_hot(labels, 3).bool()].min() > 1e-3


def test_padding_by_name_is_that_by_number() -> None:
    def worst(padding: str | int) -> Tensor:
        torch.manual_seed(0)
        size = 32 if padding in ("same", 1) else 8
        net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=padding), nn.ReLU(), nn.Flatten(), nn.Linear(size, 3))
        model = model_of(net)
        _, logits, _ = LocalBound(model).worst(torch.rand(2, 1, 4, 4).double(), torch.tensor([0, 1]), 0.1)
        logits.sum().backward()
        return torch.cat([logits.flatten(), net[0].weight.grad.flatten()])

    assert torch.allclose(worst("same"), worst(1))
    assert torch.allclose(worst("valid"), worst(0))


def test_reach_is_the_maximum_over_the_box_and_the_ball() -> None:
    """Against the best of many feasible points, found by projected ascent, and with the gradient of its value."""
    rows, down, up = torch.randn(20, 5).double(), torch.rand(20, 5).double(), torch.rand(20, 5).double()
    rho = torch.rand(20).double() * 1.5
    found = reach(rows, down, up, rho)
    best = torch.full((20,), -torch.inf).double()
    for t in torch.logspace(-4, 4, 4001).double():
        delta = torch.maximum(torch.minimum(rows * t, up), -down)
        inside = delta.norm(dim=1) <= rho
        best = torch.where(inside, torch.maximum(best, (rows * delta).sum(1)), best)
    assert (found >= best - 1e-9).all()
    assert (found <= best + 0.02).all()
    torch.manual_seed(1)
    for _ in range(2000):  # nothing feasible is above it
        delta = torch.maximum(torch.minimum(torch.randn(20, 5).double(), up), -down)
        delta = delta * (rho / delta.norm(dim=1)).clamp(max=1)[:, None]
        assert ((rows * delta).sum(1) <= found + 1e-9).all()
    inputs = tuple(part.requires_grad_() for part in (rows, down, up, rho))
    assert torch.autograd.gradcheck(lambda *parts: reach(*parts), inputs, eps=1e-7, atol=1e-4)


def test_thresholds_and_weights_have_gradients() -> None:
    model = model_of(network("clipped"))
    images, labels = torch.rand(8, 1, 4, 4).double(), torch.randint(3, (8,))
    loss, _ = local_loss(LocalBound(model), images, labels, 0.2, 1.0, sparsity=0.1)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_the_mixture_and_bottom_are_as_in_the_paper() -> None:
    model = model_of(network("maxmin"))
    images, labels = torch.rand(4, 1, 4, 4).double(), torch.tensor([0, 1, 2, 0])
    logits, worst, _ = LocalBound(model).worst(images, labels, 0.1)
    plain, robust = F.cross_entropy(logits, labels), F.cross_entropy(worst, labels)
    loss, same = local_loss(LocalBound(model), images, labels, 0.1, 0.3)
    assert torch.allclose(same, model(images))
    assert loss.item() == pytest.approx((0.7 * plain + 0.3 * robust).item())
    pairs = zip(worst.tolist(), labels.tolist(), strict=True)
    rivals = torch.tensor([max(row[j] for j in range(3) if j != y) for row, y in pairs]).double()
    bottom = F.cross_entropy(torch.cat([logits, rivals[:, None]], 1), labels)
    loss, _ = local_loss(LocalBound(model), images, labels, 0.1, 1.0, bottom=True)
    assert loss.item() == pytest.approx(bottom.item())


@pytest.mark.parametrize("loss", ["local-b", "local-g"])
def test_training_for_local_certificates_certifies_more(loss: str) -> None:
    data = load_digits()
    images = torch.from_numpy(data.images / 16).float()[:256, None]
    labels = torch.from_numpy(data.target)[:256].long()
    loader: list[tuple[Tensor, Tensor]] = list(zip(images.split(32), labels.split(32), strict=True)) * 3

    def trained(loss: str, **ways) -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), ClippedReLU(1.0), nn.Linear(32, 10))
        model = lipcert.load(net, mean=(0.5,), std=(0.5,), input_size=(1, 8, 8))
        lipcert.finetune(model, loader, eps=0.5, loss=loss, epochs=4, lr=1e-2, **ways)
        result = lipcert.certify(model, images[:48], labels[:48], eps=0.5, method="local")
        return result.certified_accuracy

    assert trained(loss, sparsity=0.001) > trained("ce") + 0.1


def test_networks_and_settings_that_do_not_fit_are_refused() -> None:
    gelu = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.GELU(), nn.Linear(4, 3))
    with pytest.raises(InputError, match="gelu at net.2; use the loss emma"):
        LocalBound(model_of(gelu))
    headless = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU())
    with pytest.raises(InputError, match="linear layer at the end"):
        LocalBound(model_of(headless))
    residual = lipcert.load("liresnet_l6w64", pretrained=False, img_size=8, width=4, depth=1, neck=4, num_features=8)
    with pytest.raises(InputError, match="the network has add"):
        LocalBound(residual)
    with pytest.raises(InputError, match="leave amp"):
        lipcert.finetune(residual, [], loss="local-b", amp="bfloat16")


def test_power_iteration_takes_the_steps_and_the_start_that_are_asked() -> None:
    """More steps from random vectors come closer to the norm; saved vectors get there over several calls of two."""
    model = model_of(network("clipped"))
    images, labels = torch.rand(4, 1, 4, 4).double(), torch.tensor([0, 1, 2, 0])

    def rise(bound: LocalBound) -> float:
        logits, worst, _ = bound.worst(images, labels, 0.05, None)
        return float((worst - logits).detach().sum())

    converged = rise(LocalBound(model, 200))
    few, many = (rise(LocalBound(model, steps, random=True)) for steps in (1, 20))
    assert few < many <= converged * (1 + 1e-9)
    saved, random = LocalBound(model, 1), LocalBound(model, 1, random=True)
    for _ in range(20):
        last, drawn = rise(saved), rise(random)
    assert drawn < last <= converged * (1 + 1e-9)


def test_upper_thresholds_weigh_as_asked() -> None:
    """Equation 26: the loss is linear in λ_θ, and None leaves it out."""
    model = model_of(network("clipped"))
    images, labels = torch.rand(4, 1, 4, 4).double(), torch.tensor([0, 1, 2, 0])
    none, tenth, whole = (float(LocalBound(model).worst(images, labels, 0.05, w)[2]) for w in (0.0, 0.1, 1.0))
    assert none < tenth < whole
    assert tenth - none == pytest.approx((whole - none) / 10)
    assert float(LocalBound(model).worst(images, labels, 0.05, None)[2]) == 0
