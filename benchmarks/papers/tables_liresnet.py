"""Tables of Hu et al., "Unlocking deterministic robustness certification on ImageNet", NeurIPS 2023 (arXiv 2301.12549).

Its first title was "Scaling in depth". Tables 2a, 3 and 6 differ for Tiny-ImageNet: 30.3 there, and 30.0 in the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.papers.recipes import CIFAR, Row, Table, trained

_SIX, _EIGHT = "lip_convnet_6c2f", "lip_convnet_8c2f"
_HUNDRED, _TINY = "cifar100", "tinyimagenet"
_TITLES = {CIFAR: "CIFAR-10", _HUNDRED: "CIFAR-100", _TINY: "Tiny-ImageNet"}
_BLOCKS = {"ConvNet": "conv", "ResNet": "residual", "LiResNet": "linear"}


def _row(name: str, data: str, recipe: str | None, *paper: float | None, model: str | None = None, **given: Any) -> Row:
    return trained(name, data, model, recipe, *paper, training="LiResNet, appendix B.1", **given)


def _lires(
    data: str, *paper: float | None, depth: int = 12, width: int = 256, block: str = "LiResNet", loss: str = "emma",
    name: str = "",
) -> Row:  # fmt: skip
    """A row of the paper's own networks: Tiny-ImageNet takes their stem for images of 64×64."""
    model = "liresnet_l12w512_64" if data == _TINY else "liresnet_l12w256"
    size = f"depth={depth} width={width} block={_BLOCKS[block]}"
    title = f"{_TITLES[data]}, {name or f'{block} L{depth}W{width}'}"
    return _row(title, data, loss, *paper, model=model, size=size)


_DDPM = "{}, LiResNet L12W512, images of a DDPM added"
_ONE = (
    _row("CIFAR-10, BCOP 6C2F", CIFAR, None, 75.1, 58.3, 2),
    _row("CIFAR-10, GloRo 6C2F", CIFAR, "gloro", 77.0, 60.0, 2, model=_SIX, act="maxmin"),
    _row("CIFAR-10, Local-Lip 6C2F", CIFAR, "local-b", 77.4, 60.7, 2, model=_SIX, act="clipped-maxmin"),
    _row("CIFAR-10, Cayley 4C3F", CIFAR, None, 75.3, 59.2, 3),
    _row("CIFAR-10, SOC LipConv-20", CIFAR, None, 76.4, 63.0, 27),
    _row("CIFAR-10, CPL XL", CIFAR, None, 78.5, 64.4, 236),
    _row("CIFAR-10, SLL X-Large", CIFAR, None, 73.3, 65.8, 236),
    _lires(CIFAR, 78.7, 64.4, 5, depth=6, width=128),
    _lires(CIFAR, 81.3, 66.9, 49, width=512),
    _row(_DDPM.format("CIFAR-10"), CIFAR, None, 82.1, 70.1, 49),
    _row("CIFAR-100, BCOP 6C2F", _HUNDRED, None, 45.4, 31.7, 2),
    _row("CIFAR-100, Cayley 4C3F", _HUNDRED, None, 45.8, 31.9, 3),
    _row("CIFAR-100, SOC LipConv-20", _HUNDRED, None, 47.8, 34.8, 27),
    _row("CIFAR-100, LOT LipConv-20", _HUNDRED, None, 49.2, 35.5, 27),
    _row("CIFAR-100, SLL X-Large", _HUNDRED, None, 46.5, 36.5, 236),
    _lires(_HUNDRED, 52.1, 36.3, 5, depth=6, width=128),
    _lires(_HUNDRED, 55.2, 38.3, 49, width=512),
    _row(_DDPM.format("CIFAR-100"), _HUNDRED, None, 55.5, 41.5, 49),
    _row("Tiny-ImageNet, GloRo 8C2F", _TINY, "gloro", 35.5, 22.4, 2, model=_EIGHT, act="maxmin"),
    _row("Tiny-ImageNet, Local-Lip 8C2F", _TINY, "local-b", 36.9, 23.4, 2, model=_EIGHT, act="clipped-maxmin"),
    _row("Tiny-ImageNet, SLL X-Large", _TINY, None, 32.1, 23.2, 236),
    _lires(_TINY, 40.8, 29.0, 5, depth=6, width=128),
    _lires(_TINY, 44.6, 30.6, 49, width=512),
    _row(_DDPM.format("Tiny-ImageNet"), _TINY, None, 46.7, 33.6, 49),
    _row("ImageNet, LiResNet L12W588", "imagenet", "emma", 45.6, 35.0, 86, model="liresnet_l12w588_224"),
)
_THREE = tuple(
    _lires(data, *figures, block=block, loss=loss, name=f"{block} {loss.upper()}")
    for data, block, trades, emma in (
        (CIFAR, "ConvNet", (71.7, 58.8), (72.5, 59.2)), (CIFAR, "LiResNet", (79.6, 66.2), (80.4, 66.3)),
        (_HUNDRED, "ConvNet", (53.4, 34.0), (50.6, 35.0)), (_HUNDRED, "LiResNet", (57.8, 37.3), (54.2, 37.8)),
        (_TINY, "ConvNet", (42.2, 26.6), (40.0, 27.4)), (_TINY, "LiResNet", (45.8, 28.8), (43.6, 30.0)),
    )
    for loss, figures in (("trades", trades), ("emma", emma))
)  # fmt: skip
_FOUR = tuple(
    _lires(data, *figures, depth=depth, block=block, name=f"{block} L{depth}")
    for data, depth, conv, residual, linear in (
        (CIFAR, 6, (77.9, 64.0), (74.2, 60.3), (79.9, 65.5)), (CIFAR, 12, (72.5, 59.2), (74.0, 60.0), (80.4, 66.3)),
        (CIFAR, 18, (None, None), (73.9, 60.1), (81.0, 66.6)), (_HUNDRED, 6, (51.8, 36.5), (48.4, 33.5), (53.6, 37.2)),
        (_HUNDRED, 12, (50.6, 35.0), (48.1, 33.5), (54.2, 37.8)),
        (_HUNDRED, 18, (None, None), (48.2, 33.6), (54.3, 38.0)),
    )
    for block, figures in zip(_BLOCKS, (conv, residual, linear), strict=True)
)  # fmt: skip
_MISPRINT = "Tiny-ImageNet, LiResNet EMMA"
_TWO = tuple(replace(row, paper=(30.3 if row.name == _MISPRINT else row.paper[1],)) for row in (*_THREE, *_FOUR))
_FIVE = tuple(
    _lires(data, *figures, depth=depth, name=f"L{depth}")
    for depth, *by_data in (
        (6, (79.9, 65.5), (53.6, 37.2), (43.1, 29.8)), (12, (80.4, 66.3), (54.2, 37.8), (43.6, 30.3)),
        (18, (81.0, 66.6), (54.3, 38.0), (43.9, 30.6)), (24, (81.2, 66.8), (55.0, 38.2), (44.2, 30.7)),
        (30, (81.3, 66.9), (54.9, 38.4), (44.2, 30.6)), (36, (81.2, 66.9), (55.0, 38.3), (44.3, 30.4)),
    )
    for data, figures in zip(_TITLES, by_data, strict=True)
)  # fmt: skip
_SIX_WIDTHS = tuple(
    _lires(data, share, width=width, name=f"W{width}")
    for width, *shares in ((64, 64.6, 36.5, 28.7), (128, 65.6, 37.5, 29.8), (256, 66.3, 37.8, 30.0),
                           (512, 66.9, 38.3, 30.6))
    for data, share in zip(_TITLES, shares, strict=True)
)  # fmt: skip
_SEVEN = (
    Row("CIFAR-10, Spatial MLP and LiFFN", (63.3,)),
    Row("CIFAR-10, Spatial MLP and FFN", (62.6,)),
    Row("CIFAR-10, OLSA and FFN", (56.6,)),
    _lires(CIFAR, 66.9, name="LiResNet-L12W256"),
    _row("CIFAR-10, lipcert's L2 attention", CIFAR, "emma", None, model="liresnet_vit_l2"),
    _row("CIFAR-10, lipcert's dot-product attention", CIFAR, "emma", None, model="liresnet_vit_dot"),
    Row("CIFAR-100, Spatial MLP and LiFFN", (36.5,)),
    Row("CIFAR-100, Spatial MLP and FFN", (33.7,)),
    Row("CIFAR-100, OLSA and FFN", (28.4,)),
    _lires(_HUNDRED, 38.3, name="LiResNet-L12W256"),
)

_BOTH = ("clean", "certified")
_CROSS = "A ConvNet of 18 blocks did not converge in the paper."
TABLES = (
    Table("liresnet", "1", "LiResNet and EMMA beside others", (*_BOTH, "parameters in millions"), _ONE),
    Table("liresnet", "2", "Losses (2a) and kinds of blocks (2b)", ("certified",), _TWO, note=_CROSS),
    Table("liresnet", "3", "Losses and blocks", _BOTH, _THREE),
    Table("liresnet", "4", "Depths of three kinds of blocks", _BOTH, _FOUR, note=_CROSS),
    Table("liresnet", "5", "Depths, and figure 1", _BOTH, _FIVE),
    Table("liresnet", "6", "Widths", ("certified",), _SIX_WIDTHS),
    Table(
        "liresnet", "7", "Transformers", ("certified",), _SEVEN,
        note="lipcert has no OLSA and no spatial MLPs; it has L2 and dot-product attention with a bound, on the tokens "
        "that linear residual blocks make of an image.",
    ),
    Table(
        "liresnet", "figure 2", "Threatening classes that change from epoch to epoch",
        measure="threats",
    ),
    Table("liresnet", "figure 4", "Fewer classes; of CIFAR-10 in place of ImageNet", measure="classes"),
)  # fmt: skip
