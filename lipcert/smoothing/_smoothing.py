"""Certifies the smoothed classifier of any network."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from lipcert.bounds import check_weights
from lipcert.denoisers import Denoised
from lipcert.errors import InputError, LipcertError, UnsupportedCode, first_line
from lipcert.graph import ONE_LOGIT, examine, outputs_of, same_logits
from lipcert.inputs.loading import number_of_classes
from lipcert.model import Model, alone, check_labels, copy_of
from lipcert.norms import Rigor
from lipcert.numerics import is_out_of_memory, without_autocast, without_cudnn
from lipcert.settings import AUTO, SMOOTHING, CertifySettings, parse_memory, settings_of, takes
from lipcert.smoothing._certificates import SmoothedCertificates
from lipcert.smoothing._lattice import cells, from_lattice, to_lattice
from lipcert.smoothing._noise import noise
from lipcert.smoothing._votes import SELECTION, Plan, Votes

if TYPE_CHECKING:
    from lipcert.inputs.data import Batch

# The number of pixels in one batch of the network.
_PIXELS = {"cpu": 32 * 224 * 224 * 3, "cuda": 1024 * 224 * 224 * 3}
_DRAWS = {"cpu": 256, "cuda": 4096}
_MOST_IMAGES = 64
# Memory for a draw, in multiples of the largest result of a module: operands, the result and a residual connection.
_COPIES = 4
# The tolerance for changes of an image's logits with the batch, relative to the largest logit; rounding is smaller.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_ROUNDING_HALF, _ROUNDING_DOUBLE = 0.05, 1e-9
# One of so many draws is compared later on, with so many times the tolerance: in some, rounding is at its worst.
_EVERY, _LATER = 32, 4
_DEPENDS = (
    "the network's logits for an image depend on the batch; smoothing needs draws that are independent of each other"
)
# Standard deviations of the noise in the test images; different images reveal networks that mix a batch.
_SPREAD = (0.1, 2.0)

Requests = Sequence[tuple[Tensor, int, range]]


class Smoothing:
    """Certificates for the smoothed classifier of a network: g(x) = the class it gives most often at x + N(0, σ²I).

    Any module is accepted: the network is not captured, and no operation needs a rule. For each image the first draws
    select a class. Further draws give a lower bound on the probability of that class, and the radius is σ Φ⁻¹ of the
    bound: g is the same at every image closer than that. Images and noise are integers, and f reads the floating-point
    number of each: :mod:`lipcert.smoothing._lattice` defines g precisely, and has the proof and what it assumes. The
    noise is a function of seed, image and draw, so results do not depend on batch, shard or device, as long as the
    network's rounding gives each draw the same class.

    Attributes:
        seed: seed of the noise.
        together: number of images certified at once, so that their draws fill batches.
        batch: number of draws computed at once; halved if memory runs out.

    Args:
        model: the model; it is not changed, and later changes to it do not affect the certifier.
        eps: the ε of the verdict, in ℓ2 on pixels in [0, 1]; or all settings, with method ``"smoothing"``.
        batch: number of draws computed at once; None chooses it by device.
        memory: bytes for these draws, or a text such as ``"8GB"``, by an estimate; None for no limit.
        **settings: the other fields of :class:`lipcert.certifier.CertifySettings`: ``sigma``, which is required,
            ``samples``, ``alpha``, ``all_samples``, ``seed`` and ``dtype``, the type in which the
            network and its denoiser run; ``"real"`` means the type of its weights.

    Raises:
        InputError: settings or weights are not valid, or the network's logits for an image depend on other images of a
            batch.
        UnsupportedCode: the network draws random numbers, changes itself, depends on whether gradients are enabled, or
            has a copy that computes something else.
    """

    # Attributes that certifiers of the network itself use; they are not used here.
    bound = None
    # Seconds that an image may take, with all draws, at the speed of the last ones.
    longest: float | None = None
    watch: Callable[[str, float], None] | None = None

    @takes(CertifySettings)
    @alone
    def __init__(
        self,
        model: Model,
        eps: float | str | CertifySettings,
        *,
        batch: int | None = None,
        memory: float | str | None = None,
        **settings: Any,
    ):
        limit = math.inf if memory is None else parse_memory(memory)
        if not isinstance(eps, CertifySettings):
            eps = settings_of(CertifySettings, eps, SMOOTHING, **settings)
        if batch is not None and not (isinstance(batch, int) and batch > 0):
            raise InputError(f"the number of draws at once must be a whole number, at least 1, got {batch}")
        eps = eps.smoothed(model.sigma)
        if eps.sigma == AUTO:
            raise InputError(
                "sigma auto looks at other images than those to certify: take sigma from "
                "lipcert.smoothing.choose_sigma(model, other_images, other_labels, eps)"
            )
        self.settings, self.seed = eps, eps.seed
        sigma, self.plan = cast(float, eps.sigma), plan_of(model, eps)
        self.skipped: dict[str, str] = {}
        check_weights(model)
        self.model = _copied(model)
        if isinstance(self.model, Denoised):
            self.model.tell(self.plan.sigma)
        self.notes: dict[str, str] = {"labels": ONE_LOGIT} if outputs_of(self.model) == 1 else {}
        self.classes = number_of_classes(self.model)
        _check_network(self.model, sigma)
        self.format = _fastest_format(self.model, sigma)
        self.model = self.model.to(memory_format=self.format)
        _check_reach(self.plan)
        if eps.dtype != "real":
            self.model = self.model.to(getattr(torch, eps.dtype))
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        kind = "cuda" if self.model.device.type == "cuda" else "cpu"
        self.batch = batch or max(1, min(_DRAWS[kind], _PIXELS[kind] // math.prod(model.input_size)))
        if limit < math.inf:
            self.batch = max(1, min(self.batch, int(limit / _bytes_of_a_draw(self.model))))
        self.together = max(1, min(_MOST_IMAGES, self.batch // 16))
        self._sizes: set[int] = set()
        self._since = 0  # draws since one was compared

    def run_batch(self, batch: Batch) -> SmoothedCertificates:
        """:meth:`run` for images of a data set, with noise drawn by their indices in it."""
        return self.run(batch.images, batch.labels, batch.indices)

    @torch.no_grad()
    def run(
        self, images: Tensor, labels: Tensor | None = None, indices: Sequence[int] | None = None
    ) -> SmoothedCertificates:
        """Certifies a batch.

        Args:
            images: pixels in [0, 1], shape (N, C, H, W).
            labels: true classes, shape (N,), or None.
            indices: indices of the images in their data set, which determine their noise; 0 to N − 1 by default.

        Raises:
            InputError: images or labels are not valid, or a single draw does not fit into memory.
        """
        numbers = range(len(images)) if indices is None else indices
        return self._run(images, labels, numbers)

    @torch.no_grad()
    def again(self, batch: Batch, claimed: Sequence[tuple[int, int]]) -> SmoothedCertificates:
        """Like :meth:`run`, but counts for each image the class and the number of samples in ``claimed``.

        On another machine a draw may round to another class, and drawing would stop at another time. Here the number of
        draws is fixed. ``predicted`` is the class that the draws for the selection select here.
        """
        return self._run(batch.images, batch.labels, batch.indices, claimed)

    @torch.no_grad()
    def classes_of(self, images: Tensor, indices: Sequence[int], draws: range) -> list[Tensor]:
        """The class of each of these draws, -1 for none: one int64 tensor per image; nothing is certified."""
        points, _ = to_lattice(images.to(self.model.device))
        requests = [(image, index, draws) for image, index in zip(points, indices, strict=True)]
        return [torch.from_numpy(classes) for classes in self._classes(requests)]

    @alone
    def _run(
        self,
        images: Tensor,
        labels: Tensor | None,
        numbers: Sequence[int],
        claimed: Sequence[tuple[int, int]] | None = None,
    ) -> SmoothedCertificates:
        images = self.model.check_images(images)
        if labels is not None:
            check_labels(labels, len(images), self.classes)
        points, distances = to_lattice(images.to(self.model.device))
        votes = [
            Votes(self.plan.at(distance), self.classes, claim)
            for distance, claim in zip(distances.tolist(), claimed or repeat(None), strict=False)
        ]
        drawn, before = 0, time.perf_counter()
        while pending := [i for i, vote in enumerate(votes) if vote.requested]:
            if self.watch is not None:
                self.watch(f"{SMOOTHING}, {drawn:,} draws", float(len(votes) - len(pending)))
            drawn += sum(len(votes[i].requested) for i in pending)
            requests = [(points[i], numbers[i], votes[i].requested) for i in pending]
            for i, classes in zip(pending, self._classes(requests), strict=True):
                votes[i].take(classes)
        if drawn:
            self.longest = (time.perf_counter() - before) / drawn * (SELECTION + self.plan.samples)
        radii = torch.tensor([v.plan.radius(v.count, v.samples) for v in votes], dtype=torch.float64)
        return SmoothedCertificates(
            predicted=torch.tensor([v.chosen for v in votes], dtype=torch.int64),
            margin=torch.full((len(votes),), math.nan, dtype=torch.float64),
            radius=radii,
            certified=radii > self.plan.eps,
            method=(SMOOTHING,) * len(votes),
            rigor=(Rigor(self.plan.alpha, self.plan.alpha),) * len(votes),
            labels=None if labels is None else labels.cpu(),
            eps=self.plan.eps,
            dtype=self.settings.dtype,
            sigma=self.plan.sigma,
            alpha=self.plan.alpha,
            seed=self.seed,
            count=torch.tensor([v.count for v in votes], dtype=torch.int64),
            samples=torch.tensor([v.samples for v in votes], dtype=torch.int64),
            selected=torch.tensor([v.selected for v in votes], dtype=torch.int64),
            distance=distances.cpu(),
        )

    def undecided(self, row: Mapping[str, Any]) -> bool:
        """Whether more draws may decide the verdict of an image, given its row."""
        if self.plan.all_samples or "count" not in row:
            return False
        return not self.plan.at(row.get("distance", 0.0)).ends(row["count"], row["samples"])

    def _classes(self, requests: Requests) -> list[NDArray[np.int64]]:
        """The class of each draw, -1 if a logit is NaN: one array per image."""
        per_image: list[list[NDArray[np.int64]]] = [[] for _ in requests]
        for pieces in _packed([draws for _, _, draws in requests], self.batch):
            noisy = [self._noise(requests[i][1], draws).add_(requests[i][0]) for i, draws in pieces]
            classes = self._predict(torch.cat(noisy)).cpu()
            for (i, _), part in zip(pieces, classes.split([len(draws) for _, draws in pieces]), strict=True):
                per_image[i].append(part.numpy())
        found = [np.concatenate(parts) for parts in per_image]
        if found and "NaN" not in self.notes and (share := float((np.concatenate(found) < 0).mean())):
            remedy = "; take bfloat16 or float32, which hold larger numbers" if self.dtype == "float16" else ""
            self.notes["NaN"] = f"{share:.0%} of {sum(map(len, found))} draws give NaN in {self.dtype}{remedy}"
            warnings.warn(self.notes["NaN"], stacklevel=2)
        return found

    def _noise(self, index: int, draws: range) -> Tensor:
        return noise(self.seed, index, draws, self.model.input_size, self.plan.sigma, self.model.device)

    def _predict(self, images: Tensor) -> Tensor:
        """Classes of images on the lattice; in parts if memory runs out; -1 if a logit is NaN."""
        try:
            logits = self._logits(images)
            # Draws are independent only if the logits of each do not depend on the others.
            new, size = len(images) not in self._sizes, len(images)
            self._since += size
            if new or self._since >= _EVERY:
                self._sizes.add(size)
                self._since = 0
                tolerance = _tolerance(self.model, logits) * (1 if new else _LATER)
                for place in {0, size // 2, size - 1} if new else {int(images[0].sum()) % size}:  # of random noise
                    one = slice(place, place + 1)
                    if not same_logits(self._logits(images[one]), logits[one], tolerance, logits):
                        raise InputError(_DEPENDS)
            return logits.argmax(1).masked_fill(logits.isnan().any(1), -1)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, LipcertError):
                raise
            if not is_out_of_memory(error):
                raise InputError(f"the network does not run on {len(images)} images: {first_line(error)}") from error
            if len(images) == 1:
                raise InputError(f"memory does not hold the network's forward pass: {first_line(error)}") from error
        half = (len(images) + 1) // 2
        self.batch = min(self.batch, half)
        return torch.cat([self._predict(part) for part in (images[:half], images[half:])])

    def _logits(self, images: Tensor) -> Tensor:
        with without_autocast(self.model.device):
            return cast(Tensor, self.model(from_lattice(images, self.model.dtype).to(memory_format=self.format)))


def _bytes_of_a_draw(model: Model) -> float:
    """An estimate of the memory of one image in a forward pass."""
    sizes = [1]
    hook = register_module_forward_hook(lambda _module, _images, result: sizes.append(getattr(result, "nbytes", 0)))
    try:
        model(torch.zeros(1, *model.input_size, dtype=model.dtype, device=model.device))
    finally:
        hook.remove()
    return float(_COPIES * max(sizes))


def _packed(ranges: Sequence[range], size: int) -> Iterator[list[tuple[int, range]]]:
    """Splits ranges into pieces and yields groups of at most ``size`` draws, as (index of the range, piece) pairs."""
    pack: list[tuple[int, range]] = []
    room = size
    for i, draws in enumerate(ranges):
        while draws:
            piece, draws = draws[:room], draws[room:]
            pack.append((i, piece))
            room -= len(piece)
            if not room:
                yield pack
                pack, room = [], size
    if pack:
        yield pack


def plan_of(model: Model, settings: CertifySettings) -> Plan:
    """The sampling plan for images of the model, with the settings' σ."""
    sigma = cast(float, settings.sigma)
    error = math.prod(model.input_size) * cells(sigma, model.device).error
    alpha, whole = float(settings.alpha), settings.all_samples
    return Plan(settings.eps, sigma, settings.samples, alpha, whole, settings.futility, error)


def _check_reach(plan: Plan) -> None:
    """Refuses a plan that cannot certify anything, even if all draws agree."""
    best = plan.radius(plan.samples, plan.samples)
    if not best:
        raise InputError(
            f"{plan.samples} samples are too few for any radius at alpha {plan.alpha:g}, even if all agreed; take more"
        )
    if not (plan.reaches or plan.all_samples):
        raise InputError(
            f"{plan.samples} samples at alpha {plan.alpha:g} and sigma {plan.sigma:g} reach radii of {best:.3g} at "
            f"most, and eps is {plan.eps:.3g}; take more samples or a larger sigma"
        )


@torch.no_grad()
def _copied(model: Model) -> Model:
    """A copy for evaluation of a network whose code is examined as that of other certificates.

    Refuses a network whose copy computes something else, as hooks that refer to the network may.
    """
    copied = copy_of(model).eval()
    image = from_lattice(noise(0, 0, range(1), model.input_size, 1.0, model.device), model.dtype)
    with without_autocast(model.device):
        code = copy_of(copied).float() if model.dtype.itemsize < 4 else copied  # half types round by much
        try:
            examine(code, image.to(code.dtype))
        except InputError:
            if code is copied:
                raise
            examine(copied, image)  # whose code names its type
        if not (model.training or same_logits(copied(image), model(image), _tolerance(model, image))):
            raise UnsupportedCode([("hooks or functions that refer to the network itself, not to its copy", "")])
    return copied


@torch.no_grad()
def _check_network(model: Model, sigma: float) -> None:
    """Refuses a network whose logits for an image depend on its batch: draws would not be independent.

    A batch of noisy images is compared with each of them alone.
    """

    def in_both(net: Model, images: Tensor) -> tuple[Tensor, Tensor]:
        return net(images), torch.cat([*map(net, images.split(1))])

    if not _agree(model, _noisy(model, sigma), in_both):
        raise InputError(_DEPENDS)


def _noisy(model: Model, sigma: float) -> Tensor:
    """A grey image with little noise and with much, float64."""
    spread = torch.tensor(_SPREAD, device=model.device).view(-1, 1, 1, 1)
    drawn = noise(0, 0, range(len(_SPREAD)), model.input_size, sigma, model.device)
    return 0.5 + spread / sigma * from_lattice(drawn, torch.float64)


def _agree(model: Model, images: Tensor, runs: Callable[[Model, Tensor], tuple[Tensor, Tensor]]) -> bool:
    """Whether two ways to run a network give the same logits; in float64, if it runs there, rounding hides less."""
    with without_autocast(model.device), without_cudnn():  # which computes in TF32, by kernels that depend on the batch
        try:
            one, two = runs(copy_of(model).double(), images.double())
            tolerance = _ROUNDING_DOUBLE if one.dtype == torch.float64 else _ROUNDING[torch.float32]
        except Exception:  # code in another type, or a device without float64
            one, two = runs(model, images.to(model.dtype))
            tolerance = _tolerance(model, one)
    return same_logits(one, two, tolerance, two)


@torch.no_grad()
def _fastest_format(model: Model, sigma: float) -> torch.memory_format:
    """Channels last, in which convolutions are faster and all else is as fast, unless the network's code needs others.

    A ``view`` may not accept the strides, and ``as_strided`` reads other pixels.
    """

    def in_both(net: Model, images: Tensor) -> tuple[Tensor, Tensor]:
        converted = copy_of(net).to(memory_format=torch.channels_last)
        return converted(images.to(memory_format=torch.channels_last)), net(images)

    try:
        same = _agree(model, _noisy(model, sigma), in_both)
    except RuntimeError:
        same = False
    return torch.channels_last if same else torch.contiguous_format


def _tolerance(model: Model, logits: Tensor) -> float:
    """How much of their size logits may change with the batch; cuDNN may compute in TF32, which depends on it."""
    coarse = logits.is_cuda and torch.backends.cudnn.enabled
    return _ROUNDING_HALF if coarse else _ROUNDING.get(model.dtype, _ROUNDING_HALF)
