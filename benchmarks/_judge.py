"""Certifies a network by every method and attacks the network itself inside each radius, with and without gradients.

Nothing here trusts what lipcert has captured: the network runs on real tensors, built anew, in float64 for real
arithmetic and in its own type where a certificate names one.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.campaign import REAL, attack
from lipcert.attacks._ball import project
from lipcert.attacks._found import lead
from lipcert.certifier import METHODS, Certifier
from lipcert.errors import LipcertError
from lipcert.loading import load
from lipcert.model import Model
from lipcert.roundoff import DTYPES

# From the worst. "not run" is no outcome of lipcert's: the network does not run without it.
OUTCOMES = ("false", "traceback", "held", "zero", "refused", "not run")
HOSTILE_EPS = 0.1
_ROUND_UP = 1 + 1e-12
# A lead in float64 counts if it is more than so much of the largest logit, and stays when the image is jittered.
_NOISE = 1e-11
_JITTER = 1e-14
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
        kind: "program" or "module".
        family: what was drawn.
        build: makes the network again, in float32 and evaluation mode, the same each time.
        size: (C, H, W) of an image.
        images: float64 in [0, 1], shape (N, C, H, W).
        casts: whether the network casts, which in real arithmetic changes nothing.
        looks_at_type: whether a difference between float64 and float32 beyond rounding counts.
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
        """The network behind its normalisation."""
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
        if row["by"].get(f"global {key[1]}") in ("refused", "traceback") and subject.seed % 10:
            continue
        name = " ".join(key)
        try:
            found[key] = _certified(subject, *key)
            row["by"][name] = "held" if bool((found[key][0] > 0).any()) else "zero"
        except LipcertError as error:
            row["by"][name] = "refused"
            row.setdefault("why", f"{type(error).__name__}: {str(error)[:160]}")
        except Exception as error:
            row["by"][name] = "traceback"
            row["defects"].append({"key": name, "raised": _raised(error)})
    for dtype in (REAL, *DTYPES):
        radii = {key: found[key] for key in found if key[1] == dtype and row["by"][" ".join(key)] == "held"}
        for defect in _broken(subject, dtype, radii) if radii else ():
            row["by"][defect["key"]] = "false"
            row["defects"].append(defect)
    return {**row, "outcome": min(row["by"].values(), key=OUTCOMES.index)}


def _plan(subject: Subject) -> list[Key]:
    """In real arithmetic all methods, for a share of the networks staged too; in float32 three, now and then others."""
    strong = METHODS[3:] + ("staged",)
    keys = [(method, REAL) for method in METHODS if method != "staged" or subject.seed % 4 == 0]
    keys += [(method, "float32") for method in ("global", "gloro", strong[subject.seed % 4])]
    if subject.seed % 6 == 0:
        small = ("float16", "bfloat16")[subject.seed % 12 == 0]
        keys += [(method, small) for method in ("global", strong[subject.seed // 6 % 4])]
    return keys


def _certified(subject: Subject, method: str, dtype: str) -> tuple[Tensor, Tensor]:
    """Radii and predicted classes."""
    mean, std = ((0.0, 1.0), (0.5, 0.25))[subject.seed % 2]
    channels = subject.size[0]
    model = load(subject.build(), mean=(mean,) * channels, std=(std,) * channels, input_size=subject.size)
    certifier = Certifier(model, HOSTILE_EPS, method, dtype=dtype)
    if _takes(subject, len(subject.images)):
        certificates = certifier.run(subject.images)
        return certificates.radius.double(), certificates.predicted
    parts = [certifier.run(image[None]) for image in subject.images]
    return torch.cat([part.radius for part in parts]).double(), torch.cat([part.predicted for part in parts])


def _takes(subject: Subject, count: int) -> bool:
    """Whether the network itself takes so many images at once."""
    try:
        with torch.no_grad():
            return len(subject.model().double()(subject.images[:count].clone())) == count
    except Exception:
        return False


def _raised(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "lipcert" in Path(frame.filename).parts]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__} in {where}: {lines[0][:160] if lines else ''}"


def _broken(subject: Subject, dtype: str, radii: dict[Key, tuple[Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    """Certificates that an attack breaks, with the distance and the lead of another class there."""
    runner = Runner(subject, dtype)
    images = subject.images if runner.together else subject.images[:2]
    diameter = math.sqrt(images[0].numel())
    nearest = {}
    for number in range(len(images)):
        given = [(key, float(radius[number]), int(predicted[number])) for key, (radius, predicted) in radii.items()]
        for own in sorted({predicted for _, radius, predicted in given if radius > 0}):
            sizes = sorted({min(radius, diameter) for _, radius, predicted in given if predicted == own and radius > 0})
            if not runner.together:
                sizes = sizes[-1:]
            near = _nearest(subject, runner, images[number], own, [sizes[0], sizes[len(sizes) // 2], sizes[-1]])
            nearest[number, own] = near
        for key, radius, own in given:
            if radius <= 0 or (number, own) not in nearest:
                continue
            distance, point = nearest[number, own]
            if distance >= radius:
                continue
            ahead = _confirmed(subject, dtype, images[number], point, own)
            if ahead is not None:
                yield {"key": " ".join(key), "image": number, "radius": radius, "distance": distance, "lead": ahead}


def _nearest(subject: Subject, runner: Runner, image: Tensor, own: int, sizes: list[float]) -> tuple[float, Tensor]:
    """The nearest image that was found with another class than ``own``; ∞ where there is none."""
    generator = torch.Generator().manual_seed(subject.seed)
    best, where = math.inf, image
    for size in dict.fromkeys(sizes):
        for points in _points(subject, runner, image, own, size, generator):
            apart = (points - image).flatten(1).norm(dim=1) * _ROUND_UP
            inside = (apart < size) | (apart == 0)
            hits = (_flips(runner, runner(points), own) & inside).nonzero()[:, 0]
            if len(hits):
                nearest = hits[apart[hits].argmin()]
                if apart[nearest] < best:
                    best, where = apart[nearest].item(), points[nearest]
    return best, where


def _flips(runner: Runner, logits: Tensor, own: int) -> Tensor:
    classes = torch.full((len(logits),), own)
    ahead = lead(logits, classes)
    if runner.dtype != torch.float64:
        return ~(ahead < 0)  # deployed, a tie is enough
    return ~(ahead <= _NOISE * logits.abs().amax(1))


def _points(
    subject: Subject, runner: Runner, image: Tensor, own: int, size: float, generator: torch.Generator
) -> Iterator[Tensor]:
    """Images within ``size``: by the network's gradient where it has one, and by several ways that ask for none."""
    within = torch.tensor([size * (1 - 1e-11)], dtype=torch.float64)
    yield image[None]
    blind = _blind(subject, image, runner.together, generator)
    pushed = project(blind * size / _length(blind), image.expand_as(blind), within.expand(len(blind)))
    spots = torch.cat([(image + part * pushed).clamp(0, 1) for part in _FRACTIONS])
    yield spots
    classes = torch.tensor([own])
    if runner.together:
        slopes = _differences(runner, image, size)
        pushed = project(slopes * size / _length(slopes), image.expand_as(slopes), within.expand(len(slopes)))
        spots = torch.cat([spots, (image + pushed).clamp(0, 1)])
        yield spots[-len(slopes) :]
    for _ in range(_CLIMBS if runner.together else 1):  # from the best so far, a little further at random
        ahead = lead(runner(spots), classes.expand(len(spots))).nan_to_num(math.inf)
        start = spots[ahead.topk(min(3, len(spots))).indices] - image
        noise = torch.randn(8 if runner.together else 2, 1, *image.shape, dtype=torch.float64, generator=generator)
        moved = (start + 0.4 * size * noise / _length(noise.flatten(0, 1))[:, None]).flatten(0, 1)
        moved = project(moved * size / _length(moved), image.expand_as(moved), within.expand(len(moved)))
        spots = torch.cat([start + image, (image + moved).clamp(0, 1)])
        yield spots
    if runner.together and runner.dtype != torch.float16:
        with contextlib.suppress(Exception), torch.enable_grad():
            network = Runner(subject, REAL).model if runner.dtype != torch.float64 else runner.model
            yield torch.cat(list(attack(network, image[None], classes, within, subject.seed)))


def _blind(subject: Subject, image: Tensor, many: bool, generator: torch.Generator) -> Tensor:
    """Directions that no gradient is needed for, shape (K, C, H, W)."""
    entries = image.numel()
    random = torch.randn(_RANDOM if many else 4, *image.shape, dtype=torch.float64, generator=generator)
    axes = torch.eye(entries, dtype=torch.float64).reshape(-1, *image.shape)
    largest, smallest = axes[image.argmax()][None], axes[image.argmin()][None]
    if many:
        few = torch.randperm(entries, generator=generator)[:16]
        axes = torch.cat([axes[few], -axes[few]])
    else:
        axes = torch.cat([largest, -smallest])
    ones = torch.ones_like(image)[None]
    other = subject.images - image
    found = [random, random[:4].sign(), axes, largest, -largest, smallest, -smallest, ones, -ones, -image[None]]
    return torch.cat([*found, 1 - image[None], 0.5 - image[None], other])


def _differences(runner: Runner, image: Tensor, size: float) -> Tensor:
    """Directions towards every class by differences of logits: central ones, near and far; shape (K, C, H, W)."""
    entries = image.numel()
    axes = torch.eye(entries, dtype=torch.float64).reshape(-1, *image.shape)
    found = []
    for step in (1e-5, min(size, 0.5)):
        step = max(step, 1e-2) if runner.dtype != torch.float64 else step
        logits = runner(torch.cat([image + step * axes, image - step * axes])).nan_to_num()
        slopes = ((logits[:entries] - logits[entries:]) / (2 * step)).T.reshape(-1, *image.shape)
        found += [slopes - slopes[i] for i in range(len(slopes))]
    directions = torch.cat(found)
    return directions[_length(directions)[:, 0, 0, 0] > 0]


def _length(directions: Tensor) -> Tensor:
    return directions.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None, None, None]


def _confirmed(subject: Subject, dtype: str, image: Tensor, point: Tensor, own: int) -> float | None:
    """How far another class leads at ``point``, in a network built anew that sees it alone; None where none does.

    A network with a state, or with noise, may answer differently the next time: it is asked several times, behind the
    image itself.
    """
    ahead = _alone(Runner(subject, dtype), point, own)
    if ahead is None:
        runner = Runner(subject, dtype)
        runner._run(image[None])
        tries = (_alone(runner, point, own) for _ in range(_REPEATS))
        ahead = next((found for found in tries if found is not None), None)
    if (
        ahead is not None
        and dtype == REAL
        and subject.casts
        and _alone(Runner(subject, dtype, True), point, own) is None
    ):
        return None
    return ahead


def _alone(runner: Runner, point: Tensor, own: int) -> float | None:
    generator = torch.Generator().manual_seed(0)
    leads = []
    for number in range(1 if runner.dtype != torch.float64 else 4):
        jitter = _JITTER * torch.randn(point.shape, dtype=torch.float64, generator=generator) if number else 0.0
        logits = runner._run((point * (1 + jitter)).clamp(0, 1)[None])
        if not bool(_flips(runner, logits, own)):
            return None
        leads.append(lead(logits, torch.tensor([own])).item())
    return min(leads)
