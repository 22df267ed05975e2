"""The table of arguments against torch's own signatures."""

import dataclasses
import inspect
import warnings

import pytest
import rule_attacks
import torch
import torch.nn.functional as F
from torch.overrides import get_testing_overrides, resolve_name
from truth import gains_hold

import lipcert
from benchmarks import _arguments
from lipcert.bounds import analyze
from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import RULES, NoAnswer, key_of
from lipcert.bounds.rules.activation import ACTIVATIONS
from lipcert.certifier import Anchored
from lipcert.errors import LipcertError
from lipcert.graph import SIGNATURES, SYNONYMS, Node, canonical, capture

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    OVERRIDABLE = {
        function: inspect.signature(dummy).parameters.values() for function, dummy in get_testing_overrides().items()
    }

# What torch's own list of signatures says otherwise than torch does.
MISPRINTED = {
    "torch.lstm",  # two signatures, of which the one for packed sequences has no rule: its operand has no batch axis
}


# Its names for arguments that torch calls otherwise, and what has to be named in torch.
DUMMY = {
    "inputs": "input",
    "train": "training",
    "names": "dim",
    "tensor": "input",
    "k": "index",
    "v": "value",
}
NAMED = ("out", "out_dtype", "_stacklevel", "cudnn_enabled")


def schemas(operation: str) -> list[list[str]]:
    """The positional arguments of torch's own kernels of this name."""
    found = torch._C._jit_get_schemas_for_operator(f"aten::{operation}")
    return [[SYNONYMS.get(a.name, a.name) for a in schema.arguments if not a.kwarg_only] for schema in found]


def agrees(given: list[str], positional: tuple[str, ...]) -> bool:
    given = [SYNONYMS.get(name, name) for name in given]
    return all(a == b for a, b in zip(given, positional, strict=False))


@pytest.mark.parametrize("operation", sorted(SIGNATURES))
def test_signature(operation):
    """Positional arguments have torch's names in torch's order, in at least one of the forms that it has."""
    positional, _ = SIGNATURES[operation]
    known = schemas(operation.removesuffix("_last_hidden").removesuffix("_last_cell"))
    for place in (F, torch, torch.Tensor):
        function = getattr(place, operation, None)
        if inspect.isfunction(function):
            names = inspect.signature(function).parameters.values()
            known.append([SYNONYMS.get(p.name, p.name) for p in names if p.kind is p.POSITIONAL_OR_KEYWORD])
    if operation == "setitem":  # python's own, without names
        known.append(["input", "index", "value"])
    assert any(names[: len(positional)] == list(positional)[: len(names)] for names in known), known


@pytest.mark.parametrize("function", [f for f in OVERRIDABLE if canonical(f) in SIGNATURES], ids=resolve_name)
def test_namesakes(function):
    """Every function that shares the rules of a name has its arguments in that order."""
    if resolve_name(function) in MISPRINTED:
        return
    positional, known = SIGNATURES[str(canonical(function))]
    names = [p.name for p in OVERRIDABLE[function] if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [DUMMY.get(name, name) for name in names]
    assert agrees([name for name in names if name not in {*NAMED, *known} - set(positional)], positional), names


def test_rules_that_read_arguments_have_them_listed():
    """A rule for an operation whose arguments nobody listed would refuse all but its operand, as entrywise ones do."""
    moved = "reshape permute getitem index_select flip roll unbind split chunk part"
    moved += " expand repeat tile repeat_interleave interpolate unfold fold unfold_axis identity"
    moved += " scaled_dot_product_attention logsigmoid"
    operations = {op for op, rule in RULES.items() if isinstance(op, str) and (rule.lipschitz or rule.rounding)}
    operations -= {key_of(function) for function in ACTIVATIONS}
    assert operations - set(SIGNATURES) - set(moved.split()) == set()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1, 2, 3, 4, 5, 6), {}), ((1,), {"dim": 0, "axis": 0}), ((1, 0), {"axis": 0}), ((1,), {"where": 0})],
)
def test_arguments_that_are_no_arguments(args, kwargs):
    with pytest.raises(NoAnswer):
        arguments(Node("sum", torch.sum, args, kwargs, ""))


def test_other_names():
    assert arguments(Node("sum", torch.sum, (1,), {"axis": 2, "keepdims": True}, "")) == {
        "input": 1,
        "dim": 2,
        "keepdim": True,
    }


# Arguments by name are the same arguments.

CALLED = [name for name in _arguments.DRAWS if name not in ("setitem",)]


def bounds(setting, named):
    """The operation's bounds and names, called by name in reverse order or by place."""
    analysis = analyze(rule_attacks.applied(dataclasses.replace(setting, named=named)), (1, setting.size))
    output = analysis.output
    return output.lip, output.magnitude, output.lowest, sorted(node.name for node in analysis.graph.nodes)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("operation", CALLED)
def test_arguments_by_name_in_another_order_are_the_same(operation):
    first, count, compared = list(_arguments.DRAWS).index(operation), len(_arguments.DRAWS), 0
    for seed in range(first, first + 60 * count, count):
        setting = _arguments.draw(seed)
        if setting is None or compared == 3:
            continue
        try:
            by_place = bounds(setting, named=False)
        except LipcertError as refusal:
            with pytest.raises(type(refusal)):
                bounds(setting, named=True)
            compared += 1
            continue
        assert bounds(setting, named=True) == by_place, setting
        compared += 1
    assert compared


def test_every_operation_with_a_rule_is_called():
    """Parts and the states of an LSTM are results of operations that are."""
    results = {"part", "lstm_last_hidden", "lstm_last_cell"}
    assert {op for op in RULES if isinstance(op, str) and RULES[op].lipschitz} <= {*_arguments.DRAWS, *results}


@pytest.mark.parametrize(
    ("forward", "operands"),
    [
        (lambda x: torch.div(other=x + 1, input=2 * x), ("mul", "add")),
        (lambda x: torch.sub(other=x + 1, input=2 * x), ("mul", "add")),
        (lambda x: torch.matmul(other=(x + 1).mT, input=2 * x), ("mul", "permute")),
        (lambda x: F.conv2d(weight=(x + 1)[None], input=(2 * x)[None]), ("getitem", "getitem")),
        (lambda x: F.scaled_dot_product_attention(value=x + 1, key=2 * x, query=x.tanh()), ("tanh", "mul", "add")),
        (lambda x: torch.addcmul(tensor2=x + 1, tensor1=2 * x, input=x.tanh()), ("tanh", "mul")),
    ],
)
def test_operands_stand_in_the_order_of_the_signature(forward, operands, network):
    graph = capture(network(forward), torch.rand(1, 2, 2).double())
    assert tuple(node.op for node in graph.output.operands) == operands


def test_the_norm_of_a_quotient_by_name_is_that_of_the_quotient(network):
    """Numerator and denominator are no longer exchanged: their constants differ by far."""
    x = torch.full((1, 1, 2, 2), 0.3).double()

    def forward(x):
        return torch.div(other=0.1 + x.flatten(1), input=5 * x.flatten(1))

    model = lipcert.load(network(forward), mean=(0.0,), std=(1.0,), input_size=(1, 2, 2)).double()
    gains_hold(Anchored(model), x)
