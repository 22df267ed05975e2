"""Where the anchored certificate is loose: what it charges, and what gradient ascent attains, operation by operation.

    python -m benchmarks.anchored_map --model cifar10-vit --data ../shared/data/cifar10/test.tar --images 4

At the certified radius ε of each image, toward the rival with the smallest first-order limit, two quantities of every
nonlinear operation v are compared. The *error* is the deviation of v's operands u from their linearisation at the
image, ‖u(x + δ) − u(x) − G δ‖ in units of ε. The certificate charges ρ_u less its first-order part. The *loss* is what
the remainder of v takes of the margin, −⟨∇_v m, R_v⟩ in units of ‖∇m‖ε. Both are those of the sector of perturbations
that decides the radius, the one in which least of the margin is left. Gradient ascent in that sector attains lower
bounds on both maxima. What is charged beyond them is left to gain, and more than is charged would show that a bound is
false.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipcert
from benchmarks._env import environment
from lipcert.bounds import margins
from lipcert.certifier import Anchored
from lipcert.certifier.anchored.margin import RivalMargin, curvature_norms
from lipcert.certifier.anchored.ray import sector
from lipcert.certifier.anchored.walk import NORM
from lipcert.graph import Node, run
from lipcert.inputs.data import open_images

# The forms of the rules are computed once more here, with start vectors that the certificate has not used.
_ROUND = 1000


def ascended(
    value: Callable[[Tensor], tuple[Tensor, Tensor]], like: Tensor, inside: Callable[[Tensor], Tensor], steps: int
) -> float:
    """The largest value that gradient ascent finds in a set of perturbations, from two random starts.

    Args:
        value: δ ↦ the value and its gradient.
        like: a tensor of the shape of δ.
        inside: moves a perturbation of any length into the set.
        steps: the number of steps from each start.
    """
    best = 0.0
    for seed in range(2):
        delta = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)
        for _ in range(steps):
            delta = inside(delta)
            found, gradient = value(delta)
            best = max(best, found.item())
            if not gradient.norm() > 0:
                break
            # The values grow as δ², and so the maximum is a fixed point of this step, as in power iteration.
            delta = delta.detach() / delta.norm() + gradient / gradient.norm()
    return best


class Map:
    """Charged and attained errors and losses of one image, shape (1, C, H, W).

    Args:
        method: the certificate.
        image: pixels in [0, 1].
        steps: the number of steps of each ascent.
    """

    def __init__(self, method: Anchored, image: Tensor, steps: int):
        self.network, self.steps = method.network, steps
        with torch.no_grad():
            predicted, gaps = margins(method.network.model(image))
        anchor = method(image)
        self.at = anchor.linearization
        radius = anchor.radius(predicted, gaps)
        self.eps = radius.item()
        rivals = gaps[0].argsort()[:-1]
        towards = [RivalMargin(self.at, j[None], predicted, gaps) for j in rivals]
        self.toward = min(towards, key=lambda one: (one.margin / one.slope).item())
        self.limit = (self.toward.margin / self.toward.slope).item()
        forms = {v: form for v, form in self.toward.forms(radius)[2].items() if form.error is None}
        curvature, ray = curvature_norms(self.toward, forms, _ROUND), self.toward.ray
        self.sector = None
        if ray is not None:
            self.sector = sector(ray, radius, self.toward.in_sectors(radius, curvature, forms).argmin(1))
        self.found = self.at.walk(radius, curvature, sector=self.sector)
        self.losses = {}
        for v, rho in self.found.operands.items():
            loss = self.toward.against[v](rho)
            if v in forms:
                loss = torch.minimum(loss, forms[v].answer.bound(rho, self.found.weighed[v]))
            self.losses[v] = loss.item()

    def inside(self, delta: Tensor) -> Tensor:
        """A perturbation in the direction of δ, of length ε, or as near to it as the sector allows."""
        delta = delta.detach() * (self.eps / delta.detach().norm())
        if self.sector is None:
            return delta
        p = self.sector.ray.tangents[self.network.source].reshape(delta.shape)
        along = (delta * p).sum()
        across = delta - along * p
        along = along.clamp(-self.sector.along, self.sector.along)
        length = (self.eps**2 - along**2).clamp_min(0).sqrt().clamp_max(self.sector.across.item())
        return along * p + across * (length / across.norm())

    def error(self, u: Node) -> tuple[float, float]:
        """The error of a value charged and attained, in units of ε."""
        network, at, source = self.network, self.at, self.network.source
        v, place = next((v, network.operands(v).index(u)) for v in network.rules if u in network.operands(v))
        gain, eps = torch.as_tensor(at.gain(source, u)), torch.tensor([self.eps], dtype=torch.float64)
        first = (gain * eps).item()
        if self.sector is not None and (source, u) not in at.plan.unconnected:
            first = self.sector.moved(self.sector.ray.size(u, NORM), gain, eps).item()
        charged = max(self.found.operands[v][place].item() - first, 0.0)
        if not network.replay.depends(u, source) or u is source:
            return 0.0, 0.0
        jacobian = at.finder.jacobians.operator(source, u, at.values, several=False)
        nominal = at.values[u].reshape(-1)

        def value(delta: Tensor) -> tuple[Tensor, Tensor]:
            delta = delta.requires_grad_()
            with torch.enable_grad():
                (moved,) = network.replay(source, at.values[source] + delta, [u], dict(at.values))
                left = (moved.reshape(-1) - nominal).detach() - jacobian.product(delta.detach().reshape(1, -1))[0]
                (gradient,) = torch.autograd.grad(moved.reshape(-1), delta, left)
            return left.norm(), gradient - jacobian.adjoint(left.reshape(1, -1)).reshape(delta.shape)

        return charged / self.eps, ascended(value, at.values[source], self.inside, self.steps) / self.eps

    def loss(self, v: Node) -> tuple[float, float]:
        """What the remainder of an operation takes of the margin, charged and attained, in units of ‖∇m‖ε."""
        network, at, source = self.network, self.at, self.network.source
        unit = self.toward.slope.item() * self.eps
        direction = self.toward.at_nodes[v]
        operands = [operand for operand in dict.fromkeys(v.operands) if network.replay.depends(operand, source)]

        def result(values: dict[Node, Tensor]) -> Tensor:
            known = {operand: at.values[operand][0] for operand in v.operands}
            return (run((v,), {**known, **values})[v] * direction[0]).sum()

        nominal = {operand: at.values[operand][0].detach().requires_grad_() for operand in operands}
        with torch.enable_grad():
            start = result(nominal)
            slopes = torch.autograd.grad(start, list(nominal.values()), allow_unused=True)

        def value(delta: Tensor) -> tuple[Tensor, Tensor]:
            delta = delta.requires_grad_()
            with torch.enable_grad():
                moved = network.replay(source, at.values[source] + delta, operands, dict(at.values))
                moved = [one[0] for one in moved]
                linear = sum(
                    ((one - nominal[u].detach()) * slope).sum()
                    for one, u, slope in zip(moved, operands, slopes, strict=True)
                    if slope is not None
                )
                lost = start.detach() + linear - result(dict(zip(operands, moved, strict=True)))
                (gradient,) = torch.autograd.grad(lost, delta)
            return lost.detach(), gradient

        return self.losses[v] / unit, ascended(value, at.values[source], self.inside, self.steps) / unit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--name", default="anchored_map", help="of the file in benchmarks/results")
    args = parser.parse_args()
    model = lipcert.load(args.model).double().requires_grad_(False)
    method = Anchored(model)
    network = method.network
    rows: list[dict[str, Any]] = []
    for batch in open_images(args.data, model, limit=args.images).batches(1):
        one = Map(method, batch.images.double(), args.steps)
        print(f"radius {one.eps:.4f}, limit {one.limit:.4f}", flush=True)
        known: dict[Node, tuple[float, float]] = {}
        operations = []
        for v in network.rules:
            known |= {u: one.error(u) for u in network.operands(v) if u not in known}
            errors, loss = [known[u] for u in network.operands(v)], one.loss(v)
            operations.append({"operation": f"{v.path.removeprefix('net.')} {v.name}", "errors": errors, "loss": loss})
            told = ", ".join(f"{charged:.3f} for {attained:.3f}" for charged, attained in errors)
            print(f"  {operations[-1]['operation']:44} error {told}; loss {loss[0]:.4f} for {loss[1]:.4f}", flush=True)
        rows.append({"radius": one.eps, "limit": one.limit, "operations": operations})
    ratios = [
        charged / attained
        for row in rows
        for operation in row["operations"]
        for charged, attained in operation["errors"]
        if attained > 1e-6
    ]
    summary = {
        "model": args.model if "/" not in args.model else Path(args.model).stem,
        "images": len(rows),
        "errors_charged_over_attained_median": torch.tensor(ratios).median().item(),
        "errors_charged_over_attained_largest": max(ratios, default=math.nan),
        "rows": rows,
        "environment": environment(),
    }
    print(json.dumps({key: value for key, value in summary.items() if key != "rows"}, indent=1))
    path = Path(__file__).parent / "results" / f"{args.name}.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
