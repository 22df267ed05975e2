"""Settings of torch and the machine that break a certificate are refused in one line, which mends them."""

import contextlib
import ctypes
import os
import subprocess
import sys

import pytest
import torch
from commands import read_summary, run
from modules import refusal
from torch import nn

import lipcert
from lipcert import certify
from lipcert.certifier import Certifier
from lipcert.errors import InputError
from lipcert.numerics import _environment, assumptions, check_environment, environment_settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT_TYPES = ("float32", "float16", "bfloat16")
NEWER = "torch.backends.mkldnn.{}.fp32_precision"


def value_of(name):
    return _environment._setting(name.removeprefix("torch.backends."))


def assign(name, value):
    holder, _, last = name.removeprefix("torch.backends.").rpartition(".")
    setattr(_environment._setting(holder) if holder else torch.backends, last, value)


@contextlib.contextmanager
def put(name, value):
    before = value_of(name)
    if before is None:
        pytest.skip(f"this torch has no {name}")
    assign(name, value)
    try:
        yield
    finally:
        assign(name, before)


@contextlib.contextmanager
def matmul_precision(value):
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def flushed():
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine does not flush")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def rounded(mode):
    library = ctypes.CDLL(None)
    try:
        done = library.fesetround(mode) == 0
    except AttributeError:
        pytest.skip("no fesetround")
    try:
        if not done or os.uname().machine != "x86_64":
            pytest.skip("modes have other numbers here")
        yield
    finally:
        library.fesetround(0)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# What is set, for which dtypes it is refused on the CPU, and what mends it.
BREAKING = {
    "precision medium": (lambda: matmul_precision("medium"), ("float32",), 'set_float32_matmul_precision("highest")'),
    "precision high": (lambda: matmul_precision("high"), ("float32",), 'set_float32_matmul_precision("highest")'),
    "oneDNN, matmul": (
        lambda: put(NEWER.format("matmul"), "bf16"),
        ("float32",),
        'mkldnn.matmul.fp32_precision = "ieee"',
    ),
    "oneDNN, conv": (lambda: put(NEWER.format("conv"), "bf16"), ("float32",), 'mkldnn.conv.fp32_precision = "ieee"'),
    "oneDNN, rnn": (lambda: put(NEWER.format("rnn"), "bf16"), ("float32",), 'mkldnn.rnn.fp32_precision = "ieee"'),
    "everything": (lambda: put("torch.backends.fp32_precision", "tf32"), ("float32",), 'fp32_precision = "ieee"'),
    "flushed": (flushed, ("real", *FLOAT_TYPES), "set_flush_denormal(False)"),
    "rounded down": (lambda: rounded(0x400), ("real", *FLOAT_TYPES), "restore the rounding mode"),
    "rounded up": (lambda: rounded(0x800), ("real", *FLOAT_TYPES), "restore the rounding mode"),
    "truncated": (lambda: rounded(0xC00), ("real", *FLOAT_TYPES), "restore the rounding mode"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), ("real", *FLOAT_TYPES), "leave the torch.autocast"),
    "default float64": (lambda: default_dtype(torch.float64), FLOAT_TYPES, "set_default_dtype(torch.float32)"),
    "default float16": (lambda: default_dtype(torch.float16), ("real", *FLOAT_TYPES), "set_default_dtype"),
}


@pytest.fixture(name="model", scope="module")
def _model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    return lipcert.load(net, mean=(0.2,), std=(0.5,), input_size=(1, 6, 6))


def test_torch_as_it_starts_is_accepted():
    for dtype in ("real", *FLOAT_TYPES):
        check_environment(CPU, dtype)


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_a_claim_is_refused_and_nothing_else(name, model):
    setting, refused, remedy = BREAKING[name]
    certifiers = {dtype: Certifier(model, 0.1, "gloro", dtype=dtype) for dtype in ("real", "float32")}
    image = torch.rand(1, 1, 6, 6)
    with setting():
        for dtype in ("real", *FLOAT_TYPES):
            if dtype in refused:
                with refusal(remedy):
                    check_environment(CPU, dtype)
            else:
                check_environment(CPU, dtype)
        for dtype, certifier in certifiers.items():
            if dtype in refused:
                with pytest.raises(InputError, match="do not hold in this process"):
                    certify(model, image, eps=0.1, dtype=dtype)
                with pytest.raises(InputError, match="do not hold in this process"):
                    certifier.run(image)  # set behind its back
            else:
                certifier.run(image)
    check_environment(CPU, "float32")


@pytest.mark.parametrize("name", ["precision high", "rounded down", "autocast", "default float64"])
def test_the_command_ends_in_that_line(name):
    setting, _, remedy = BREAKING[name]
    words = ("--eps", "0.1", "--limit", "1", "--method", "gloro", "--dtype", "float32", "--device", "cpu")
    with setting():
        said = run("certify", *words, code=2).stderr
    assert remedy in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("torch.backends.cudnn.enabled", True, "float32"),
        ("torch.backends.cudnn.enabled", True, "bfloat16"),
        ("torch.backends.cuda.matmul.allow_tf32", True, "float32"),
        ("torch.backends.cudnn.allow_tf32", True, "float32"),
        ("torch.backends.cuda.matmul.fp32_precision", "tf32", "float32"),
        ("torch.backends.cudnn.conv.fp32_precision", "tf32", "float32"),
        ("torch.backends.cudnn.rnn.fp32_precision", "tf32", "float32"),
        ("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction", True, "float16"),
        ("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction", True, "bfloat16"),
        ("torch.backends.cuda.matmul.allow_fp16_accumulation", True, "float16"),
    ],
)
def test_settings_of_cuda_matter_there(name, value, dtype, monkeypatch):
    """Read without such a device: probes are left out, and all settings but one are as they should be."""
    for probe in ("_rounds_to_nearest", "_products_are_exact"):
        monkeypatch.setattr(_environment, probe, lambda *given: True)
    monkeypatch.setattr(_environment, "_flushes", lambda device: False)
    found = {name.removeprefix("torch.backends."): value}
    monkeypatch.setattr(_environment, "_setting", found.get)
    with pytest.raises(InputError, match="do not hold") as error:
        check_environment(CUDA, dtype)
    assert f"{name} = " in str(error.value)
    check_environment(CPU, dtype)
    check_environment(CUDA)
    found.clear()
    check_environment(CUDA, dtype)


@pytest.mark.parametrize("dtype", ["real", *FLOAT_TYPES])
def test_the_commands_give_a_gpu_these_settings_for_a_while(dtype):
    def state():
        return environment_settings(), torch.backends.cuda.mem_efficient_sdp_enabled()

    before = state()
    with _environment.as_assumed(CUDA, dtype):
        settings, efficient = state()
        refused = [] if dtype == "real" else [name for name in _environment._switches(dtype) if value_of(name)]
        assert refused == []
        assert settings["torch.backends.cudnn.enabled"] is (dtype == "real")
        assert efficient is (dtype != "float32")
    with _environment.as_assumed(CPU, dtype):
        assert state() == before
    assert state() == before


def test_settings_by_their_newer_names_do_not_stop_a_certificate(model):
    with put("torch.backends.cudnn.conv.fp32_precision", "ieee"):  # torch then refuses to read some older names
        assert certify(model, torch.rand(1, 1, 6, 6), eps=0.1, method="local").radius[0] > 0


def test_fewer_bits_are_seen_where_no_setting_tells():
    """oneDNN takes its precision from the environment too; where the processor has no bfloat16 nothing changes."""
    code = (
        "import torch; from lipcert.numerics import check_environment; x = torch.rand(16, 32, 16, 16); "
        "w = torch.rand(32, 32, 3, 3); y = torch.conv2d(x, w, padding=1); "
        "e = ((y - torch.conv2d(x.double(), w.double(), padding=1)).abs().max() / y.max()).item(); print(e > 1e-4); "
        "check_environment(torch.device('cpu'), 'float32')"
    )
    environment = {**os.environ, "ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    coarse = done.stdout.strip() == "True"
    assert coarse is (done.returncode != 0)
    assert ("ONEDNN_DEFAULT_FPMATH_MODE" in done.stderr) is coarse


def test_products_by_a_transform_are_seen(monkeypatch):
    """What Winograd's transforms round differs from the product in the last bits."""
    exact = torch.nn.functional.conv2d
    assert _environment._products_are_exact(CPU)
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda *given, **more: exact(*given, **more).mul(1.1).div(1.1))
    assert not _environment._products_are_exact(CPU)


def test_attention_in_fewer_bits_is_seen(monkeypatch):
    """Three products of TF32, as in CUDA's memory-efficient kernel, keep 22 of 24 bits."""
    exact = torch.nn.functional.scaled_dot_product_attention

    def coarse(query, key, value, **more):
        first = (value.view(torch.int32) & -(2**13)).view(torch.float32)
        rest = ((value - first).view(torch.int32) & -(2**13)).view(torch.float32)
        return exact(query, key, first + rest, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", coarse)
    with pytest.raises(InputError, match="enable_mem_efficient_sdp|ONEDNN_DEFAULT_FPMATH_MODE"):
        check_environment(CPU, "float32")


def test_summaries_say_what_remains_assumed():
    for dtype, more in (("real", 0), ("float32", 4), ("float16", 5)):
        assert len(assumptions(dtype)) == len(assumptions("real")) + more
    assert not set(environment_settings()) - {name for name in environment_settings() if name.startswith("torch.")}
    run("certify", "--eps", "0.1", "--limit", "1", "--method", "gloro", "--dtype", "float32", "--out", "r.jsonl")
    summary = read_summary()
    assert summary["assumptions"] == assumptions("float32")
    assert summary["environment"]["settings"]["torch.get_float32_matmul_precision()"] == "highest"
