"""Data sets: order, labels and pixels are what they seem, and what cannot be read is named."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm.data
import torch
from modules import refusal
from PIL import Image
from torch import nn

from lipcert.errors import InputError
from lipcert.inputs import data
from lipcert.inputs import data as _data
from lipcert.inputs.data import open_images
from lipcert.inputs.loading import load


def model(classes=3, size=(3, 8, 8), **config):
    net = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(size)), classes))
    channels = size[0]
    loaded = load(net, mean=(0.5,) * channels, std=(0.25,) * channels, input_size=size)
    loaded.data_config = {"crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "center", **config}
    return loaded


def picture(value: int, size=(8, 8)) -> bytes:
    """A PNG file whose pixels are (value, value + 1, value + 2)."""
    pixels = np.full((*size, 3), (value, value + 1, value + 2), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


CLASSES = {f"{name}/{i}.png": picture(30 * k + 10 * i) for k, name in enumerate("cab") for i in range(2)}


def refused(spec, *expected: str, loaded=None, **options) -> None:
    with refusal(*expected):
        list(open_images(spec, loaded or model(), **options).batches(2))


@pytest.fixture(params=["folder", "tar", "tar with dots"])
def classes(request, tmp_path):
    if request.param == "folder":
        return write(tmp_path / "images", CLASSES)
    dots = "./" if request.param == "tar with dots" else ""
    return write_tar(tmp_path / "images.tar", {dots + name: content for name, content in CLASSES.items()})


def test_class_folders_give_labels_in_sorted_order(classes):
    images = open_images(str(classes), model())
    assert (len(images), images.labelled, images.note) == (6, True, None)
    assert [images[i][1] for i in range(6)] == [0, 0, 1, 1, 2, 2]  # a, b, c
    values = [int(image[0, 0, 0] * 255 + 0.5) for image, _ in (images[i] for i in range(6))]
    assert values == [30, 40, 60, 70, 0, 10]


def test_batches_keep_order_and_pixels(classes):
    images = open_images(classes, model())
    batches = list(images.batches(4))
    assert [batch.indices for batch in batches] == [(0, 1, 2, 3), (4, 5)]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 0, 1, 1, 2, 2]
    pixels = torch.cat([batch.images for batch in batches])
    assert pixels.dtype == torch.float32
    assert pixels.shape == (6, 3, 8, 8)
    expected = torch.tensor([30, 31, 32]).view(3, 1, 1).expand(3, 8, 8) / 255
    assert torch.equal(pixels[0], expected)  # no normalisation, no rounding beyond 8 bits


def test_one_image_is_a_data_set(tmp_path):
    (tmp_path / "x.png").write_bytes(picture(30))
    images = open_images(tmp_path / "x.png", model())
    assert (images.total, images.labelled, images.file(0)) == (1, False, "x.png")
    (batch,) = images.batches(4)
    assert (batch.labels, batch.files) == (None, ("x.png",))
    (tmp_path / "x.png").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"x\.png: it is damaged, or no image of a known format; repair or remove it"):
        next(open_images(tmp_path / "x.png", model()).batches(1))


def test_unwanted_images_are_not_read(tmp_path):
    root = write(tmp_path / "images", {**CLASSES, "a/0.png": b"not an image"})
    images = open_images(root, model())
    assert [batch.indices for batch in images.batches(4, only={1, 2, 4, 5})] == [(1, 2, 4, 5)]


def test_one_folder_gives_no_labels(tmp_path):
    files = {f"{i}.png": picture(10 * i) for i in range(3)}
    for source in (
        write(tmp_path / "flat", files),
        write_tar(tmp_path / "flat.tar", files),
        write_tar(tmp_path / "dots.tar", {f"./{name}": content for name, content in files.items()}),
        write(tmp_path / "one", {f"cats/{name}": content for name, content in files.items()}),
    ):
        images = open_images(source, model())
        assert (len(images), images.labelled, images.note) == (3, False, None)
        assert images[0][1] is None
        assert next(images.batches(3)).labels is None


def test_folder_of_splits_takes_the_validation_images(tmp_path):
    files = {f"train/{name}": picture(200) for name in CLASSES} | {f"val/{k}": v for k, v in CLASSES.items()}
    images = open_images(write(tmp_path / "set", files), model())
    assert len(images) == 6
    assert int(images[0][0][0, 0, 0] * 255 + 0.5) == 30


def test_labels_of_other_classes_are_left_out(classes):
    for count in (2, 4):
        images = open_images(classes, model(classes=count))
        assert not images.labelled
        assert f"3 classes and the model has {count}" in images.note
        assert next(images.batches(2)).labels is None


def test_limit_takes_from_every_class(tmp_path):
    files = {f"{name}/{i:03}.png": picture(i) for name in "abc" for i in range(40)}
    root = write(tmp_path / "images", files)
    whole, some, more = (open_images(root, model(), limit=limit) for limit in (None, 12, 24))
    assert list(whole.order) == list(range(120))
    assert (len(some), some.total) == (12, 120)
    assert {some[i][1] for i in range(12)} == {0, 1, 2}
    assert list(some.order) == list(more.order)[:12]  # so that a longer run goes on with a shorter one
    assert list(open_images(root, model(), limit=12).order) == list(some.order)
    assert [batch.indices for batch in some.batches(5)][0] == tuple(some.order[:5])
    assert len(open_images(root, model(), limit=1000)) == 120


def test_images_are_resized_and_cropped_as_timm_does(tmp_path):
    rows, columns = np.mgrid[:40, :60]
    pixels = np.stack([4 * rows, 4 * columns, rows + columns], axis=2).astype(np.uint8)
    root = tmp_path / "images"
    root.mkdir()
    Image.fromarray(pixels).save(root / "x.png")
    config = {"interpolation": "bicubic", "crop_pct": 0.5, "crop_mode": "center"}
    loaded = model(size=(3, 10, 10), **config)
    transform = timm.data.create_transform((3, 10, 10), mean=(0.5,) * 3, std=(0.25,) * 3, **config)
    expected = transform(Image.fromarray(pixels)) * 0.25 + 0.5
    torch.testing.assert_close(open_images(root, loaded)[0][0], expected)


def test_grey_and_transparent_images(tmp_path):
    root = tmp_path / "images"
    root.mkdir()
    Image.new("L", (8, 8), 51).save(root / "0.png")
    Image.new("RGBA", (8, 8), (51, 102, 153, 0)).save(root / "1.png")
    colour = open_images(root, model())
    torch.testing.assert_close(colour[0][0], torch.full((3, 8, 8), 0.2))
    torch.testing.assert_close(colour[1][0][:, 0, 0], torch.tensor([0.2, 0.4, 0.6]))
    torch.testing.assert_close(open_images(root, model(size=(1, 8, 8)))[0][0], torch.full((1, 8, 8), 0.2))
    refused(root, "4 channels", loaded=model(size=(4, 8, 8)))


@pytest.mark.parametrize(("suffix", "noted"), [("jpg", 1), ("png", 1), ("webp", 1), ("tif", 0)])
def test_an_orientation_that_is_not_applied_is_noted(tmp_path, suffix, noted):
    """Pillow applies those of TIFF, and timm none."""
    exif = Image.Exif()
    exif[274] = 3  # upside down
    image = Image.fromarray(np.repeat(np.array([0, 255], dtype=np.uint8), 32).reshape(8, 8))
    image.save(tmp_path / f"0.{suffix}", exif=exif)
    image.save(tmp_path / "1.png")
    images = open_images(tmp_path, model())
    assert images.sizes(9) == [(8, 8)] * 2
    assert sum("1 of 2 sampled images have an EXIF orientation" in note for note in images.notes) == noted
    assert (images[0][0][0, 0, 0] > 0.5) == (not noted)


@pytest.mark.parametrize(("kind", "noted"), [("tif", 1), ("gif", 1), ("webp", 1), ("mpo", 0)])
def test_pages_and_frames_after_the_first_are_noted(tmp_path, kind, noted):
    """But not the previews that cameras put behind a photograph."""
    pages = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    pages[0].save(tmp_path / f"0.{kind}", save_all=True, append_images=pages[1:])
    pages[1].save(tmp_path / "1.tif")
    images = open_images(tmp_path, model())
    assert images.sizes(9) == images.sizes(9) == [(8, 8)] * 2
    assert sum("1 of 2 sampled images have several pages or frames" in note for note in images.notes) == noted
    assert images[0][0][0, 0, 0] > 0.9


def test_images_and_labels_in_an_archive_of_numpy(tmp_path):
    """As generated images of CIFAR-10 are shared."""
    shades, path = np.full((4, 8, 8, 3), [[[[0, 60, 255]]]], dtype=np.uint8), tmp_path / "made.npz"
    np.savez(path, image=shades, label=np.arange(4)[:, None] % 3)
    images = open_images(path, model(3), purpose="train")
    assert [images[place][1] for place in range(4)] == [0, 1, 2, 0]
    torch.testing.assert_close(images[0][0].mean((1, 2)), torch.tensor([0, 60, 255]) / 255)
    np.savez(path, image=shades[..., :1], label=np.arange(4))
    assert open_images(path, model(5))[0][0].shape[0] == 3
    refused(path, "has the label 3", "classes 0 to 2")
    for arrays in ({"images": shades}, {"image": shades, "label": np.eye(4)}, {"image": shades / 255, "label": shades}):
        np.savez(path, **arrays)
        refused(path, "it needs the arrays image")
    refused(path, "--classes and --labels are for folders", classes=path)
    path.write_bytes(b"PK")
    refused(path, "it needs the arrays image")


def test_paths_without_images(tmp_path):
    refused(tmp_path / "none", "there is no image, folder or .tar file", "torch/")
    refused(write(tmp_path / "texts", {"a/1.txt": b"text"}), "holds no images", ".png")
    refused(write_tar(tmp_path / "texts.tar", {"a/1.txt": b"text"}), "holds no images")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no images")
    refused("", "empty name", "leave --data out")
    (tmp_path / "x.txt").write_bytes(picture(0))
    refused(tmp_path / "x.txt", "neither a folder or .tar of images nor an image (.apng")
    refused("https://x.org/images.zip", "download it first")
    (tmp_path / "link").symlink_to("nowhere")
    refused(tmp_path / "link", "a link to nowhere")
    refused(f"{tmp_path}:", "there is no image")
    refused(write(tmp_path / "batches", {"test_batch": b"\x80\4"}), "no suffix; give a folder", "torch/NAME")
    refused(write(tmp_path / "mixed", {**CLASSES, "0.png": picture(0)}), "outside")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_positive(classes, limit):
    refused(classes, "at least 1", limit=limit)


@pytest.mark.parametrize("content", [b"", b"not a tar" * 100, b"\x1f\x8b\x08" + b"x" * 600])
def test_damaged_tar(tmp_path, content):
    (tmp_path / "x.tar").write_bytes(content)
    refused(tmp_path / "x.tar", "x.tar")


def test_truncated_tar(tmp_path):
    path = write_tar(tmp_path / "x.tar", CLASSES)
    content = path.read_bytes()
    for size in (300, 700, 2000):
        path.write_bytes(content[:size])
        refused(path, "x.tar")


def test_compressed_tar(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w:gz") as tar:
        tar.add(write(tmp_path / "images", CLASSES), "images")
    refused(tmp_path / "x.tar", "compressed by gzip; unpack it")


def test_bundled_images(tmp_path, monkeypatch):
    file = tmp_path / "digits.safetensors"
    monkeypatch.setattr(data, "BUNDLED", file)
    small = model(classes=3, size=(1, 8, 8))
    refused(None, "bundled", loaded=small)
    pixels = torch.arange(6 * 64, dtype=torch.int64).remainder(256).to(torch.uint8).view(6, 1, 8, 8)
    safetensors.torch.save_file({"images": pixels, "labels": torch.tensor([0, 1, 2, 2, 1, 0])}, file)
    images = open_images(None, small)
    assert (len(images), images.labelled, images.spec) == (6, True, None)
    assert torch.equal(images[1][0], pixels[1].float() / 255)
    assert next(images.batches(6)).labels.tolist() == [0, 1, 2, 2, 1, 0]
    assert not open_images(None, model(classes=4, size=(1, 8, 8))).labelled
    assert len(open_images(None, small, limit=2)) == 2
    drawn = open_images(None, model())
    assert not drawn.labelled
    assert next(drawn.batches(1)).images.shape[1:] == model().input_size
    file.write_bytes(b"damaged")
    refused(None, "bundled", loaded=small)


class Torchvision:
    """A data set as torchvision has them: random access, PIL images, class names."""

    class_to_idx = {"a": 0, "b": 1, "c": 2}

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return Image.new("L", (8, 8), 10 * i), i % 3


def test_torch_data_sets(monkeypatch, tmp_path, capsys):
    calls = []

    def create(name, **options):
        calls.append((name, options["split"], options["download"]))
        print("Downloading")
        return Torchvision()

    monkeypatch.setattr(timm.data, "create_dataset", create)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    images = open_images("torch/kmnist", model(size=(1, 8, 8)))
    assert (len(images), images.labelled) == (5, True)
    assert images[4][1] == 1
    torch.testing.assert_close(images[4][0], torch.full((1, 8, 8), 40 / 255))
    open_images("torch/kmnist:train", model(size=(1, 8, 8)))
    assert calls == [("torch/kmnist", "validation", True), ("torch/kmnist", "train", True)]
    assert capsys.readouterr().out == ""


def test_data_sets_of_the_hub(monkeypatch):
    """By timm's reader of them, which this stands for."""

    class Reader:
        class_to_idx = {"a": 0, "b": 1, "c": 2}

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return io.BytesIO(picture(10 * i)), labels[i]

    monkeypatch.setattr(_data.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(timm.data, "create_dataset", lambda *_, **__: timm.data.ImageDataset("", reader=Reader()))
    labels = [2, 0, 1]
    images = open_images("hfds/owner/name", model())
    assert [image[0, 0, 0].mul(255).round().item() for image, _ in (images[i] for i in range(3))] == [0, 10, 20]
    assert [images[i][1] for i in range(3)] == [2, 0, 1]
    known = model()
    known.class_names = ("c", "a", "b")
    assert [open_images("hfds/owner/name", known)[i][1] for i in range(3)] == [0, 1, 2]
    labels = [-1, -1, -1]
    assert not open_images("hfds/owner/name", model()).labelled
    labels = [0, 3, 0]
    refused("hfds/owner/name", "label 3", "0 to 2")
    labels = [0.5, 0, 0]
    refused("hfds/owner/name", "label 0.5")
