"""The captured network after the perturbed value: its stages, and the remainder rules of its operations."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds import (
    NoAnswer,
    Remainder,
    Tag,
    arguments,
    canonical_forms,
    explicit_attention,
    explicit_maxima,
    kept_whole,
    refusal,
    remainder_of,
    tagged,
)
from lipcert.errors import InputError, UnsupportedOperation, WrongDerivative
from lipcert.graph import Graph, Node, capture, close, cuts, examples, needed
from lipcert.model import Model
from lipcert.numerics import computed_l2_norm
from lipcert.roundoff import Chains, OperationRounding

# Derivatives are wrong if they differ by more than this, relative to their norm, and by more than this multiple of what
# they differ by at some of this many points at this distance in every entry, and by more than saturated networks do,
# whose small slopes are lost in sums with 1.
_ACCURACY, _NOISE, _POINTS, _NEARBY, _SATURATED = 1e-5, 100.0, 16, 1e-10, 1e-12
# The operations of networks whose derivatives have been compared.
_CHECKED: weakref.WeakSet[Node] = weakref.WeakSet()


@dataclass
class Stage:
    """The nonlinear operations between two cuts. Everything after a cut depends on the image only through its value."""

    start: Node
    end: Node
    nonlinear: list[Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The module path at which the stage ends, for messages."""
        return self.end.path.removeprefix("net.").removeprefix("net") or "(model)"


def an_image(model: Model) -> Tensor:
    """A random image for the capture, shape (1, C, H, W)."""
    pixels = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0))
    return pixels.to(model.device, model.dtype)


def recorded(model: Model) -> Graph:
    """The captured network; modules with remainder rules are kept whole."""
    return capture(model, an_image(model), whole_modules)


def whole_modules(module: nn.Module) -> bool:
    """Whether a module has a remainder rule."""
    return kept_whole(module, "remainder")


def prepared(graph: Graph, model: Model, *, forms: bool, deployed: bool = False) -> Graph:
    """The network as it is linearised.

    Attention is replaced by its parts. So are max and min, except in a deployed network, where they are exact. With
    ``forms``, one operation replaces several that implement it.
    """
    if forms:
        graph = canonical_forms(graph, "remainder", examples(an_image(model)))
    graph = explicit_attention(graph, model.device)
    return needed(graph if deployed else explicit_maxima(graph))


class Network:
    """A captured network, divided into stages after the perturbed value.

    Attributes:
        deployed: whether rounding errors of the operations are bounded, as they are recorded.
        source: the perturbed value.
        rules: the remainder rule of every nonlinear operation after it, in order.
        stages: the stages, in order.
        head: features h and weight W if the logits are W h + b; None otherwise.
        chains: products of norms along the operations after the source.
        kept: the nodes whose nominal values are kept, in order.
        local: rounding errors of these operations in float64.
    """

    def __init__(
        self,
        model: Model,
        *,
        at: str | int | Node | None = None,
        deployed: bool = False,
        graph: Graph | None = None,
        merged: bool = False,
    ):
        self.model, self.deployed = model, deployed
        example = an_image(model)
        if graph is None:  # ``at`` may name a value inside a form
            graph = prepared(recorded(model), model, forms=at is None)
        self.graph = needed(graph)
        self.source = (
            at if isinstance(at, Node) else self._output_of(at, example) if isinstance(at, str) else self.graph.input
        )
        self.kept = self._kept()
        self.rules = self._rules(example)
        self.stages = self._stages()
        if isinstance(at, int):
            if not 0 <= at < len(self.stages):
                raise InputError(f"there is no stage {at}; the network has the stages 0 to {len(self.stages) - 1}")
            self.source = self.stages[at].start
            self.stages = self.stages[at:]
            self.rules = {v: self.rules[v] for stage in self.stages for v in stage.nonlinear}
        self.stages = _merged(self.stages) if merged else self.stages
        self.head = self._head()
        self.chains = Chains(self.graph, self.source)
        self.local = OperationRounding(self.chains)
        if not deployed and self.graph.output not in _CHECKED:
            compared = self._check_derivatives(example)
            _CHECKED.update(self.graph.nodes if compared else [self.graph.output])

    def _check_derivatives(self, example: Tensor) -> bool:
        """Compares derivatives of replays, which run under vmap, with those without it; False where there are none.

        Torch has kernels of their own for these, some of which have been wrong for a single image, or for one memory
        layout. Compares gradients for one image and for two, and products with Jacobians by ⟨u, Jv⟩ = ⟨Jᵀu, v⟩.
        Gradients that consist of rounding errors, as those of saturated networks may, differ at nearby points too.
        """
        generator = torch.Generator().manual_seed(1)

        def random(shape: torch.Size) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(example)

        def near(point: Tensor) -> Tensor:
            return point + _NEARBY * random(point.shape)

        def gradients(images: Tensor, back: Tensor) -> Tensor | None:
            results = []
            for image, u in zip(images, back, strict=True):
                with torch.enable_grad():
                    start = image.clone().requires_grad_()
                    result = self.graph.replay(start)
                if not result.requires_grad:
                    return None
                results.append(torch.autograd.grad(result, start, u)[0])
            return torch.stack(results)

        both = torch.stack((example, example.flip(-1)))
        pair = random(torch.Size((2, *self.graph.output.shape)))
        for images, back in ((both[:1], pair[:1]), (both, pair)):
            expected = gradients(images, back)
            if expected is None or not expected.isfinite().all():
                return False
            with torch.enable_grad():
                start = images.clone().requires_grad_()
                (result,) = self.graph.forward(self.graph.input, start, [self.graph.output], {})
                weight = torch.zeros_like(result, requires_grad=True)
                (pulled,) = torch.autograd.grad(result, start, weight, create_graph=True)
            (computed,) = torch.autograd.grad(result, start, back, retain_graph=True)
            off, forth = computed_l2_norm(computed - expected), random(start.shape)

            def product(v: Tensor, pulled: Tensor = pulled, weight: Tensor = weight, back: Tensor = back) -> Tensor:
                return torch.autograd.grad(pulled, weight, v, retain_graph=True)[0] * back

            if pulled.requires_grad:
                off = off + (product(forth).sum() - (computed * forth).sum()).abs() / computed_l2_norm(forth)
            allowed = _ACCURACY * computed_l2_norm(expected) + _SATURATED
            for _ in range(_POINTS):
                if off <= allowed:
                    break
                nearby = gradients(near(images), near(back))
                noise = torch.zeros_like(off) if nearby is None else computed_l2_norm(nearby - expected)
                if pulled.requires_grad:
                    noise = noise + computed_l2_norm(product(near(forth)) - product(forth))
                allowed = torch.maximum(allowed, _NOISE * noise)
            if not off <= allowed:
                raise WrongDerivative
        return True

    def _output_of(self, path: str, example: Tensor) -> Node:
        """The output of the module at ``path``: its last value, which must be the only one that is read outside it."""
        places = {node: node.path.removeprefix("net.") for node in self.graph.nodes}
        module = path if path in dict(self.model.net.named_modules()) else path.removeprefix("net.")
        part = [node for node, place in places.items() if f"{place}.".startswith(f"{module}.")]
        inside = [node for node in part if node.single]
        if not inside:
            modules = dict.fromkeys(".".join(place.split(".")[:2]) for place in places.values())
            listed = ", ".join(place for place in modules if place not in ("", "net"))
            raise InputError(f"no operation of the network belongs to at={path!r}; it has {listed}")
        if inside[-1] is self.graph.output:
            raise InputError(f"at={path!r} gives the logits, and nothing follows; name a module before it")
        outputs: list[Any] = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            outputs.append(output.clone() if isinstance(output, Tensor) else output)  # what follows may write to it

        hook = self.model.net.get_submodule(module).register_forward_hook(note)
        try:
            self.model(example)
        finally:
            hook.remove()
        (last,) = self.graph.forward(self.graph.input, example[:, None], inside[-1:], {})
        read = {operand for node in places.keys() - part for operand in node.operands}
        whole = len(outputs) == 1 and read.isdisjoint(inside[:-1])
        if not whole or not isinstance(outputs[0], Tensor) or not close(last[0], outputs[0], 1e-4):
            raise InputError(
                f"at={path!r} needs a module that runs once and returns the tensor that it computes last; "
                "name one inside it, or before or after it"
            )
        return inside[-1]

    def _kept(self) -> list[Node]:
        """The nodes whose values are needed to linearise what follows the source."""
        after = self.graph.between(self.source, [self.graph.output])
        read = {operand for node in after for operand in node.operands}
        needed_for = {self.source, self.graph.output, *after, *read}
        return [node for node in self.graph.nodes if node in needed_for]

    def _rules(self, example: Tensor) -> dict[Node, type[Remainder]]:
        values = self.values(example[:, None])
        rules: dict[Node, type[Remainder]] = {}
        missing = []
        after = self.graph.between(self.source, [self.graph.output])
        for node in after:
            try:
                rule = remainder_of(node)
                if rule is not None and not {self.source, *after}.issuperset(node.operands):
                    raise NoAnswer("of a value that does not depend on the output that at= names")
                if rule is not None:
                    rule(node, [values[operand] for operand in node.operands], values[node])
            except NoAnswer as reason:
                missing.append(refusal(node, reason))
                continue
            if rule is not None:
                rules[node] = rule
        if missing:
            raise UnsupportedOperation(missing, "remainder")
        return rules

    def _stages(self) -> list[Stage]:
        """The stages: two consecutive cuts are the ends of a stage if a nonlinear operation lies between them.

        A cut is represented by its root. The root is a cut too, because no other operation of the graph reads it.
        """
        marks, position = set(cuts(self.graph)), self.graph.position
        stages = [Stage(self.source, self.source)]
        last = self.source
        for node in self.graph.nodes[position[self.source] + 1 :]:
            if node in self.rules:
                earlier = stages[-1].nonlinear
                if earlier and last is not stages[-1].start and position[last] >= position[earlier[-1]]:
                    stages[-1].end = last
                    stages.append(Stage(last, last))
                elif not earlier:
                    stages[-1].start = last
                stages[-1].nonlinear.append(node)
            if node in marks:
                last = self.root(node)
        stages[-1].end = self.graph.output
        return stages

    def _head(self) -> tuple[Node, Tensor] | None:
        """Features h and weight W if the logits are W h + b, for one vector h and with the classes in the order of W.

        An operation after the matrix could change the order of the classes, so only identities are accepted there.
        """
        node = self.graph.output
        while tagged(node, Tag.KEEPS) and node is not self.source and node.operands[0].shape == node.shape:
            node = node.operands[0]
        if not tagged(node, Tag.DENSE) or len(node.operands) != 1 or node is self.source:
            return None
        call = arguments(node)
        features, weight = call["input"], call["weight"]
        if not isinstance(weight, Tensor) or not isinstance(features, Node) or weight.dim() != 2:
            return None
        if node.shape != (1, len(weight)) or features.shape != (1, weight.shape[1]):
            return None
        return features, weight.detach().double()

    @property
    def outputs(self) -> list[Node]:
        """The logits, and the root of the features before a linear head."""
        return [self.graph.output, *([self.root(self.head[0])] if self.head is not None else [])]

    def operands(self, node: Node) -> list[Node]:
        """The roots of the values that an operation reads."""
        return [self.root(operand) for operand in node.operands]

    def root(self, node: Node) -> Node:
        """The value of which ``node`` is a rearrangement."""
        while tagged(node, Tag.REARRANGES) and len(node.operands) == 1 and node is not self.source:
            node = node.operands[0]
        return node

    def order(self, operand: Node) -> Tensor:
        """The places of the entries of ``operand`` in its root."""
        u = self.root(operand)
        places = torch.arange(u.entries, dtype=torch.float64, device=self.model.device)
        (moved,) = self.graph.forward(u, places.reshape(1, *u.shape), [operand], {}) if operand is not u else (places,)
        return moved.flatten().long()

    def affine_path(self, a: Node, b: Node) -> bool:
        """Whether b is an affine function of a while all other values are fixed."""
        return not any(node in self.rules for node in self.graph.between(a, [b]))

    def values(self, images: Tensor, start: Tensor | None = None) -> dict[Node, Tensor]:
        """Nominal values, each of shape (N, *node.shape): of the source, of what follows it, and of what that reads.

        ``start`` is the value of a source through which everything later depends on the image.
        """
        if start is not None:
            asked = [node for node in self.kept if node.single]
            return dict(zip(asked, self.graph.forward(self.source, start, asked, {}), strict=True))
        return self.graph.values(images, self.kept)

    def remainders(
        self, values: Mapping[Node, Tensor], rules: Mapping[Node, Remainder] | None = None, index: Tensor | None = None
    ) -> dict[Node, Remainder]:
        """The rules of all nonlinear operations; with ``index`` at these images, given the ``rules`` at all of them."""
        answers = {}
        for v in self.rules:
            part = None if rules is None or index is None else rules[v].only(index)
            if part is None:
                read = values if index is None else {node: values[node][index] for node in (v, *v.operands)}
                part = self.rules[v](v, [read[operand] for operand in v.operands], read[v])
            answers[v] = part
        return answers


def _merged(stages: list[Stage]) -> list[Stage]:
    """The stages without the cuts that save no norms.

    Between m and n operations a cut replaces the m n norms from each of the first to each of the others by m + n norms
    from and to the cut, and two more. A remainder that crosses a cut counts with a product of two norms.
    """
    merged = stages[:1]
    for stage in stages[1:]:
        before, after = len(merged[-1].nonlinear), len(stage.nonlinear)
        if before * after <= before + after + 2:
            merged[-1] = Stage(merged[-1].start, stage.end, merged[-1].nonlinear + stage.nonlinear)
        else:
            merged.append(stage)
    return merged
