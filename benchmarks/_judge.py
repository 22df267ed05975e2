"""Certifies a network by every method and attacks the network itself inside each radius, with and without gradients.

Nothing here trusts what lipcert has captured: the network runs on real tensors, built anew, in float64 for real
arithmetic and in its own type where a certificate names one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._arguments import raised
from benchmarks.campaign import REAL, attack
from lipcert.attacks._found import lead, project
from lipcert.certifier import Certifier
from lipcert.errors import LipcertError
from lipcert.inputs.loading import load
from lipcert.model import Model
from lipcert.roundoff import DTYPES

# From the worst. "not run" is no outcome of lipcert's: the network does not run without it.
OUTCOMES = ("false", "traceback", "held", "zero", "refused", "not run")
# Beyond any radius, so that staged certification goes through all its methods.
_EPS = 100.0
# Radii are multiplied by this, to see how many of those that are too large are found.
inflation = 1.0
_ROUND_UP = 1 + 1e-12
# A lead in float64 counts if it is more than so much of the largest logit, and than its second differences.
_NOISE = 1e-11
_STEP = 1e-8
_REPEATS = 12
_FRACTIONS = (1.0, 0.5, 0.1)
_RANDOM = 12
_CLIMBS = 3
# A certificate of real arithmetic for a network that looks at its type is false where float32 differs by this.
_TYPE = 1e-2

Key = tuple[str, str]


@dataclass(frozen=True)
class Subject:
    """A network to certify and attack.

    Attributes:
        seed: draws it again.
        kind: "program".
        family: what was drawn.
        build: makes the network again, in float32 and evaluation mode, the same each time.
        size: (C, H, W) of an image.
        images: float64 in [0, 1], shape (N, C, H, W).
        casts: whether the network casts, which in real arithmetic changes nothing.
        looks_at_type: whether its code asks for the floating type; then a certificate of real arithmetic is false too
            where the network in float32 is far from the one in float64.
    """

    seed: int
    kind: str
    family: str
    build: Callable[[], nn.Module]
    size: tuple[int, int, int]
    images: Tensor
    casts: bool = False
    looks_at_type: bool = False

    def model(self) -> Model:
        """The network after its normalisation."""
        mean, std = ((0.0, 1.0), (0.5, 0.25))[self.seed % 2]
        channels = self.size[0]
        return Model(self.build(), mean=(mean,) * channels, std=(std,) * channels, input_size=self.size)


class Runner:
    """Runs a network on many images: together where that gives what each gives alone, else one after the other.

    Args:
        subject: the network.
        dtype: ``real`` or one of ``DTYPES``.
        real: leave casts out, as :class:`lipcert.Model` does for real arithmetic.
    """

    def __init__(self, subject: Subject, dtype: str, real: bool = False):
        self.dtype = DTYPES.get(dtype, torch.float64)
        self.model = subject.model().requires_grad_(False).to(self.dtype)
        self.model.real = real
        self.classes = 0
        self.together = self._together(subject.images)

    def _together(self, images: Tensor) -> bool:
        alone = [self._run(image[None]) for image in images]
        self.classes = max(logits.shape[1] for logits in alone)
        both = self._run(images)
        again = torch.cat([self._run(image[None]) for image in images.flip(0)]).flip(0)
        apart = torch.cat(alone)
        if both.shape != apart.shape or both.isnan().any() or self.dtype in (torch.float16, torch.bfloat16):
            return False
        slack = 1e-9 if self.dtype == torch.float64 else 1e-4
        return bool(((both - apart).abs() <= slack * (1 + apart.abs())).all()) and torch.equal(again, apart)

    def _run(self, images: Tensor) -> Tensor:
        """Logits in float64; NaN where the network raises."""
        try:
            with torch.no_grad():
                return self.model(images.clone().to(self.dtype)).double()
        except Exception:
            return torch.full((len(images), max(self.classes, 2)), math.nan, dtype=torch.float64)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of images (P, C, H, W), float64, shape (P, classes)."""
        if self.together:
            return self._run(images)
        return torch.cat([self._run(image[None]) for image in images])


def runs(subject: Subject) -> bool:
    """Whether the network gives finite logits for each image without lipcert, in float32 and in float64."""
    try:
        for dtype in (torch.float32, torch.float64):
            model = subject.model().to(dtype)
            with torch.no_grad():
                for image in subject.images:
                    logits = model(image[None].to(dtype))
                    shape = (1, logits.shape[1])
                    if logits.shape != shape or shape[1] < 2 or not bool(logits.isfinite().all()):
                        return False
                    if not logits.is_floating_point() or logits.requires_grad:
                        return False
    except Exception:
        return False
    return True


def examine(subject: Subject) -> dict[str, Any]:
    """Certifies and attacks one network.

    Returns:
        ``outcome`` (the worst, one of ``OUTCOMES``), ``by`` (the outcome of every method and type), ``why`` (the first
        refusal) and ``defects`` (what is wrong, with radius and distance, or where the traceback comes from).
    """
    row: dict[str, Any] = {
        "seed": subject.seed,
        "kind": subject.kind,
        "family": subject.family,
        "by": {},
        "defects": [],
    }
    if not runs(subject):
        return {**row, "outcome": "not run"}
    found: dict[Key, tuple[Tensor, Tensor]] = {}
    for key in _plan(subject):
        if "refused" in row["by"].values() and (subject.seed % 4 or key[0] != "staged"):
            continue  # as a rule, what is refused once is refused always
        name = " ".join(key)
        try:
            found[key] = _certified(subject, *key)
            row["by"][name] = "held" if bool((found[key][0] > 0).any()) else "zero"
        except LipcertError as error:
            row["by"][name] = "refused"
            row.setdefault("why", f"{type(error).__name__}: {str(error)[:160]}")
        except Exception as error:
            row["by"][name] = "traceback"
            row["defects"].append({"key": name, "raised": raised(error)})
    for dtype in (REAL, *DTYPES):
        radii = {key: found[key] for key in found if key[1] == dtype and row["by"][" ".join(key)] == "held"}
        for defect in _broken(subject, dtype, radii) if radii else ():
            row["by"][defect["key"]] = "false"
            row["defects"].append(defect)
    return {**row, "outcome": min(row["by"].values(), key=OUTCOMES.index)}


def _plan(subject: Subject) -> list[Key]:
    """Staged certification in real arithmetic and in float32; by turns single methods and smaller types.

    Beyond any radius, staged certification takes the largest that global, gloro, local and anchored give: where one of
    them is false, it is.
    """
    single, turn = ("global", "gloro", "local", "lofast", "anchored"), subject.seed
    keys = [("staged", REAL), ("staged", "float32")]
    if turn % 3 == 0:
        keys.append((single[turn // 6 % 5], ("float32", REAL)[turn % 2]))
    if turn % 12 == 0:
        keys.append((("staged", *single)[turn // 24 % 6], ("float16", "bfloat16")[turn // 12 % 2]))
    return keys


def _certified(subject: Subject, method: str, dtype: str) -> tuple[Tensor, Tensor]:
    """Radii and predicted classes."""
    mean, std = ((0.0, 1.0), (0.5, 0.25))[subject.seed % 2]
    channels = subject.size[0]
    model = load(subject.build(), mean=(mean,) * channels, std=(std,) * channels, input_size=subject.size)
    certifier = Certifier(model, _EPS, method, dtype=dtype)
    if _takes(subject, len(subject.images)):
        certificates = certifier.run(subject.images)
        return inflation * certificates.radius.double(), certificates.predicted
    parts = [certifier.run(image[None]) for image in subject.images]
    return inflation * torch.cat([part.radius for part in parts]).double(), torch.cat(
        [part.predicted for part in parts]
    )


def _takes(subject: Subject, count: int) -> bool:
    """Whether the network itself takes so many images at once."""
    try:
        with torch.no_grad():
            return len(subject.model().double()(subject.images[:count].clone())) == count
    except Exception:
        return False


def _broken(subject: Subject, dtype: str, radii: dict[Key, tuple[Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    """Certificates that an attack breaks, with the distance and the lead of another class there."""
    runner = Runner(subject, dtype)
    count = len(subject.images) if runner.together else 2
    diameter = math.sqrt(subject.images[0].numel())
    given = {
        (key, number): (float(radius[number]), int(predicted[number]))
        for key, (radius, predicted) in radii.items()
        for number in range(count)
        if radius[number] > 0
    }
    cases = []
    for number, own in sorted({(number, own) for (_, number), (_, own) in given.items()}):
        sizes = sorted({min(size, diameter) for (_, n), (size, y) in given.items() if (n, y) == (number, own)})
        chosen = (sizes[0], sizes[len(sizes) // 2], sizes[-1]) if runner.together else sizes[-1:]
        cases += [(number, own, size) for size in dict.fromkeys(chosen)]
    nearest = _nearest(subject, runner, cases) if cases else {}
    for (key, number), (size, own) in given.items():
        distance, point = nearest[number, own]
        if distance < size and (ahead := _confirmed(subject, dtype, subject.images[number], point, own)) is not None:
            yield {"key": " ".join(key), "image": number, "radius": size, "distance": distance, "lead": ahead}
    if dtype == REAL and subject.looks_at_type:  # real arithmetic is what both types stand for
        logits = Runner(subject, "float32")(subject.images[:count])
        for (key, number), (size, own) in given.items():
            ahead = lead(logits[number][None], torch.tensor([own])).item()
            if ahead > _TYPE * logits[number].abs().max():
                yield {"key": " ".join(key), "image": number, "radius": size, "distance": 0.0, "lead": ahead}


def _nearest(
    subject: Subject, runner: Runner, cases: list[tuple[int, int, float]]
) -> dict[tuple[int, int], tuple[float, Tensor]]:
    """The nearest images that were found with another class; ∞ where there are none.

    Args:
        subject: the network.
        runner: runs it.
        cases: number of the image, its class and how far to look.

    Returns:
        Distance and image by number and class.
    """
    numbers, owns = torch.tensor([case[0] for case in cases]), torch.tensor([case[1] for case in cases])
    sizes = torch.tensor([case[2] for case in cases], dtype=torch.float64)
    images = subject.images[numbers]
    best = {(number, own): (math.inf, images[0]) for number, own, _ in cases}
    for points in _points(subject, runner, images, owns, sizes):
        apart = (points - images[:, None]).flatten(2).norm(dim=2) * _ROUND_UP
        inside = (apart < sizes[:, None]) | (apart == 0)
        hit = _flips(runner, _logits(runner, points), owns[:, None].expand_as(apart).flatten()).reshape(apart.shape)
        distance, which = torch.where(hit & inside, apart, math.inf).min(1)
        for place in torch.isfinite(distance).nonzero()[:, 0].tolist():
            key = cases[place][:2]
            if distance[place] < best[key][0]:
                best[key] = distance[place].item(), points[place, which[place]]
    return best


def _logits(runner: Runner, points: Tensor) -> Tensor:
    """Logits of points (P, K, C, H, W), shape (P·K, classes)."""
    return runner(points.flatten(0, 1))


def _flips(runner: Runner, logits: Tensor, owns: Tensor) -> Tensor:
    """Whether another class leads, beyond rounding; deployed, a tie is enough."""
    ahead = lead(logits, owns)
    return ~(ahead < 0) if runner.dtype != torch.float64 else ~(ahead <= _NOISE * logits.abs().amax(1))


def _points(subject: Subject, runner: Runner, images: Tensor, owns: Tensor, sizes: Tensor) -> Iterator[Tensor]:
    """Images within ``sizes``: by the network's gradient where it has one, and by several ways that ask for none.

    Yields:
        Shape (P, K, C, H, W), for images (P, C, H, W).
    """
    generator = torch.Generator().manual_seed(subject.seed)
    within, many = sizes * (1 - 1e-11), runner.together
    yield images[:, None]

    def reach(directions: Tensor) -> Tensor:
        count = directions.shape[1]
        long = directions / _length(directions) * sizes[:, None, None, None, None]
        centres = images[:, None].expand_as(long)
        return project(long.flatten(0, 1), centres.flatten(0, 1), within.repeat_interleave(count)).reshape(long.shape)

    pushed = reach(_blind(subject, images, many, generator))
    centre = images[:, None]
    spots = torch.cat([(centre + part * pushed).clamp(0, 1) for part in _FRACTIONS], 1)
    yield spots
    if many:
        slopes = (centre + reach(_differences(runner, images, sizes, owns))).clamp(0, 1)
        spots = torch.cat([spots, slopes], 1)
        yield slopes
    for _ in range(_CLIMBS if many else 1):  # from the best so far, a little further at random
        ahead = lead(_logits(runner, spots), owns.repeat_interleave(spots.shape[1])).nan_to_num(math.inf)
        top = ahead.reshape(spots.shape[:2]).topk(3, 1).indices
        start = spots[torch.arange(len(spots))[:, None], top] - centre
        shape = (len(images), 24 if many else 6, *images.shape[1:])
        noise = torch.randn(shape, dtype=torch.float64, generator=generator)
        further = 0.4 * sizes[:, None, None, None, None] * noise / _length(noise)
        moved = start.repeat(1, further.shape[1] // 3, 1, 1, 1) + further
        spots = torch.cat([start + centre, (centre + reach(moved)).clamp(0, 1)], 1)
        yield spots
    if many and runner.dtype != torch.float16:
        with contextlib.suppress(Exception), torch.enable_grad():
            network = Runner(subject, REAL).model if runner.dtype != torch.float64 else runner.model
            yield torch.stack(list(attack(network, images, owns, within, subject.seed)), 1)


def _blind(subject: Subject, images: Tensor, many: bool, generator: torch.Generator) -> Tensor:
    """Directions that no gradient is needed for, shape (P, K, C, H, W)."""
    flat = images.flatten(1)
    count, entries = flat.shape
    random = torch.randn(count, _RANDOM if many else 4, entries, dtype=torch.float64, generator=generator)
    axes = torch.eye(entries, dtype=torch.float64)
    largest, smallest = axes[flat.argmax(1)][:, None], axes[flat.argmin(1)][:, None]
    ones = torch.ones_like(flat)[:, None]
    few = axes[torch.randperm(entries, generator=generator)[: 16 if many else 1]].expand(count, -1, -1)
    found = [random, random[:, :4].sign(), few, -few, largest, -largest, smallest, -smallest, ones, -ones]
    found += [-flat[:, None], ones - flat[:, None], 0.5 - flat[:, None]]
    found.append(subject.images.flatten(1)[None] - flat[:, None])
    return torch.cat(found, 1).unflatten(2, images.shape[1:])


def _differences(runner: Runner, images: Tensor, sizes: Tensor, owns: Tensor) -> Tensor:
    """Directions towards every class by differences of logits, central ones, near and far; shape (P, K, C, H, W)."""
    count, entries = len(images), images[0].numel()
    axes = torch.eye(entries, dtype=torch.float64).reshape(-1, *images.shape[1:])
    least = 1e-5 if runner.dtype == torch.float64 else 1e-2
    found = []
    for step in (torch.full_like(sizes, least), sizes.clamp(least, 0.5)):
        wide = step[:, None, None, None, None] * axes
        logits = _logits(runner, torch.cat([images[:, None] + wide, images[:, None] - wide], 1)).nan_to_num()
        up, down = logits.reshape(count, 2, entries, -1).unbind(1)
        slopes = ((up - down) / step[:, None, None]).mT
        found.append(slopes - slopes[torch.arange(count), owns][:, None])
    return torch.cat(found, 1).unflatten(2, images.shape[1:])


def _length(directions: Tensor) -> Tensor:
    """Norms of directions (P, K, C, H, W), shape (P, K, 1, 1, 1)."""
    return directions.flatten(2).norm(dim=2).clamp_min(1e-300)[:, :, None, None, None]


def _confirmed(subject: Subject, dtype: str, image: Tensor, point: Tensor, own: int) -> float | None:
    """How far another class leads at ``point``, in a network built anew that sees it alone; None where none does.

    A network with a state, or with noise, may answer differently the next time: it is asked several times, after the
    image itself.
    """
    ahead = _alone(Runner(subject, dtype), point, own)
    if ahead is None:
        runner = Runner(subject, dtype)
        runner._run(image[None])
        tries = (_alone(runner, point, own) for _ in range(_REPEATS))
        ahead = next((found for found in tries if found is not None), None)
    if ahead is None or dtype != REAL:
        return ahead
    if subject.casts and _alone(Runner(subject, dtype, True), point, own) is None:
        return None
    return ahead if ahead > _rounding(Runner(subject, dtype), point, own) else None


def _alone(runner: Runner, point: Tensor, own: int) -> float | None:
    logits, owns = runner._run(point[None]), torch.tensor([own])
    return lead(logits, owns).item() if bool(_flips(runner, logits, owns)) else None


def _rounding(runner: Runner, point: Tensor, own: int) -> float:
    """What rounding may do to a lead at ``point`` that float64 computes.

    On a straight line through the point, a function without rounding has second differences of the order of the step
    squared, or of the step where it has a kink; what rounding adds does not shrink with the step.
    """
    generator = torch.Generator().manual_seed(0)
    ways = _STEP * torch.randn(_REPEATS, *point.shape, dtype=torch.float64, generator=generator)
    here = lead(runner._run(point[None]), torch.tensor([own]))
    there = [lead(runner._run((point + way)[None]), torch.tensor([own])) for way in (*ways, *-ways)]
    forth, back = torch.cat(there).chunk(2)
    return 4 * (forth + back - 2 * here).abs().nan_to_num(0.0).max().item()
