"""``lipcert doctor``: versions, devices and settings of this machine."""

import importlib.metadata
import os
import platform
from pathlib import Path

import huggingface_hub.constants

from lipcert.errors import InputError
from lipcert.settings import DTYPES, version

from ._errors import one_line_errors
from ._options import AsJson
from ._print import busy, command, in_bytes, print_facts, print_json

PACKAGES = ("torch", "torchvision", "timm", "safetensors", "huggingface_hub", "numpy", "rich", "typer")
EXTRAS = {
    "attack": ("adversarial-robustness-toolbox", "AutoAttack"),
    "plot": ("matplotlib", "figures in reports"),
    "docs": ("mkdocs", "the documentation"),
    "test": ("pytest", "the tests"),
}
DATASETS = {"datasets": "hfds/ data sets", "webdataset": "wds/ data sets", "tensorflow_datasets": "tfds/ data sets"}


@one_line_errors
def doctor(as_json: AsJson = False) -> None:
    """Show versions, devices, memory, caches, optional packages, and whether the model hub can be reached."""
    with busy("looking"):
        import torch

        from lipcert.inputs.loading import BUNDLED
        from lipcert.numerics import assumptions

        facts = [
            ("lipcert", version()),
            ("python", f"{platform.python_version()} on {platform.platform()}"),
            *((name, _installed(name) or "missing: pip install lipcert again") for name in PACKAGES),
            *_devices(),
            *((f"arithmetic, {dtype}", _holds("cpu", dtype)) for dtype in DTYPES),
            *((f"arithmetic, {dtype}, cuda", _holds("cuda", dtype)) for dtype in DTYPES if torch.cuda.is_available()),
            *(("assumed", line) for line in assumptions("float16")),
            ("bundled model", str(BUNDLED) if BUNDLED.is_file() else "missing: pip install lipcert again"),
            ("cache of the hub", _folder(Path(huggingface_hub.constants.HF_HUB_CACHE))),
            ("cache of torch", _folder(Path(torch.hub.get_dir()))),
            ("hub", _hub(huggingface_hub.constants.ENDPOINT)),
            *((f"extra {extra}", _optional(name, what, f"lipcert[{extra}]")) for extra, (name, what) in EXTRAS.items()),
            *((name, _optional(name, what, name.replace("_", "-"))) for name, what in DATASETS.items()),
        ]
    if as_json:
        record: dict[str, list[str]] = {}
        for name, value in facts:
            record.setdefault(name, []).append(value)
        print_json({name: values[0] if len(values) == 1 else values for name, values in record.items()})
    else:
        print_facts([*facts, ("next", command("certify", "--eps", "36/255"))])


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _optional(name: str, what: str, requirement: str) -> str:
    version = _installed(name)
    return f"{name} {version}" if version else f"not installed; for {what}: pip install '{requirement}'"


def _devices() -> list[tuple[str, str]]:
    import torch

    from lipcert.numerics import memory_left

    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    devices = [("cpu", f"{threads}, {in_bytes(memory_left(torch.device('cpu')))} free")]
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        devices.append((f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, {in_bytes(free)} of {in_bytes(total)} free"))
    return devices


def _holds(device: str, dtype: str) -> str:
    """Whether the assumptions of certificates hold in this process."""
    import torch

    from lipcert.numerics import check_environment

    try:
        check_environment(torch.device(device), dtype)
    except InputError as error:
        return str(error)
    return "as certificates assume"


def _folder(path: Path) -> str:
    """The path of a cache, and whether it can be written."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    state = "" if path.exists() else ", does not exist yet"
    return f"{path}{state}" if os.access(existing, os.W_OK) else f"{path}, not writable"


def _hub(endpoint: str) -> str:
    """Whether the hub answers."""
    from lipcert.inputs.timm_networks import hub_answers

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return f"{endpoint}, switched off by HF_HUB_OFFLINE"
    return f"{endpoint}, reached" if hub_answers() else f"{endpoint} does not answer; the bundled model and files work"
