"""``lipcert.certify``: certifies images given in Python and returns a result that can be shown and saved."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.bounds import Progress
from lipcert.certifier import Certifier
from lipcert.errors import InputError
from lipcert.inputs.batches import pair_of
from lipcert.inputs.data import Batch, Images
from lipcert.model import Model, check_eps, checked, outside_inference_mode
from lipcert.numerics import Certificates
from lipcert.results._files import ResultFile
from lipcert.results._parallel import clocks
from lipcert.results._rows import rows
from lipcert.results.description import describe
from lipcert.settings import SMOOTHING, CertifySettings, settings_of, shown, takes
from lipcert.smoothing import SmoothedCertificates, Smoothing

if TYPE_CHECKING:
    from typing import Unpack

    from lipcert.settings import CertifyOptions

_SHOWN = 20
GIVEN_IN_PYTHON = "images given in Python"  # in a summary, in place of a folder


@dataclass(frozen=True, repr=False)
class Result(Certificates):
    """The result of :func:`lipcert.certify` for N images: :class:`lipcert.certifier.Certificates` with a few methods.

    ``len(result)`` is N and ``result[i]`` the row of image i. Iteration yields the rows. Notebooks show a table.
    ``save``, ``to_pandas`` and :func:`lipcert.report` export the result.
    """

    about: Mapping[str, Any] = field(default_factory=dict)  # the description of the run, as in a summary
    hashes: tuple[str, ...] = ()
    seconds: float = 0.0  # by the clock
    cpu_seconds: float = 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows of the images, as :meth:`save` writes them."""
        return map(dict, self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """The row of image i, with ``radius``, ``certified``, ``predicted`` and the other entries of a result row."""
        try:
            return dict(self._rows[index(i)])
        except TypeError as error:
            raise InputError(f"a result is indexed by the number of one image, and not by {i!r:.50}") from error

    def __repr__(self) -> str:
        certified = int(self.certified.sum())
        what = f"{certified} of {len(self)} certified at {self.about.get('eps_typed', self.eps)}"
        if len(self) and (accuracy := self.certified_accuracy) is not None:
            what += f", certified accuracy {100 * accuracy:.1f} %"
        if (place := self.about.get("at")) is not None:
            what += f", for perturbations of the output of {place}"
        return f"<{type(self).__name__}: {what}>"

    def _repr_html_(self) -> str:
        """A table of the first images, for notebooks."""
        names = ("index", "label", "predicted", "radius", "certified", "method")
        columns = [name for name in names if self._rows and name in self._rows[0]]
        lines = [f"<p>{html.escape(repr(self)[1:-1])}</p>", "<table><tr>"]
        lines += [*(f"<th>{name}</th>" for name in columns), "</tr>"]
        for row in self._rows[:_SHOWN]:
            cells = (shown(row[name]) if name == "radius" else html.escape(str(row[name])) for name in columns)
            lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        hidden = len(self) - _SHOWN
        return "".join([*lines, "</table>", f"<p>and {hidden} more</p>" if hidden > 0 else ""])

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``."""
        try:
            import pandas
        except ImportError as error:
            raise InputError("to_pandas needs pandas: pip install pandas; list(result) needs nothing") from error
        return pandas.DataFrame(self._rows)

    def save(self, path: str | Path) -> Path:
        """Writes a result file and its summary, as ``lipcert certify --out`` does."""
        with ResultFile(path, self.about) as file:
            file.absorb(self._rows, None, self.seconds)
        return Path(path)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        batch = Batch(tuple(range(len(self))), torch.zeros(len(self), 0), self.labels)
        return rows(batch, self, self.cpu_seconds, self.hashes)


@dataclass(frozen=True, repr=False)
class SmoothedResult(Result, SmoothedCertificates):
    """:class:`lipcert.smoothing.SmoothedCertificates` with a view."""


class _TensorImages(Images):
    """The description, for a summary, of images given as tensors."""

    stored = True

    def __init__(self, hashes: Sequence[str], labelled: bool):
        super().__init__(GIVEN_IN_PYTHON, total=len(hashes), limit=None)
        self.hashes, self.labelled = hashes, labelled

    @property
    def digest(self) -> str | None:
        return hashlib.sha256("\n".join(self.hashes).encode()).hexdigest()


Pixels = Tensor | np.ndarray | Iterable[Any]


@takes(CertifySettings)
@outside_inference_mode
def certify(
    model: Model | nn.Module,
    images: Pixels,
    labels: Tensor | np.ndarray | Sequence[int] | None = None,
    eps: float | str | Sequence[float | str] | None = None,
    *,
    batch_size: int | None = None,
    memory: float | str | None = None,
    mean: Sequence[float] | float | None = None,
    std: Sequence[float] | float | None = None,
    input_size: Sequence[int] | None = None,
    **settings: Unpack[CertifyOptions],
) -> Result | SmoothedResult:
    """Certifies which predictions no ℓ2 perturbation of the pixels within [0, 1] up to ε changes.

    Method ``"smoothing"`` accepts any network. It certifies another function, the network's smoothed classifier.

    Args:
        model: from :func:`lipcert.load`, or a module that timm made, or a smoothed classifier, for method smoothing; or
            any module, with ``mean``, ``std`` and ``input_size``.
        images: pixels in [0, 1], shape (N, C, H, W), as a tensor or an array; or an iterable of batches, such as a
            DataLoader, where each batch is a tensor of images or a pair of images and labels.
        labels: true classes, shape (N,), or None. Of misclassified images, staged certification computes only the
            global methods.
        eps: ℓ2 radius on pixels in [0, 1], such as ``"36/255"``, or several, such as ``"36/255,0.5"``; required. See
            :meth:`~lipcert.certifier.Certificates.certified_accuracy_at`.
        batch_size: number of images, or of noise draws, computed at once; None chooses it by time and memory.
        memory: bytes for what is computed at once, or a text such as ``"8GB"``; None for half of what is free. Noise
            draws have no such default: their number depends on the device.
        mean: that of the normalisation, for a plain module, as for :func:`lipcert.load`.
        std: likewise.
        input_size: likewise.
        **settings: the fields of :class:`lipcert.certifier.CertifySettings`: ``method``, ``dtype``,
            ``rigor``, ``at``, ``delta``, ``attack``, and ``sigma``, ``samples``, ``alpha``,
            ``all_samples``, ``seed`` for smoothing. An attack gives upper bounds on the radii.

    Returns:
        A :class:`Result` with ``predicted``, ``radius``, ``certified``, ``margin``, ``method``, ``rigor``, each of
        length N; with an attack also ``attacked`` and ``attack_distance``. With smoothing, a :class:`SmoothedResult`.

    Raises:
        InputError: images, labels or settings are not valid.
        BrokenCertificate: the attack changed a prediction inside its certified radius, which is a defect of lipcert.
        UnsupportedOperation: the model has operations without a rule.
    """
    started = clocks()
    asked = settings_of(CertifySettings, *(() if eps is None else (eps,)), **settings)
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise InputError(f"batch_size is a number of images, at least 1, got {batch_size!r}; or leave it out")
    pixels = {"mean": mean, "std": std, "input_size": input_size}
    model = checked(model, **{name: value for name, value in pixels.items() if value is not None})
    asked = asked.smoothed(model.sigma)
    certifier = certifier_for(model, asked, batch=batch_size, memory=memory)
    smoothed = isinstance(certifier, Smoothing)
    parts: list[Certificates] = []
    hashes: list[str] = []
    done = 0
    for given, classes in _batches(images, labels):
        some = model.check_images(given)
        size = certifier.together if smoothed else batch_size or certifier.together
        for i in range(0, max(1, len(some)), size):
            part = slice(i, i + size)
            part_labels = None if classes is None else classes[part]
            batch = Batch(tuple(range(done, done + len(some[part]))), some[part], part_labels)
            parts.append(certifier.run_batch(batch))
            hashes += batch.hashes
            done += len(batch)
    if not parts:
        raise InputError("there are no images; give a tensor of shape (N, C, H, W), or an iterable of such batches")
    joined = Certificates.join(parts)
    about = describe(model, _TensorImages(hashes, joined.labels is not None), certifier, "lipcert.certify")
    columns = {one.name: getattr(joined, one.name) for one in fields(joined)}
    kind = SmoothedResult if smoothed else Result
    seconds = clocks(started)
    return kind(**columns, about=about, hashes=tuple(hashes), seconds=seconds.wall, cpu_seconds=seconds.cpu)


def certifier_for(
    model: Model,
    settings: CertifySettings,
    *,
    progress: Progress | None = None,
    batch: int | None = None,
    memory: float | str | None = None,
) -> Certifier | Smoothing:
    """The certifier for the network itself or for its smoothed classifier, depending on the method."""
    if settings.at is None:
        check_eps(settings.largest_eps, model)
    if settings.method != SMOOTHING:
        return Certifier(model, settings, progress=progress, memory=memory)
    return Smoothing(model, settings, batch=batch, memory=memory)


def _batches(images: Pixels, labels: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields images as tensors, with their classes or None."""
    if isinstance(images, (str, bytes, Mapping)) or not isinstance(images, Iterable):
        pair_of(images)  # says what to give
    if isinstance(images, (Tensor, np.ndarray)):
        yield pair_of((images, labels))
        return
    if labels is not None and isinstance(images, Sized) and getattr(next(iter(images), None), "ndim", 0) == 3:
        each = [pixels for pixels, _ in _batches(images, None)]  # images one by one, as columns have them
        if len({pixels.shape for pixels in each}) > 1:
            raise InputError("images have different sizes; resize them to the model's input")
        listed = isinstance(labels, Iterable) and not isinstance(labels, (Tensor, np.ndarray))
        yield pair_of((torch.cat(each), [*labels] if listed else labels))
        return
    if labels is not None:
        raise InputError("labels come with the batches of a loader, as pairs (images, labels); leave labels out")
    for batch in images:
        pixels, classes = pair_of(batch)
        yield pixels[None] if pixels.dim() == 3 else pixels, classes
