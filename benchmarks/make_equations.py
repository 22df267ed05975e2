"""Where lipcert has each numbered equation, table and figure of the four papers: writes the page of the documentation.

python -m benchmarks.make_equations

A test looks the numbers up in the docstrings and comments of the modules that the page names.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.papers.recipes import CIFAR
from benchmarks.papers.tables import TABLES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "equations.md"
HEAD = """# The papers' equations and tables

Made by `benchmarks/make_equations.py`; a test looks each number up in the module's docstrings. Modules of `benchmarks`
come with the repository and not with the package. "As printed" is the paper's formula, "tighter" a bound that is never
larger than the paper's.

Each table and figure is run by `python -m benchmarks.papers` and the arguments below, in a checkout after `pip install
.`. What it takes besides stands beside it; `--scale trial` tries any of them on random images within minutes.

"""
# Functions of benchmarks.papers.measures that train on CIFAR-10.
ON_CIFAR = (
    "behind", "beside_crown", "before_crown", "shapes", "local_lip", "threats", "perturbed", "iterations", "classes",
)  # fmt: skip
_PRINTED, _TIGHTER = "as printed", "tighter"
_LOFAST, _ATTENTION = "lipcert.certifier._lofast", "benchmarks.papers.attention"
_THEOREM, _PAPERS = "benchmarks.papers.lofast", "lipcert.certifier._lofast_paper"
_LOCAL, _BOXES = "lipcert.training._local", "lipcert.bounds._box"
_SOLVE, _FAITHFUL, _BEHIND = "lipcert.certvit.solve", "lipcert.certvit.blockwise", "benchmarks.papers.behind"
# (numbers, what, how it compares with the paper, module, or None and then the reason why there is none)
Entry = tuple[str, str, str, str | None]
PAPERS: dict[str, tuple[Entry, ...]] = {
    "CertViT: Gupta and Verma, arXiv 2302.10287": (
        ("definition 1, equation 1", "Lipschitz constant", _PRINTED, "lipcert.numerics._bound"),
        (
            "equation 2", "product of the layers' norms",
            f"{_TIGHTER}: operators on images in place of flattened kernels, and every operation counts",
            "lipcert.bounds._global",
        ),
        ("equations 3 to 8", "activations as proximity operators, distance to ∂f(y)", f"{_PRINTED}, for ReLU", _BEHIND),
        (
            "equation 9", "the measure of a layer",
            "differs, because the spectral norm is what the bound multiplies: it is the default; ℓ1 by `--measure l1`",
            _SOLVE,
        ),
        (
            "equation 10", "the constraint set",
            "differs, because one mini-batch of all images has an exact projection; by `--eta`; with ∂f of ReLU in "
            "`benchmarks.papers.behind`",
            _SOLVE,
        ),
        ("problem 2, equation 11, proposition 3", "least norm at a given error", _PRINTED, _SOLVE),
        (
            "algorithm 1", "`--engine faithful`",
            "as printed but for a misprint: Ŵ + λ (W̃ − W), because Ŵ + λ (W − W̃) diverges", _FAITHFUL,
        ),
        (
            "algorithm 2", "its projection",
            "as printed but for two signs, because else the branches do not agree with the projection onto two "
            "half-spaces", _FAITHFUL,
        ),
        (
            "equations 12 and 13", "constraint of a mini-batch and its gradient",
            "as printed, with y = W_pre x, because equation 13 is the gradient for no activation", _FAITHFUL,
        ),
        (
            "algorithm 3", "a whole network",
            "as printed: `lipcert constrain --engine faithful`, then `lipcert finetune --loss ce --keep-zeros`",
            "lipcert.certvit.network",
        ),
        (
            "equations 14 to 16", "slope of GELU",
            "differs, because the paper's 1.12 is too small: 1.128905, rounded up",
            "lipcert.bounds.rules.activation",
        ),
    ),
    "LoFAST: Havens, Araujo, Zhang and Hu, ICML 2024": (
        ("equations 1 to 5", "dot-product attention", f"{_PRINTED}, and with biases", _ATTENTION),
        ("equation 6", "attention with and without the residual branch", _PRINTED, _THEOREM),
        ("equation 7", "sensitivity at a point", _PRINTED, _ATTENTION),
        ("equation 8", "its maximum, by projected gradient ascent", _PRINTED, _THEOREM),
        ("equation 9", "stages of a network", f"{_PRINTED}; `--method lofast` takes any operations", _LOFAST),
        ("proposition 1", "√2 times the change of the logits", f"{_TIGHTER}: ‖w_y − w_j‖ in place of √2",
         "lipcert.bounds._margins"),
        (
            "theorem 1, lemmas 1 and 2", "LoFAST",
            "as printed: `--method lofast-paper`; `--method lofast` bounds the same by the exact Jacobian", _PAPERS,
        ),
        ("equations 10 to 24", "parts of its proof", _PRINTED, _THEOREM),
        (
            "equation 25", "M_l",
            "as in appendix B.4, because with the second term of equation 25 the theorem is false",
            _THEOREM,
        ),
        ("equations 26 to 28", "ξ_l, δ₂⁽¹⁾ and δ₂⁽²⁾", _PRINTED, _THEOREM),
        ("equations 10 to 28", "the same with lipcert's constants", f"{_TIGHTER}: softmax is ½-Lipschitz", _ATTENTION),
        (
            "equation 29", "`RmsLayerProject`, by `convert --norm lofast`",
            "as printed; `LayerProject` centres, as LayerNorm does, and is another map", "lipcert.surgery._projections",
        ),
    ),
    "LiResNet: Hu, Zou, Wang, Leino and Fredrikson, arXiv 2301.12549": (
        ("definition 1", "ε-local robustness", f"{_PRINTED}, without ties", "lipcert.bounds._margins"),
        ("definition 2", "Lipschitz constant", _PRINTED, "lipcert.numerics._bound"),
        ("equation 1", "the logit ⊥", f"{_PRINTED}; f_ŷ > f_⊥ is radius > ε", "lipcert.training._losses"),
        ("equation 2, definition 3", "the loss EMMA", _PRINTED, "lipcert.training._losses"),
    ),
    "Local-Lip: Huang, Zhang, Shi, Kolter and Anandkumar, arXiv 2111.01395": (
        ("definition 1", "Lipschitz constant", _PRINTED, "lipcert.numerics._bound"),
        ("equations 1 and 2", "product of the layers' norms", f"{_TIGHTER}, see CertViT", "lipcert.bounds._global"),
        (
            "equations 3 to 6 and 9 to 11", "units that are constant on the ball, the local bound",
            "as printed, with upper bounds on norms, where power iteration stays below them", _BOXES,
        ),
        ("proposition 1, equation 7", "norm of the masked operator", _PRINTED, "lipcert.bounds._masked"),
        ("theorem 1", "no worse than the global bound", _PRINTED, "lipcert.certifier._local"),
        ("equation 8", "`ClippedReLU`, a θ of each unit", _PRINTED, "lipcert.surgery._activations"),
        (
            "algorithm 1", "training",
            "differs, because vectors of each image take the memory of all values: one of each layer is saved",
            _LOCAL,
        ),
        ("equation 12", "the sparsity loss", "differs, because means over units do not depend on their number", _LOCAL),
        ("equations 13 and 14", "an example of three layers", "as printed, in the tests", None),
        (
            "equations 15 to 19", "linear and varying units",
            "differs, because the sum can exceed the global bound, as the paper shows: not implemented", None,
        ),
        ("equation 20", "certified error", _PRINTED, "lipcert.results._statistics"),
        ("equations 21 to 23", "the box after a layer", f"{_PRINTED}, within [0, 1] at the pixels", _BOXES),
        ("equations 21 to 26", "worst logits and losses in training", _PRINTED, _LOCAL),
        ("equation 27", "the learning rate, by `--schedule exponential --decay-from --last-lr`", _PRINTED,
         "lipcert.settings._finetune"),
        ("equations 28 and 29", "ε and λ, by `--ramp`", _PRINTED, "lipcert.settings._finetune"),
    ),
}  # fmt: skip
_KINDS = "equation|definition|theorem|lemma|proposition|algorithm|problem"
_PLACE = re.compile(rf"\b({_KINDS})s?\s+(\d+(?:(?:,\s+(?:and\s+)?|\s+and\s+|\s+to\s+)\d+(?!\d|\.\d))*)", re.IGNORECASE)


def cited(text: str) -> set[str]:
    """The numbers that a text refers to: "equations 3 to 5 and 7" gives "equation 3", "equation 4" and so on."""
    found = set()
    for kind, numbers in _PLACE.findall(re.sub(r"\n[\s#]*", " ", text)):
        kind = "lemma" if kind.lower().startswith("lemma") else kind.lower()
        for part in re.split(r",\s+(?:and\s+)?|\s+and\s+", numbers):
            first, *last = (int(number) for number in re.split(r"\s+to\s+", part))
            found |= {f"{kind} {number}" for number in range(first, (last or [first])[0] + 1)}
    return found


def source(module: str) -> str:
    """The text of a module of this repository."""
    return (ROOT / f"{module.replace('.', '/')}.py").read_text()


def tables(paper: str) -> str:
    """The tables and figures of a paper, with what each takes."""
    text = "| table | what | takes |\n| --- | --- | --- |\n"
    for one in TABLES:
        if one.paper != paper:
            continue
        data = [row.data for row in one.rows if row.recipe]
        takes = one.needs or ", ".join(f"`--data {name}=FOLDER`" for name in dict.fromkeys(data) if name)
        takes = takes or (f"`--data {CIFAR}=FOLDER`" if one.measure in ON_CIFAR else "nothing")
        text += f"| `--paper {paper} --table '{one.number}'` | {one.title} | {takes} |\n"
    return text


def page() -> str:
    """The page as Markdown."""
    text = HEAD
    for paper, entries in PAPERS.items():
        text += f"## {paper}\n\n| in the paper | what | beside the paper | where |\n| --- | --- | --- | --- |\n"
        text += "".join(
            f"| {numbers} | {what} | {how} | {f'`{module}`' if module else ''} |\n"
            for numbers, what, how, module in entries
        )
        text += f"\n{tables(paper.partition(':')[0].lower())}\n"
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
