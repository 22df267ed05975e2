"""``lipcert models``, its table, and the public check of rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from commands import refused

import lipcert
from benchmarks import zoo_operations
from lipcert.bounds import Remainder, Value, box, remainder, rounding, rule
from lipcert.bounds._registry import RULES, key_of
from lipcert.bounds.testing import check_rule
from lipcert.errors import InputError
from lipcert.inputs.sources import architectures


def test_the_command_knows_checkpoints_only() -> None:
    assert "did you mean cifar10-vit" in refused("models", "cifar10-vitt")
    assert "lipcert inspect vit_tiny_patch16_224 shows" in refused("models", "vit_tiny_patch16_224")
    assert "lipcert inspect resnet18 shows" in refused("models", "resnet1")


def test_names_are_read_from_the_code() -> None:
    assert set(timm.list_models()) <= architectures()


def test_operations_of_architectures_are_listed(tmp_path: Path) -> None:
    names = ["test_efficientnet_gn", "test_vit3"]
    rows = zoo_operations.describe_all(names, tmp_path)
    assert zoo_operations.describe_all(names, tmp_path) == rows  # an interrupted run goes on
    assert all(rows[name]["logits"] for name in names)
    listed = zoo_operations.operations(rows)
    assert "| gelu | 1 | 0 |" in listed
    assert "group_norm" not in listed.partition("rules that none needs")[2]


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

    def answer(propagation, node, x):
        return propagation.result(node, x.up * 2 * share, x.down * 2 * share, (x,))

    def symmetric(propagation, node, x):
        reach = torch.maximum(x.up, x.down) * 2 * share
        return propagation.result(node, reach, reach, (x,))

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
