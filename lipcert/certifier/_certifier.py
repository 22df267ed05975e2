"""Certifies batches of images with one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lipcert import roundoff
from lipcert.attacks import PGD, Adversarial, Attack, smallest
from lipcert.bounds import Analysis, Bound, Progress, analyze, check_batch, margins, radii
from lipcert.certifier._global import Global
from lipcert.certifier._method import NEGLIGIBLE, Subject, forward_pass
from lipcert.certifier._nominal import ENTRIES_AT_ONCE, NominalMargins
from lipcert.certifier._staged import budgets, prepare, run
from lipcert.certifier._triage import Screening, first_order_limit
from lipcert.denoisers import check_noise
from lipcert.errors import (
    BrokenCertificate,
    InputError,
    LipcertError,
    UnsupportedCode,
    UnsupportedOperation,
    first_line,
)
from lipcert.graph import (
    ONE_LOGIT,
    confirm,
    examine,
    logits,
    outputs_of,
    same_logits,
    same_operations,
    unchecked,
    without_fused_kernels,
)
from lipcert.inputs.artifact import seed_of
from lipcert.model import Model, alone, check_labels, copy_of
from lipcert.norms import Budget, Rigor
from lipcert.numerics import Certificates, check_environment, give_back, is_out_of_memory, memory_left
from lipcert.settings import SMOOTHING, STAGED, CertifySettings, parse_eps, parse_memory, settings_of, takes

if TYPE_CHECKING:
    from lipcert.inputs.data import Batch

# An attack counts as 12 runs of 40 steps.
_PASSES_AN_ATTACK = 1500
# Before methods that need more than this many forward passes for an image, a short attack may rule it out.
_TRIAGE, _PASSES_OF_TRIAGE = PGD(steps=10, restarts=1), 300
# For networks with more floating-point operations per image, rounding of the margins is checked, as the norms that a
# proof needs would take longer than the certificate.
_WORK_OF_A_PROOF = 1e9
# Images are certified together as long as the batch needs at most _WORK_TOGETHER, some ten seconds on a core, or as
# long as one operation needs at most _WORK_OF_A_CALL, because then the overhead of the call exceeds its arithmetic.
_WORK_TOGETHER = 4e11
_WORK_OF_A_CALL = 1e7
_TOGETHER = {"cpu": 32, "cuda": 64}
# The largest number of images if a certificate takes a forward pass, and at most _PASSES with its rounding; there a GPU
# is counted as so many cores.
_FORWARD, _PASSES = {"cpu": 256, "cuda": 2048}, 4
_CORES = {"cpu": 1, "cuda": 100}
# The smallest part of an operation for which a thread is worthwhile; waiting threads cost more than they save. On a CPU
# more than _FEW images are certified together only if an operation on all of them needs less than this.
_WORK_OF_A_THREAD = 1e6
_FEW = 8
# Memory is returned to the system no more often: pages that are used again have to be mapped again.
_SECONDS = 10.0


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
            little, and limited by memory. It is halved if memory runs out.
        watch: called with the running method and the number of finished images of the batch, which may be fractional.

    Args:
        model: the model; it is not changed, and later changes to it do not reach the certifier.
        eps: ε in ℓ2 on pixels in [0, 1], or all settings.
        method: one of ``METHODS``.
        progress: as for :func:`lipcert.lipschitz`, while the bound is computed.
        memory: bytes for the images that are certified at once, or a text such as ``"8GB"``; None for half of what is
            free. By estimates, and at least one image is certified.
        **settings: the other fields of :class:`CertifySettings`.

    Raises:
        InputError: settings or weights are not valid, rounding cannot be bounded, the network is too large for
            deterministic norms, or certificates do not hold under the settings of torch.
        UnsupportedOperation: the model has operations without a rule.
    """

    watch: Callable[[str, float], None] | None = None

    @takes(CertifySettings)
    @alone
    def __init__(
        self,
        model: Model,
        eps: float | str | CertifySettings,
        method: str = "staged",
        *,
        progress: Progress | None = None,
        memory: float | str | None = None,
        **settings: Any,
    ):
        limit = None if memory is None else parse_memory(memory)
        if not isinstance(eps, CertifySettings):
            eps = settings_of(CertifySettings, eps, method, **settings)
        if eps.method == SMOOTHING:
            raise InputError("method smoothing has its own certifier; use lipcert.smoothing.Smoothing")
        check_noise(model)
        self.settings = eps = eps.smoothed(None)
        self.eps, self.method, self.dtype = eps.eps, eps.method, eps.dtype
        self.attack = cast("Attack | None", eps.attack)
        check_environment(model.device, eps.dtype)
        self.model, rounding = _as_deployed(model, eps.dtype)
        self.analysis = analyze(self.model, progress=progress)
        _check_types(model, self.model, rounding)
        if len(self.analysis.output.shape) != 2:
            raise InputError(
                f"the model must return logits (N, classes), it returns shape {self.analysis.output.shape}"
            )
        self._compared, self._seed = 0, seed_of(self.model)
        weights = {tensor.untyped_storage().data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers())}
        read = [tensor for node in self.analysis.graph.nodes for tensor in node.tensors]
        # What the graph reads and no copy of the network holds, such as tensors of closures in hooks.
        self._outside = [(each, each.clone()) for each in read if each.untyped_storage().data_ptr() not in weights]
        flops, size = forward_pass(self.model, self.analysis)
        self.nominal = NominalMargins(self.model, self.analysis, prove=flops <= _WORK_OF_A_PROOF)
        self.subject = Subject(self.model, self.analysis, eps, rounding, self.nominal.bounded, flops, size)
        with _one_line_refusals(self.method):
            self.methods, self.skipped, self.notes = prepare(self.subject)
        if outputs_of(model) == 1:
            _check_sign(self.analysis)
            self.notes["labels"] = ONE_LOGIT
        self.budgets = budgets(self.subject)
        self.delta = 0.0 if eps.rigor == "deterministic" else eps.delta
        self.together = self._images_together(memory_left(self.model.device) / 2 if limit is None else limit)

    def _images_together(self, memory: float) -> int:
        """The number of images, a power of two, whose work and memory stay within the limits."""
        flops, size = self.subject.flops, self.subject.bytes
        kind = "cuda" if self.model.device.type == "cuda" else "cpu"
        largest = max(method.memory for method in self.methods.values())
        slowest = max(method.work for method in self.methods.values())
        if self.attack is not None:
            slowest = max(slowest, _PASSES_AN_ATTACK * flops)
        count = (_TOGETHER if slowest else _FORWARD)[kind]
        # A forward pass, and a look at rounding, take a part of the batch at once.
        in_memory = count if slowest else max(1, int(8 * ENTRIES_AT_ONCE / size))
        work = slowest or _PASSES * flops / _CORES[kind]

        def too_many() -> bool:
            slow = count * work > _WORK_TOGETHER and count * self._call > _WORK_OF_A_CALL
            useless = slowest and kind == "cpu" and count > _FEW and count * self._call > _WORK_OF_A_THREAD
            return bool(slow or useless or min(count, in_memory) * largest > memory)

        while count > 1 and too_many():
            count //= 2
        return count

    @property
    def least(self) -> int:
        """The number of images from which on a batch is worthwhile: more than one where calls are most of its cost."""
        return self.together // 2 if self.costly and self.together > _FEW else 1

    @property
    def _call(self) -> float:
        """Average number of floating-point operations per image in one operation of the network."""
        return self.subject.flops / self.subject.operations

    @property
    def costly(self) -> bool:
        """Whether there is a method that takes more than a forward pass and the global bound."""
        return any(not isinstance(method, Global) for method in self.methods.values())

    @property
    def bound(self) -> Bound:
        """The global Lipschitz bound from pixels to logits."""
        return self.analysis.bound()

    def _says(self, method: str, done: float) -> None:
        if self.watch is not None:
            self.watch(method, done)

    def run_batch(self, batch: Batch) -> Certificates:
        """:meth:`run` for images of a data set."""
        return self.run(batch.images, batch.labels)

    @alone
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
        images = self.model.check_images(images)
        if labels is not None:
            check_labels(labels, len(images), self.analysis.output.shape[1])
        try:
            with _at_most_threads(int(self.together * self._call / _WORK_OF_A_THREAD)):
                results = self._run(images, labels)
            give_back(_SECONDS)  # the holes between matrices of many sizes fill memory over thousands of images
            return results
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
        outputs = self._logits(images)
        if not self._compared and len(images):
            confirm(self.model, self.analysis.graph, images[:1], self.model.real)
            self._compared = 1
        some = slice(0, _FEW)
        if len(images[some]) > self._compared:  # attacks run the network on all images
            check_batch(self.model, images[some].flip(0), outputs[some].flip(0))
            self._compared = len(images[some])
        predicted, computed = margins(outputs.cpu())
        margin = computed.amin(dim=1)
        attacked = self._attacked(images, predicted)
        broken = torch.zeros(len(images), dtype=torch.bool) if attacked is None else attacked.broken.cpu()
        least = radii(computed, self.subject.margins.of(predicted))
        screening = self._screen(images, predicted, labels, broken, least)
        # Where only a negligible radius is left, what rounding takes is not examined, and the radius is 0.
        examined = (least > NEGLIGIBLE * self.eps) | (~screening.ruled_out & self.costly)
        reduced, proved = torch.zeros_like(computed), torch.ones_like(broken)
        reduced[examined], proved[examined] = self.nominal.sound(
            images[examined.to(images.device)], predicted[examined], computed[examined]
        )
        ledger = Budget(self.delta).ledger(len(images), self._seed)
        with _one_line_refusals(self.method):
            verdicts = run(
                self.methods, images, predicted, (computed, reduced), proved, screening.ruled_out, ledger, self._says
            )
        radius = verdicts.radius
        distance = None if attacked is None else self._distance(images, predicted, attacked, radius)
        if distance is not None:
            for place in (distance < radius).nonzero()[:1, 0].tolist():
                raise BrokenCertificate(place, distance[place].item(), radius[place].item(), verdicts.method[place])
        certified = radius > self.eps
        return Certificates(
            predicted,
            margin,
            radius,
            certified,
            tuple(verdicts.method),
            # A probabilistic radius is the largest of all computed ones, so the charges of all of them count.
            tuple(Rigor(spent, self.delta) for spent in (ledger.spent * verdicts.random).tolist()),
            None if labels is None else labels.cpu(),
            self.eps,
            None if distance is None else broken | (distance <= self.eps),
            distance,
            self.dtype,
            tuple("proved" if each else "checked" for each in verdicts.proved.tolist()),
            screening.limit,
            screening.reasons(certified, self.skipped) if self.method == STAGED else (),
        )

    def _logits(self, images: Tensor) -> Tensor:
        """The logits, shape (N, classes), of each image alone: all bounds are for the graph of one image.

        The graph computes them, with the numbers that forward code or hooks had when it was captured.

        Raises:
            InputError: a tensor that the graph reads has changed since, or the network's logits of the first image.
        """
        alone = logits(self.analysis.graph, images)
        same = all(_equal(tensor, before) for tensor, before in self._outside)
        if len(alone) and self._compared:
            with without_fused_kernels():
                same &= same_logits(self.model(images[:1]), alone[:1], 1e-9)
        if not same:
            raise InputError("the network has changed since its certifier was made; make a new Certifier")
        return alone

    def _screen(
        self, images: Tensor, predicted: Tensor, labels: Tensor | None, broken: Tensor, least: Tensor
    ) -> Screening:
        """The reasons against certificates: none, unless certification is staged and has costly methods."""
        none = torch.zeros_like(broken)
        if self.method != STAGED or not self.costly or self.subject.settings.at is not None or not len(images):
            return Screening(None, none, none, none)
        wrong = none if labels is None else predicted != labels.cpu()
        with torch.enable_grad():
            limit = first_order_limit(self.model, images, predicted)
        beyond = limit <= self.eps
        open_images = ~(broken | beyond | wrong) & limit.isfinite() & (least <= self.settings.largest_eps)
        open_images = open_images.nonzero()[:, 0]
        costly = any(method.work > _PASSES_OF_TRIAGE * self.subject.flops for method in self.methods.values())
        if self.attack is None and costly and len(open_images):
            self._says("attack", 0.0)
            index = open_images.to(images.device)
            broken = broken.clone()
            broken[open_images] = _TRIAGE(
                self.model, images[index], predicted.to(images.device)[index], self.eps
            ).broken.cpu()
        return Screening(limit, broken, beyond, wrong)

    def _attacked(self, images: Tensor, predicted: Tensor) -> Adversarial | None:
        """The result of the attack within ε."""
        if self.attack is None or not len(images):
            return None
        self._says("attack", 0.0)
        return self.attack(self.model, images, predicted.to(images.device), self.eps)

    def _distance(self, images: Tensor, predicted: Tensor, adversarial: Adversarial, radius: Tensor) -> Tensor:
        """Distances of the nearest adversarial examples, shape (N,); also searches inside the certified radii."""
        self._says("attack", float(len(images)))
        search = self.attack if isinstance(self.attack, PGD) else PGD()
        classes = predicted.to(images.device)
        adversarial = smallest(search, self.model, images, classes, adversarial, self.eps)
        certified = ((radius > 0) & torch.isfinite(radius)).nonzero()[:, 0].to(images.device)
        if len(certified):
            inside = search(self.model, images[certified], classes[certified], radius.to(images)[certified])
            adversarial = adversarial.with_closer(certified, inside.images, inside.distance)
        return adversarial.distance.cpu()

    @torch.no_grad()
    def logit_bounds(self, images: Tensor, eps: float | str | None = None) -> tuple[Tensor, Tensor]:
        """Bounds on every logit over all images within ℓ2 distance ε, from Lipschitz constants.

        Logit j moves by at most K_j ε, with K_j the constant of the features times ‖w_j‖ of the last layer. A bound on
        round-off in the logits at the image is added; it holds for exact arithmetic.

        Args:
            images: pixels in [0, 1], shape (N, C, H, W).
            eps: ε, positive, a number or a text such as ``"36/255"``; None for that of the certifier.

        Returns:
            Lower and upper bounds, float64, shape (N, classes) each.

        Raises:
            InputError: the certifier is for another arithmetic than ``"real"``, or ε is not a positive number.
            UnsupportedOperation: an operation has no rule for its round-off.
        """
        if self.dtype != "real":
            raise InputError(f"logit bounds are for dtype real, and this certifier is for {self.dtype}")
        images = self.model.check_images(images)
        distance = self.eps if eps is None else parse_eps(str(eps))
        pixels = images.to(self.model.device, torch.float64)
        outputs = self._logits(pixels).cpu()
        error = roundoff.Roundoff(self.model, roundoff.REAL, self.analysis.graph).values(pixels).cpu()
        moved = self.subject.margins.of_logits() * distance + error[:, None]
        moved = (moved + outputs.abs() * 2.0**-52) * (1 + 2.0**-50)  # the roundings of these lines
        return outputs - moved, outputs + moved


@contextmanager
def _one_line_refusals(name: str) -> Iterator[None]:
    """Converts unexpected errors of a method into a one-line InputError."""
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

    Casts inside the copy are the identity, as in real arithmetic. Weights do not need gradients here.
    """
    copied = copy_of(model).requires_grad_(False)
    copied.real = True
    if dtype == "real":
        return copied.double(), None
    rounded = copied.to(roundoff.DTYPES[dtype]).double()
    try:
        with _one_line_refusals(f"--dtype {dtype}"):
            return rounded, roundoff.Roundoff(rounded, dtype)
    except UnsupportedCode:
        raise
    except UnsupportedOperation as error:
        raise InputError(f"there is no bound on rounding in {dtype}: {error}; use dtype real") from error


def _equal(tensor: Tensor, other: Tensor) -> bool:
    """Whether all numbers are the same; NaN is the same as NaN."""
    return tensor.shape == other.shape and bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def _check_sign(analysis: Analysis) -> None:
    """Refuses one output that is never negative, and so always of class 1."""
    lowest = analysis.values[analysis.graph.output.operands[0]].lowest
    if lowest > -1e-9:  # 0 but for rounding
        raise InputError(
            f"the network's one output is never below {lowest:.3g}, as a probability; let the network return the logit "
            "before it, which is positive for class 1 only"
        )


@torch.no_grad()
def _check_types(model: Model, copied: Model, rounding: roundoff.Roundoff | None) -> None:
    """Refuses a network that behaves differently in float64, where bounds are computed, and in its own type."""
    dtype = model.dtype if rounding is None else rounding.format.dtype  # the type of the copy's weights
    image = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0)).to(model.device)
    twin = model if dtype == model.dtype else copy_of(model).to(dtype)
    examined = examine(twin, image.to(dtype))
    images, results = map(torch.cat, examined[:2])
    own, real = (unchecked(net, image.to(net.dtype), lambda part: False) for net in (twin, copied))
    same_operations(own, real, "in another floating-point type")
    examined.refuse_reads()
    if rounding is None:
        exact, limits = copied(images.double()), torch.finfo(dtype)
        rounds = limits.bits == 16 or bool(exact.abs().amax() * limits.eps < limits.tiny)  # by much, or underflows
        if not (rounds or same_logits(exact, results, 1e-3, exact)):
            what = f"autocast, or code that gives other logits in {str(dtype)[6:]} than in float64"
            raise UnsupportedCode([(what, "")])
        return
    images, deployed = images.double(), results.double()
    predicted, all_margins = margins(copied(images))
    lost = (all_margins - (deployed.gather(1, predicted[:, None]) - deployed)).scatter(1, predicted[:, None], 0.0)
    if bool((lost > rounding.margins(images, predicted, torch.zeros(len(images))).to(lost)).any()):
        raise InputError(
            f"the model in {str(dtype)[6:]} is further from real arithmetic than its rounding bounds allow; "
            "use --dtype real, and report this as a defect of lipcert"
        )
