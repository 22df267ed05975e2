"""The registry: one rule for each operation, with its answers to all questions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lipcert
from lipcert.bounds import (
    NoAnswer,
    Remainder,
    Value,
    answer_of,
    box,
    kept_whole,
    remainder,
    remainder_of,
    rounding,
    rule,
)
from lipcert.bounds._registry import RULES
from lipcert.errors import UnsupportedOperation
from lipcert.graph import Node


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def halved(x: Tensor) -> Tensor:
    return x / 2


def test_all_answers_of_an_operation_stand_in_one_rule() -> None:
    rule(halved, linear=True)(lambda call, x: Value(x.shape, x.lip / 2))
    box(halved)(lambda propagation, node, x: x)
    rounding(halved)(lambda node, operands, fmt: operands[0].nominal)
    found = RULES[halved]
    assert None not in (found.lipschitz, found.box, found.rounding)
    assert found.remainder is None
    assert remainder_of(Node(halved, halved, (), {}, "")) is None, "it is linear"


def test_a_later_answer_replaces_that_answer_alone() -> None:
    before = RULES["add"]
    rule("add")(lambda call, x, y, alpha=1: Value(call.shape, x.lip))
    assert RULES["add"].lipschitz is not before.lipschitz
    assert RULES["add"].box is before.box
    assert RULES["add"].linear is before.linear


@pytest.mark.parametrize("question", ["lipschitz", "box", "remainder", "rounding"])
def test_no_answer_where_there_is_none(question: str) -> None:
    with pytest.raises(NoAnswer):
        answer_of(halved, question)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            "lipschitz",
            "no rule for 1 operation: exp at act; add one with @lipcert.bounds.rule, ",
        ),
        (
            "remainder",
            "no remainder rule for 1 operation: exp at act; add one with @lipcert.bounds.remainder, ",
        ),
        (
            "rounding",
            "no rounding rule for 1 operation: exp at act; add one with @lipcert.bounds.rounding, ",
        ),
    ],
)
def test_the_error_names_the_question_and_what_to_do(question: str, message: str) -> None:
    assert str(UnsupportedOperation([("exp", "act")], question)).startswith(f"{message}convert the modules, or")
    assert hasattr(lipcert.bounds, message.partition("@lipcert.bounds.")[2].partition(",")[0])


class Folded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def test_a_class_is_kept_whole_for_the_questions_that_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    rule(Folded)(lambda call, module, x: Value(x.shape, x.lip))
    assert kept_whole(Folded())
    assert not kept_whole(Folded(), "remainder")
    monkeypatch.setattr(Folded, "forward", lambda self, x: 3 * x)
    remainder(Folded)(type("Answer", (Remainder,), {}))
    assert kept_whole(Folded(), "remainder")
    assert not kept_whole(Folded()), "its method is another one than when that answer was registered"
    assert torch.equal(Folded()(torch.ones(1)), torch.full((1,), 3.0))


def test_a_remainder_must_have_the_base_class() -> None:
    with pytest.raises(TypeError, match=r"subclass of lipcert\.bounds\.Remainder"):
        remainder(Folded)(type("Answer", (), {}))


def test_the_table_of_operations_is_what_the_registry_says() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference" / "operations.md").read_text()
    rows = lipcert.bounds.coverage().splitlines(keepends=True)
    table = "".join(row for row in rows if not row.startswith("| (your own) |"))
    assert page.endswith("\n\n" + table), "write the output of lipcert.bounds.coverage() to the end of the page"
    assert "| attention | softmax |  | yes | yes | yes |" in table
    assert "| activation | relu | yes | yes | yes | yes |" in table
    assert "| arithmetic | mul | yes | yes, or linear | yes | yes |" in table
    assert "| structure | flip | yes | linear |  | yes |" in table
