"""Data and checkpoints as people have them: read, refused with one line, or wrong, which must not happen.

    python -m benchmarks.inputs [--out table.md]

Everything is made here, in a temporary folder: folders and archives of images, data sets of the hub and web data sets,
and checkpoints as training scripts and other tools write them. *Read* means that every label, or every logit and the
normalisation, is the right one; *refused* that one line says why; *wrong* is everything else.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import io
import os
import pickle
import sys
import tarfile
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import nn

import lipcert
from benchmarks._page import table
from lipcert.errors import LipcertError
from lipcert.inputs.data import open_images

NAME, CLASSES, SIZE = "resnet10t", 3, 32
READ, REFUSED, WRONG = "read", "refused", "wrong"
Row = tuple[str, str, str, str]


def _picture(value: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def _files(root: Path, *names: str) -> Path:
    """Images, each of a different grey; a name that ends with a slash is a folder."""
    for value, name in enumerate(names):
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            kinds = {".webp": "WEBP", ".tif": "TIFF", ".bmp": "BMP", ".gif": "GIF", ".jpg": "JPEG"}
            path.write_bytes(_picture(value, kinds.get(path.suffix, "PNG")))
    return root


def _tar(path: Path, root: Path, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        archive.add(root, path.name.partition(".")[0])
    return path


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _shards(root: Path, *samples: tuple[str, int, int | None]) -> Path:
    """(shard, key, label)."""
    root.mkdir(parents=True)
    for name in dict.fromkeys(shard for shard, _, _ in samples):
        with tarfile.open(root / name, "w") as archive:
            for _, key, label in (sample for sample in samples if sample[0] == name):
                members = {f"{key}.png": _picture(key)} | ({} if label is None else {f"{key}.cls": str(label).encode()})
                for member, content in members.items():
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    return root


def _hub(rows: list[dict[str, Any]], splits: tuple[str, ...] = ("train", "test")) -> str:
    """Puts a module in the place of ``datasets`` that has these rows."""

    class Rows(list[Any]):
        features = {
            key: type("Image" if isinstance(value, Image.Image) else "Value", (), {})()
            for key, value in rows[0].items()
        }

    def load_dataset(name: str, split: str, streaming: bool = False) -> Rows:
        if split not in splits:
            raise ValueError(f'Unknown split "{split}"')
        return Rows(rows)

    fake = types.ModuleType("datasets")
    fake.__dict__["load_dataset"] = load_dataset
    fake.__spec__ = importlib.util.spec_from_loader("datasets", None)
    sys.modules["datasets"] = fake
    return "hfds/x"


def _grey(**columns: Any) -> dict[str, Any]:
    return {"image": Image.new("RGB", (8, 8))} | columns


# Name, what makes the spec and further arguments of open_images, and the right labels in order; None for no labels,
# ... for a refusal.
Data = tuple[str, Callable[[Path], tuple[Any, dict[str, Any]]], Any]
PAIR = ("a/1.png", "b/1.png")


def _data() -> list[Data]:
    def folder(*names: str, **more: Any) -> Callable[[Path], tuple[Any, dict[str, Any]]]:
        return lambda place: (_files(place / "root", *names), more)

    def split(*tops: str) -> tuple[str, ...]:
        return tuple(f"{top}/{name}/{top}.png" for top in tops for name in "ab")

    def listed(
        text: str, name: str, key: str, *names: str, **more: Any
    ) -> Callable[[Path], tuple[Any, dict[str, Any]]]:
        return lambda place: (_files(place / "root", *names), {key: _written(place / name, text), **more})

    two, nested = (0, 1), ("benign/100X/1.png", "benign/200X/1.png", "malignant/100X/1.png", "malignant/200X/1.png")
    wnids = ("n01440764/1.png", "n02102040/1.png", "n03000684/1.png")
    return [
        ("class folders", folder(*PAIR), two),
        ("class folders, numbers", folder("2/x.png", "10/x.png"), two),
        ("one folder", folder("1.png", "2.png"), None),
        ("train and val, to certify", folder(*split("train", "val")), two),
        ("train and val, to train", folder(*split("train", "val"), purpose="train"), two),
        ("train and test", folder(*split("train", "test")), two),
        ("Train and Test", folder(*split("Train", "Test")), two),
        ("training and testing, to train", folder(*split("training", "testing"), purpose="train"), two),
        ("train and dev", folder(*split("train", "dev")), two),
        ("seg_train and seg_test", folder(*split("seg_train", "seg_test")), two),
        ("val and test alone, to train", folder(*split("val", "test"), purpose="train"), ...),
        ("val without a class", folder("train/a/1.png", "train/b/1.png", "val/b/1.png"), (1,)),
        ("classes beside a split", folder(*PAIR, "test/a/1.png"), ...),
        ("folders in class folders", folder(*nested), (0, 0, 1, 1)),
        ("images beside class folders", folder(*PAIR, "1.png"), ...),
        ("hidden folders and files", folder(*PAIR, "a/.ipynb_checkpoints/1.png", "b/._1.png", ".c/1.png"), two),
        ("an empty class folder", folder("a/1.png", "b/"), (0,)),
        ("other formats", folder("a/1.webp", "a/2.tif", "b/1.bmp", "b/2.gif", "b/3.jpg"), (0, 0, 1, 1, 1)),
        ("more classes than the model", folder(*PAIR, "c/1.png"), None),
        ("--classes, names and numbers", listed("b 0\na 1\n", "c.txt", "classes", *PAIR), (1, 0)),
        ("--classes, names in order", listed("b\na\n", "c.txt", "classes", *PAIR), (1, 0)),
        ("--classes, JSON", listed('{"0": ["b", "x"], "1": ["a", "y"]}', "c.json", "classes", *PAIR), (1, 0)),
        ("--classes that lacks one", listed("b 0\n", "c.txt", "classes", *PAIR), ...),
        ("--classes beyond the model", listed("b 0\na 2\n", "c.txt", "classes", *PAIR), ...),
        ("WordNet ids, 3 of 1000", folder(*wnids, model=1000), (0, 217, 491)),
        (
            "--labels, numbers",
            listed("filename,label\n1.png,1\n2.png,0\n", "l.csv", "labels", "1.png", "2.png"),
            (1, 0),
        ),
        ("--labels, names", listed("id,label\n1,dog\n2,cat\n", "l.csv", "labels", "1.png", "2.png"), (1, 0)),
        ("--labels, halves", listed("id,label\n1,0.5\n2,1\n", "l.csv", "labels", "1.png", "2.png"), ...),
        ("--labels from 1", listed("id,label\n1,1\n2,2\n", "l.csv", "labels", "1.png", "2.png"), ...),
        ("--labels that lacks one", listed("id,label\n1,1\n", "l.csv", "labels", "1.png", "2.png"), ...),
        ("--labels, columns turned", listed("1,1.png\n0,2.png\n", "l.csv", "labels", "1.png", "2.png"), (1, 0)),
        ("--labels, JSON", listed('{"1.png": 1, "2.png": 0}', "l.json", "labels", "1.png", "2.png"), (1, 0)),
        (
            "--labels, metadata.jsonl",
            listed(
                '{"file_name": "1.png", "label": 1}\n{"file_name": "2.png", "label": 0}',
                "m.jsonl",
                "labels",
                "1.png",
                "2.png",
            ),
            (1, 0),
        ),
        (
            "--labels, an empty one",
            listed("filename,label\n1.png,1\n2.png,\n", "l.csv", "labels", "1.png", "2.png"),
            ...,
        ),
        ("--labels, numbers and names", listed("id,label\n1,1\n2,dog\n", "l.csv", "labels", "1.png", "2.png"), ...),
        ("--labels, one for two files", listed("id,label\n1,1\n", "l.csv", "labels", "a/1.png", "b/1.png"), ...),
        ("--labels, all hidden", listed("id,label\n1,-1\n2,-1\n", "l.csv", "labels", "1.png", "2.png"), None),
        (
            "--classes of a hub's model",
            listed('{"id2label": {"0": "b", "1": "a"}}', "c.json", "classes", *PAIR),
            (1, 0),
        ),
        ("links that lead nowhere", lambda p: (_linked(_files(p / "root", *PAIR)), {}), two),
        ("grey values, palettes, CMYK", lambda p: (_modes(p / "root"), {}), (0, 0, 0, 1, 1)),
        (".tar of a folder", lambda p: (_tar(p / "x.tar", _files(p / "root", "d/a/1.png", "d/b/1.png")), {}), two),
        (".tar that is cut off", lambda p: (_cut(_tar(p / "x.tar", _files(p / "root", *PAIR))), {}), ...),
        (".tar", lambda p: (_tar(p / "x.tar", _files(p / "root", *PAIR)), {}), two),
        (".tar of splits", lambda p: (_tar(p / "x.tar", _files(p / "root", *split("train", "val"))), {}), two),
        (".tar.gz", lambda p: (_tar(p / "x.tar.gz", _files(p / "root", *PAIR), "w:gz"), {}), ...),
        ("a damaged image", lambda p: (_damaged(_files(p / "root", *PAIR)), {}), ...),
        ("a name that is no UTF-8", lambda p: (_latin(_files(p / "root", *PAIR)), {}), two),
        ("hub, image and label", lambda p: (_hub([_grey(label=0), _grey(label=1)]), {}), two),
        ("hub, fine_label", lambda p: (_hub([_grey(fine_label=1), _grey(fine_label=0)]), {}), (1, 0)),
        ("hub, labels", lambda p: (_hub([_grey(labels=1), _grey(labels=0)]), {}), (1, 0)),
        ("hub, hidden labels", lambda p: (_hub([_grey(label=-1), _grey(label=-1)]), {}), None),
        ("hub, halves", lambda p: (_hub([_grey(label=0.7), _grey(label=0.2)]), {}), ...),
        ("hub, texts", lambda p: (_hub([_grey(label="x"), _grey(label="y")]), {}), None),
        ("hub, without the split", lambda p: (_hub([_grey(label=0)]) + ":extra", {}), ...),
        ("web data set", lambda p: (f"wds/{_shards(p / 'w', ('0.tar', 0, 1), ('1.tar', 1, 0))}", {}), (1, 0)),
        (
            "web data set, splits",
            lambda p: (f"wds/{_shards(p / 'w', ('train-0.tar', 0, 1), ('val-0.tar', 1, 0))}", {}),
            (0,),
        ),
        ("web data set, no labels", lambda p: (f"wds/{_shards(p / 'w', ('0.tar', 0, None))}", {}), None),
    ]


def _linked(root: Path) -> Path:
    (root / "b" / "2.png").symlink_to(root / "nothing.png")
    return root


def _modes(root: Path) -> Path:
    for value, (name, mode) in enumerate({"a/1": "L", "a/2": "P", "a/3": "RGBA", "b/1": "I;16", "b/2": "LA"}.items()):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (8, 8), {"RGBA": (value,) * 4, "LA": (value,) * 2}.get(mode, value)).save(root / f"{name}.png")
    return root


def _cut(archive: Path) -> Path:
    archive.write_bytes(archive.read_bytes()[:2048])
    return archive


def _damaged(root: Path) -> Path:
    (root / "a" / "1.png").write_bytes(b"x")
    return root


def _latin(root: Path) -> Path:
    os.rename(os.fsencode(root / "b" / "1.png"), os.fsencode(root / "b") + b"/caf\xe9.png")
    return root


def _model(classes: int) -> lipcert.Model:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, classes))
    return lipcert.load(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 8, 8))


def of_data(place: Path) -> Iterator[Row]:
    for number, (name, make, right) in enumerate(_data()):
        folder = place / str(number)
        folder.mkdir()
        try:
            spec, more = make(folder)
            images = open_images(spec, _model(more.pop("model", 2)), **more)
            labels = [None if batch.labels is None else batch.labels.tolist() for batch in images.batches(16)]
        except LipcertError as error:
            yield ("data", name, REFUSED if right is ... else WRONG, _line(error, folder))
            continue
        except Exception as error:
            yield ("data", name, WRONG, f"{type(error).__name__}: {error}")
            continue
        found = None if None in labels else tuple(label for batch in labels for label in batch or ())
        said = images.note or images.labels_by or "; ".join(images.notes)
        yield ("data", name, READ if found == right else WRONG, _short(said, folder) if said else "")


def _line(error: Exception, place: Path) -> str:
    text = str(error)
    return _short(text, place) if "\n" not in text else f"{WRONG}: several lines"


def _short(text: str, place: Path) -> str:
    return text.replace(f"{place}/", "").replace("|", "\\|")


def _prefixed(net: nn.Module, prefix: str) -> dict[str, Any]:
    return {prefix + key: value.clone() for key, value in net.state_dict().items()}


def _torch(make: Callable[[nn.Module], Any], name: str = "w.pth") -> tuple[str, Callable[[nn.Module, Path], None]]:
    return name, lambda net, path: torch.save(make(net), path)


def _bytes(name: str, content: bytes) -> tuple[str, Callable[[nn.Module, Path], None]]:
    return name, lambda net, path: _discard(path.write_bytes(content))


def _discard(_: object) -> None:
    pass


def _safetensors(prefix: str) -> tuple[str, Callable[[nn.Module, Path], None]]:
    return "w.safetensors", lambda net, path: safetensors.torch.save_file(_prefixed(net, prefix), path)


def _script(net: nn.Module, path: Path) -> None:
    torch.jit.save(torch.jit.trace(net, torch.zeros(1, 3, SIZE, SIZE)), path)


def _quantised(net: nn.Module, path: Path) -> None:
    small = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    torch.save(small.state_dict(), path)


def _robustness(net: nn.Module) -> dict[str, Any]:
    state = {**_prefixed(net, "module.model."), **_prefixed(net, "module.attacker.model.")}
    state |= {"module.normalizer.new_mean": torch.full((3, 1, 1), 0.25)}
    return {"model": state | {"module.normalizer.new_std": torch.full((3, 1, 1), 0.5)}, "epoch": 3}


def _normalised(net: nn.Module, mean: str, std: str, prefix: str) -> dict[str, Any]:
    return {mean: torch.full((1, 3, 1, 1), 0.25), std: torch.full((1, 3, 1, 1), 0.5), **_prefixed(net, prefix)}


def _trained(net: nn.Module) -> dict[str, Any]:
    recorded = {"model": NAME, "num_classes": CLASSES, "mean": [0.25] * 3, "std": [0.5] * 3}
    return {"arch": NAME, "state_dict": net.state_dict(), "args": argparse.Namespace(**recorded)}


def _other(net: nn.Module) -> dict[str, Any]:
    return {key: value + 1 for key, value in net.state_dict().items()}


def _renamed(net: nn.Module) -> dict[str, Any]:
    return {f"l{i}.{key.rpartition('.')[2]}": value for i, (key, value) in enumerate(net.state_dict().items())}


# Name, file name and what writes it, and what is right: the mean, or ... for a refusal.
def _checkpoints() -> list[tuple[str, tuple[str, Callable[[nn.Module, Path], None]], Any]]:
    own = 0.485
    return [
        ("state dict", _torch(lambda n: n.state_dict()), own),
        (
            "state dict, old format",
            ("w.pth", lambda n, p: torch.save(n.state_dict(), p, _use_new_zipfile_serialization=False)),
            own,
        ),
        ("safetensors", _safetensors(""), own),
        ("safetensors of transformers", _safetensors("timm_model."), own),
        ("state_dict", _torch(lambda n: {"state_dict": n.state_dict(), "epoch": 3}), own),
        (
            "state_dict with a NumPy number",
            _torch(lambda n: {"state_dict": n.state_dict(), "acc": np.float64(93.2)}),
            own,
        ),
        ("state_dict with a NumPy array", _torch(lambda n: {"state_dict": n.state_dict(), "acc": np.arange(3.0)}), own),
        ("state_dict with objects", _torch(lambda n: {"state_dict": n.state_dict(), "x": collections.deque([1])}), own),
        ("timm's train.py", _torch(_trained, "model_best.pth.tar"), 0.25),
        (
            "averaged weights of timm",
            _torch(lambda n: {"state_dict": _other(n), "state_dict_ema": n.state_dict()}),
            own,
        ),
        ("Lightning", _torch(lambda n: {"state_dict": _prefixed(n, "model."), "loops": {}}, "last.ckpt"), own),
        (
            "Lightning, net and loss",
            _torch(lambda n: {"state_dict": {**_prefixed(n, "net."), "loss.w": torch.ones(3)}}, "l.ckpt"),
            own,
        ),
        ("PyTorch's tutorial", _torch(lambda n: {"model_state_dict": n.state_dict(), "optimizer_state_dict": {}}), own),
        ("pytorch-cifar", _torch(lambda n: {"net": n.state_dict(), "acc": 93.1, "epoch": 3}), own),
        ("MadryLab's robustness", _torch(_robustness, "w.pt"), 0.25),
        ("a normaliser and a network in a Sequential", _torch(lambda n: _normalised(n, "0.mean", "0.std", "1.")), 0.25),
        ("RobustBench", _torch(lambda n: _normalised(n, "mu", "sigma", "model.")), 0.25),
        ("SWA", _torch(lambda n: {"n_averaged": torch.tensor(3), **_prefixed(n, "module.")}), own),
        ("DataParallel", _torch(lambda n: _prefixed(n, "module.")), own),
        ("torch.compile", _torch(lambda n: _prefixed(n, "_orig_mod.")), own),
        ("DataParallel of a compiled model", _torch(lambda n: _prefixed(n, "module._orig_mod.")), own),
        ("a backbone in a wrapper", _torch(lambda n: _prefixed(n, "backbone.")), own),
        ("two wrappers", _torch(lambda n: _prefixed(n, "module.encoder.")), own),
        ("fastai", _torch(lambda n: {"model": n.state_dict(), "opt": {}}), own),
        ("Composer", _torch(lambda n: {"state": {"model": n.state_dict()}, "rng": []}), own),
        ("DeepSpeed", _torch(lambda n: {"module": n.state_dict(), "dp_world_size": 1}), own),
        ("ema", _torch(lambda n: {"ema": n.state_dict()}), own),
        ("params_ema", _torch(lambda n: {"params": _other(n), "params_ema": n.state_dict()}), own),
        ("thop's counters", _torch(lambda n: {**n.state_dict(), "total_ops": torch.ones(1)}), own),
        (
            "without num_batches_tracked",
            _torch(lambda n: {k: v for k, v in n.state_dict().items() if "num_b" not in k}),
            own,
        ),
        ("names in timm's order", _torch(_renamed), own),
        (
            "float64",
            _torch(lambda n: {k: v.double() if v.is_floating_point() else v for k, v in n.state_dict().items()}),
            own,
        ),
        (
            "teacher and student",
            _torch(lambda n: {**_prefixed(n, "a."), **{f"b.{k}": v for k, v in _other(n).items()}}),
            ...,
        ),
        ("another architecture", _torch(lambda n: timm.create_model("test_vit").state_dict()), ...),
        ("another number of classes", _torch(lambda n: timm.create_model(NAME, num_classes=5).state_dict()), ...),
        ("mean of 255", _torch(lambda n: {**_trained(n), "args": {"mean": [123.675] * 3}}), ...),
        (
            "weights that are NaN",
            _torch(lambda n: {k: v * float("nan") if v.is_floating_point() else v for k, v in n.state_dict().items()}),
            ...,
        ),
        ("a whole module", _torch(lambda n: n), ...),
        ("a plain pickle", ("w.pkl.pth", lambda n, p: _discard(p.write_bytes(pickle.dumps({"a": 1})))), ...),
        ("TorchScript", ("w.pt", _script), ...),
        ("int8", ("w.pth", _quantised), ...),
        ("ONNX", _bytes("w.onnx", b"\x08\x07"), ...),
        ("Keras", _bytes("w.h5", b"\x89HDF\r\n\x1a\n"), ...),
        ("NumPy", ("w.npz", lambda n, p: np.savez(p, a=np.zeros(3))), ...),
        ("half a file", ("w.pth", lambda n, p: _half(n, p)), ...),
        ("a web page", _bytes("w.pth", b"<html>404</html>"), ...),
        ("a pointer of Git LFS", _bytes("w.safetensors", b"version https://git-lfs.github.com/spec/v1"), ...),
        ("weight norm", _torch(lambda n: {**_prefixed(n, ""), "fc.weight_g": torch.ones(CLASSES, 1)}), ...),
        (
            "a sparse weight",
            _torch(lambda n: n.state_dict() | {"fc.weight": n.state_dict()["fc.weight"].to_sparse()}),
            ...,
        ),
        ("an optimiser alone", _torch(lambda n: {"optimizer": {"state": {}}, "epoch": 3}), ...),
        ("an empty file", _bytes("w.pth", b""), ...),
        ("a folder", ("w.pth", lambda n, p: p.mkdir()), ...),
    ]


def _half(net: nn.Module, path: Path) -> None:
    torch.save(net.state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def of_checkpoints(place: Path) -> Iterator[Row]:
    torch.manual_seed(0)
    net = timm.create_model(NAME, num_classes=CLASSES).eval()
    pixels = torch.rand(2, 3, SIZE, SIZE)
    deviations = {0.485: (0.229, 0.224, 0.225), 0.25: (0.5,) * 3}
    means = {0.485: (0.485, 0.456, 0.406), 0.25: (0.25,) * 3}
    for number, (name, (file, write), right) in enumerate(_checkpoints()):
        path = place / f"c{number}" / file
        path.parent.mkdir()
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("ignore")
            write(net, path)
            warnings.simplefilter("always", UserWarning)
            try:
                model = lipcert.load(NAME, checkpoint=path, num_classes=CLASSES, input_size=(3, SIZE, SIZE))
            except LipcertError as error:
                yield ("checkpoint", name, REFUSED if right is ... else WRONG, _line(error, path.parent))
                continue
            except Exception as error:
                yield ("checkpoint", name, WRONG, f"{type(error).__name__}: {error}")
                continue
            mean, std = (torch.tensor(of.get(right, (0,) * 3)).view(3, 1, 1) for of in (means, deviations))
            same = right is not ... and torch.allclose(model(pixels), net((pixels - mean) / std), atol=1e-5)
        notes = "; ".join(_short(str(warning.message), path.parent) for warning in said)
        yield ("checkpoint", name, READ if same else WRONG, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table to a Markdown file too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = sys.modules.get("datasets")
        try:
            rows = [*of_data(Path(folder)), *of_checkpoints(Path(folder))]
        finally:
            sys.modules.pop("datasets", None)
            if before is not None:
                sys.modules["datasets"] = before
    lines = table(("kind", "input", "outcome", "what is said"), rows)
    counts = Counter((kind, outcome) for kind, _, outcome, _ in rows)
    for kind in ("data", "checkpoint"):
        shown = ", ".join(f"{counts[kind, outcome]} {outcome}" for outcome in (READ, REFUSED, WRONG))
        lines.append(f"\n{sum(row[0] == kind for row in rows)} kinds of {kind}: {shown}")
    print("\n".join(lines))
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n")
    sys.exit(any(row[2] == WRONG for row in rows))


if __name__ == "__main__":
    main()
