"""Tables of Havens et al., "Fine-grained local sensitivity analysis of standard dot-product self-attention", ICML 2024.

The networks of its tables 1 and 2 are ViTs of width 128 with ``LayerProject`` and weights of bounded norm. Rows of
CROWN are the paper's.
"""

from __future__ import annotations

from benchmarks.papers.recipes import Row, Table

_ONE = tuple(
    Row(f"ViT of {layers} layers, {name}", figures)
    for layers, crown, own in (
        (3, (41.2, 14.1, None, 6.7), (29.1, 16.0, 3.0, 0.055)),
        (4, (42.9, None, None, 13.3), (28.9, 11.9, 0.8, 0.077)),
        (5, (44.7, None, None, 20.4), (27.6, 8.3, 0.0, 0.094)),
    )
    for name, figures in (("α,β-CROWN", crown), ("LoFAST, Theorem 1", own))
)
_TWO = (
    Row("CIFAR-10, CROWN", (41.99, 4.33, 14.35, 6.06)), Row("CIFAR-10, CROWN and LoFAST", (41.99, 1.71, 20.03, 4.17)),
    Row("SVHN, CROWN", (43.73, 5.68, 27.45, 8.60)), Row("SVHN, CROWN and LoFAST", (43.73, 1.44, 29.51, 3.64)),
)  # fmt: skip
_THREE = {
    "attack": (0.0286, 0.0860, 0.1427, 0.2008, 0.2582, 0.2860),
    "LoFAST, Theorem 1": (0.0291, 0.0875, 0.1462, 0.2052, 0.2646, 0.2943),
    "SpecFormer": (16.901, 52.515, 90.600, 131.219, 174.436, 197.036),
}
_TIMED = "seconds an image"
_NOTE = """Norms of matrices are limited by --max-norm during training, the paper's by SLL parametrizations; MLPs with
their residual branch multiply the bound by up to 1.29, the paper's by 1; patches have 4 pixels, the paper's 16."""

TABLES = (
    Table(
        "lofast", "1", "LoFAST beside CROWN", ("certified at 0.02", "at 0.05", "at 0.1", _TIMED), _ONE,
        measure="layers", note=_NOTE,
    ),
    Table(
        "lofast", "2", "LoFAST before CROWN", ("certified at 0.02", f"{_TIMED}, 0.02", "at 0.05", f"{_TIMED}, 0.05"),
        _TWO, needs="CROWN",
    ),
    Table(
        "lofast", "3", "One residual attention of 8 heads: largest change over ε",
        ("0.01", "0.03", "0.05", "0.07", "0.09", "0.10"),
        tuple(Row(name, figures) for name, figures in _THREE.items()), measure="one_attention",
    ),
    Table("lofast", "figure 1", "Parts of Theorem 1 over ε", measure="parts"),
    Table("lofast", "figure 2", "Certified accuracy over layers, heads and norms", measure="shapes", note=_NOTE),
    Table("lofast", "figure 3", "Weights and input perturbed, and the bound", measure="ablation"),
    Table("lofast", "figure 4", "Theorem 1 over ε for tokens of several norms", measure="token_norms"),
    Table("lofast", "figure 5", "Word embeddings", needs="the Stanford Sentiment Treebank, which is text"),
)  # fmt: skip
