"""Certifies batches of images with one model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pickle import PickleError
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lipcert import roundoff
from lipcert.attacks import PGD, Adversarial, Attack, smallest
from lipcert.bounds import Analysis, Bound, MarginBounds, Progress, analyze, bottom_logit, margins, radii
from lipcert.certifier._local import Local
from lipcert.certifier._lofast import LoFAST
from lipcert.certifier._nominal import NominalMargins
from lipcert.certifier.anchored import Anchored, Behind, DeployedAnchored, anchored
from lipcert.errors import (
    BrokenCertificate,
    InputError,
    LipcertError,
    UnsupportedCode,
    UnsupportedOperation,
    first_line,
)
from lipcert.graph import ONE_LOGIT, across_types, confirm, examine, only_in, outputs_of
from lipcert.inputs.artifact import seed_of
from lipcert.model import Model
from lipcert.norms import Ledger, part_of, rigor_of
from lipcert.numerics import Certificates, check_environment, is_out_of_memory, memory_left
from lipcert.settings import DETERMINISTIC, LINEARISED, SMOOTHING, CertifySettings, settings_of, takes
from lipcert.surgery import ClippedMaxMin, ClippedReLU, MaxMin

if TYPE_CHECKING:
    from lipcert.inputs.data import Batch

# The methods of staged certification, each applied to the images that are still undecided. It omits lofast, because
# anchored includes it.
_STAGES = ("global", "gloro", "local", "anchored")
_STRONGER = ("local", "lofast", "anchored")  # usually stronger than gloro

# Staged certification skips methods that need more floating-point operations per image than _WORK_LIMIT, a minute or
# two on a core. If all norms of Jacobians would need more, it computes those that fit into about ten seconds. The
# search of the local certificate counts as 64 trials with 4 passes for each operation, an attack as 12 runs of 40
# steps.
_WORK_LIMIT = 1e12
_WORK_INSTEAD = 5e10
_PASSES_AN_OPERATION = 256
_PASSES_AN_ATTACK = 1500
# For networks with more floating-point operations per image, rounding of the margins is checked, as the norms that a
# proof needs would take longer than the certificate.
_WORK_OF_A_PROOF = 1e9
# Images are certified together as long as the batch needs at most _WORK_TOGETHER, a few seconds on a core, or as long
# as one operation needs at most _WORK_OF_A_CALL, because then the overhead of the call exceeds its arithmetic.
_WORK_TOGETHER = 1e11
_WORK_OF_A_CALL = 1e7
_TOGETHER = {"cpu": 32, "cuda": 64}
# The smallest part of an operation for which a thread is worthwhile; waiting threads cost more than they save. On a CPU
# more than _FEW images are certified together only if an operation on all of them needs less than this.
_WORK_OF_A_THREAD = 1e6
_FEW = 8
# Memory for the certificate of one image, in multiples of the results of its forward pass.
_COPIES = 16
_TOO_LARGE = "it would take very long for a network of this size; request it with method {}"


class Certifier:
    """Certificates for one model at one ε: the constructor computes the bounds once, and then every batch is cheap.

    The logits are evaluated in float64 on a copy of the model, so rounding in the nominal forward pass is far below any
    relevant margin. The certificate holds for the network in real arithmetic, or, with a ``dtype``, for
    ``model.to(dtype)`` on ``images.to(dtype)``. In that case the possible effect of rounding is subtracted
    (:mod:`lipcert.roundoff`).

    Attributes:
        bound: the global Lipschitz bound.
        skipped: methods that staged certification skips for this model, with reasons.
        notes: further remarks on methods for this model.
        together: number of images certified at once. It is small if each takes long, so that a stopped run loses
            little, and limited by memory. It is halved if memory still runs out.
        watch: called with the running method and the number of finished images of the batch, which may be fractional.

    Args:
        model: the model; it is not changed, and later changes to it do not reach the certifier.
        eps: ε in ℓ2 on pixels in [0, 1], or all settings.
        method: one of ``METHODS``.
        progress: as for :func:`lipcert.lipschitz`, while the bound is computed.
        **settings: the other fields of :class:`CertifySettings`.

    Raises:
        InputError: settings or weights are not valid, rounding cannot be bounded, the network is too large for
            deterministic norms, or certificates do not hold under the settings of torch.
        UnsupportedOperation: the model has operations without a rule.
    """

    watch: Callable[[str, float], None] | None = None

    @takes(CertifySettings)
    def __init__(
        self,
        model: Model,
        eps: float | str | CertifySettings,
        method: str = "staged",
        *,
        progress: Progress | None = None,
        **settings: Any,
    ):
        if not isinstance(eps, CertifySettings):
            eps = settings_of(CertifySettings, eps, method, **settings)
        if eps.method == SMOOTHING:
            raise InputError("method smoothing has a separate certifier, lipcert.smoothing.Smoothing")
        self.settings = eps
        self.eps, self.method, self.dtype, self.rigor = eps.eps, eps.method, eps.dtype, eps.rigor
        self.at, self.passes, self.attack = eps.at, eps.passes, cast("Attack | None", eps.attack)
        dtype, rigor, delta = eps.dtype, eps.rigor, eps.delta
        check_environment(model.device, dtype)
        self.model, self.roundoff = _as_deployed(model, dtype)
        self.analysis = analyze(self.model, progress=progress)
        _check_types(model, self.model, self.roundoff)
        self._confirmed, self._seed = False, seed_of(self.model)
        self._flops, self._results = self._forward_pass()
        self.nominal = NominalMargins(self.model, self.analysis, prove=self._flops <= _WORK_OF_A_PROOF)
        if len(self.analysis.output.shape) != 2:
            raise InputError(
                f"the model must return logits (N, classes), it returns shape {self.analysis.output.shape}"
            )
        self.margin_bounds = MarginBounds(self.analysis)
        self.skipped: dict[str, str] = {}
        self.notes: dict[str, str] = {"labels": ONE_LOGIT} if outputs_of(model) == 1 else {}
        # The methods of an image that are probabilistic share its failure probability.
        self.delta = 0.0 if rigor == "deterministic" else delta
        self.share = part_of(self.delta, 2) if self.method == "staged" else self.delta
        self.stages: dict[str, roundoff.RadiusMethod] = {}
        self._proved: set[str] = set()  # stages that prove what rounding takes of the nominal values
        self._slowest = 0.0 if self.attack is None else _PASSES_AN_ATTACK * self._flops
        chosen = _STAGES if self.method == "staged" else (self.method,)
        for name in chosen if self.at is None else chosen[-1:]:
            with _understood(name):
                self._prepare(name)
        if not self.stages:
            raise InputError(f"no method is left for this model: {'; '.join(self.skipped.values())}")
        # Deterministic and known from the analysis, so no other method needs to return less. It refers to pixels.
        self._least = self._everywhere("gloro") if self.at is None and self.method in _STRONGER else None
        self.together = self._images_together()

    def _prepare(self, name: str) -> None:
        """Prepares one method, or records why staged certification skips it."""
        staged = self.method == "staged"
        if name in ("global", "gloro"):
            self.stages[name] = self._everywhere(name)
        elif name == "local":
            if staged and not _piecewise_linear(self.analysis):
                return  # no unit can become constant, so local bounds equal global ones
            work = _PASSES_AN_OPERATION * len(self.analysis.graph.nodes) * self._flops
            if not self._affords(name, work, _WORK_LIMIT):
                return
            calls = 1 if self.roundoff is None else 2
            local = Local(self.model, analysis=self.analysis, delta=self.share, calls=calls)
            self.stages[name] = self._deployed(
                lambda images, predicted, ledger: (
                    lambda margin, call: local.radius(images, predicted, margin, ledger=ledger, call=call)
                )
            )
        else:
            limit = _WORK_LIMIT
            try:
                method = self._linearized(name, self.passes)
                in_all, work = method.count, method.work
                if staged and self.passes is None and work > limit:
                    method = self._linearized(name, _WORK_INSTEAD / method.plan.work_of_a_pass)
                    work = method.work
                    limit = 2 * _WORK_INSTEAD  # a single operation may already exceed it
            except (UnsupportedOperation, InputError) as error:
                if not staged or self.at is not None:
                    raise
                self.skipped[name] = str(error)
                return
            if not self._affords(name, work, limit if self.passes is None else math.inf):
                return
            if isinstance(method, Behind):
                self.notes[name] = method.described
            if method.plan.chained and self.passes is None:
                self.notes[name] = (
                    f"it computes {len(method.plan.pairs)} norms of {in_all}, and products of norms for the others; "
                    f"request more with passes, or all with method {name}"
                )

            def stage(images: Tensor, predicted: Tensor, ledger: Ledger) -> roundoff.Radii:
                found = method(images, lambda done, total: self._says(name, len(images) * done / total), ledger)
                classes = predicted.to(images.device)
                return lambda margin, call: found.radius(classes, margin.to(images.device)).to(margin.device)

            self.stages[name] = stage if isinstance(method, DeployedAnchored) else self._deployed(stage)
            proves = not method.plan.chained and self.nominal.bounded
            if isinstance(method, Behind):
                proves = method.proves and (method.whole is None or (not method.whole.plan.chained and proves))
            if self.roundoff is None and proves:
                self._proved.add(name)

    def _everywhere(self, name: str) -> roundoff.RadiusMethod:
        """The methods global and gloro."""
        bounds = self.margin_bounds if name == "gloro" else MarginBounds(self.analysis, rows=False)
        return self._deployed(
            lambda images, predicted, ledger: lambda margin, call: radii(margin, bounds.of(predicted))
        )

    def _linearized(self, name: str, passes: float | None) -> LoFAST | Anchored | Behind | DeployedAnchored:
        arguments: dict[str, Any] = {"delta": self.share, "rigor": self.rigor, "passes": passes}
        if name == "lofast":
            return LoFAST(self.model, at=self.at, **arguments)
        if self.roundoff is None:
            eps = self.eps if self.method == "staged" else None
            if self.at is None:
                return anchored(self.model, eps=eps, **arguments)
            return Anchored(self.model, at=self.at, eps=eps, **arguments)
        return DeployedAnchored(self.model, self.dtype, **arguments)

    def _deployed(self, stage: roundoff.RadiusMethod) -> roundoff.RadiusMethod:
        return stage if self.roundoff is None else self.roundoff.deployed(stage)

    def _forward_pass(self) -> tuple[float, float]:
        """Floating-point operations of one forward pass, and the bytes of all its results."""
        image = torch.zeros(1, *self.model.input_size, dtype=torch.float64, device=self.model.device)
        results = sum(8 * math.prod(node.shape) for node in self.analysis.graph.nodes)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.model(image)
        return float(counter.get_total_flops()), float(results)

    def _affords(self, name: str, work: float, limit: float) -> bool:
        """Whether to use a method that needs ``work`` operations per image; only staged certification has a limit."""
        if self.method == "staged" and work > limit:
            self.skipped[name] = _TOO_LARGE.format(name)
            return False
        self._slowest = max(self._slowest, work)
        return True

    def _images_together(self) -> int:
        """The number of images, a power of two, whose work and memory stay within the limits."""
        count = _TOGETHER.get(self.model.device.type, min(_TOGETHER.values()))
        left = memory_left(self.model.device)
        cpu = self.model.device.type == "cpu"

        def too_many() -> bool:
            slow = count * self._slowest > _WORK_TOGETHER and count * self._call > _WORK_OF_A_CALL
            useless = cpu and count > _FEW and count * self._call > _WORK_OF_A_THREAD
            return slow or useless or count * _COPIES * self._results > left / 2

        while count > 1 and too_many():
            count //= 2
        return count

    @property
    def _call(self) -> float:
        """Average number of floating-point operations per image in one operation of the network."""
        return self._flops / len(self.analysis.graph.nodes)

    @property
    def bound(self) -> Bound:
        """The global Lipschitz bound from pixels to logits."""
        return self.analysis.bound()

    def _says(self, stage: str, done: float) -> None:
        if self.watch is not None:
            self.watch(stage, done)

    def run_batch(self, batch: Batch) -> Certificates:
        """:meth:`run` for images of a data set."""
        return self.run(batch.images, batch.labels)

    def run(self, images: Tensor, labels: Tensor | None = None) -> Certificates:
        """Certifies a batch, in parts if memory does not suffice.

        Args:
            images: pixels in [0, 1], shape (N, C, H, W).
            labels: true classes, shape (N,), or None.

        Raises:
            InputError: images or labels are not valid, a single image does not fit into memory, or certificates do not
                hold under the settings of torch.
            BrokenCertificate: the attack changed a prediction inside its certified radius.
        """
        check_environment(self.model.device, self.dtype)
        self.model.check_images(images)
        if labels is not None and tuple(labels.shape) != (len(images),):
            raise InputError(f"labels must have shape ({len(images)},), got {tuple(labels.shape)}")
        classes = self.analysis.output.shape[1]
        if labels is not None and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise InputError(f"labels must be from 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}")
        try:
            with _at_most_threads(int(self.together * self._call / _WORK_OF_A_THREAD)):
                return self._run(images, labels)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(images) == 1:
                raise InputError(
                    f"memory does not hold the certificate of one image: {first_line(error)}; "
                    "try --method gloro, or a machine with more"
                ) from error
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        half = (len(images) + 1) // 2
        self.together = max(1, min(self.together, half))
        parts = [slice(None, half), slice(half, None)]
        return Certificates.join([self.run(images[part], None if labels is None else labels[part]) for part in parts])

    @torch.no_grad()
    def _run(self, images: Tensor, labels: Tensor | None) -> Certificates:
        images = images.to(self.model.device, torch.float64).contiguous()  # otherwise views of them may be copies
        if not self._confirmed and len(images):
            confirm(self.model, self.analysis.graph, images[:1], self.model.real)
            self._confirmed = True
        predicted, computed = margins(self.model(images).cpu())
        margin = computed.amin(dim=1)
        reduced, proved = self.nominal.sound(images, predicted, computed)
        # Linearised methods take off themselves what rounding does, from margins as they were computed.
        linearised = torch.where(proved[:, None], computed, reduced)
        rounding = proved.clone()
        found = self._attacked(images, predicted)
        broken = torch.zeros(len(images), dtype=torch.bool) if found is None else found.broken.cpu()
        radius = torch.zeros(len(images), dtype=torch.float64)
        decided = [next(iter(self.stages))] * len(images)
        ledger = Ledger(self.delta, len(images), self._seed)
        random = torch.zeros(len(images), dtype=torch.bool)  # whether the radius is probabilistic
        for name, stage in self.stages.items():
            hopeless = broken & (name not in DETERMINISTIC and self.method == "staged")
            wanted = ((radius <= self.eps) & ~hopeless).nonzero()[:, 0]
            if not len(wanted):
                continue
            self._says(name, 0.0)
            own = ledger.only(wanted).part(name)
            before = own.spent
            asked = images[wanted], predicted[wanted], own
            with _understood(name):
                itself = name in self._proved
                bounds = stage(*asked)((linearised if itself else reduced)[wanted], 0)
                sure = torch.full_like(proved[wanted], itself) if name in LINEARISED else proved[wanted]
                if self._least is not None:
                    least = self._least(*asked)(reduced[wanted], 0)
                    sure = torch.where(bounds < least, proved[wanted], sure)
                    bounds = torch.maximum(bounds, least)
            larger = bounds >= radius[wanted]
            better = wanted[larger]
            radius[better], random[better] = bounds[larger], (own.spent > before)[larger]
            rounding[better] = sure[larger]
            for place in better.tolist():
                decided[place] = name
        distance = None if found is None else self._distance(images, predicted, found, radius)
        if distance is not None:
            for place in (distance < radius).nonzero()[:1, 0].tolist():
                raise BrokenCertificate(place, distance[place].item(), radius[place].item(), decided[place])
        return Certificates(
            predicted,
            margin,
            radius,
            radius > self.eps,
            tuple(decided),
            # A probabilistic radius is the largest of all computed ones, so the charges of all of them count.
            tuple(rigor_of(chance, self.delta) for chance in (ledger.spent * random).tolist()),
            None if labels is None else labels.cpu(),
            self.eps,
            None if distance is None else broken | (distance <= self.eps),
            distance,
            self.dtype,
            tuple("proved" if each else "checked" for each in rounding.tolist()),
        )

    def _attacked(self, images: Tensor, predicted: Tensor) -> Adversarial | None:
        """The result of the attack within ε."""
        if self.attack is None or not len(images):
            return None
        self._says("attack", 0.0)
        return self.attack(self.model, images, predicted.to(images.device), self.eps)

    def _distance(self, images: Tensor, predicted: Tensor, found: Adversarial, radius: Tensor) -> Tensor:
        """Distances of the nearest adversarial examples, shape (N,); also searches inside the certified radii."""
        self._says("attack", float(len(images)))
        search = self.attack if isinstance(self.attack, PGD) else PGD()
        classes = predicted.to(images.device)
        found = smallest(search, self.model, images, classes, found, self.eps)
        certified = ((radius > 0) & torch.isfinite(radius)).nonzero()[:, 0].to(images.device)
        if len(certified):
            inside = search(self.model, images[certified], classes[certified], radius.to(images)[certified])
            found = found.with_closer(certified, inside.images, inside.distance)
        return found.distance.cpu()

    @torch.no_grad()
    def bottom(self, images: Tensor) -> Tensor:
        """Logits with the ⊥ logit of GloRo at the certifier's ε appended, float64, shape (N, classes + 1)."""
        self.model.check_images(images)
        logits = self.model(images.to(self.model.device, torch.float64)).cpu()
        return bottom_logit(logits, self.margin_bounds, self.eps)


@contextmanager
def _understood(name: str) -> Iterator[None]:
    """Turns unexpected errors of a method into a refusal in one line.

    Raises:
        InputError: an unexpected error occurred.
    """
    try:
        yield
    except LipcertError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{name} cannot handle this network ({type(error).__name__}: {first_line(error)[:200]}); "
            "try another --method or --dtype, and report this as a defect of lipcert"
        ) from error


@contextmanager
def _at_most_threads(count: int) -> Iterator[None]:
    """Limits torch to ``count`` threads, at least one, inside the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, count)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _as_deployed(model: Model, dtype: str) -> tuple[Model, roundoff.Roundoff | None]:
    """A copy in float64 with the weights of the deployed model, and the bounds on its rounding.

    In real arithmetic casts inside the network are the identity. With a ``dtype`` they are kept, because the rounding
    bounds need them. Weights do not need gradients here.
    """
    try:
        copied = copy.deepcopy(model).requires_grad_(False)
    except (RuntimeError, TypeError, PickleError) as error:
        raise InputError(f"the model cannot be copied: {first_line(error)}") from error
    if dtype == "real":
        copied.real = True
        return copied.double(), None
    copied.real = False
    rounded = copied.to(roundoff.DTYPES[dtype]).double()
    try:
        with _understood(f"--dtype {dtype}"):
            return rounded, roundoff.Roundoff(rounded, dtype)
    except UnsupportedCode:
        raise
    except UnsupportedOperation as error:
        raise InputError(f"there is no bound on rounding in {dtype}: {error}; use dtype real") from error


def _check_types(model: Model, copied: Model, rounding: roundoff.Roundoff | None) -> None:
    """Refuses a network that behaves differently in float64, where bounds are computed, and in its own type.

    Args:
        model: the given model.
        copied: its copy in float64.
        rounding: rounding bounds of the deployed type, or None. They must cover the errors on a few images.

    Raises:
        InputError: the rounding error on an image exceeds its bound.
        UnsupportedOperation: the forward code depends on the type, or does not run in it.
    """
    dtype = model.dtype if rounding is None else rounding.format.dtype  # the type of the copy's weights
    image = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0)).to(model.device)
    precise, *_ = examine(copied, image.double(), copied.real)
    looks = examine(model if dtype == model.dtype else copy.deepcopy(model).to(dtype), image.to(dtype))
    across_types(looks[0], precise)
    if rounding is None:
        return
    only_in(dtype, looks[0])
    seen = torch.cat([found.image for found in looks]).double()
    predicted, all_margins = margins(copied(seen))
    deployed = torch.cat([found.result for found in looks]).double()
    lost = (all_margins - (deployed.gather(1, predicted[:, None]) - deployed)).scatter(1, predicted[:, None], 0.0)
    if bool((lost > rounding.margins(seen, predicted, torch.zeros(len(seen))).to(lost)).any()):
        raise InputError(
            f"the model in {str(dtype)[6:]} is further from real arithmetic than its rounding bounds allow; "
            "use --dtype real, and report this as a defect of lipcert"
        )


def _piecewise_linear(analysis: Analysis) -> bool:
    """Whether the network has units that can be constant on a ball."""
    kinds = {"relu", "leaky_relu", "hardtanh", "clamp", "max_pool2d", ClippedReLU, MaxMin, ClippedMaxMin}
    return any(node.op in kinds for node in analysis.graph.nodes)
