"""Which class becomes what under ``lipcert convert``: writes the page of the documentation.

python -m benchmarks.make_class_table
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lipcert.surgery._projections import PROJECTIONS
from lipcert.surgery._swap import _LINEAR
from lipcert.surgery._table import ATTENTIONS, KEPT, KEPT_NORMS, LINEAR_NORMS, NORMS

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "classes.md"
HEAD = """# What convert does to which class

Made by `benchmarks/make_class_table.py` from the tables that `lipcert convert` reads. A class stands for itself alone:
a subclass may have a forward of its own, and stays. Whatever stays is named in the report of a conversion with its
reason, and the rest of the model is converted all the same. `lipcert models NAME --json` says what becomes of the
classes of one architecture.
"""
EXCEPTIONS = """Instances stay that have a gate, a norm before the output projection, pooled queries, keys that several
heads share, or a position bias that depends on the image.
"""


def page() -> str:
    """The page as Markdown."""
    replaced = ((name, form.now) for name, form in ATTENTIONS.items())
    maps = ((name, new.__name__) for name, new in _LINEAR.items())
    projected = ((name, " or ".join(f"`{kind}`" for kind in _projections(how))) for name, how in NORMS.items())
    return "\n".join(
        [
            HEAD,
            *_section("Attention that `--attention l2` replaces", "becomes", replaced),
            EXCEPTIONS,
            *_section("Attention that stays", "because", KEPT.items()),
            *_section("Normalisations that `--norm project`, `smooth` or `lofast` replace", "become", projected),
            "An activation that is part of such a class stays after the projection.\n",
            *_section("Normalisations that stay", "because", KEPT_NORMS.items()),
            *_section("Needs no surgery", "because", ((name, "linear in evaluation") for name in sorted(LINEAR_NORMS))),
            *_section("Linear maps, always", "become", maps),
        ]
    )


def _projections(how: str) -> list[str]:
    kind = "rms" if how.startswith("rms") else "group" if how == "group" else ""
    return list(dict.fromkeys(forms[kind].__name__ for forms in PROJECTIONS.values() if kind in forms))


def _section(title: str, verb: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"| `{name}` | {what} |" for name, what in rows]
    return [f"## {title}\n", f"| class | {verb} |", "| --- | --- |", *lines, ""]


if __name__ == "__main__":
    PAGE.write_text(page())
