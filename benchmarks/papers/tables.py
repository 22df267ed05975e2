"""The tables and figures of the four papers as data: what they report, with which settings, and what they need here.

Figures of a row stand in the order of its table's columns; None is a figure that the paper does not give. Shares are
in percent, as the papers print them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lipcert._constrain_settings import PRESETS
from lipcert._settings import Method

CIFAR = "cifar10"
_ACCURACY = ("clean", "pgd", "certified")
_EPS = "36/255"


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
    """

    name: str
    paper: tuple[float | None, ...]
    data: str | None = None
    model: str | None = None
    recipe: str | None = None
    eps: str = _EPS
    model_args: str = ""


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
        needs: what it takes that is not at hand, in a sentence; then it is not run.
        settings: hyper-parameters, of tables that list them.
    """

    paper: str
    number: str
    title: str
    columns: tuple[str, ...] = _ACCURACY
    rows: tuple[Row, ...] = ()
    measure: str | None = None
    needs: str = ""
    settings: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True)
class Recipe:
    """Commands that make a row: arguments of ``lipcert``, with names in braces for what the row and the scale say.

    Attributes:
        source: equation or table that the hyper-parameters are from.
        steps: one command after the other; each takes the model that the one before wrote.
        methods: certificates of the last model.
    """

    source: str
    steps: tuple[str, ...]
    methods: tuple[Method, ...]


_TRAIN = "finetune --data {train} --eps {eps} --batch-size {batch} --epochs {epochs} --limit {images}"
# Table 9 of CertViT, and its section 3.5: constrain, then fine-tune, zeros kept.
_CONSTRAIN = "constrain --data {train} --limit {calibration} --keep activations --preset {preset}"
_EMMA = f"{_TRAIN} --loss emma --optimizer nadam --lr 1e-3 --schedule cosine --randaugment rand-m9-n2 --crop shift"
RECIPES = {
    "standard": Recipe("CertViT, table 9", (f"{_TRAIN} --loss ce --lr 1e-3",), ("gloro",)),
    "gloro": Recipe("CertViT, table 7", (f"{_TRAIN} --loss gloro --lr 1e-3",), ("gloro",)),
    "local-b": Recipe(
        "Local-Lip, table 3 and equations 25 to 29",
        (f"{_TRAIN} --loss local-b --lr 1e-3 --schedule exponential",),
        ("gloro", "local"),
    ),
    "local-g": Recipe(
        "Local-Lip, table 3 and equations 25 to 29",
        (f"{_TRAIN} --loss local-g --lr 1e-3 --schedule exponential",),
        ("gloro", "local"),
    ),
    "certvit": Recipe(
        "CertViT, table 9, equations 9 to 13 and section 3.5",
        (f"{_TRAIN} --loss ce --lr 1e-3", _CONSTRAIN, f"{_TRAIN} --loss gloro --lr 3e-4"),
        ("gloro", "local"),
    ),
    "certvit-l2": Recipe(
        "CertViT, table 9, figure 3 and section 3.6",
        (
            f"{_TRAIN} --loss ce --lr 1e-3",
            "convert --attention l2 --norm smooth --data {train}",
            f"{_TRAIN} --loss ce --lr 1e-3 --only *.attn.*",
            _CONSTRAIN,
            f"{_TRAIN} --loss gloro --lr 3e-4",
        ),
        ("gloro", "anchored"),
    ),
    "emma": Recipe("LiResNet, appendix B.1", (_EMMA,), ("gloro",)),
    "trades": Recipe("LiResNet, section 5.2", (_EMMA.replace("--loss emma", "--loss trades"),), ("gloro",)),
}


@dataclass(frozen=True)
class Scale:
    """How much of a table is run.

    Attributes:
        images: training images.
        tested: test images.
        batch: images a step.
        epochs: by paper; "small" takes its own.
        calibration: images that layers are constrained on.
        data: the data sets that are taken; None for all.
    """

    images: int
    tested: int
    batch: int
    epochs: Mapping[str, int]
    calibration: int
    data: tuple[str, ...] | None = None


SCALES = {
    "small": Scale(1000, 100, 100, dict.fromkeys(("certvit", "lofast", "liresnet", "local-lip"), 1), 100, (CIFAR,)),
    # table 9, appendix B.1 and table 3 of the papers; LoFAST states no number
    "full": Scale(
        50_000, 10_000, 256, {"certvit": 200, "lofast": 200, "liresnet": 800, "local-lip": 800}, 10_000, None
    ),
}


def _row(name: str, data: str, model: str | None, recipe: str | None, *paper: float | None, eps: str = _EPS) -> Row:
    """A row that is trained, with the arguments that the data set and the recipe ask of the network."""
    own = (model or "").startswith("certvit")  # knows the size and channels of its images
    wanted = {"mnist": "" if own else "in_chans=1 img_size=28", "cifar100": "num_classes=100"}
    wanted["tinyimagenet"] = "num_classes=200" + ("" if own else " img_size=64")
    arguments = [wanted.get(data, "")]
    if (model or "").startswith("lip_convnet") and recipe in ("standard", "gloro", "certvit"):
        arguments.append("act_layer=relu")  # the bounded ReLU is Local-Lip's
    return Row(name, paper, data, model, recipe, eps, " ".join(arguments).strip())


_FOUR, _SIX, _EIGHT = "lip_convnet_4c3f", "lip_convnet_6c2f", "lip_convnet_8c2f"
_BOUND = (*_ACCURACY, "bound", "training flops 1e13")
_NEEDS_IMAGENET = "ImageNet-1K, timm's checkpoints and GPUs; table 2 has what needs none of them"

_CERTVIT_1 = (
    _row("MNIST, Standard 4C3F", "mnist", _FOUR, "standard", 99.3, 45.9, 0.0, 2.5e3, 6.1, eps="1.58"),
    _row("MNIST, BCP 4C3F", "mnist", None, None, 92.4, 65.8, 44.9, 6.9, 18.2, eps="1.58"),
    _row("MNIST, GloRo 4C3F", "mnist", _FOUR, "gloro", 97.0, 68.9, 50.1, 2.3, 30.3, eps="1.58"),
    _row("MNIST, Local-Lip 4C3F", "mnist", _FOUR, "local-g", 96.2, 78.2, 55.8, 0.7, 17.6, eps="1.58"),
    _row("MNIST, CertViT 4C3F", "mnist", _FOUR, "certvit", 98.2, 82.9, 61.3, 0.8, 5.5, eps="1.58"),
    _row("MNIST, Standard ViT", "mnist", "certvit_mnist", "standard", 98.6, 63.4, 0.0, 1.4e13, 9.3, eps="1.58"),
    _row("MNIST, CertViT ViT", "mnist", "certvit_mnist", "certvit-l2", 97.8, 64.2, 54.5, 1.2, 8.4, eps="1.58"),
    _row("CIFAR-10, Standard 4C3F", CIFAR, _FOUR, "standard", 84.6, 51.1, 0.0, 2.7e4, 8.2),
    _row("CIFAR-10, BCP 4C3F", CIFAR, None, None, 64.4, 59.4, 50.0, 5.7, 16.3),
    _row("CIFAR-10, GloRo 4C3F", CIFAR, _FOUR, "gloro", 73.2, 66.3, 49.0, 6.3, 49.1),
    _row("CIFAR-10, Local-Lip 4C3F", CIFAR, _FOUR, "local-b", 75.7, 68.3, 67.6, 2.5, 20.4),
    _row("CIFAR-10, CertViT 4C3F", CIFAR, _FOUR, "certvit", 81.2, 69.8, 69.1, 1.9, 7.4),
    _row("CIFAR-10, Standard 6C2F", CIFAR, _SIX, "standard", 86.4, 50.5, 0.0, 2.8e5, 17.5),
    _row("CIFAR-10, BCP 6C2F", CIFAR, None, None, 65.7, 60.8, 51.3, 11.35, 35.0),
    _row("CIFAR-10, GloRo 6C2F", CIFAR, _SIX, "gloro", 70.7, 63.8, 49.3, 9.21, 140.1),
    _row("CIFAR-10, Local-Lip 6C2F", CIFAR, _SIX, "local-b", 69.8, 64.3, 54.1, 7.89, 43.7),
    _row("CIFAR-10, CertViT 6C2F", CIFAR, _SIX, "certvit", 82.1, 63.2, 57.3, 6.12, 19.2),
    _row("CIFAR-10, Standard ViT", CIFAR, "certvit_cifar10", "standard", 81.4, 33.7, 0.0, 8.2e16, 331.5),
    _row("CIFAR-10, CertViT ViT", CIFAR, "certvit_cifar10", "certvit-l2", 75.1, 42.7, 33.1, 9.1, 358.0),
    _row("CIFAR-100, Standard 8C2F", "cifar100", _EIGHT, "standard", 62.3, 25.3, 0.0, 8.1e7, 128.6),
    _row("CIFAR-100, GloRo 8C2F", "cifar100", _EIGHT, "gloro", 29.3, 27.7, 21.3, 10.2, 514.3),
    _row("CIFAR-100, Local-Lip 8C2F", "cifar100", _EIGHT, "local-b", 34.0, 31.1, 22.9, 8.9, 360.7),
    _row("CIFAR-100, CertViT 8C2F", "cifar100", _EIGHT, "certvit", 42.4, 35.2, 25.4, 7.2, 77.1),
    _row("CIFAR-100, Standard ViT", "cifar100", "certvit_cifar100", "standard", 55.3, 15.4, 0.0, 6.3e14, 397.6),
    _row("CIFAR-100, CertViT ViT", "cifar100", "certvit_cifar100", "certvit-l2", 46.2, 21.6, 9.1, 12.1, 429.4),
    _row("TinyImageNet, Standard 8C2F", "tinyimagenet", _EIGHT, "standard", 39.1, 12.1, 0.0, 2.9e8, 583.0),
    _row("TinyImageNet, GloRo 8C2F", "tinyimagenet", _EIGHT, "gloro", 35.5, 32.3, 22.4, 7.7, 2331.8),
    _row("TinyImageNet, Local-Lip 8C2F", "tinyimagenet", _EIGHT, "local-b", 37.4, 34.2, 27.4, 5.9, 1020.2),
    _row("TinyImageNet, CertViT 8C2F", "tinyimagenet", _EIGHT, "certvit", 38.1, 34.9, 26.3, 6.1, 349.8),
    _row("TinyImageNet, Standard ViT", "tinyimagenet", "certvit_tinyimagenet", "standard", 42.4, 10.8, 0.0, 1.64e28,
         2860.1),
    _row("TinyImageNet, CertViT ViT", "tinyimagenet", "certvit_tinyimagenet", "certvit-l2", 36.3, 13.1, 2.3, 13.2,
         3088.9),
)  # fmt: skip

_TRANSFORMERS = {
    # name here: parameters in millions with dot-product and with L2 attention; FLOPs 1e16 of adapting and constraining
    "vit_tiny_patch16_224": (5.7, 5.2, 6.4, 7.7), "vit_small_patch16_224": (22.0, 20.2, 25.0, 31.2),
    "vit_small_patch32_224": (22.9, 21.0, 6.4, 7.7), "vit_base_patch8_224": (86.4, 78.8, 392.7, 471.2),
    "vit_base_patch16_224": (80.5, 79.2, 100.6, 120.7), "vit_base_patch32_224": (88.2, 81.0, 25.6, 30.7),
    "vit_large_patch16_224": (304.1, 278.4, 350.4, 420.5), "deit_tiny_patch16_224": (5.7, 5.2, 6.4, 8.2),
    "deit_small_patch16_224": (22.0, 20.2, 26.7, 33.2), "deit_base_patch16_224": (86.4, 78.8, 396.8, 473.2),
    "swin_tiny_patch4_window7_224": (28.3, 25.7, 26.3, 31.5), "swin_small_patch4_window7_224": (49.5, 44.9, 50.1, 59.9),
    "swin_base_patch4_window7_224": (87.7, 79.9, 90.3, 108.4), "swin_large_patch4_window7_224": (196.4, 179.4, 199.9,
                                                                                               239.8),
}  # fmt: skip

_LIRESNET_1 = (
    _row("CIFAR-10, LiResNet L6W128", CIFAR, "liresnet_l6w128", "emma", 78.7, 64.4),
    _row("CIFAR-10, LiResNet L12W512", CIFAR, "liresnet_l12w512", "emma", 81.3, 66.9),
    _row("CIFAR-10, GloRo 6C2F", CIFAR, _SIX, "gloro", 77.0, 60.0),
    _row("CIFAR-10, Local-Lip 6C2F", CIFAR, _SIX, "local-b", 77.4, 60.7),
    _row("CIFAR-10, SLL X-Large", CIFAR, None, None, 73.3, 65.8),
    _row("CIFAR-100, LiResNet L6W128", "cifar100", "liresnet_l6w128", "emma", 52.1, 36.3),
    _row("CIFAR-100, LiResNet L12W512", "cifar100", "liresnet_l12w512", "emma", 55.2, 38.3),
    _row("Tiny-ImageNet, LiResNet L12W512", "tinyimagenet", "liresnet_l12w512_64", "emma", 44.6, 30.6),
    _row("ImageNet, LiResNet L12W588", "imagenet", "liresnet_l12w588_224", "emma", 45.6, 35.0),
)
_LIRESNET_2 = tuple(
    _row(f"{data}, LiResNet {loss.upper()}", data, "liresnet_l12w256", loss, clean, share)
    for data, figures in {CIFAR: ((79.6, 66.2), (80.4, 66.3)), "cifar100": ((57.8, 37.3), (54.2, 37.8))}.items()
    for loss, (clean, share) in zip(("trades", "emma"), figures, strict=True)
)
_LIRESNET_6 = tuple(
    _row(f"CIFAR-10, W{width}", CIFAR, f"liresnet_l12w{width}" if width > 128 else None, "emma", None, share)
    for width, share in ((64, 64.6), (128, 65.6), (256, 66.3), (512, 66.9))
)

_LIRESNET_5 = (
    Row("L6", (79.9, 65.5, 53.6, 37.2, 43.1, 29.8)),
    Row("L12", (80.4, 66.3, 54.2, 37.8, 43.6, 30.3)),
    Row("L18", (81.0, 66.6, 54.3, 38.0, 43.9, 30.6)),
    Row("L24", (81.2, 66.8, 55.0, 38.2, 44.2, 30.7)),
    Row("L30", (81.3, 66.9, 54.9, 38.4, 44.2, 30.6)),
    Row("L36", (81.2, 66.9, 55.0, 38.3, 44.3, 30.4)),
)
_LIRESNET_7 = (
    Row("CIFAR-10, Spatial MLP and LiFFN", (63.3,)),
    Row("CIFAR-10, Spatial MLP and FFN", (62.6,)),
    Row("CIFAR-10, OLSA and FFN", (56.6,)),
    Row("CIFAR-100, Spatial MLP and LiFFN", (36.5,)),
    Row("CIFAR-100, Spatial MLP and FFN", (33.7,)),
    Row("CIFAR-100, OLSA and FFN", (28.4,)),
)

_LOCAL_2 = (
    _row("MNIST, GloRo 4C3F", "mnist", _FOUR, "gloro", 92.9, 68.9, 50.1, eps="1.58"),
    _row("MNIST, Local-Lip-G 4C3F", "mnist", _FOUR, "local-g", 96.3, 78.2, 55.8, eps="1.58"),
    _row("MNIST, BCP 4C3F", "mnist", None, None, 92.4, 65.8, 47.9, eps="1.58"),
    _row("MNIST, Local-Lip-B 4C3F", "mnist", _FOUR, "local-b", 93.0, 66.7, 48.7, eps="1.58"),
    _row("CIFAR-10, Standard 4C3F", CIFAR, _FOUR, "standard", 85.3, 41.2, 0.0),
    _row("CIFAR-10, GloRo 4C3F", CIFAR, _FOUR, "gloro", 73.2, 66.3, 49.0),
    _row("CIFAR-10, Local-Lip-G 4C3F", CIFAR, _FOUR, "local-g", 75.7, 68.6, 49.7),
    _row("CIFAR-10, Local-Lip-B 4C3F", CIFAR, _FOUR, "local-b", 70.1, 64.2, 53.5),
    _row("CIFAR-10, Standard 6C2F", CIFAR, _SIX, "standard", 87.5, 32.5, 0.0),
    _row("CIFAR-10, GloRo 6C2F", CIFAR, _SIX, "gloro", 70.7, 63.8, 49.3),
    _row("CIFAR-10, Local-Lip-G 6C2F", CIFAR, _SIX, "local-g", 76.4, 69.2, 51.3),
    _row("CIFAR-10, BCP 6C2F", CIFAR, None, None, 65.7, 60.8, 51.3),
    _row("CIFAR-10, Local-Lip-B 6C2F", CIFAR, _SIX, "local-b", 70.7, 64.8, 54.3),
    _row("Tiny-ImageNet, Local-Lip-G 8C2F", "tinyimagenet", _EIGHT, "local-g", 37.4, 34.2, 13.2),
    _row("Tiny-ImageNet, Local-Lip-B 8C2F", "tinyimagenet", _EIGHT, "local-b", 30.8, 28.4, 20.7),
)

_TABLE_3 = {
    "attack": (0.0286, 0.0860, 0.1427, 0.2008, 0.2582, 0.2860),
    "LoFAST, Theorem 1": (0.0291, 0.0875, 0.1462, 0.2052, 0.2646, 0.2943),
    "SpecFormer": (16.901, 52.515, 90.600, 131.219, 174.436, 197.036),
}

_PRESETS = [{"name": name, **asdict(preset)} for name, preset in PRESETS.items()]
_LOCAL_3 = [
    {"data": "MNIST", "lr": 1e-3, "last lr": 5e-6, "batch": 256, "eps": 1.58, "sparsity": 0.0, "epochs": 300,
     "decay from": 150, "eps until": 150, "power iterations": 5},
    {"data": "CIFAR", "lr": 1e-3, "last lr": 1e-6, "batch": 256, "eps": 0.1551, "sparsity": 0.0, "epochs": 800,
     "decay from": 400, "eps until": 400, "power iterations": 2},
    {"data": "Tiny-ImageNet, ReLU", "lr": 2.5e-4, "last lr": 5e-7, "batch": 128, "eps": 0.16, "sparsity": 0.01,
     "epochs": 250, "decay from": 150, "eps until": 125, "power iterations": 1},
    {"data": "Tiny-ImageNet, MaxMin", "lr": 1e-4, "last lr": 5e-7, "batch": 128, "eps": 0.16, "sparsity": 0.01,
     "epochs": 250, "decay from": 150, "eps until": 125, "power iterations": 3},
]  # fmt: skip
_VERIFY = "auto_LiRPA for the rows of CROWN, and a trained ViT: python -m benchmarks.crown_radii"
TABLES = (
    Table("certvit", "1", "Certified training on small networks", _BOUND, _CERTVIT_1),
    Table(
        "certvit", "2", "Parameters with dot-product and with L2 attention, in millions",
        ("dot-product", "L2", "flops 1e16 of adapting", "flops 1e16 of constraining"),
        tuple(Row(name, figures, model=name) for name, figures in _TRANSFORMERS.items()), measure="parameters",
    ),
    Table("certvit", "3", "Transformers on ImageNet-1K", needs=_NEEDS_IMAGENET),
    Table("certvit", "9", "Hyper-parameters of training from scratch", measure="settings", settings=_PRESETS[:4]),
    Table("certvit", "10", "Hyper-parameters of pretrained transformers", measure="settings", settings=_PRESETS[4:]),
    Table(
        "certvit", "equation 10", "The constraint set with and without the ReLU behind the layer",
        ("norm", "outputs kept", "activations kept"), measure="behind",
    ),
    Table("lofast", "1", "LoFAST beside CROWN", needs=_VERIFY),
    Table("lofast", "2", "LoFAST before CROWN", needs=_VERIFY),
    Table(
        "lofast", "3", "One residual attention of 8 heads: largest change over ε",
        ("0.01", "0.03", "0.05", "0.07", "0.09", "0.10"),
        tuple(Row(name, figures) for name, figures in _TABLE_3.items()), measure="one_attention",
    ),
    Table("lofast", "figure 1", "Parts of Theorem 1 over ε", measure="parts"),
    Table("lofast", "figure 2", "Certified accuracy over layers, heads and norms", needs="hours of a GPU: 24 ViTs"),
    Table("lofast", "figure 3", "Weights and input perturbed, and the bound", measure="ablation"),
    Table("lofast", "figure 4", "Theorem 1 over ε for tokens of several norms", measure="token_norms"),
    Table("lofast", "figure 5", "Word embeddings", needs="the Stanford Sentiment Treebank, which has no images"),
    Table("liresnet", "1", "LiResNet and EMMA beside others", ("clean", "certified"), _LIRESNET_1),
    Table("liresnet", "2", "Losses, table 2a and table 3", ("clean", "certified"), _LIRESNET_2),
    Table("liresnet", "6", "Widths", ("clean", "certified"), _LIRESNET_6),
    Table(
        "liresnet", "5", "Depths, clean and certified: CIFAR-10, CIFAR-100, Tiny-ImageNet",
        ("CIFAR-10 clean", "certified", "CIFAR-100 clean", "certified", "Tiny clean", "certified"), _LIRESNET_5,
        needs="LiResNets of width 256 with up to 36 blocks: a GPU for weeks",
    ),
    Table("liresnet", "7", "Transformers", ("certified",), _LIRESNET_7, needs="a GPU for weeks"),
    Table("liresnet", "figure 4", "Classes of ImageNet", needs="ImageNet-1K and eight A100 GPUs for days"),
    Table("local-lip", "2", "Certified training beside others", _ACCURACY, _LOCAL_2),
    Table(
        "local-lip", "1", "Start of power iteration", _ACCURACY,
        (
            Row("Random, 2 iterations", (76.7, 69.0, 0.5)), Row("Random, 5 iterations", (73.7, 66.8, 46.0)),
            Row("Random, 10 iterations", (72.0, 65.8, 51.6)), Row("Saved, 2 iterations", (70.7, 64.8, 54.3)),
        ), needs="random starts in training, which lipcert does not have: it saves the vectors",
    ),
    Table("local-lip", "3", "Hyper-parameters", measure="settings", settings=_LOCAL_3),
)  # fmt: skip


LISTED = ("certvit", "lofast", "liresnet", "local-lip")


def find(paper: str, number: str) -> Table:
    """The table.

    Raises:
        SystemExit: there is none; says which there are.
    """
    of_paper = [table for table in TABLES if table.paper == paper]
    for table in of_paper:
        if table.number == number:
            return table
    raise SystemExit(f"no table {number} of {paper} here; there are {', '.join(t.number for t in of_paper)}")
