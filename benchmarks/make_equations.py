"""Where lipcert has each numbered equation of the four papers: writes the page of the documentation.

python -m benchmarks.make_equations

A test looks the numbers up in the docstrings and comments of the modules that the page names.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "equations.md"
HEAD = """# The papers' equations

Made by `benchmarks/make_equations.py`; a test looks each number up in the module's docstrings. Modules of `benchmarks`
come with the repository and not with the package.

"""
_LOFAST, _ATTENTION = "lipcert.certifier._lofast", "benchmarks.papers.attention"
_PRINTED = "benchmarks.papers.lofast"
_LOCAL, _BOXES = "lipcert.training._local", "lipcert.bounds._box"
# (numbers, what, module, or None and then the reason why there is none)
Entry = tuple[str, str, str | None]
PAPERS: dict[str, tuple[Entry, ...]] = {
    "CertViT: Gupta and Verma, arXiv 2302.10287": (
        ("definition 1, equation 1", "Lipschitz constant", "lipcert.numerics._bound"),
        ("equation 2", "product of the layers' norms", "lipcert.bounds._global"),
        ("equations 3 to 8", "activations as proximity operators, distance to ∂f(y)", "benchmarks.papers.behind"),
        ("problem 2, equations 9, 10 and 11, proposition 3", "least norm at a given error", "lipcert.certvit.solve"),
        ("algorithms 1 and 2, equations 12 and 13", "the engine `faithful`", "lipcert.certvit.blockwise"),
        ("algorithm 3", "a whole network, by `lipcert.constrain`", "lipcert.certvit.network"),
        ("equations 14 to 16", "slope of GELU; the paper's constant is too small", "lipcert.bounds.rules.activation"),
    ),
    "LoFAST: Havens, Araujo, Zhang and Hu, ICML 2024": (
        ("equations 1 to 5", "dot-product attention", _ATTENTION),
        ("equation 7", "sensitivity at a point", _ATTENTION),
        ("equation 9", "stages of a network", _LOFAST),
        ("proposition 1", "√2 times the change of the logits", "lipcert.bounds._margins"),
        ("equations 10 to 28", "in place of them: constants of lipcert's own, which are tighter", _ATTENTION),
        ("theorem 1, lemmas 1 and 2, equations 6, 8 and 10 to 28", "as published, to compare with", _PRINTED),
        ("equation 29", "`RmsLayerProject`, by `convert --norm lofast`", "lipcert.surgery._projections"),
    ),
    "LiResNet: Hu, Zou, Wang, Leino and Fredrikson, arXiv 2301.12549": (
        ("definition 1", "ε-local robustness", "lipcert.bounds._margins"),
        ("definition 2", "Lipschitz constant", "lipcert.numerics._bound"),
        ("equation 1", "the logit ⊥, constants of margins", "lipcert.bounds._margins"),
        ("equation 2, definition 3", "the loss EMMA", "lipcert.training._losses"),
    ),
    "Local-Lip: Huang, Zhang, Shi, Kolter and Anandkumar, arXiv 2111.01395": (
        ("definition 1", "Lipschitz constant", "lipcert.numerics._bound"),
        ("equations 1 and 2", "product of the layers' norms", "lipcert.bounds._global"),
        ("equations 3 to 6 and 9 to 11", "units that are constant on the ball, the local bound", _BOXES),
        ("proposition 1, equation 7", "norm of the masked operator", "lipcert.bounds._masked"),
        ("theorem 1", "no worse than the global bound", "lipcert.certifier._local"),
        ("equation 8", "`ClippedReLU`", "lipcert.surgery._activations"),
        ("algorithm 1, equation 12", "training, the sparsity loss", _LOCAL),
        ("equations 13 and 14", "an example of three layers, which the tests compute", None),
        (
            "equations 15 to 19",
            "not implemented: the sum over linear and varying units can exceed the global bound, as the paper shows",
            None,
        ),
        ("equation 20", "certified error", "lipcert.results._statistics"),
        ("equations 21 to 23", "the box after a layer", _BOXES),
        ("equations 21 to 26", "worst logits and losses in training", _LOCAL),
        ("equation 27", "schedule of the learning rate", "lipcert.settings._finetune"),
        ("equations 28 and 29", "schedules of ε and λ", "lipcert.settings._finetune"),
    ),
}
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


def page() -> str:
    """The page as Markdown."""
    text = HEAD
    for paper, entries in PAPERS.items():
        text += f"## {paper}\n\n| in the paper | what | where |\n| --- | --- | --- |\n"
        text += "".join(
            f"| {numbers} | {what} | {f'`{module}`' if module else ''} |\n" for numbers, what, module in entries
        )
        text += "\n"
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
