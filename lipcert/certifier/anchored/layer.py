"""The last nonsmooth layer before a cut: by how much a linear functional of the cut may decrease.

After a cut c (:mod:`.prefix`) the value c(x′) lies in a ball of radius K ε around ĉ(x), and the first-order part of a
margin, −⟨g, c(x′) − ĉ(x)⟩ with its gradient g at c, is at most ‖g‖ K ε. That is far from attained if g does not lie
along the directions that the last layer before c enlarges most. Let b be an earlier cut, K_b the Lipschitz constant of
x ↦ b(x), and let c be a function of b in which a single operation v = relu(z) is not affine. With ĉ, b̂, ẑ computed at
x, δ = b(x′) − b̂(x), p and q the gradients of ⟨g, c⟩ with respect to b and v, and R the remainder of v, exactly

    −⟨g, c(x′) − ĉ⟩ = −⟨p, δ⟩ − ⟨q, R⟩,        ‖δ‖ ≤ ρ = K_b ε + e_b.

R ≥ 0, as a ReLU is convex, so only the weights w = max(0, −q) count. At an entry with operand u, for every r > 0 with
r ≥ |u| and every deviation d, since (t)₊ ≤ (t + r)²/(4r),

    w R ≤ w ((u + d + r)²/(4r) − (u)₊ − 1[u > 0] d) = C + ℓ d + s² d²,
    C = w (r − |u|)²/(4r),    ℓ = ±w (r − |u|)/(2r),    s² = w/(4r),

with the minus for u > 0. We take r = max(|u|, w/(4κ)), so that s² ≤ κ: this holds for all ε. With G the Jacobian of z
with respect to b, and p′ = p − Gᵀℓ,

    −⟨g, c(x′) − ĉ⟩ ≤ −⟨p′, δ⟩ + ‖s ∘ Gδ‖² + Σ C.

Let n = −p′/‖p′‖ and δ = σ n + δ′ with δ′ orthogonal to n, so that −⟨p′, δ⟩ = σ ‖p′‖ ≤ |σ| ‖p′‖. For ρ cos β ≤ |σ| ≤
ρ cos α, where ‖δ′‖ ≤ ρ sin β,

    ‖s ∘ Gδ‖² ≤ σ² ‖s ∘ Gn‖² + 2 |σ| ‖δ′‖ ‖Gᵀ(s² ∘ Gn)‖ + κ ‖G‖² ‖δ′‖².

The largest of the bounds in the sectors of a partition of [0, π/2] is one in the ball. Since the layer makes most of
its error in directions that are nearly orthogonal to p′, where the first term is small, the bound is little more than
‖p′‖ ρ. No norm is computed for an image, and nothing is random.

**Rounding.** Values, gradients and products have the errors of :mod:`lipcert.roundoff`; its "Margins" is the identity
above with the terms Σ‖p_w‖‖e_w‖ + Σ_o ‖f_o‖‖Δ_o‖. All of them are bounded at ρ = 1 and multiplied by max(1, ρ). Another
evaluation of c, such as that with which the network after c starts, has a distance of at most 2e from this ĉ, with a
bound e on the rounding error of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import Tag, Value, canonical_forms, gamma, global_values, lengths, per_image, tagged
from lipcert.certifier.anchored.jacobians import perturbed, tangents
from lipcert.certifier.anchored.network import Network, an_image
from lipcert.errors import UnsupportedOperation
from lipcert.graph import Graph, Node, evaluate, examples, segment
from lipcert.model import Model
from lipcert.norms import dot_error
from lipcert.numerics import (
    INFLATE,
    OWN_ROUNDING,
    ROUNDED_ANGLE,
    ROUNDED_SUM,
    SAFETY,
    at_most,
    l2_norm,
    over,
    sum_squares,
    unit_vectors,
)
from lipcert.roundoff import Errors, Evaluated

# κ ‖G‖² ρ² is half of this share of the margin, at the radius ρ at which ‖p‖ ρ is the margin.
_CURVED = 0.8
_SECTORS = 80
# Bounds are computed for margins below this multiple of ‖g‖ times the radius, for as many images at once.
_NEAR, _TOGETHER = 2.0, 8
# What is computed for each image.
_TERMS = ("scale", "offset", "slope", "ahead", "pulled", "apart", "noise", "constant", "lost")
# Shorter gradients have no direction in float64.
_NO_SLOPE = 1e-100


def constant_between(network: Network, node: Node) -> float:
    """A Lipschitz constant of the perturbed value of a network ↦ ``node``; smoothness does not matter for it."""
    graph = network.graph
    with torch.no_grad():
        nominal = [evaluate(graph.nodes, {graph.input: image}) for image in examples(an_image(network.model))]
    forms = canonical_forms(
        segment(graph, network.source, node), "lipschitz", [values[network.source] for values in nominal]
    )
    value: Value = global_values(forms, source=Value(forms.input.shape, 1))[forms.output]
    return float(value.lip)


def _norm_of(network: Network, z: Node) -> float:
    """A bound on ‖G‖ for z.

    A difference of two pieces of a value u that have no entry in common, as before a MaxMin, moves by at most √2 times
    as much as u: ‖a − b‖² ≤ 2‖a‖² + 2‖b‖², and the squares of the norms of the pieces add up to at most that of u.
    """
    bound = constant_between(network, z)
    plain = tagged(z, Tag.SUBTRACTS) and len(z.args) == len(z.operands) == 2 and not z.kwargs  # alpha is a keyword
    if not plain or any(not tagged(piece, Tag.PART) or piece.shape != z.shape for piece in z.operands):
        return bound
    split, other = (piece.operands[0] for piece in z.operands)
    if split is not other or not tagged(split, Tag.SPLITS):
        return bound
    return min(bound, math.sqrt(2) * INFLATE * constant_between(network, split.operands[0]))


def product_error(network: Network, operations: Errors, start: Node, node: Node) -> float:
    """A bound on the errors of products of G(start → node), for an affine path, with unit vectors."""
    reach, lost = {start: 1.0}, {start: 0.0}  # bounds on computed products, and on their errors
    for u in filter(network.chains.links.__contains__, network.graph.between(start, [node])):
        terms = [
            (operations.gains[link].item(), operations.off[link].item(), link.operand)
            for link in network.chains.links[u]
            if link.operand in reach
        ]
        reach[u] = sum((gain + kappa) * reach[o] for gain, kappa, o in terms)
        lost[u] = sum((gain + kappa) * lost[o] + kappa * reach[o] for gain, kappa, o in terms)
    return lost[node]


def moved_within(network: Network, local: Errors, radius: Tensor) -> tuple[dict[Node, Tensor], dict[Node, Tensor]]:
    """Bounds on the deviations of values within a radius, and on the rounding errors of the values there.

    For networks in which every nonlinear operation is a ReLU, whose slopes are at most 1; all of shape (N,). ``local``
    has the bounds for single operations at the nominal values.
    """
    moved, noise = {network.source: radius}, {network.source: torch.zeros_like(radius)}
    for node, before in network.chains.links.items():
        gains = [(local.gains[link].clamp_min(float(node in network.rules)), link) for link in before]
        error = local.errors[node]
        moved[node] = sum((gain * moved[link.operand] for gain, link in gains), error)
        carried = sum((gain * noise[link.operand] for gain, link in gains), torch.zeros_like(radius))
        for link in before:  # off the image, operands and results may be larger
            error = error + 2 * local.off[link] * (moved[link.operand] + noise[link.operand])
        noise[node] = (carried + error + gamma(0) * (moved[node] + carried)) * (1 + SAFETY)
    return moved, noise


class Layer:
    """The layer between two cuts b and c, as far as it does not depend on images."""

    def __init__(
        self,
        model: Model,
        graph: Graph,
        start: Node,
        scale: float,
        radius: float,
    ):
        network = self.network = Network(model, at=start, graph=graph)
        self.scale, self.radius = scale, radius
        links = network.chains.links
        unfit = [v for v in network.rules if not tagged(v, Tag.RECTIFIES)] or list(network.rules)[1:]
        unfit += [node for node in links if not all(map(network.local.bounded, links[node]))]
        if unfit:
            raise UnsupportedOperation([(node.name, node.path) for node in unfit], "remainder")
        (self.relu,) = network.rules
        operations = network.local(network.values(an_image(model)[:, None]))
        self.operand = self.relu.operands[0]
        self.norm = _norm_of(network, self.operand)
        self.error = product_error(network, operations, start, self.operand)

    def at(self, before: Evaluated) -> LayerAt:
        """The layer at N images, from the operations up to c."""
        network = self.network
        values = {node: before.values[node] for node in network.kept if node.single}
        errors = [error_at(before, node) for node in (network.source, network.graph.output)]
        return LayerAt(self, values, *errors)

    def terms(self, at: LayerAt, g: Tensor, margin: Tensor) -> Tensor:
        """The numbers ``_TERMS``, shape (N, terms); arguments as for :meth:`LayerAt.decrease`."""
        network, relu, z = self.network, self.relu, self.operand
        start, end = network.source, network.graph.output
        values, error, at_end = at.values, at.error, at.at_end
        nodes = list(network.chains.links)
        reached, added = perturbed(values, [start, *nodes], network.graph.between(start, [end]), [end, z])
        pulled = torch.autograd.grad(reached[end], list(added.values()), g.view_as(reached[end]), retain_graph=True)
        at_nodes = {node: slope.detach() for node, slope in zip(added, pulled, strict=True)}

        def adjoint(rows: Tensor) -> Tensor:
            (columns,) = torch.autograd.grad(reached[z], added[start], rows.view_as(reached[z]), retain_graph=True)
            return per_image(columns.detach())

        # Another evaluation of z may lie on the other side of a breakpoint: u is the one whose slopes p has.
        p, q, u = (per_image(part) for part in (at_nodes.pop(start), at_nodes[relu], reached[z].detach()))
        weight, size = (-q).clamp_min(0), u.abs()
        steepest = over(_CURVED * sum_squares(p, 1), 2 * self.norm**2 * margin)
        r = torch.maximum(size, over(weight, 4 * steepest[:, None]).clamp_max(1 / _NO_SLOPE))
        r = torch.where(weight > 0, r, 1.0)
        squares, beyond = weight / (4 * r), (r - size).clamp_min(0)
        constant = (squares * beyond.square()).sum(1)
        linear = 2 * squares * beyond * torch.where(u > 0, -1.0, 1.0)
        p = p - adjoint(linear)
        slope = l2_norm(p, 1)
        moving = tangents(network, values, [z], -unit_vectors(p))
        if z not in moving:
            return g.new_full((len(g), len(_TERMS)), math.inf)
        ahead = per_image(moving[z])
        largest = squares.amax(1)
        lost_ahead = self.error * INFLATE
        along = l2_norm(squares.sqrt() * ahead, 1) + largest.sqrt() * lost_ahead
        sized = l2_norm(squares * ahead, 1)
        across = l2_norm(adjoint(squares * ahead), 1) + self.error * sized + largest * self.norm * lost_ahead
        across = across + dot_error(1) * self.norm * sized
        # What is lost by rounding within a radius of 1.
        local = network.local(values)
        moved, noise = moved_within(network, local, torch.ones_like(margin))
        lengths_at = {node: lengths(part) for node, part in at_nodes.items()}
        lost = sum((lengths_at[node] * local.errors[node] for node in nodes), torch.zeros_like(margin))
        for node in nodes:
            for link in network.chains.links[node]:
                lost = lost + local.off[link] * lengths_at[node] * moved[link.operand]
        tilt = l2_norm(linear, 1)
        lost = lost + tilt * (self.error + noise[z] + ROUNDED_SUM * moved[z])
        lost = lost + ROUNDED_SUM * (slope + 2 * tilt * self.norm) + 2 * at_end * l2_norm(g, 1)
        slope = torch.where(slope > _NO_SLOPE, slope, math.inf)
        offset = self.scale + torch.zeros_like(margin), error
        apart, noise_along = largest.sqrt() * self.norm, largest.sqrt() * noise[z]
        return torch.stack((*offset, slope, along, across, apart, noise_along, constant, lost), 1)


def error_at(before: Evaluated, node: Node) -> Tensor:
    """Bounds on the rounding error of a value, shape (N,)."""
    return at_most(before.errors[node] * OWN_ROUNDING)


class LayerAt(NamedTuple):
    """The layer at N images: nominal values, and bounds e_b and e on the rounding errors of b and c."""

    layer: Layer
    values: Mapping[Node, Tensor]
    error: Tensor
    at_end: Tensor

    def only(self, index: Tensor) -> LayerAt:
        """The layer at the images with the given indices."""
        values = {node: value[index] for node, value in self.values.items()}
        return LayerAt(self.layer, values, self.error[index], self.at_end[index])

    def decrease(self, g: Tensor, slope: Tensor, margin: Tensor) -> Decrease:
        """Bounds on −⟨g, c(x′) − ĉ(x)⟩; ∞ for images whose margin is far above ‖g‖ times the radius that is wanted."""
        terms = g.new_full((len(g), len(_TERMS)), math.inf)
        some = ((margin > 0) & (margin < _NEAR * slope * self.layer.radius)).nonzero()[:, 0]
        for part in some.split(_TOGETHER) if len(some) else ():
            terms[part] = self.layer.terms(self.only(part), g[part], margin[part])
        return Decrease(terms)


class Decrease:
    """Upper bounds on −⟨g, c(x′) − ĉ(x)⟩ for N images and all x′ with K ‖x′ − x‖ + e at most a radius."""

    def __init__(self, terms: Tensor):
        self.terms = terms

    def only(self, index: Tensor) -> Decrease:
        """The bounds for the images with the given indices."""
        return Decrease(self.terms[index])

    def __call__(self, radius: Tensor) -> Tensor:
        """The bounds for K ‖x′ − x‖ + e up to this radius, shape (N,)."""
        scale, offset, slope, ahead, pulled, apart, noise, constant, lost = self.terms.T[:, :, None]
        angles = torch.linspace(0, math.pi / 2, _SECTORS + 1, dtype=torch.float64, device=radius.device)
        rho = (scale * radius[:, None] + offset) * INFLATE
        along, across = rho * (angles[:-1].cos() + ROUNDED_ANGLE), rho * (angles[1:].sin() + ROUNDED_ANGLE)
        curved = (along * ahead).square() + 2 * along * across * pulled + (across * apart).square()
        more = rho.clamp_min(1)
        curved = (curved.sqrt() + more * noise).square() + constant + more * lost
        return at_most((slope * along + curved).amax(1)) * (1 + SAFETY)
