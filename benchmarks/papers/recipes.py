"""What a table of a paper is made of, and the commands that make its rows.

Figures of a row stand in the order of its table's columns; None is a figure that the paper does not give. Shares are
in percent, as the papers print them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.papers.presets import PRESETS, Preset
from lipcert.settings import MethodName

CIFAR = "cifar10"
ACCURACY = ("clean", "pgd", "certified")
EPS = "36/255"
NO_DATA = "CIFAR-10: --data cifar10=FOLDER"
IMAGES = {"mnist": 60_000, CIFAR: 50_000, "cifar100": 50_000, "tinyimagenet": 100_000, "imagenet": 1_281_167}


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: method and network, as in the paper.
        paper: its figures.
        data: data set by name; None where the row needs none.
        model: of timm's registry, where this package has the network.
        recipe: one of :data:`RECIPES`; None for methods of others, which are quoted alone.
        eps: ε.
        model_args: as ``--model-args`` takes them.
        training: one of :data:`TRAININGS`; None for recipes that take their numbers from :data:`PRESETS`.
        sparsity: weight of the sparsity loss in place of the training's.
        checkpoint: a file with the pretrained weights, in place of timm's.
    """

    name: str
    paper: tuple[float | None, ...]
    data: str | None = None
    model: str | None = None
    recipe: str | None = None
    eps: str = EPS
    model_args: str = ""
    training: str | None = None
    sparsity: float | None = None
    checkpoint: str | None = None


@dataclass(frozen=True)
class Table:
    """One table or figure.

    Attributes:
        paper: ``"certvit"``, ``"lofast"``, ``"liresnet"`` or ``"local-lip"``.
        number: such as ``"1"`` or ``"figure 4"``.
        title: what it shows.
        columns: names of the figures.
        rows: its lines.
        measure: the function of :mod:`benchmarks.papers.measures` that makes it; None where its rows are trained.
        needs: what it takes that is not at hand, in a sentence. Rows with a recipe are run when ``--data`` names their
            data set; without it their commands are printed.
        settings: hyper-parameters, of tables that list them.
        ordered: the figure by which methods are compared; small is better for seconds.
        note: what a reader of the paper should know.
    """

    paper: str
    number: str
    title: str
    columns: tuple[str, ...] = ACCURACY
    rows: tuple[Row, ...] = ()
    measure: str | None = None
    needs: str = ""
    settings: Sequence[Mapping[str, object]] = ()
    ordered: str = "certified"
    note: str = ""


@dataclass(frozen=True)
class Given:
    """What a function of :mod:`benchmarks.papers.measures` is given.

    Attributes:
        small: the scale is small.
        data: folder of CIFAR-10 with ``train.tar`` and ``test.tar``.
        kept: folder for trained networks.
    """

    small: bool
    data: str | None = None
    kept: Path = Path()


@dataclass(frozen=True)
class Training:
    """Hyper-parameters of training from scratch, by data set.

    Attributes:
        source: table or section of the paper.
        batch: images a step.
        epochs: passes over the images.
        lr: the largest learning rate.
        warmup: epochs in which it rises.
        schedule: how it falls.
        decay_from: the epoch after which ``exponential`` falls.
        last_lr: the learning rate at the end.
        over: ε of training over ε of the test.
        until: the epochs in which ε rises.
        sparsity: weight of the sparsity loss, λ_sparse.
        upper_weight: that of upper thresholds in it, λ_θ.
        power: power iterations an update.
        optimizer: of ``finetune``.
    """

    source: str
    batch: int
    epochs: int
    lr: float = 1e-3
    warmup: int = 0
    schedule: str = "cosine"
    decay_from: int = 0
    last_lr: float | None = None
    over: float = 1.0
    until: int = 0
    sparsity: float = 0.0
    upper_weight: float = 0.0
    power: int = 2
    optimizer: str = "adam"

    @property
    def updates(self) -> str:
        """The options of ``finetune`` for optimizer, learning rate and norms."""
        parts = [f"--optimizer {self.optimizer} --lr {self.lr} --schedule {self.schedule}"]
        parts += [f"--warmup {self.warmup / self.epochs:.4g} --power-iterations {self.power}"]
        parts += [f"--decay-from {self.decay_from / self.epochs:.4g}"] if self.schedule == "exponential" else []
        parts += [f"--last-lr {self.last_lr}"] if self.last_lr else []
        return " ".join(parts)


@dataclass(frozen=True)
class Recipe:
    """Commands that make a row: arguments of ``lipcert``, with names in braces for what the row and the scale say.

    Attributes:
        source: equations that the commands are from; the numbers are from the row's training.
        steps: one command after the other; each takes the model that the one before wrote.
        methods: certificates of the last model.
        pretrained: the first command starts from timm's weights.
    """

    source: str
    steps: tuple[str, ...]
    methods: tuple[MethodName, ...]
    pretrained: bool = False


_ON = "finetune --data {train} {limit} --eps {eps} --batch-size {batch} --epochs {epochs}"
_TRAIN = f"{_ON} {{updates}}"
_RAMPED = f"{_TRAIN} --ramp {{ramp}}"
# Section 3.5 of CertViT: "similar to retraining after magnitude based pruning"; the learning rate is not said.
_RETRAIN = f"{_ON} {{tuning}} --loss ce --keep-zeros"
_FAITHFUL = (
    "constrain --data {train} --limit {calibration} --engine faithful --point sparse --eta {eta} "
    "--relaxation {relaxation} --iterations {iterations} --projection-epochs {projections} "
    "--mini-batches {parts}"
)
_AS_PRINTED, _AS_QUANTILE = f"{_FAITHFUL} --beta {{beta}}", f"{_FAITHFUL} --quantile {{beta}}"
_OURS = ("constrain --data {train} --limit {calibration}", f"{_ON} {{tuning}} --loss gloro")
_LOCAL = f"{_RAMPED} --sparsity {{sparsity}} --upper-weight {{upper}} --loss local-"
_EMMA = f"{_ON} {{updates}} --ramp 0.1,2,0.5 {{strong}} --loss "
_TO_L2 = "convert --attention l2 --norm smooth --data {train}"
_ADAPT = f"{_TRAIN} --loss ce --only *.attn.*"
_CE = f"{_TRAIN} --loss ce"
_CERTVIT, _FIGURE_3 = (
    "CertViT, algorithms 1 to 3, equations 9 to 13, section 3.5",
    "CertViT, figure 3 and algorithms 1 to 3",
)
_OF_LIPCERT = "lipcert: least spectral norms (docs/theory.md), then GloRo"
_PLAIN: tuple[MethodName, ...] = ("gloro", "local")
_SMOOTH: tuple[MethodName, ...] = ("gloro", "anchored")
RECIPES = {
    "standard": Recipe("cross-entropy", (_CE,), ("gloro",)),
    "lmt": Recipe("Tsuzuku et al. 2018", (f"{_RAMPED} --loss lmt",), ("gloro",)),
    "gloro": Recipe("LiResNet, equation 1", (f"{_RAMPED} --loss gloro",), _PLAIN),
    "local-b": Recipe("Local-Lip, equations 6, 21 to 29", (f"{_LOCAL}b",), _PLAIN),
    "local-g": Recipe("Local-Lip, equations 6, 21 to 29", (f"{_LOCAL}g",), _PLAIN),
    **{
        f"local-b, random {steps}": Recipe(
            "Local-Lip, section 4", (f"{_LOCAL}b --vectors random --power-iterations {steps}",), _PLAIN
        )
        for steps in (2, 5, 10)
    },
    "certvit": Recipe(_CERTVIT, (_CE, _AS_PRINTED, _RETRAIN), _PLAIN),
    "certvit, quantile": Recipe(f"{_CERTVIT}, the authors' scripts", (_CE, _AS_QUANTILE, _RETRAIN), _PLAIN),
    "lipcert": Recipe(_OF_LIPCERT, (_CE, *_OURS), _PLAIN),
    "certvit-l2": Recipe(_FIGURE_3, (_CE, _TO_L2, _ADAPT, _AS_PRINTED, _RETRAIN), _SMOOTH),
    "certvit-l2, quantile": Recipe(
        f"{_FIGURE_3}, the authors' scripts", (_CE, _TO_L2, _ADAPT, _AS_QUANTILE, _RETRAIN), _SMOOTH
    ),
    "lipcert-l2": Recipe(_OF_LIPCERT, (_CE, _TO_L2, _ADAPT, *_OURS), _SMOOTH),
    "certvit-pretrained": Recipe(_FIGURE_3, (_TO_L2, _ADAPT, _AS_PRINTED, _RETRAIN), _SMOOTH, pretrained=True),
    "certvit-plain": Recipe(_FIGURE_3, (_AS_PRINTED, _RETRAIN), ("gloro",), pretrained=True),
    "emma": Recipe("LiResNet, definition 3 and appendix B.1", (f"{_EMMA}emma",), ("gloro",)),
    "trades": Recipe("LiResNet, section 5.2 and appendix B.1", (f"{_EMMA}trades",), ("gloro",)),
}
# What the paper does and full scale does not, or does in a way that the paper leaves open; by the start of a recipe.
DIFFERENCES = {
    "": "each network is trained once, without the paper's own random numbers",
    "gloro": "table 7 of CertViT names the schedule of ε single: here ε rises over half the epochs; the learning rate "
    "falls exponentially over the second half",
    "lmt": "as gloro",
    "local": "all images start power iteration from one vector of each layer, the paper from one of each image "
    "(--vectors); warm-up epochs are those of the learning rate; images are shifted by 4 pixels and flipped, but for "
    "MNIST, which the paper does not say",
    "certvit": "10,000 images constrain the layers, the paper's number is not said; y of equation 10 is the output of "
    "a layer as in equation 13, not what the activation makes of it; learning rate and epochs of the last step are not "
    "in the paper",
    "lipcert": "no row of a paper",
    "emma": "RandAugment is timm's, of the same strength as torchvision's default; Lookahead has timm's defaults",
    "trades": "as emma",
}

_SMALL_EPS = 36 / 255
_LONG = Training("LiResNet, appendix B.1", 256, 800, warmup=20, optimizer="nadam")


def _seven(epochs: int, warmup: int, over: float, lr: float = 1e-3, last: float = 5e-6) -> Training:
    half = epochs // 2
    return Training("CertViT, table 7", 512, epochs, lr, warmup, "exponential", half, last, over, half, power=5)


def _local(source: str, batch: int, epochs: int, warmup: int, decay: int, until: int, **more: Any) -> Training:
    last: dict[str, Any] = {"last_lr": 5e-6, "over": 0.1551 / _SMALL_EPS, **more}
    return Training(source, batch, epochs, warmup=warmup, schedule="exponential", decay_from=decay, until=until, **last)


_TINY: dict[str, Any] = {
    "lr": 2.5e-4, "last_lr": 5e-7, "over": 0.16 / _SMALL_EPS, "sparsity": 0.01, "upper_weight": 0.1, "power": 1
}  # fmt: skip
_EIGHT, _THREE = "CertViT, table 8", "Local-Lip, table 3"
_CIFAR_3 = _local(_THREE, 256, 800, 20, 400, 400, last_lr=1e-6)
# By what a row names, then by data set.
TRAININGS: dict[str, dict[str, Training]] = {
    "CertViT, table 7": {
        "mnist": _seven(500, 5, 1.74 / 1.58), CIFAR: _seven(800, 15, 0.16 / _SMALL_EPS),
        "cifar100": _seven(800, 30, 0.16 / _SMALL_EPS),
        "tinyimagenet": _seven(500, 35, 0.16 / _SMALL_EPS, 2.5e-4, 5e-7),
    },
    _EIGHT: {
        "mnist": _local(_EIGHT, 256, 300, 0, 150, 150, over=1.0, power=5),
        CIFAR: _local(_EIGHT, 256, 300, 5, 200, 200, power=5), "cifar100": _local(_EIGHT, 256, 800, 20, 400, 400),
        "tinyimagenet": _local(_EIGHT, 128, 250, 30, 150, 125, **_TINY),
    },
    "CertViT, table 9": {
        name: Training(
            "CertViT, table 9", PRESETS[name].batch_size, PRESETS[name].epochs,
            2.5e-4 if name == "tinyimagenet" else 1e-3, schedule="multistep" if name == "mnist" else "cosine",
            last_lr=None if name == "mnist" else 1e-5,
        )
        for name in ("mnist", CIFAR, "cifar100", "tinyimagenet")
    },
    "LiResNet, appendix B.1": {
        CIFAR: _LONG, "cifar100": _LONG, "tinyimagenet": _LONG,
        "imagenet": replace(_LONG, batch=1024, epochs=400),
    },
    _THREE: {
        "mnist": _local(_THREE, 256, 300, 0, 150, 150, over=1.0, power=5), CIFAR: _CIFAR_3,
        "tinyimagenet": _local(_THREE, 128, 250, 0, 150, 125, **_TINY),
    },
    "Local-Lip, table 3, MaxMin": {
        CIFAR: _CIFAR_3,
        "tinyimagenet": _local(_THREE, 128, 250, 0, 150, 125, **{**_TINY, "lr": 1e-4, "power": 3}),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """How much of a table is run; None stands for what the paper says, and for all images.

    Attributes:
        images: training images.
        tested: test images, by certificate.
        attacked: test images that PGD attacks.
        batch: images a step.
        epochs: passes over the images.
        calibration: images that layers are constrained on.
        thinner: what the widths of the LiResNets are divided by.
        optimizers: in place of the paper's, with its learning rate, by what the name of a network starts with; images
            are then shifted and flipped.
        ramp: schedule of ε in place of the paper's, for all losses that have one but EMMA and TRADES.
        sizes: arguments of networks in place of the paper's, by what the name of a network starts with.
        longer: training images, images a step and epochs in place of these, by what the name of a network starts with.
        data: the data sets that are taken without ``--data``; None for all.
    """

    images: int | None
    tested: Mapping[MethodName, int]
    attacked: int
    batch: int | None
    epochs: int | None
    calibration: int
    thinner: int = 1
    optimizers: Mapping[str, str] = field(default_factory=dict)
    ramp: str | None = None
    sizes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    longer: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    data: tuple[str, ...] | None = None

    def passes(self, model: str | None) -> tuple[int | None, int | None, int | None]:
        """Training images, images a step and epochs of a network."""
        fitting = [start for start in self.longer if (model or "").startswith(start)]
        return self.longer[max(fitting, key=len)] if fitting else (self.images, self.batch, self.epochs)

    def updates(self, model: str | None) -> str | None:
        """Options of ``finetune`` that stand in place of the paper's."""
        fitting = [start for start in self.optimizers if (model or "").startswith(start)]
        return f"--optimizer {self.optimizers[max(fitting, key=len)]} --crop shift" if fitting else None

    def described(self) -> dict[str, object]:
        """What the rows of a table have in common, for the file of results."""
        return {name: dict(v) if isinstance(v, Mapping) else v for name, v in vars(self).items() if name != "data"}


_TRIAL = {
    "liresnet": {"depth": "2", "width": "8", "num_features": "16"}, "liresnet_vit": {"depth": "1"},
    "certvit": {"embed_dim": "48", "depth": "1"},
}  # fmt: skip
SCALES = {
    "trial": Scale(16, {"gloro": 4, "local": 1, "anchored": 1}, 2, 8, 1, 10, 16, {}, None, _TRIAL),
    "small": Scale(
        2000, {"gloro": 2000, "local": 200, "anchored": 8}, 32, 32, 3, 200, 16,
        {"": "adamw --lr 1e-3", "liresnet": "muon --lr 1e-2"}, "0,1.1,0.5",
        {"certvit": {"embed_dim": "96", "depth": "2"}}, {"lip_convnet": (2000, 16, 4)}, (),
    ),
    "full": Scale(None, {"gloro": 10_000, "local": 10_000, "anchored": 10_000}, 10_000, None, None, 10_000),
}  # fmt: skip


def preset_of(row: Row) -> Preset:
    """The hyper-parameters of CertViT's tables 9 and 10 for the row's network, or for its data set."""
    fitting = [name for name in PRESETS if (row.model or "").startswith(name)]
    return PRESETS[max(fitting, key=len) if fitting else row.data if row.data in PRESETS else CIFAR]


def values_of(row: Row, scale: Scale, train: str) -> dict[str, object]:
    """What the braces of a recipe stand for."""
    preset = preset_of(row)
    stated = TRAININGS[row.training][str(row.data)] if row.training else None
    updates = scale.updates(row.model)
    known = stated or Training("CertViT, table 10", preset.batch_size, preset.epochs)
    images, batch, epochs = scale.passes(row.model)
    moved = "--crop none" if row.data == "mnist" else "--crop shift"
    return {
        "train": shlex.quote(train), "eps": row.eps, "eta": preset.eta, "beta": preset.beta,
        "relaxation": preset.relaxation, "iterations": preset.iterations, "projections": preset.projection_epochs,
        # of the images, every fifth is held out
        "parts": max(1, round(0.8 * scale.calibration / (batch or preset.batch_size))),
        "ramp": scale.ramp or f"0,{known.over:.4g},{known.until / known.epochs:.4g}",
        "updates": updates or f"{known.updates} {moved}",
        "tuning": updates or f"--optimizer adam --lr 3e-4 {moved}",
        "strong": "" if updates else "--randaugment rand-m9-n2" + " --cutout 0.5" * (row.data == "tinyimagenet"),
        "sparsity": known.sparsity if row.sparsity is None else row.sparsity, "upper": known.upper_weight,
        "batch": batch or known.batch, "epochs": epochs or known.epochs,
        "limit": f"--limit {images}" if images else "", "calibration": scale.calibration,
    }  # fmt: skip


def differences(rows: Sequence[Row]) -> list[str]:
    """What full scale does otherwise than the paper, in the recipes of these rows; a line each."""
    used = {str(row.recipe).partition("-")[0].partition(",")[0] for row in rows if row.recipe and row.model}
    return [line for start, line in DIFFERENCES.items() if not start or start in used]


def trained(
    name: str, data: str, model: str | None, recipe: str | None, *paper: float | None, eps: str = EPS,
    training: str | None = None, act: str = "", size: str = "", sparsity: float | None = None,
) -> Row:  # fmt: skip
    """A row that is trained, with the arguments that the data set and the recipe ask of the network.

    Args:
        name: as in :class:`Row`, like those that are not named here.
        data: likewise.
        model: likewise.
        recipe: likewise.
        *paper: the paper's figures.
        eps: likewise.
        training: likewise.
        act: the activation of a convolutional network; by default what its recipe takes.
        size: arguments of the network besides those.
        sparsity: likewise.
    """
    own = (model or "").startswith("certvit")  # knows the size and channels of its images
    plain = (model or "").startswith("lip_convnet")
    eight = (model or "").startswith("lip_convnet_8c2f")  # is made for images of 64×64
    arguments = [size]
    if model is not None and not own and not (recipe and RECIPES[recipe].pretrained):
        arguments.append(
            {"mnist": "in_chans=1 img_size=28", "tinyimagenet": "num_classes=200 img_size=64"}.get(data, "")
        )
        arguments.append("img_size=32" if eight and data in (CIFAR, "cifar100") else "")
    elif own and data == "tinyimagenet":
        arguments.append("num_classes=200")
    arguments.append("num_classes=100" if data == "cifar100" and model is not None else "")
    if plain:
        # The clipped ReLU is Local-Lip's; by its sizes, CertViT has it but for MNIST, and no biases.
        certvit = (training or "").startswith("CertViT")
        relu = not str(recipe).startswith("local") and (data == "mnist" or not certvit)
        arguments.append("bias=False" if certvit else "")
        arguments.append(f"act_layer={act}" if act else "act_layer=relu" if relu else "")
    joined = " ".join(argument for argument in arguments if argument)
    return Row(name, paper, data, model, recipe, eps, joined, training if recipe else None, sparsity)
