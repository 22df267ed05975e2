"""Checks the settings of torch and the machine on which certificates depend.

Certificates need float64 arithmetic. Certificates for a ``dtype`` also need a network that rounds as
:mod:`lipcert.roundoff` assumes. :func:`check_environment` refuses a process that violates one of the two, and names
the line that fixes it. Settings are read by name if this version of torch has them. Other properties are probed:
subnormal numbers that are flushed to zero, the rounding mode, and float32 products with an operand that selects entries
of the other. The exact results of such products are these entries, so reduced precision or a transform (Winograd, FFT)
becomes visible.

The network may run in another process than the one that certifies it. :data:`ASSUMED` lists what must hold there. The
summary of a run shows this list. Call :func:`check_environment` in that process to check it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.errors import InputError

# Assumptions on the deploying process that cannot be checked here, by the arithmetic of the certificate.
ASSUMED = {
    "real": (
        "torch evaluates the network in float64 to 1e-6 of its logits and gradients",
        "the network and the image were not made to meet lipcert's start vectors",
    ),
    "deployed": (
        "the network runs as model.to(dtype)(images.to(dtype)) in evaluation mode, without autocast, quantisation or "
        "compilation that changes its arithmetic",
        "operations round to nearest; subnormal numbers may be flushed to zero",
        "products, convolutions and sums add the products of their definition in any order: no TF32, no bfloat16 or "
        "float16 inside float32 operations, no Winograd, FFT or Strassen transforms (on CUDA "
        "torch.backends.cudnn.enabled = False, and for float32 torch.backends.cuda.enable_mem_efficient_sdp(False))",
        "exp, erf, tanh, log, sqrt and rsqrt are accurate to 4 ulp; exp in attention to 20 ulp, or to 2⁻¹³ in float16 "
        "and bfloat16",
    ),
    "smoothing": (
        "the bits of the noise are random, and its seed was chosen before looking at results",
        "the network is one function: it gives an image the same class in every batch",
    ),
    "half": (
        "sums inside float16 and bfloat16 operations are float32 (on CUDA torch.backends.cuda.matmul."
        "allow_fp16_reduced_precision_reduction = False and its bfloat16 counterpart)",
    ),
}

_EXACT = ("none", "ieee")
_CPU = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_CUDA = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
_TF32 = ("cuda.matmul.allow_tf32", "cudnn.allow_tf32")
# cuDNN chooses Winograd and FFT transforms by the sizes of a convolution, for float16 and bfloat16 too.
_TRANSFORMS = ("cudnn.enabled",)
_REDUCED = (
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
)
# The number of entries that torch gives to one intra-op thread.
_GRAIN = 2**15
# Of these, subnormal in a probe: arithmetic on subnormal numbers is slow.
_PROBED = 64


def assumptions(dtype: str) -> list[str]:
    """The assumptions of a certificate for ``dtype``, for real arithmetic, or of ``smoothing``."""
    if dtype == "smoothing":
        return list(ASSUMED[dtype])
    texts = [*ASSUMED["real"], *(ASSUMED["deployed"] if dtype != "real" else ())]
    return texts + list(ASSUMED["half"] if dtype in ("float16", "bfloat16") else ())


def environment_settings() -> dict[str, Any]:
    """The torch settings on which certificates depend, by name; settings that this version lacks are omitted."""
    settings = {f"torch.backends.{name}.fp32_precision": _setting(f"{name}.fp32_precision") for name in (*_CPU, *_CUDA)}
    settings |= {f"torch.backends.{name}": _setting(name) for name in (*_TRANSFORMS, *_TF32, *_REDUCED)}
    settings["torch.get_float32_matmul_precision()"] = matmul_precision()
    settings["torch.are_deterministic_algorithms_enabled()"] = torch.are_deterministic_algorithms_enabled()
    settings["torch.get_default_dtype()"] = str(torch.get_default_dtype()).removeprefix("torch.")
    return {name: value for name, value in settings.items() if value is not None}


def check_environment(device: torch.device, dtype: str = "real") -> None:
    """Refuses a process in which a certificate would not hold."""
    broken = tuple(_broken(device, dtype))
    if broken:
        kind = "certificates" if dtype == "real" else f"certificates for {dtype}"
        reasons, remedies = (", ".join(dict.fromkeys(texts)) for texts in zip(*broken, strict=True))
        raise InputError(f"{kind} do not hold in this process: {reasons}; {remedies}")


@contextmanager
def as_assumed(device: torch.device, dtype: str) -> Iterator[None]:
    """Gives a GPU, inside the ``with`` block, the settings that certificates for ``dtype`` assume."""
    if device.type != "cuda" or dtype == "real":
        yield
        return
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
    with _off(*_switches(dtype)):
        try:
            torch.backends.cuda.enable_mem_efficient_sdp(efficient and dtype != "float32")
            yield
        finally:
            torch.backends.cuda.enable_mem_efficient_sdp(efficient)


def without_cudnn() -> AbstractContextManager[None]:
    """Disables cuDNN, whose kernels depend on types and sizes and are not accurate for each entry."""
    return _off(*_TRANSFORMS)  # torch.backends.cudnn.flags also reads settings that may be unreadable


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disables autocast, in which a network runs in another type than that of its weights."""
    return torch.autocast(device.type, enabled=False) if _autocast(device.type) else nullcontext()


@contextmanager
def _off(*names: str) -> Iterator[None]:
    """Switches settings below ``torch.backends`` off inside the ``with`` block."""
    on = [(_setting(holder), last) for holder, _, last in (name.rpartition(".") for name in names if _setting(name))]
    try:
        for holder, name in on:
            setattr(holder, name, False)
        yield
    finally:
        for holder, name in on:
            setattr(holder, name, True)


def _switches(dtype: str) -> tuple[str, ...]:
    """The settings that must be off on a GPU in which a network runs in ``dtype``."""
    return (*_TRANSFORMS, *(_TF32 if dtype == "float32" else _REDUCED))


def _broken(device: torch.device, dtype: str) -> Iterator[tuple[str, str]]:
    """Yields the violated assumptions, each with its fix."""
    for kind in dict.fromkeys(("cpu", device.type)):
        if _autocast(kind):
            yield f"autocast is on for {kind}", "leave the torch.autocast block"
    default = torch.get_default_dtype()
    if default not in ((torch.float32, torch.float64) if dtype == "real" else (torch.float32,)):
        yield f"the default dtype is {str(default).removeprefix('torch.')}", "torch.set_default_dtype(torch.float32)"
    if _flushes(device):
        yield "subnormal float64 numbers are flushed to zero", "torch.set_flush_denormal(False)"
    for format in (torch.float64, torch.float32):
        if not _rounds_to_nearest(device, format):
            yield f"{str(format).removeprefix('torch.')} does not round to nearest", "restore the rounding mode"
    for name in _switches(dtype) if dtype != "real" and device.type == "cuda" else ():
        if _setting(name):
            yield f"torch.backends.{name} is on", f"torch.backends.{name} = False"
    if dtype == "float32":
        yield from _fewer_bits(device)
        if not _products_are_exact(device):
            yield (
                f"float32 products on {device.type} have fewer bits, or are made by a transform",
                "torch.backends.cuda.enable_mem_efficient_sdp(False), unset NVIDIA_TF32_OVERRIDE"
                if device.type == "cuda"
                else "unset ONEDNN_DEFAULT_FPMATH_MODE, torch.backends.nnpack.set_flags(False)",
            )


def _fewer_bits(device: torch.device) -> Iterator[tuple[str, str]]:
    precision = matmul_precision()
    if precision not in (None, "highest"):
        yield f"the float32 matmul precision is {precision}", 'torch.set_float32_matmul_precision("highest")'
    for name in _CUDA if device.type == "cuda" else _CPU:
        setting = _setting(f"{name}.fp32_precision")
        if setting is not None and setting not in _EXACT:
            line = f"torch.backends.{name}.fp32_precision"
            yield f"{line} is {setting}", f'{line} = "ieee"'


def _setting(name: str) -> Any:
    """A setting below ``torch.backends``; None if this version does not have it or cannot read it."""
    value: Any = torch.backends
    try:
        for part in name.split("."):
            value = getattr(value, part)
    except (AttributeError, RuntimeError):  # torch refuses to mix its older and its newer names
        return None
    return value


def _autocast(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # this kind of device has no autocast
        return False


def matmul_precision() -> str | None:
    """The precision of float32 matrix products, by torch's older name; None if only the newer names are readable."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer names, which are read separately
        return None


def _flushes(device: torch.device) -> bool:
    """Whether arithmetic flushes subnormal numbers to zero, on any thread."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    small = torch.zeros(threads, _GRAIN, dtype=torch.float64, device=device)
    small[:, :_PROBED] = 2.0**-1060
    return bool((small * 1.0 * 2.0**1000)[:, :_PROBED].ne(2.0**-60).any())


def _rounds_to_nearest(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether 1 + ulp/4 rounds to 1 and 1 + 3 ulp/4 to the next number, for both signs."""
    ulp = torch.finfo(dtype).eps
    signs = torch.tensor([1.0, -1.0], dtype=dtype, device=device)
    return bool(torch.equal(signs + signs * (ulp / 4), signs)) and bool(
        torch.equal(signs + signs * (0.75 * ulp) - signs, signs * ulp)
    )


@torch.no_grad()
def _products_are_exact(device: torch.device) -> bool:
    """Whether matrix products and convolutions with an operand that selects entries return these entries exactly.

    A sum of one number and zeros is exact in any order. Reduced precision changes the number, and Winograd or FFT
    transforms round all entries. Attention selects a value if all other weights underflow to 0; the memory-efficient
    kernel of CUDA splits float32 into numbers of TF32, and loses the last bits.
    """
    generator = torch.Generator().manual_seed(0)
    x: Tensor = torch.rand(16, 32, 16, 16, generator=generator).add_(0.5).to(device)
    order = torch.randperm(32, generator=generator).to(device)
    kernel = torch.zeros(32, 32, 3, 3, device=device)
    kernel[torch.arange(32, device=device), order, 1, 1] = 1.0
    rows, values, keys = x.reshape(512, 256), x.reshape(16, 4, 32, 64), 16 * torch.eye(32, 64, device=device)
    keys = keys.expand(16, 4, 32, 64).contiguous()
    chosen = F.scaled_dot_product_attention(keys[:, :, order], keys, values, scale=1.0)
    return (
        torch.equal(F.conv2d(x, kernel, padding=1), x[:, order])
        and torch.equal(chosen, values[:, :, order])
        and torch.equal(rows @ torch.eye(256, device=device), rows)
        and torch.equal(F.linear(rows.mT.contiguous(), torch.eye(512, device=device)), rows.mT)
    )
