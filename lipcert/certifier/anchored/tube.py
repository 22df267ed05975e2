"""The certificate behind a cut where every nonlinear operation is a ReLU: perturbations in tubes around a ray.

Let c be the perturbed value, ‖δ‖ ≤ r, and let v be the ReLUs behind it, with operands z_v. Each z_v is an affine map of
a cut a_v, with Jacobian G_v, and c ↦ a_v has a Lipschitz constant L_v that does not see kinks. As for
:class:`.margin.RivalMargin`, the margin falls by at most

    −⟨g, δ⟩ + Σ_v (‖M_v δz_v‖² + C_v),

where g is the gradient of the margin without the linear terms of the contracted forms, M_v and C_v are the forms, and
δz_v is the deviation of z_v. This is exact but for the forms, because the network is piecewise linear.

Let p = −g/‖g‖ and δ = s p + δ' with δ' orthogonal to p. The ball is covered by s ≤ 0 and by the sectors
r cos β ≤ s ≤ r cos α, ‖δ'‖ ≤ r sin β, for 0 ≤ α ≤ β ≤ π/2. In a sector −⟨g, δ⟩ ≤ ‖g‖ r cos α. Let c_i = c + s_i p be
a point of the ray, at which the network is evaluated, and d_v the deviation of z_v there. Because
‖δ − s_i p‖ ≤ t = (max (s − s_i)² + r² sin² β)^½, the value of a_v lies within L_v t of its value at c_i. So
δz_v = d_v + G_v x with ‖x‖ ≤ L_v t, and

    ‖M_v δz_v‖² ≤ ‖M_v d_v‖² + 2 ‖G_vᵀ M_v² d_v‖ L_v t + ‖M_v G_v‖² (L_v t)².

For s ≤ 0, −⟨g, δ⟩ ≤ 0, and the same holds with s_i = 0 and t = r. Errors of early layers are not carried through later
ones: neither remainders nor Jacobians of several layers are multiplied. Along the ray, where the margin falls most, the
deviations are exact, and off it the margin falls less.

**Rounding.** The forms hold at the computed values, with errors ν_v of z_v (:mod:`.rounding`, "Values"); operands
nearer to their kinks than that have no certificate. "Margins" there gives the loss Σ‖p_w‖‖e_w‖ + Σ_o ‖f_o‖‖Δ_o‖ of
computed gradients. Here ‖Δ_o‖ and ν are bounded by products of the norms A of single operations, which for a ReLU are
at least 1, so they hold across kinks. d_v has twice the error ν_v, bounded for values as large as those at c_i.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.bounds import Contracted, lengths, per_image
from lipcert.certifier._search import search
from lipcert.certifier.anchored.gradients import margin_gradients, tangents
from lipcert.certifier.anchored.jacobians import Jacobians, written_error
from lipcert.certifier.anchored.layer import constant_between, moved_within, product_error
from lipcert.certifier.anchored.matrices import JacobianMatrix
from lipcert.certifier.anchored.network import Network, an_image
from lipcert.certifier.anchored.ray import ROUNDED
from lipcert.certifier.anchored.written import Written
from lipcert.errors import UnsupportedOperation
from lipcert.graph import Graph, Node, cuts
from lipcert.model import Model
from lipcert.norms import dot_error
from lipcert.numerics import INFLATE, SAFETY, UNIT

# The number of sectors.
_SECTORS = 80
# Forms are chosen for the first-order limit, and again for radii up to this multiple of what they give.
_ROUNDS, _FURTHER = 2, 1.1
# More than the rounding error of a sum of two vectors, relative to both.
_ADDED = 1e-13
# The largest number of entries of a Jacobian, those that are 0 included.
_ENTRIES = 2**26
# Shorter gradients have no direction in float64.
_NO_SLOPE = 1e-100


@dataclass(frozen=True)
class Layer:
    """A ReLU v behind the perturbed value c.

    Attributes:
        start: a_v.
        lipschitz: L_v.
        factor: a factor of G_v (:mod:`.matrices`).
        error: a bound on the distance of the computed G_v from G_v.
    """

    start: Node
    lipschitz: float
    factor: JacobianMatrix
    error: float


class Tubes:
    """The network behind a cut c, as far as it does not depend on images."""

    def __init__(self, model: Model, graph: Graph, cut: Node):
        network = self.network = Network(model, at=cut, graph=graph)
        chains = network.chains
        unfit = [v for v in network.rules if v.op != "relu"]
        unfit += [node for node, links in chains.links.items() if not all(map(network.local.bounded, links))]
        if unfit:
            raise _refusal(unfit)
        jacobians = Jacobians(network, tolerance=0.0, deterministic=True, seed=0)
        values = network.values(an_image(model)[:, None])
        written = Written(jacobians, values, ())
        operations = network.local(values)
        marks = [cut, *(node for node in cuts(network.graph) if network.replay.depends(node, cut) and node is not cut)]
        self.layers: dict[Node, Layer] = {}
        for v in network.rules:
            z = v.operands[0]
            affine = (a for a in marks if network.replay.depends(z, a) and network.affine_path(a, z))
            start = next(affine, None)
            large = start is None or start.entries * z.entries > _ENTRIES
            if start is None or large or not jacobians.writes(start, z):
                raise _refusal([v])
            constant = 1.0 if start is cut else constant_between(network, start)
            lost = product_error(network, operations, start, z)
            error = 2 * written_error(start.entries, z.entries) * lost * (1 + SAFETY)
            self.layers[v] = Layer(start, constant, written.factor(start, z), error)

    @property
    def work(self) -> float:
        """An estimate of the floating-point operations for an image: products with Jacobians for the runner-up."""
        entries = sum(layer.start.entries * v.operands[0].entries for v, layer in self.layers.items())
        return 2.0 * _ROUNDS * _SECTORS * entries

    def radius(self, image: Tensor, predicted: Tensor, margins: Tensor, enough: float | None) -> float:
        """A radius around c(image), rounded down, within which the prediction is constant."""
        best = math.inf if enough is None else enough
        for toward in self._rivals(image, predicted, margins):
            if enough is not None and not toward.limit > enough:
                return 0.0
            best = toward.radius(best)
            if best == 0 or (enough is not None and best < enough):
                return 0.0
        return best * (1 - SAFETY) if best < math.inf else 0.0

    def limit(self, image: Tensor, predicted: Tensor, margins: Tensor) -> float:
        """The first-order limit min_j m_j/‖∇_c m_j‖ of radii around c(image), an estimate; as for :meth:`radius`."""
        return min((toward.limit for toward in self._rivals(image, predicted, margins)), default=math.inf)

    def _rivals(self, image: Tensor, predicted: Tensor, margins: Tensor) -> Iterator[Tube]:
        """The margins toward all classes j, the smallest first."""
        network = self.network
        values = network.values(image[:, None].to(network.model.device, network.model.dtype))
        logits = values[network.graph.output].reshape(1, -1)
        (least,) = torch.minimum(margins.to(logits), logits.gather(1, predicted[:, None]) - logits)
        for rival in least.argsort():
            if rival != predicted:
                yield Tube(self, values, rival[None], predicted, least[rival].item())


def _refusal(unfit: list[Node]) -> UnsupportedOperation:
    return UnsupportedOperation([(node.name, node.path) for node in unfit], "remainder")


class Tube:
    """The margin toward one rival class at one image.

    Attributes:
        limit: the first-order limit m/‖∇m‖, an estimate.
    """

    def __init__(self, tubes: Tubes, values: Mapping[Node, Tensor], rival: Tensor, predicted: Tensor, margin: float):
        self.tubes, self.network, self.values = tubes, tubes.network, values
        self.classes, self.margin = (rival, predicted), margin
        self.gradients = self._gradients({})
        self.limit = margin / max(self.gradients[0].norm().item(), 1e-140)

    def radius(self, most: float) -> float:
        """The largest r up to ``most`` and to the first-order limit with a positive bound."""
        if not 0 < self.limit < math.inf:
            return 0.0
        radius, upto = 0.0, min(self.limit, most)
        for _ in range(_ROUNDS):
            self._prepare(upto)
            if self.bound(upto) > 0:
                return upto
            guess = torch.tensor([0.9 * upto], dtype=torch.float64)
            radius = max(radius, search(lambda eps: torch.tensor([self.bound(eps.item())]).double(), guess).item())
            upto = min(upto, _FURTHER * radius)
        return radius

    def _gradients(self, linear: Mapping[Node, Tensor]) -> tuple[Tensor, dict[Node, Tensor]]:
        return margin_gradients(self.network, self.values, list(self.network.chains.links), *self.classes, linear)

    @torch.no_grad()
    def _prepare(self, upto: float) -> None:
        """Chooses the forms, which hold up to the radius ``upto``, and evaluates the network along the ray."""
        network, values = self.network, self.values
        source, local, (slope, at_nodes) = network.source, network.local(values), self.gradients
        radius = values[source].new_tensor([upto])
        moved, noise = ({u: x.item() for u, x in part.items()} for part in moved_within(network, local, radius))
        operands = [v.operands[0] for v in self.tubes.layers]
        ahead = tangents(network, values, operands, slope / slope.norm().clamp_min(1e-140))
        certain, linear = True, dict[Node, Tensor]()
        forms: dict[Node, tuple[Contracted, Tensor]] = {}
        # A linear term changes the gradients at earlier operations.
        for v, layer in reversed(self.tubes.layers.items()):
            z, rule = v.operands[0], network.remainder(v, values)
            rows = (layer.factor.row_norms() + layer.error) * (layer.lipschitz * upto * INFLATE) + noise[z]
            answer = rule.contracted(at_nodes[v], [rows.new_tensor([moved[z]]), rows], -upto * ahead[z])
            assert answer is not None
            assert answer.linear is not None
            certain &= not rule.uncertain(rows.new_tensor([noise[z]]))
            forms[v] = answer, answer.bound([], [rows.new_zeros(1)])
            linear[z] = linear[z] + answer.linear if z in linear else answer.linear
            at_source, at_nodes = self._gradients(linear)
        size = {node: lengths(part).item() for node, part in at_nodes.items()}
        lost = [size[node] * local.errors[node].item() for node in size]
        lost += [
            local.off[link].item() * size[node] * moved[link.operand]
            for node in size
            for link in network.chains.links[node]
        ]
        lost += [_ADDED * (size.get(z, 0.0) + lengths(b).item()) * moved[z] for z, b in linear.items()]
        self.upto, self.slope = upto, at_source.norm().item() * (1 + SAFETY)
        certain &= self.slope > _NO_SLOPE
        self.reduced = self.margin - sum(lost) * (1 + SAFETY) if certain else -math.inf
        angles = torch.linspace(0, math.pi / 2, _SECTORS + 1, dtype=torch.float64)
        self.most, self.least = angles[:-1].cos() + ROUNDED, (angles[1:].cos() - ROUNDED).clamp_min(0)
        self.across = angles[1:].sin() + ROUNDED
        self.places = torch.cat((upto * (angles[:-1] + angles[1:]).div(2).cos(), torch.zeros(1, dtype=torch.float64)))
        self.off = (INFLATE - 1) * upto + 4 * UNIT * (lengths(values[source]).item() + upto)  # of the points of the ray
        self.terms = list(self._along(-at_source / at_source.norm(), forms, noise))

    def _along(
        self, direction: Tensor, forms: Mapping[Node, tuple[Contracted, Tensor]], noise: Mapping[Node, float]
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        """For each ReLU v its ‖M_v d_v‖² + C_v and ‖G_vᵀ M_v² d_v‖ L_v at the points of the ray, and ‖M_v G_v‖ L_v."""
        network, values, layers = self.network, self.values, self.tubes.layers
        start, operands = values[network.source], [v.operands[0] for v in layers]
        ray = self.places.to(start.device)[:, None] * direction
        points = start + ray.reshape(-1, *start.shape[1:])
        many = {node: value.expand(len(points), *value.shape[1:]) for node, value in values.items()}
        at_points = network.replay(network.source, points, operands, many)
        for (v, layer), z, at in zip(layers.items(), operands, at_points, strict=True):
            answer, constant = forms[v]
            scale, d = per_image(answer.forms[0].tensors[0]), per_image(at - values[z])
            largest = scale.amax().item()
            error = 2 * noise[z] * largest  # of scale ∘ d
            across = layer.factor.scaled(scale).norm().item() + largest * layer.error
            pulled = scale.square() * d
            slopes = (pulled @ layer.factor.dense()[0]).norm(dim=1)
            distance = layer.factor.error + layer.error + dot_error(z.entries) * layer.factor.size
            slopes = slopes + pulled.norm(dim=1) * distance + across * error
            squares = ((scale * d).norm(dim=1) + error).square() + constant
            yield squares.cpu(), slopes.cpu() * layer.lipschitz, across * layer.lipschitz

    def bound(self, radius: float) -> float:
        """A lower bound on the margin within a radius of at most ``upto``."""
        if radius > self.upto:
            return -1.0
        most, least = self.most * radius, self.least * radius
        place = (self.places - ((most + least) / 2)[:, None]).abs().argmin(1)
        off = torch.maximum(most - self.places[place], self.places[place] - least)
        tube = (off.square() + (self.across * radius).square()).sqrt()
        # The last: s ≤ 0.
        place, tube = torch.cat((place, place.new_tensor([_SECTORS]))), torch.cat((tube, tube.new_tensor([radius])))
        loss = torch.cat((self.slope * most, most.new_zeros(1)))
        tube = tube * INFLATE + self.off
        for squares, slopes, across in self.terms:
            loss = loss + squares[place] + 2 * slopes[place] * tube + (across * tube).square()
        return self.reduced - loss.max().item() * (1 + SAFETY)
