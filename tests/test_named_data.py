"""Data sets by name, from small files in their own formats: pixels, labels, splits, and what cannot be had."""

import gzip
import hashlib
import pickle
import struct
import urllib.error

import numpy as np
import pytest
import timm
import torch
import torchvision.datasets
from commands import run
from modules import refusal
from torch import nn

import lipcert
from lipcert.inputs import data as _data
from lipcert.inputs.data import open_images
from lipcert.training import Augmentation, Batches, finetune


def model(size, classes=10):
    channels = size[0]
    net = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(size)), classes))
    loaded = lipcert.load(net, mean=(0.5,) * channels, std=(0.25,) * channels, input_size=size)
    loaded.data_config = {"crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "center"}
    return loaded


@pytest.fixture
def root(monkeypatch, tmp_path):
    """Where data sets lie; nothing is downloaded."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def unreachable(*_, **__):
        raise urllib.error.URLError("there is no network")

    monkeypatch.setattr(torchvision.datasets.utils, "_urlretrieve", unreachable)
    folder = tmp_path / "datasets"
    folder.mkdir()
    return folder


def pixels(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_mnist(root):
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for seed, (name, count) in enumerate((("train", 6), ("t10k", 4))):
        images, labels = pixels(seed, count, 28, 28), np.arange(count, dtype=np.uint8)
        parts = {
            "images-idx3": struct.pack(">4i", 2051, count, 28, 28) + images.tobytes(),
            "labels-idx1": struct.pack(">2i", 2049, count) + labels.tobytes(),
        }
        for part, content in parts.items():
            (folder / f"{name}-{part}-ubyte").write_bytes(content)
            (folder / f"{name}-{part}-ubyte.gz").write_bytes(gzip.compress(content))
    return pixels(1, 4, 28, 28)[..., None].repeat(3, 3), list(range(4))


def write_cifar(root, monkeypatch, name="CIFAR10"):
    kind = getattr(torchvision.datasets, name)
    hundred = name == "CIFAR100"
    folder = root / kind.base_folder
    folder.mkdir()
    key, names = ("fine_labels", "fine_label_names") if hundred else ("labels", "label_names")

    def write(file, content):
        path = folder / file
        path.write_bytes(pickle.dumps(content))
        return [file, hashlib.md5(path.read_bytes()).hexdigest()]

    test = pixels(2, 4, 32, 32, 3)
    rows = {"data": test.transpose(0, 3, 1, 2).reshape(4, -1), key: [3, 1, 2, 0]}
    monkeypatch.setattr(kind, "test_list", [write("test" if hundred else "test_batch", rows)])
    training = {"data": pixels(3, 5, 3072), key: [0, 1, 2, 3, 4]}
    monkeypatch.setattr(kind, "train_list", [write("train" if hundred else "data_batch_1", training)])
    meta = {names: [f"class {k}" for k in range(100 if hundred else 10)]}
    file, md5 = write("meta" if hundred else "batches.meta", meta)
    monkeypatch.setattr(kind, "meta", {"filename": file, "key": names, "md5": md5})
    return test, [3, 1, 2, 0]


def write_svhn(root, monkeypatch):
    savemat = pytest.importorskip("scipy.io").savemat
    kind = torchvision.datasets.SVHN
    images = pixels(4, 3, 32, 32, 3)
    split_list = {}
    for split, count in (("train", 2), ("test", 3)):
        path = root / f"{split}_32x32.mat"
        labels = np.array([[10], [1], [7]], dtype=np.uint8)[:count]  # 10 is the digit 0
        savemat(path, {"X": images[:count].transpose(1, 2, 3, 0), "y": labels})
        split_list[split] = ["http://there", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(kind, "split_list", split_list)
    return images, [0, 1, 7]


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "svhn"])
def test_pixels_and_labels_are_those_of_the_files(root, monkeypatch, name):
    if name == "mnist":
        stored, labels = write_mnist(root)
    elif name == "svhn":
        stored, labels = write_svhn(root, monkeypatch)
    else:
        stored, labels = write_cifar(root, monkeypatch, name.upper())
    size = stored.shape[1]
    images = open_images(f"torch/{name}", model((3, size, size), 100 if name == "cifar100" else 10))
    assert images.labelled
    (batch,) = images.batches(10)
    assert batch.labels.tolist() == labels
    torch.testing.assert_close(batch.images, torch.from_numpy(stored.transpose(0, 3, 1, 2).copy()).float() / 255)
    train = open_images(f"torch/{name}:train", model((3, size, size), 100 if name == "cifar100" else 10))
    assert len(train) == {"mnist": 6, "svhn": 2}.get(name, 5)


def test_grey_images_train_and_certify_a_network_of_one_channel(root):
    stored, labels = write_mnist(root)
    torch.manual_seed(0)
    net = lipcert.load("certvit_mnist", pretrained=False, depth=1, embed_dim=12, num_heads=2)
    assert net.input_size == (1, 28, 28)
    images = open_images("torch/mnist", net)
    (batch,) = images.batches(10)
    torch.testing.assert_close(batch.images, torch.from_numpy(stored[..., 0].copy()).float()[:, None] / 255)
    finetune(net, Batches(images, net, 2, Augmentation("shift", cutout=0.5)), loss="ce", epochs=1)
    result = lipcert.certify(net, batch.images, batch.labels, eps=1.58, method="global")
    assert len(result) == len(labels)


def test_a_module_that_timm_made_for_one_channel_is_taken_as_it_is():
    for name, more in (("resnet10t", {}), ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 1})):
        loaded = lipcert.load(timm.create_model(name, in_chans=1, num_classes=4, **more))
        assert loaded.input_size[0] == 1
        assert loaded(torch.rand(1, *loaded.input_size)).shape == (1, 4)


def refused(spec, *parts, size=(3, 32, 32)):
    with refusal(*parts):
        open_images(spec, model(size))


def test_what_cannot_be_downloaded_is_one_line(root):
    for name in ("mnist", "cifar10", "cifar100", "svhn"):
        refused(f"torch/{name}", f"cannot open torch/{name}: no network", "put its files into", str(root))
    refused("torch/imagenet22k", "Unknown torchvision dataset imagenet22k")


def test_the_package_that_reads_a_data_set_is_named(root, monkeypatch):
    monkeypatch.setattr(_data.importlib.util, "find_spec", lambda _: None)
    refused("torch/svhn", "pip install scipy")
    refused("hfds/x", "pip install datasets")


def test_the_command_ends_with_one_line(root):
    assert "no network" in run("certify", "--data", "torch/svhn", "--eps", "0.1", "bundled", code=2).stderr
