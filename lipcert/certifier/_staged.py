"""The methods of one run: which of them suit a network, and which of them an image needs.

Staged certification goes from the cheapest method to the strongest. Each method gets the images that are still open: no
method so far has certified them at ε, and nothing rules a certificate out (:mod:`lipcert.certifier._triage`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.certifier._global import Global, GloRo
from lipcert.certifier._linearised import AnchoredMethod, LinearisedMethod
from lipcert.certifier._local import LocalMethod
from lipcert.certifier._lofast import LoFASTMethod
from lipcert.certifier._lofast_paper import LoFASTPaper
from lipcert.certifier._method import Method, Subject, duration
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.norms import Budget, Ledger
from lipcert.settings import FACTS, STAGED, MethodFacts, add_method

CLASSES: dict[str, type[Method]] = {
    kind.name: kind for kind in (Global, GloRo, LocalMethod, LoFASTMethod, LoFASTPaper, AnchoredMethod)
}


def certificate(facts: MethodFacts) -> Callable[[type[Method]], type[Method]]:
    """A decorator that registers a method of your own, after the others: see docs/how-to/add-a-certificate.md."""

    def register(kind: type[Method]) -> type[Method]:
        add_method(facts)
        CLASSES[facts.name] = kind
        return kind

    return register


def budgets(subject: Subject) -> dict[str, Budget]:
    """The failure probability that each method of a run may spend on an image."""
    settings = subject.settings
    whole = Budget(0.0 if settings.rigor == "deterministic" else settings.delta)
    if settings.method != STAGED:
        return {settings.method: whole}
    names = [name for name, facts in FACTS.items() if facts.staged]
    random = [name for name in names if not FACTS[name].deterministic]
    return {name: whole.split(len(random)) if name in random else Budget(0.0) for name in names}


def prepare(subject: Subject) -> tuple[dict[str, Method], dict[str, str], dict[str, str]]:
    """The methods of a run, from the cheapest to the strongest; those that are skipped, with reasons; and remarks."""
    settings = subject.settings
    methods: dict[str, Method] = {}
    skipped: dict[str, str] = {}
    notes: dict[str, str] = {}
    staged = settings.method == STAGED
    shares = budgets(subject)
    if settings.at is not None:  # global bounds refer to pixels
        shares = dict([list(shares.items())[-1]])
    for name, budget in shares.items():
        kind = CLASSES[name]
        if not staged:
            methods[name] = kind(subject, budget)
        elif not kind.adds(subject):
            continue
        elif settings.at is None and not FACTS[name].deterministic and subject.too_loose:
            skipped[name] = subject.too_loose
            continue
        else:
            try:
                limit = (settings.time * kind.rate,) if issubclass(kind, LinearisedMethod) else ()
                method = kind(subject, budget, *limit)
            except (UnsupportedOperation, InputError) as error:
                if settings.at is not None:
                    raise
                skipped[name] = str(error)
                continue
            if method.seconds > settings.time:
                needs = duration(method.seconds)
                skipped[name] = f"it would take about {needs} per image, and the limit is {settings.time:g} s"
                continue
            methods[name] = method
        if methods[name].note:
            notes[name] = methods[name].note
    if not methods:
        raise InputError(f"no method suits this model: {'; '.join(skipped.values())}")
    return methods, skipped, notes


@dataclass
class Verdicts:
    """The radii of N images so far.

    Attributes:
        radius: float64, shape (N,).
        method: the names of the methods that gave them.
        random: whether a radius is probabilistic, bool, shape (N,).
        proved: whether the effect of rounding in float64 on it is proved, bool, shape (N,).
    """

    radius: Tensor
    method: list[str]
    random: Tensor
    proved: Tensor


def run(
    methods: Mapping[str, Method],
    images: Tensor,
    predicted: Tensor,
    margins: tuple[Tensor, Tensor],
    proved: Tensor,
    ruled_out: Tensor,
    ledger: Ledger,
    watch: Callable[[str, float], None],
) -> Verdicts:
    """Applies methods in order, each to the images that are still open."""
    eps = next(iter(methods.values())).subject.settings.largest_eps
    count = len(images)
    verdicts = Verdicts(
        torch.zeros(count, dtype=torch.float64),
        [next(iter(methods))] * count,
        torch.zeros(count, dtype=torch.bool),
        proved.clone(),
    )
    for name, method in methods.items():
        closed = ruled_out & (not method.facts.deterministic)
        active = ((verdicts.radius <= eps) & ~closed).nonzero()[:, 0]
        if not len(active):
            continue
        watch(name, 0.0)
        part = ledger.only(active).part(name)
        before = part.spent

        def norms_done(done: float, total: float, name: str = name, count: int = len(active)) -> None:
            watch(name, count * done / total)

        computed, reduced = (each[active] for each in margins)
        # Linearised methods account for rounding themselves, from margins as they were computed.
        used = torch.where(proved[active, None], computed, reduced) if method.proves else reduced
        radius = method.radius(images[active], predicted[active], used, part, norms_done)
        sure = torch.full_like(proved[active], method.proves) if method.facts.linearised else proved[active]
        if len(methods) == 1 and not method.facts.deterministic and method.subject.settings.at is None:
            # Known from the analysis and deterministic, so no other method needs to return less.
            least = GloRo(method.subject, Budget(0.0)).radius(images[active], predicted[active], reduced, part)
            sure = torch.where(radius < least, proved[active], sure)
            radius = torch.maximum(radius, least)
        larger = radius >= verdicts.radius[active]
        better = active[larger]
        verdicts.radius[better], verdicts.random[better] = radius[larger], (part.spent > before)[larger]
        verdicts.proved[better] = sure[larger]
        for place in better.tolist():
            verdicts.method[place] = name
    return verdicts
