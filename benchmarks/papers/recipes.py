"""What a table of a paper is made of, and the commands that make its rows.

Figures of a row stand in the order of its table's columns; None is a figure that the paper does not give. Shares are
in percent, as the papers print them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
        over: ε of training over ε of the test.
        sparsity: weight of the sparsity loss.
        schedule: of the learning rate.
        until: share of the run in which ε rises.
    """

    source: str
    batch: int
    epochs: int
    lr: float = 1e-3
    over: float = 1.0
    sparsity: float = 0.0
    schedule: str = "cosine"
    until: float = 0.5


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
# Section 3.5 of CertViT says fine-tuning and no learning rate.
_TUNE = f"{_ON} {{tuning}} --loss gloro"
_CONSTRAIN = "constrain --data {train} --limit {calibration} --keep activations --eta {eta}"
_LOCAL = f"{_TRAIN} --ramp {{ramp}} --sparsity {{sparsity}} --loss local-"
_EMMA = f"{_ON} {{updates}} --ramp 0.1,2,0.5 {{strong}} --loss "
_TO_L2 = "convert --attention l2 --norm smooth --data {train}"
_ADAPT = f"{_TRAIN} --loss ce --only *.attn.*"
RECIPES = {
    "standard": Recipe("cross-entropy", (f"{_TRAIN} --loss ce",), ("gloro",)),
    "gloro": Recipe("LiResNet, equation 1", (f"{_TRAIN} --ramp {{ramp}} --loss gloro",), ("gloro", "local")),
    "local-b": Recipe("Local-Lip, equations 6, 21 to 29", (f"{_LOCAL}b",), ("gloro", "local")),
    "local-g": Recipe("Local-Lip, equations 6, 21 to 29", (f"{_LOCAL}g",), ("gloro", "local")),
    "certvit": Recipe(
        "CertViT, equations 9 to 13 and section 3.5", (f"{_TRAIN} --loss ce", _CONSTRAIN, _TUNE), ("gloro", "local")
    ),
    "certvit-l2": Recipe(
        "CertViT, figure 3 and section 3.6",
        (f"{_TRAIN} --loss ce", _TO_L2, _ADAPT, _CONSTRAIN, _TUNE),
        ("gloro", "anchored"),
    ),
    "certvit-pretrained": Recipe(
        "CertViT, figure 3 and section 4.2", (_TO_L2, _ADAPT, _CONSTRAIN, _TUNE), ("gloro", "anchored"), pretrained=True
    ),
    "emma": Recipe("LiResNet, definition 3 and appendix B.1", (f"{_EMMA}emma",), ("gloro",)),
    "trades": Recipe("LiResNet, section 5.2 and appendix B.1", (f"{_EMMA}trades",), ("gloro",)),
}

_SMALL_EPS = 36 / 255
_LONG = Training("LiResNet, appendix B.1", 256, 800)
# By what a row names, then by data set.
TRAININGS: dict[str, dict[str, Training]] = {
    "CertViT, table 7": {
        "mnist": Training("CertViT, table 7", 512, 500, over=1.74 / 1.58),
        CIFAR: Training("CertViT, table 7", 512, 800, over=0.16 / _SMALL_EPS),
        "cifar100": Training("CertViT, table 7", 512, 800, over=0.16 / _SMALL_EPS),
        "tinyimagenet": Training("CertViT, table 7", 512, 500, 2.5e-4, over=0.16 / _SMALL_EPS),
    },
    "CertViT, table 8": {
        "mnist": Training("CertViT, table 8", 256, 300, schedule="exponential"),
        CIFAR: Training("CertViT, table 8", 256, 300, over=0.1551 / _SMALL_EPS, schedule="exponential", until=0.667),
        "cifar100": Training("CertViT, table 8", 256, 800, over=0.1551 / _SMALL_EPS, schedule="exponential"),
        "tinyimagenet": Training("CertViT, table 8", 128, 250, 2.5e-4, 0.16 / _SMALL_EPS, 0.01, "exponential"),
    },
    "CertViT, table 9": {
        name: Training(
            "CertViT, table 9", PRESETS[name].batch_size, PRESETS[name].epochs,
            2.5e-4 if name == "tinyimagenet" else 1e-3, schedule="multistep" if name == "mnist" else "cosine",
        )
        for name in ("mnist", CIFAR, "cifar100", "tinyimagenet")
    },
    "LiResNet, appendix B.1": {
        CIFAR: _LONG, "cifar100": _LONG, "tinyimagenet": _LONG,
        "imagenet": Training("LiResNet, appendix B.1", 1024, 400),
    },
    "Local-Lip, table 3": {
        "mnist": Training("Local-Lip, table 3", 256, 300, schedule="exponential"),
        CIFAR: Training("Local-Lip, table 3", 256, 800, over=0.1551 / _SMALL_EPS, schedule="exponential"),
        "tinyimagenet": Training("Local-Lip, table 3", 128, 250, 2.5e-4, 0.16 / _SMALL_EPS, 0.01, "exponential"),
    },
    "Local-Lip, table 3, MaxMin": {
        CIFAR: Training("Local-Lip, table 3", 256, 800, over=0.1551 / _SMALL_EPS, schedule="exponential"),
        "tinyimagenet": Training("Local-Lip, table 3", 128, 250, 1e-4, 0.16 / _SMALL_EPS, 0.01, "exponential"),
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


SCALES = {
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
    return {
        "train": shlex.quote(train), "eps": row.eps, "eta": preset.eta,
        "ramp": scale.ramp or f"0,{known.over:.4g},{known.until}",
        "updates": updates or f"--lr {known.lr} --schedule {known.schedule}",
        "tuning": updates or "--lr 3e-4",
        "strong": "" if updates else "--optimizer nadam --randaugment rand-m9-n2 --crop shift",
        "sparsity": known.sparsity if row.sparsity is None else row.sparsity,
        "batch": batch or known.batch, "epochs": epochs or known.epochs,
        "limit": f"--limit {images}" if images else "", "calibration": scale.calibration,
    }  # fmt: skip


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
    if model is not None and not own and recipe != "certvit-pretrained":
        arguments.append(
            {"mnist": "in_chans=1 img_size=28", "tinyimagenet": "num_classes=200 img_size=64"}.get(data, "")
        )
        arguments.append("img_size=32" if eight and data in (CIFAR, "cifar100") else "")
    elif own and data == "tinyimagenet":
        arguments.append("num_classes=200")
    arguments.append("num_classes=100" if data == "cifar100" and model is not None else "")
    if plain:
        relu = recipe in ("standard", "gloro", "certvit")  # the bounded ReLU is Local-Lip's
        arguments.append(f"act_layer={act}" if act else "act_layer=relu" if relu else "")
    joined = " ".join(argument for argument in arguments if argument)
    return Row(name, paper, data, model, recipe, eps, joined, training if recipe else None, sparsity)
