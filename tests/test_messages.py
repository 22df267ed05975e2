"""Every text that ends a command, collected from the code: ``python tests/test_messages.py`` lists them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ERRORS = ("InputError", "LoadError", "ConvertError")
OF_INPUTS = ("refusal", "no_file")
# What to do stands after a semicolon or a colon, or is what the argument must be.
REMEDY = re.compile(r"[;:] |\bneeds?\b|\bmust\b|\btakes?\b|\bgive\b|\bchoose\b|\bcheck\b|, got|such as|for example")
# Arithmetic of shapes, which only code of the user's own can get wrong.
CODE = ("norms", "networks", "surgery", "certvit/blockwise.py")
# Said by the system.
SYSTEM = re.compile(r"^cannot (read|write|make)")


def texts() -> list[tuple[str, str]]:
    """The place and the text of each error, as far as it is written there."""
    found = []
    for path in sorted([*(ROOT / "lipcert").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]):
        names = (*ERRORS, *OF_INPUTS) if path.parent.name == "inputs" else ERRORS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", getattr(node.func, "attr", "")) not in names:
                continue
            for argument in node.args:
                left = argument.left if isinstance(argument, ast.BinOp) else argument
                if isinstance(left, (ast.JoinedStr, ast.Constant)):
                    more = "" if left is argument else f"{{{ast.unparse(argument.right)}}}"
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", _text(left) + more))
    return found


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    """A string, with the code of its values in braces."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(x.value) if isinstance(x, ast.Constant) else f"{{{ast.unparse(x.value)}}}" for x in parts)


def test_every_error_says_in_one_line_what_to_do():
    every = texts()
    assert len(every) > 300
    for place, text in every:
        assert "\n" not in text, place
        assert not text.endswith((".", " ", ";")), place
        assert len(re.sub(r"\{.*?\}", "", text)) < 400, place
        within = place.removeprefix("lipcert/").startswith(CODE)
        # A text that ends with a variable, which holds the rest, is written elsewhere.
        assert within or REMEDY.search(text) or SYSTEM.match(text) or text.endswith("}"), f"{place}: {text}"


if __name__ == "__main__":
    print("\n".join(f"{place}: {text}" for place, text in texts()))
