"""Data sets by name, as timm opens them: those of torchvision and of the hub."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import timm.data
import torch
import torchvision.datasets

from lipcert.errors import InputError, first_line
from lipcert.inputs.files import KINDS
from lipcert.inputs.folders import Purpose
from lipcert.inputs.timm_networks import is_network_error


def open_named(spec: str, purpose: Purpose = "certify") -> Any:
    """Opens a data set by name, such as ``torch/svhn:train``; downloads those of torchvision to torch.hub's folder."""
    name, _, split = spec.partition(":")
    kind = name.partition("/")[0].lower()
    package = "scipy" if name.lower() == "torch/svhn" else KINDS[kind]
    if package is not None and importlib.util.find_spec(package) is None:
        raise InputError(f"{name} needs the package {package}: pip install {package}")
    chosen, where = split or ("train" if purpose in ("train", "calibrate") else "validation"), ""
    options: dict[str, Any] = {"split": chosen}
    if kind == "torch":
        options |= {"root": os.path.join(torch.hub.get_dir(), "datasets"), "download": True}
        Path(options["root"]).mkdir(parents=True, exist_ok=True)
        where = f"put its files into {options['root']}; "
    try:
        with contextlib.redirect_stdout(sys.stderr):  # downloads report on standard output
            if name.lower() == "torch/svhn":  # timm does not open it
                options["split"] = "train" if chosen == "train" else "test"
                opened: Any = torchvision.datasets.SVHN(**options)
            else:
                opened = timm.data.create_dataset(name, **options)
    except Exception as error:
        # torchvision tells of the mirrors it tried in a text alone.
        offline = is_network_error(error) or "urlopen error" in str(error)
        reason = "no network, or its server is unreachable" if offline else first_line(error)
        where = f"connect, or {where}" if offline and where else "" if "Unknown" in reason else where
        raise InputError(f"cannot open {spec}: {reason}; {where}a split is named as in {name}:SPLIT") from error
    if not split:
        with contextlib.suppress(AttributeError, TypeError):
            opened.split = chosen
    return opened
