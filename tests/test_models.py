"""``lipcert models``, its table, and the public check of rules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from typer.testing import CliRunner

import lipcert
from benchmarks import make_zoo_table
from lipcert.bounds import Remainder, Value, box, remainder, rounding, rule
from lipcert.bounds._registry import RULES, key_of
from lipcert.bounds.testing import check_rule
from lipcert.cli import app
from lipcert.errors import InputError
from lipcert.inputs import zoo
from lipcert.surgery._swap import plan

CONTENT = {
    "timm": "1.0.0",
    "texts": [
        "vision_transformer",
        "",
        "sort at head",
        "LayerNorm",
        "SmoothProject",
        "Attention",
        "L2Attention",
        "why",
    ],
    "rows": [
        ["vit_tiny_patch16_224", 0, 5717416, 1, 1, 1, [[5, 6]], [[3, 4]], []],
        ["vit_small_patch16_224", 0, 22050664, 1, 1, 2, [[5, 6]], [[3, 4]], [[5, 7]]],
        ["vit_base_patch16_224", 0, 86567656, 1, 2, 1, [], [], []],
    ],
}


@pytest.fixture
def small_table(tmp_path, monkeypatch):
    path = tmp_path / "zoo.json"
    path.write_text(json.dumps(CONTENT))
    monkeypatch.setattr(zoo, "TABLE", path)
    zoo.architectures.cache_clear()
    yield
    zoo.architectures.cache_clear()


def test_what_the_table_says_of_each(small_table) -> None:
    tiny, small, base = (zoo.architectures()[f"vit_{size}_patch16_224"] for size in ("tiny", "small", "base"))
    assert tiny.covered
    assert tiny.certificates == ("global", "gloro", "local", "lofast", "anchored")
    assert small.certificates == ("global", "gloro", "local")
    assert small.kept == (("Attention", "why"),)
    assert not base.covered
    assert base.certificates == ()
    assert base.reason == "sort at head"


def test_the_command_shows_one_architecture(small_table, monkeypatch) -> None:
    found = {"vision_transformer": ("test_vit", {"float32": "", "float16": "no rule"})}
    monkeypatch.setattr("lipcert.cli._models.roundings", lambda: found)
    shown = CliRunner().invoke(app, ["models", "vit_small_patch16_224.augreg_in1k"]).stdout
    assert dict(line.split("\t") for line in shown.splitlines()) == {
        "architecture": "vit_small_patch16_224",
        "family": "vision_transformer",
        "parameters": "22.1M",
        "global bound": "has rules",
        "methods with rules": "global, gloro, local",
        "not linearised": "sort at head",
        "--dtype": "float32 (seen on test_vit)",
        "--dtype float16": "none: no rule (seen on test_vit)",
        "convert replaces": "LayerNorm by SmoothProject",
        "convert keeps": "Attention: why",
        "next": "lipcert convert vit_small_patch16_224",
    }
    one = json.loads(CliRunner().invoke(app, ["models", "vit_base_patch16_224", "--json"]).stdout)
    assert (one["reason"], one["covered"]) == ("sort at head", False)
    wrong = CliRunner().invoke(app, ["models", "vit_tiny_patch16_225"])
    assert wrong.exit_code == 2
    assert "did you mean vit_tiny_patch16_224" in wrong.stderr.replace("\n", " ")


def test_the_shipped_table_speaks_of_what_surgery_does() -> None:
    known = zoo.architectures()
    if "vit_tiny_patch16_224" not in known:
        pytest.skip("the table does not hold this architecture")
    with torch.device("meta"):
        edits, _ = plan(timm.create_model("vit_tiny_patch16_224"), attention="l2", norm="smooth")
    swapped = {(edit.was.__name__, type(edit.new).__name__) for edit in edits if edit.new is not None}
    assert swapped == {*known["vit_tiny_patch16_224"].attention, *known["vit_tiny_patch16_224"].norms}


def test_every_architecture_of_this_timm_is_answered_with_a_bound() -> None:
    if json.loads(zoo.TABLE.read_text())["timm"] != timm.__version__:
        pytest.skip("the table was made with another timm")
    found = zoo.architectures()
    assert set(timm.list_models()) <= found.keys()
    assert [(one.name, one.reason) for one in found.values() if not one.covered] == []
    sets = json.loads((Path(__file__).parent.parent / "benchmarks" / "zoo_sets.json").read_text())
    assert len(sets["signatures"]) == 338
    assert {*sets["signatures"], *sets["smallest"]} <= found.keys()


def test_the_script_makes_what_is_shipped(tmp_path: Path) -> None:
    content = json.loads(zoo.TABLE.read_text())
    if content["timm"] != timm.__version__:
        pytest.skip("the table was made with another timm")
    names = ["test_efficientnet_gn", "test_mambaout", "test_vit3", "tiny_vit_5m_224"]
    rows = make_zoo_table.describe_all(names, tmp_path)
    found = make_zoo_table.answer_all(rows, tmp_path, resume=False, limit=math.inf)
    made = tmp_path / "zoo.json"
    make_zoo_table.write(make_zoo_table.table(rows, found), made)

    def in_words(table: dict[str, Any]) -> dict[str, list[Any]]:
        """Rows with texts in place of their numbers, in the places that hold such."""
        texts = table["texts"]
        return {
            row[0]: [texts[row[1]], *row[2:4], texts[row[4]], texts[row[5]]]
            + [[(texts[a], texts[b]) for a, b in pairs] for pairs in row[6:]]
            for row in table["rows"]
        }

    shipped, anew = in_words(content), in_words(json.loads(made.read_text()))
    assert anew == {name: shipped[name] for name in names}
    assert anew["tiny_vit_5m_224"][-1] == [("Attention", "normalises its own input")]


def test_networks_without_a_classifier_can_be_inspected() -> None:
    arguments = {"img_size": 28, "depth": 1, "embed_dim": 24, "num_heads": 2}
    with pytest.raises(InputError, match="num_classes"):
        lipcert.load("vit_small_patch14_dinov2", pretrained=False, **arguments)
    model = lipcert.load("vit_small_patch14_dinov2", pretrained=False, features=True, **arguments)
    assert lipcert.lipschitz(model).finite


# The check of rules ---------------------------------------------------------------------------------------------------


def doubled(x: torch.Tensor) -> torch.Tensor:
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(doubled, (x,), x)
    return torch.sin(2 * x)


@pytest.fixture
def constant(request):
    @rule(doubled)
    def answer(call, x: Value) -> Value:
        """|d sin(2x)| ≤ 2."""
        return Value(x.shape, x.lip * request.param)

    yield request.param
    del RULES[key_of(doubled)]


@pytest.mark.parametrize("constant", [2.0], indirect=True)
def test_a_true_rule_passes_and_is_seen_to_be_tight(constant) -> None:
    found = check_rule(doubled, (2, 3))
    assert found.keys() == {"lipschitz", "box"}
    assert 0.99 < found["lipschitz"] <= 1 + 1e-9


@pytest.mark.parametrize("constant", [1.9], indirect=True)
def test_a_false_rule_is_caught(constant) -> None:
    with pytest.raises(AssertionError, match="the norm of a Jacobian is .*, and the bound is 1.9"):
        check_rule(doubled, (2, 3))


@pytest.mark.parametrize("constant", [float("inf")], indirect=True)
def test_an_infinite_constant_leaves_nothing_to_check(constant) -> None:
    with pytest.raises(InputError, match="no finite constant"):
        check_rule(doubled, (2, 3))


def _answers(**answers):
    """Registers other answers of ``doubled``; the fixture below takes them away again."""
    if "linear" in answers:
        rule(doubled, linear=True)(RULES[key_of(doubled)].lipschitz)
    for question, register in (("box", box), ("remainder", remainder), ("rounding", rounding)):
        if question in answers:
            register(doubled)(answers[question])


def _moves_by(share):
    """sin(2x) moves by at most twice what x does."""

    def answer(walk, node, x):
        return walk.result(node, x.up * 2 * share, x.down * 2 * share, (x,))

    def symmetric(walk, node, x):
        reach = torch.maximum(x.up, x.down) * 2 * share
        return walk.result(node, reach, reach, (x,))

    return symmetric if share == 1 else answer


def _curved(factor):
    """|d² sin(2x)| ≤ 4, so what the linearisation leaves out is at most 2ρ²."""

    class Curved(Remainder):
        def __init__(self, node, operands, result):
            pass

        def norm(self, rho):
            return factor * rho[0] ** 2

        def against(self, direction):
            size = direction.flatten(1).norm(dim=1)
            return lambda rho: size * self.norm(rho)

    return Curved


def _rounds_by(ulps):
    """2x, sin, and three changes of format or so, all of numbers up to max(1, 2|x|)."""

    def answer(node, operands, fmt):
        return fmt.gamma(ulps) * (2 * operands[0].most + 1)

    return answer


@pytest.mark.parametrize("constant", [2.0], indirect=True)
def test_answers_to_all_questions_that_hold(constant) -> None:
    _answers(box=_moves_by(1), remainder=_curved(2), rounding=_rounds_by(8))
    found = check_rule(doubled, (2, 3))
    assert found.keys() == {"lipschitz", "box", "remainder", "rounding"}
    assert all(0.01 < share <= 1 + 1e-9 for share in found.values())


@pytest.mark.parametrize("constant", [2.0], indirect=True)
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"box": _moves_by(0.5)}, "the box of an entry"),
        ({"remainder": _curved(1)}, "the remainder of doubled: its norm is"),
        ({"linear": True}, "doubled is registered as linear"),
        ({"rounding": lambda node, operands, fmt: 0 * operands[0].most}, "the error of doubled in torch.float32 is"),
    ],
    ids=["box", "remainder", "linear", "rounding"],
)
def test_each_false_answer_is_caught(constant, answers, message) -> None:
    _answers(**answers)
    with pytest.raises(AssertionError, match=message):
        check_rule(doubled, (2, 3))
