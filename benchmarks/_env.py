"""The environment record that stands beside every measurement."""

from __future__ import annotations

import platform
from pathlib import Path

import timm
import torch


def environment() -> dict[str, str | int]:
    """Versions, threads and processor: nothing that names the machine."""
    record: dict[str, str | int] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
    }
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
    return record


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
