"""Tables of Huang et al., "Training certifiably robust neural networks with efficient local Lipschitz bounds", 2021.

NeurIPS 2021 (arXiv 2111.01395). 7C1F is not described there.
"""

from __future__ import annotations

from typing import Any

from benchmarks.papers.recipes import ACCURACY, CIFAR, Row, Table, trained

_FOUR, _SIX, _EIGHT = "lip_convnet_4c3f", "lip_convnet_6c2f", "lip_convnet_8c2f"
_TINY = "tinyimagenet"


def _row(name: str, data: str, model: str | None, recipe: str | None, *paper: float | None, **given: Any) -> Row:
    table = "Local-Lip, table 3, MaxMin" if "maxmin" in given.get("act", "") else "Local-Lip, table 3"
    eps = "1.58" if data == "mnist" else "36/255"
    return trained(name, data, model, recipe, *paper, eps=eps, training=table, **given)


_ONE = (
    _row("Random, 2 iterations", CIFAR, _SIX, "local-b, random 2", 76.7, 69.0, 0.5),
    _row("Random, 5 iterations", CIFAR, _SIX, "local-b, random 5", 73.7, 66.8, 46.0),
    _row("Random, 10 iterations", CIFAR, _SIX, "local-b, random 10", 72.0, 65.8, 51.6),
    _row("Saved, 2 iterations", CIFAR, _SIX, "local-b", 70.7, 64.8, 54.3),
)
_TWO = (
    _row("MNIST, Standard 4C3F", "mnist", _FOUR, "standard", 99.0, 45.4, 0.0),
    _row("MNIST, LMT 4C3F", "mnist", _FOUR, "lmt", 86.5, 53.6, 40.5),
    _row("MNIST, CAP 4C3F", "mnist", None, None, 88.1, 67.9, 44.5),
    _row("MNIST, CROWN-IBP 4C3F", "mnist", None, None, 82.3, 80.4, 41.3),
    _row("MNIST, GloRo 4C3F", "mnist", _FOUR, "gloro", 92.9, 68.9, 50.1),
    _row("MNIST, Local-Lip-G 4C3F", "mnist", _FOUR, "local-g", 96.3, 78.2, 55.8),
    _row("MNIST, BCP 4C3F", "mnist", None, None, 92.4, 65.8, 47.9),
    _row("MNIST, Local-Lip-B 4C3F", "mnist", _FOUR, "local-b", 93.0, 66.7, 48.7),
    _row("CIFAR-10, Standard 4C3F", CIFAR, _FOUR, "standard", 85.3, 41.2, 0.0),
    _row("CIFAR-10, IBP 4C3F", CIFAR, None, None, 34.5, 31.8, 24.4),
    _row("CIFAR-10, LMT 4C3F", CIFAR, _FOUR, "lmt", 56.5, 49.8, 37.2),
    _row("CIFAR-10, CAP 4C3F", CIFAR, None, None, 60.1, 55.7, 50.3),
    _row("CIFAR-10, CROWN-IBP 4C3F", CIFAR, None, None, 54.2, 52.7, 41.9),
    _row("CIFAR-10, ReLU-Stability 4C3F", CIFAR, None, None, 57.4, 52.4, 51.1),
    _row("CIFAR-10, GloRo 4C3F", CIFAR, _FOUR, "gloro", 73.2, 66.3, 49.0),
    _row("CIFAR-10, Local-Lip-G 4C3F", CIFAR, _FOUR, "local-g", 75.7, 68.6, 49.7),
    _row("CIFAR-10, BCP 4C3F", CIFAR, None, None, 64.4, 59.4, 50.0),
    _row("CIFAR-10, Local-Lip-B 4C3F", CIFAR, _FOUR, "local-b", 70.1, 64.2, 53.5),
    _row("CIFAR-10, Standard 6C2F", CIFAR, _SIX, "standard", 87.5, 32.5, 0.0),
    _row("CIFAR-10, IBP 6C2F", CIFAR, None, None, 33.0, 31.1, 23.4),
    _row("CIFAR-10, LMT 6C2F", CIFAR, _SIX, "lmt", 63.1, 58.3, 38.1),
    _row("CIFAR-10, CAP 6C2F", CIFAR, None, None, 60.1, 56.2, 50.9),
    _row("CIFAR-10, CROWN-IBP 6C2F", CIFAR, None, None, 53.7, 52.2, 41.9),
    _row("CIFAR-10, GloRo 6C2F", CIFAR, _SIX, "gloro", 70.7, 63.8, 49.3),
    _row("CIFAR-10, Local-Lip-G 6C2F", CIFAR, _SIX, "local-g", 76.4, 69.2, 51.3),
    _row("CIFAR-10, BCP 6C2F", CIFAR, None, None, 65.7, 60.8, 51.3),
    _row("CIFAR-10, Local-Lip-B 6C2F", CIFAR, _SIX, "local-b", 70.7, 64.8, 54.3),
    _row("CIFAR-10, GloRo and MaxMin 6C2F", CIFAR, _SIX, "gloro", 77.0, 69.2, 58.4, act="maxmin"),
    _row("CIFAR-10, Cayley and MaxMin 6C2F", CIFAR, None, None, 75.3, 67.7, 59.2),
    _row("CIFAR-10, Local-Lip-B and MaxMin 6C2F", CIFAR, _SIX, "local-b", 77.4, 70.4, 60.7, act="clipped-maxmin"),
    _row("Tiny-ImageNet, Standard 7C1F", _TINY, None, None, 35.9, 19.4, 0.0),
    _row("Tiny-ImageNet, GloRo 7C1F", _TINY, None, None, 31.3, 28.2, 13.2),
    _row("Tiny-ImageNet, Local-Lip-G 8C2F", _TINY, _EIGHT, "local-g", 37.4, 34.2, 13.2),
    _row("Tiny-ImageNet, BCP 8C2F", _TINY, None, None, 28.7, 26.6, 20.0),
    _row("Tiny-ImageNet, Local-Lip-B 8C2F", _TINY, _EIGHT, "local-b", 30.8, 28.4, 20.7),
    _row("Tiny-ImageNet, GloRo and MaxMin 8C2F", _TINY, _EIGHT, "gloro", 35.5, 32.3, 22.4, act="maxmin"),
    _row("Tiny-ImageNet, Local-Lip-B and MaxMin 8C2F", _TINY, _EIGHT, "local-b", 36.9, 33.3, 23.4,
         act="clipped-maxmin"),
)  # fmt: skip
_THREE = [
    {"data": data, "lr": lr, "last lr": last, "batch": batch, "eps of training": eps, "λ_sparse": sparse, "λ_θ": theta,
     "warm-up": warm, "epochs": epochs, "decay from": decay, "eps until": until, "power iterations": steps}
    for data, lr, last, batch, eps, sparse, theta, warm, epochs, decay, until, steps in (
        ("MNIST", 1e-3, 5e-6, 256, 1.58, 0.0, 0.0, 0, 300, 150, 150, 5),
        ("CIFAR", 1e-3, 1e-6, 256, 0.1551, 0.0, 0.0, 20, 800, 400, 400, 2),
        ("Tiny-ImageNet, ReLU", 2.5e-4, 5e-7, 128, 0.16, 0.01, 0.1, 0, 250, 150, 125, 1),
        ("Tiny-ImageNet, MaxMin", 1e-4, 5e-7, 128, 0.16, 0.01, 0.1, 0, 250, 150, 125, 3),
    )
]  # fmt: skip
_FOUR_SEEDS = (
    _row("MNIST, 4C3F", "mnist", _FOUR, "local-g", 96.29, 0.07, 78.31, 0.08, 55.79, 0.23),
    _row("CIFAR-10, 4C3F", CIFAR, _FOUR, "local-b", 69.78, 0.30, 63.95, 0.26, 53.40, 0.08),
    _row("CIFAR-10, 6C2F", CIFAR, _SIX, "local-b", 70.64, 0.05, 64.81, 0.05, 53.96, 0.60),
    _row("Tiny-ImageNet, 8C2F", _TINY, _EIGHT, "local-b", 29.78, 0.08, 27.7, 0.13, 20.5, 0.13),
)
_FIVE = (
    _row("Standard", CIFAR, _SIX, "standard", 1.52e9, 4.81e8, 87.7, 35.9, 0.0),
    _row("AT", CIFAR, None, None, 2.27e4, 1.85e4, 80.7, 70.76, 0.0),
    _row("TRADES", CIFAR, None, None, 1.82e4, 1.32e4, 80.0, 72.3, 0.0),
    _row("BCP", CIFAR, None, None, 11.35, 11.08, 65.7, 60.8, 51.3),
    _row("Local-Lip-B", CIFAR, _SIX, "local-b", 7.89, 6.68, 70.7, 64.8, 54.3),
)
_SIX_SPARSE = tuple(
    _row(f"λ_sparse {weight}", _TINY, _EIGHT, "local-b", *figures, sparsity=weight)
    for weight, figures in {
        0.0: (30.6, 28.3, 19.9), 0.01: (30.8, 28.4, 20.7), 0.03: (29.7, 27.3, 20.2), 0.1: (28.9, 26.7, 19.8)
    }.items()
)  # fmt: skip
_SEVEN = tuple(
    _row(f"{name}, {method}", data, model if recipe else None, recipe, seconds)
    for name, data, model, *all_seconds in (
        ("MNIST 4C3F", "mnist", _FOUR, 689, 9.0, 17.3, 45.5), ("CIFAR-10 4C3F", CIFAR, _FOUR, 645, None, 23.5, 38.2),
        ("CIFAR-10 6C2F", CIFAR, _SIX, 1369, 6.5, 26.0, 69.8),
        ("Tiny-ImageNet 8C2F", _TINY, _EIGHT, None, None, 343.5, 398.8),
    )
    for method, recipe, seconds in zip(
        ("CAP", "GloRo", "BCP", "Local-Lip"), (None, "gloro", None, "local-b"), all_seconds, strict=True
    )
)  # fmt: skip

TABLES = (
    Table(
        "local-lip", "1", "Start of power iteration", ACCURACY, _ONE,
        note="The paper saves the vectors of each image; lipcert saves their mean over the images of a batch, one "
        "vector a layer.",
    ),
    Table("local-lip", "2", "Certified training beside others", ACCURACY, _TWO),
    Table("local-lip", "3", "Hyper-parameters", measure="settings", settings=_THREE),
    Table(
        "local-lip", "4", "Mean and deviation of three runs; one is trained here",
        tuple(f"{name}{part}" for name in ACCURACY for part in ("", ", deviation")), _FOUR_SEEDS,
    ),
    Table(
        "local-lip", "5", "Beside adversarial training, 6C2F on CIFAR-10", ("global bound", "local bound", *ACCURACY),
        _FIVE,
    ),
    Table("local-lip", "6", "Weights of the sparsity loss, 8C2F on Tiny-ImageNet", ACCURACY, _SIX_SPARSE),
    Table(
        "local-lip", "7", "Seconds an epoch; here CPU seconds, with reading and evaluation",
        ("seconds an epoch",), _SEVEN,
        ordered="seconds an epoch",
    ),
    Table("local-lip", "figure 2", "Bounds and losses during training", measure="local_lip"),
    Table("local-lip", "figure 3", "Share of varying ReLUs", measure="local_lip"),
    Table("local-lip", "figure 4", "Iterations of power iteration, one layer", measure="iterations"),
    Table("local-lip", "figure 5", "Iterations of power iteration, every layer", measure="iterations"),
    Table("local-lip", "figure 6", "Share of varying ReLUs during training", measure="local_lip"),
    Table("local-lip", "figure 7", "Bounds of each layer during training", measure="local_lip"),
)  # fmt: skip
