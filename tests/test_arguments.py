"""The table of arguments against torch's own signatures."""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import get_testing_overrides, resolve_name

import lipcert.certifier  # noqa: F401  fills the tables of rules
from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import RULES, NoAnswer
from lipcert.graph import SIGNATURES, SYNONYMS, Node, canonical

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    OVERRIDABLE = {
        function: inspect.signature(dummy).parameters.values() for function, dummy in get_testing_overrides().items()
    }

# What torch's own list of signatures says otherwise than torch does.
MISPRINTED = {
    "torch.max_pool3d",
    "torch.nn.functional.max_pool3d",  # ceil_mode comes before return_indices
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
    if operation == "rsub":
        known.append(["input", "other"])
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
    """A rule for an operation whose arguments nobody listed would fail when it is asked."""
    moved = "reshape permute movedim transpose getitem index_select flip roll unbind split chunk tensor_split part"
    moved += (
        " split_with_sizes expand repeat tile repeat_interleave interpolate unfold fold unfold_axis identity einsum"
    )
    moved += " scaled_dot_product_attention logsigmoid tanhshrink"
    operations = {op for op in RULES if isinstance(op, str)}
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
