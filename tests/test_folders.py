"""Layouts, names and lists as people have them: splits and labels are right, or it is said why there are none."""

import io
import json
import os
import random
import re
import tarfile
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import refusal
from PIL import Image
from timm.utils.misc import natural_key
from torch import nn

import lipcert
from lipcert.inputs.classes import natural
from lipcert.inputs.data import open_images
from lipcert.inputs.loading import load
from lipcert.report import other_order
from lipcert.training import Batches


def model(classes: int = 2):
    return load(
        nn.Sequential(nn.Flatten(), nn.Linear(192, classes)), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 8, 8)
    )


def picture(value: int = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def write(root: Path, *names: str) -> Path:
    """Files of images, and folders whose names end with a slash."""
    for number, name in enumerate(names):
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(picture(number))
    return root


def labels(images) -> dict[str, int | None]:
    return {images.file(i): images[n][1] for n, i in enumerate(images.order)}


def refused(*parts: str, **options) -> None:
    spec = options.pop("spec")
    with refusal(*parts):
        list(open_images(spec, options.pop("loaded", None) or model(), **options).batches(2))


@pytest.mark.parametrize(
    ("folders", "purpose", "split"),
    [
        (("train", "val"), "train", "train"),
        (("train", "val"), "certify", "val"),
        (("train", "val", "test"), "certify", "val"),
        (("train", "test"), "certify", "test"),
        (("Train", "Test"), "certify", "Test"),
        (("training", "testing"), "train", "training"),
        (("training_set", "test_set"), "certify", "test_set"),
        (("train", "dev"), "certify", "dev"),
        (("train", "Validation"), "certify", "Validation"),
        (("seg_train", "seg_test"), "certify", "seg_test"),
        (("seg_train/seg_train", "seg_test/seg_test"), "certify", "seg_test"),
        (("train_2012", "val_2012", "original"), "certify", "val_2012"),
        (("train2017", "val2017"), "train", "train2017"),
        (("train",), "certify", "train"),
        (("data/train", "data/test"), "certify", "test"),
    ],
)
def test_the_split_of_a_purpose(tmp_path, folders, purpose, split):
    root = write(tmp_path / "root", *(f"{top}/{name}/{top[-3:]}.png" for top in folders for name in "ab"))
    images = open_images(root, model(), purpose=purpose)
    assert images.split == split
    assert labels(images) == {f"a/{split[-3:]}.png": 0, f"b/{split[-3:]}.png": 1}


@pytest.mark.parametrize(
    ("files", "purpose", "read"),
    [
        (("a/1.png", "z/1.png", "2.png"), "calibrate", ["2.png", "a/1.png", "z/1.png"]),
        (("train/a/1.png", "train/z/1.png", "val/a/1.png"), "calibrate", ["a/1.png", "z/1.png"]),
        (("train/a/1.png", "val/z/1.png", "2.png"), "predict", ["2.png", "train/a/1.png", "val/z/1.png"]),
        (("val/a/1.png", "valid/a/1.png"), "predict", ["val/a/1.png", "valid/a/1.png"]),
    ],
)
def test_where_labels_are_not_needed_folders_are_no_classes(tmp_path, files, purpose, read):
    images = open_images(write(tmp_path / "root", *files), model(), purpose=purpose)
    assert not images.labelled
    assert sorted(images.file(index) for index in range(len(images))) == read
    assert images.class_names == {}


def test_folders_with_equal_parts_are_said_to_be_classes_of_which_one_may_be_meant(tmp_path):
    for names, parts in (("fold_0 fold_1", "a b"), ("images masks", "a b"), ("cat test_dog", "day night")):
        root = write(tmp_path / names, *(f"{top}/{part}/1.png" for top in names.split() for part in parts.split()))
        images = open_images(root, model())
        assert {*labels(images).values()} == {0, 1}
        assert any(f"each has the folders {parts.replace(' ', ', ')}" in note for note in images.notes)
    assert not open_images(write(tmp_path / "x", "a/1/1.png", "a/2/1.png", "b/1/1.png"), model()).notes


def test_a_folder_of_annotations_is_no_class(tmp_path):
    root = write(tmp_path / "coco", "val2017/1.png", "val2017/2.png", "annotations/")
    images = open_images(root, model())
    assert (images.split, images.labelled) == ("val2017", False)
    for names in (("images/a/1.png", "images/b/1.png"), ("images/a_1.png", "images/b_1.png")):
        root = write(tmp_path / names[0][7:10].replace("/", "-"), *names, "meta/xmls/")
        (root / "meta/xmls/a_1.xml").write_text("<annotation/>")
        refused("has a folder meta with files, but no images", spec=root)
        (tmp_path / "l.csv").write_text("".join(f"{name},{k}\n" for k, name in enumerate(names)))
        assert {*labels(open_images(root, model(), labels=tmp_path / "l.csv")).values()} == {0, 1}
    root = write(tmp_path / "split", "train/a/1.png", "train/b/1.png", "test/b/1.png", "train/aa/")
    (root / "train/aa/files.txt").write_text("1.png\n")
    refused("has a folder aa with files, but no images", spec=root)


def test_images_without_classes_beside_the_splits_are_no_class(tmp_path):
    parts = ("train/seg_train/a", "train/seg_train/b", "test/seg_test/a", "test/seg_test/b", "pred/seg_pred")
    images = open_images(write(tmp_path / "intel", *(f"seg_{part}/1.png" for part in parts)), model())
    assert (images.split, labels(images)) == ("seg_test", {"a/1.png": 0, "b/1.png": 1})


@pytest.mark.parametrize("sign", [" ", ",", "\t"])
def test_names_in_a_list_may_hold_the_sign_between_columns(tmp_path, sign):
    root = write(tmp_path / "r", f"my{sign}cat.png", f"my{sign}{sign}dog.png")
    (tmp_path / "l.txt").write_text(f"my{sign}cat.png{sign}1\nmy{sign}{sign}dog.png{sign}0\n")
    assert [*labels(open_images(root, model(), labels=tmp_path / "l.txt")).values()] == [0, 1]
    (tmp_path / "l.txt").write_text(f"my{sign}cat.png{sign}big{sign}cat\nmy{sign}{sign}dog.png{sign}small{sign}dog\n")
    refused("it needs one of file names", spec=root, labels=tmp_path / "l.txt")


def test_a_split_that_is_named(tmp_path):
    root = write(tmp_path / "root", *(f"{top}/{name}/{top}.png" for top in ("train", "val", "test") for name in "ab"))
    for split in ("train", "val", "test"):
        assert labels(open_images(f"{root}:{split}", model())) == {f"a/{split}.png": 0, f"b/{split}.png": 1}
    refused("no split extra", spec=f"{root}:extra")
    flat = write(tmp_path / "flat", "a/1.png", "b/1.png")
    refused("no folders for splits", spec=f"{flat}:train")


def test_no_training_images_are_made_up(tmp_path):
    root = write(tmp_path / "root", "val/a/1.png", "val/b/1.png", "test/a/1.png")
    refused("no training images", "test, val", spec=root, purpose="train")
    refused("two folders for one split", spec=write(tmp_path / "two", "val/a/1.png", "valid/a/1.png"))
    refused("give one split", spec=write(tmp_path / "mixed", "a/1.png", "b/1.png", "test/a/1.png"))


def test_classes_of_a_split_are_numbered_among_those_of_the_training_images(tmp_path):
    root = write(tmp_path / "root", *(f"train/{name}/1.png" for name in "abc"), "val/a/1.png", "val/c/1.png")
    assert labels(open_images(root, model(3))) == {"a/1.png": 0, "c/1.png": 2}
    other = write(tmp_path / "other", *(f"train/{name}/1.png" for name in "abc"), "val/a/1.png", "val/d/1.png")
    refused("none of those of the training images", ": d;", spec=other, loaded=model(3))


def test_classes_that_are_called_like_splits_stay_classes(tmp_path):
    images = open_images(write(tmp_path / "root", "test/1.png", "train station/1.png", "bus/1.png"), model(3))
    assert images.split is None
    assert labels(images) == {"bus/1.png": 0, "test/1.png": 1, "train station/1.png": 2}


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_the_first_folder_is_the_class(tmp_path, kind):
    names = [f"{top}/{size}/{k}.png" for k, top in enumerate(("benign", "malignant")) for size in ("100X", "200X")]
    root = write(tmp_path / "root", *names)
    if kind == "tar":
        with tarfile.open(tmp_path / "root.tar", "w") as archive:
            archive.add(root, "root")  # in a folder of the archive's name
        root = tmp_path / "root.tar"
    assert labels(open_images(root, model())) == {name: int(name.startswith("m")) for name in names}


def test_hidden_files_are_no_data_and_empty_folders_are_classes(tmp_path):
    root = write(
        tmp_path / "root", "a/1.png", "a/.ipynb_checkpoints/1.png", "a/._1.png", ".cache/x.png", "b/", "c/1.png",
        "__MACOSX/a/1.png",
    )  # fmt: skip
    images = open_images(root, model(3))
    assert labels(images) == {"a/1.png": 0, "c/1.png": 2}
    assert any("b: no images" in note for note in images.notes)


def test_formats_are_read_or_counted(tmp_path):
    root = write(tmp_path / "root", "a/1.png", "b/1.png")
    for kind, suffix in (("WEBP", "webp"), ("TIFF", "tif"), ("BMP", "bmp"), ("GIF", "GIF"), ("PPM", "ppm")):
        (root / "a" / f"2.{suffix}").write_bytes(picture(7, kind))
    for name in ("a/3.heic", "b/3.heic", "b/4"):
        (root / name).write_bytes(b"x")
    (root / "readme.txt").write_text("x")
    images = open_images(root, model())
    assert len(images) == 7
    assert images.notes[0] == "3 files of other formats left out: 2 .heic, 1 no suffix"
    notes = open_images(root / "b", model()).notes  # of images without labels, such as those of a web data set
    assert [note.partition(":")[0] for note in notes] == [
        "no class folders, and so no labels; --labels FILE gives them",
        "2 files of other formats left out",
    ]
    assert open_images(root / "a" / "2.webp", model()).total == 1


def test_natural_order_is_said_where_it_is_not_the_sorted_one(tmp_path):
    root = write(tmp_path / "root", "2/x.png", "10/x.png")
    images = open_images(root, model())
    assert labels(images) == {"2/x.png": 0, "10/x.png": 1}
    assert any("2 comes before 10" in note and "--classes" in note for note in images.notes)
    assert "natural order: 2, 10" in images.labels_by
    (tmp_path / "sorted.txt").write_text("10\n2\n")
    assert labels(open_images(root, model(), classes=tmp_path / "sorted.txt")) == {"2/x.png": 1, "10/x.png": 0}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"dog": 7, "cat": 3}'),
        ("c.json", '{"7": "dog", "3": ["cat", "a cat"]}'),
        ("c.json", '{"7": ["n1", "dog"], "3": ["n2", "cat"], "0": ["n3", "crane"], "1": ["n4", "crane"]}'),  # of Keras
        ("c.json", '{"dog": "7", "cat": "3", "hound": "7"}'),
        ("c.json", '{"label2id": {"cat": 3, "dog": 7}}'),
        ("c.txt", "a\nb\nc\ncat\ne\nf\ng\ndog\ni\nj\n"),
        ("c.txt", "{3: 'cat',\n 7: \"dog\", 0: 'tench, Tinca tinca'}\n"),  # as Python prints a dict
        ("c.txt", "['a', 'b', 'c', 'cat', 'e', 'f', 'g', 'dog', 'i', 'j']"),
        ("c.yaml", "path: x\nnc: 10\nnames: [no, b, c, cat, e, f, g, dog, i, j]\n"),  # of Ultralytics
        ("c.yml", "names:\n  3: cat\n  7: dog\n"),
        ("c.yaml", "cat: 3\ndog: 7\n"),
        ("c.txt", "a: 0\nb: 1\nc: 2\ncat: 3\ne: 4\nf: 5\ng: 6\ndog: 7\ni: 8\nj: 9\n"),
        ("c.txt", "crane\nb\nc\ncat\ncrane\nf\ng\ndog\ni\nj\n"),  # as in lists of ImageNet
        ("c.json", '["a", "b", "c", "cat", "e", "f", "g", "dog", "i", "j"]'),
    ],
)
def test_lists_of_classes(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    root = write(tmp_path / "root", "cat/1.png", "dog/1.png")
    images = open_images(root, model(10), classes=tmp_path / name)
    assert (images.labelled, images.note) == (True, None)
    assert labels(images) == {"cat/1.png": 3, "dog/1.png": 7}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"cat": 0, "Dog": 1}', "does not name dog (1 of 2 classes), but cat, Dog; add them, or write both alike"),
        ('["cat", "dog"]', "names 2 classes, and the model has 10"),
        ('{"cat": 0, "dog": 1, "emu": 10}', "gives emu the number 10, which is not 0 to 9; correct it"),
        ('{"cat": 1, "dog": 2, "emu": 10}', "gives emu the number 10, which is not 0 to 9; it counts from 1"),
        ('{"cat": 3, "dog": 1, "none": -1}', "gives none the number -1"),
        ('{"0": "cat", "1": "dog", "2": "cat"}', "cat the number 0 and cat the number 2"),
        ('{"cat": 3, "dog": 1.5}', "no list of classes"),
        ('{"cat": 3, "dog": 10}', "0 to 9"),
        ('{"cat": 3, "dog": "x"}', "no list of classes"),
        ("3", "no list of classes"),
        ("", "is empty"),
        ('{"cat": 3, "dog": 1, "cat": 2}', "a name occurs twice"),
        ("{'cat': 3, 'dog'", "no list of classes"),
        ("[" * 5000, "no list of classes"),
    ],
)
def test_lists_of_classes_that_do_not_fit(tmp_path, text, says):
    root = write(tmp_path / "r", "cat/1.png", "dog/1.png")
    (tmp_path / "c.json").write_text(text)
    refused(says, "c.json", spec=root, classes=tmp_path / "c.json", loaded=model(10))
    (tmp_path / "c.txt").write_text("cat\ndog\n")
    refused("names 2 classes, and the model has 10", spec=root, classes=tmp_path / "c.txt", loaded=model(10))
    (tmp_path / "c.txt").write_text("cat 0\ndog 0\nemu 1\n")
    refused("cat the number 0 and dog the number 0", spec=root, classes=tmp_path / "c.txt", loaded=model(3))
    (tmp_path / "c.txt").write_text("1 cat\n2 dog\n3 emu\n")  # of emu there are no images
    refused("emu the number 3", "counts from 1", spec=root, classes=tmp_path / "c.txt", loaded=model(3))


def test_of_two_numbers_on_a_line_neither_is_guessed_to_be_the_name(tmp_path):
    root = write(tmp_path / "r", "1/1.png", "0/1.png")
    (tmp_path / "c.txt").write_text("1 2\n2 0\n0 1\n")
    refused("two numbers on each line", spec=root, classes=tmp_path / "c.txt", loaded=model(3))
    for text in ("1 1\n2 0\n0 2\n", "2\n1\n0\n"):  # the first says the same either way
        (tmp_path / "c.txt").write_text(text)
        assert labels(open_images(root, model(3), classes=tmp_path / "c.txt")) == {"0/1.png": 2, "1/1.png": 1}


def test_wordnet_ids_are_numbered_as_in_imagenet(tmp_path):
    root = write(tmp_path / "root", "n01440764/1.png", "n02102040/1.png", "n03000684/1.png")
    images = open_images(root, model(1000))
    # tench, English springer and chain saw are classes 0, 217 and 491 of ImageNet-1k
    assert list(labels(images).values()) == [0, 217, 491]
    assert "ImageNet" in images.labels_by
    assert not open_images(root, model(999)).labelled
    assert list(labels(open_images(root, model(3))).values()) == [0, 1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "filename,label\nx1.png,1\nx2.png,0\n",
        "id,label\nx1,1\nx2,0\n",
        "label;file_name\n1;./x1.png\n0;./x2.png\n",
        "x1.png 1\nx2.png 0\n",
        "image,other,class\nx1.png,z,1.0\nx2.png,z,0.0\n",
        "filename,label\nval/x1.png,1\nval/x2.png,0\n",
        "filename,label\nx1.png,dog\nx2.png,cat\n",
        "filename,label\nval\\x1.png,1\nval\\x2.png,0\n",
        "Class ID,Image-Id\n1,x1\n0,x2\n",
        "filename,label\n/elsewhere/val/x1.jpg,1\nC:\\\\data\\\\val\\\\x2.jpg,0\n",
        ",diagnosed,label\nx1.png,2020,1\nx2.png,2021,0\n",
        "filename,label\nx1.png,1\nx2.png,0\ntest/x2.png,\ntest/x1.png,NA\n",
        "filename,label\nx1.png,1,\nx2.png,0,,\n",
        'filename label\nx1.png "dog 172"\nx2.png "cat 50"\n',
    ],
)
def test_labels_of_a_flat_folder(tmp_path, text):
    (tmp_path / "labels.csv").write_text(text)
    root = write(tmp_path / "val", "x1.png", "x2.png")
    images = open_images(root, model(), labels=tmp_path / "labels.csv")
    assert labels(images) == {"x1.png": 1, "x2.png": 0}
    assert str(tmp_path / "labels.csv") in images.labels_by
    assert images.lists == {"labels": str(tmp_path / "labels.csv")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("filename,label\nx1.png,1\n", "no label for 1 of 2"),
        ("filename,label\nx1.png,0.5\nx2.png,1\n", "has the label 0.5, which is not 0 to 1"),
        ("filename,label\nx1.png,0\nx2.png,1\nx3.png,2\nx4.png,NA\n", "has the label 2"),
        ("filename,label\nx1.png,1\nx2.png,1\nx3.png,2\nx4.png,-1\n", "counts the 2 classes from 1"),
        ("filename,label\nx1.png,1\nx2.png,0\nx3.png,dog\n", "such as 1 and dog"),
        ("filename,label\ntrain/x1.png,1\ntrain/x2.png,0\n", "such as x1.png; it has those of train/x1.png, train/x2"),
        ("filename,label\n/d/train/x1.png,1\n/d/train/x2.png,0\n", "such as x1.png; it has those of /d/train/x1.png"),
        ("first,second,label\nx1.png,x2.png,1\nx2.png,x1.png,0\n", "first and second may be the names of the files"),
        ("filename,label\nx1.png,1\nx2.png,2\n", "from 1"),
        ("filename,label\nx1.png,1\nx2.png,5\n", "label 5"),
        ("filename,label\nx1.png,1\nx1.png,0\n", "several labels for x1.png: 1;0"),
        ("a,b,c\nx1.png,1,2\n", "begins with a, b, c; its first line names columns, and it needs one of file names"),
        ("x1.png,1,cat\nx2.png,0,dog\n", "begins with x1.png, 1, cat; its first line names columns"),
        ("filename,label\nx1.png,1\nx2.png,\n", "no label for 1 of 2"),
        ("filename,label\nx1.png,1\nx2.png,dog\n", "such as 1 and dog"),
        ("filename,label\nx1.png,1\nx2.png,-1\n", "label -1"),
        (
            "filename label\nx1.png dog\nx2.png Cessna 172\n",
            "names 2 columns, and a line has 3 cells: x2.png Cessna 172;",
        ),
        ("filename,label\nx1.png,tench, Tinca tinca\nx2.png,dog\n", "a line has 3 cells: x1.png,tench,Tinca tinca;"),
        ("label\tfile_name\n1\tx1.png\n0\tx2.png\t62\n", "a line has 3 cells: 0"),
        ("filename,label\nX1.PNG,1\nX2.PNG,1\n", "such as x1.png; it has those of X1.PNG, X2.PNG"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, text, says):
    (tmp_path / "labels.csv").write_text(text)
    refused(says, spec=write(tmp_path / "val", "x1.png", "x2.png"), labels=tmp_path / "labels.csv")


@settings(max_examples=30)
@given(
    order=st.permutations(range(4)),
    head=st.permutations(("id", "", "image_name", "fold", "label")),
    suffix=st.sampled_from((".png", "", ".jpg")),
    above=st.sampled_from(("", "val/", "root/val/", "../val/", "/elsewhere/val/")),
    here=st.sets(st.integers(0, 3), min_size=1),
)
def test_the_column_of_files_is_told_by_its_cells(tmp_path_factory, order, head, suffix, above, here):
    """Beside numbers of rows, of which each is the name of a file too."""
    folder = tmp_path_factory.mktemp("x")
    root = write(folder / "root" / "val", *(f"{i}.png" for i in sorted(here)))
    rows = [{"id": order[i], "": i, "image_name": f"{above}{i}{suffix}", "fold": 0, "label": 3 - i} for i in range(4)]
    lines = [",".join(head), *(",".join(str(row[name]) for name in head) for row in rows)]
    (folder / "l.csv").write_text("\n".join(lines))
    assert labels(open_images(root, model(4), labels=folder / "l.csv")) == {f"{i}.png": 3 - i for i in here}


@pytest.mark.parametrize("listed", ["a/images/1.png", "train/images/1.png", "/data/train/images/1.png"])
def test_a_list_for_another_folder_of_the_same_names_is_refused(tmp_path, listed):
    root = write(tmp_path / "val", "images/1.png", "images/2.png")
    (tmp_path / "l.csv").write_text(f"file,label\n{listed},1\n{listed.replace('1', '2')},0\n")
    for spec in (root, root / "images"):
        refused("no label for 2 of 2", f"it has those of {listed}", spec=spec, labels=tmp_path / "l.csv")


@pytest.mark.parametrize(
    ("names", "listed", "read"),
    [
        ("1 2 3", "1 2 3", [0, 1]),  # as numbers they would count from 1
        ("1 2 3", "1 2 2", None),
        ("01 02 03", "1 2 2", None),
        ("1 2 3", "1 2 0", [1, 2]),  # 0 is no name
        ("0 1 2", "1 2 2", [1, 2]),
        ("20 30 stop", "30 stop 20", [1, 2]),
        ("20 30 stop", "30 20 20", [1, 0]),
        ("a b c", "1 2 2", [1, 2]),
    ],
)
def test_labels_that_are_numbers_may_be_names_of_the_models_classes(tmp_path, names, listed, read):
    """They are names where they can be no numbers; where they can be either, --classes says which."""
    (tmp_path / "l.csv").write_text("file,label\n" + "".join(f"{i}.png,{x}\n" for i, x in enumerate(listed.split())))
    root, known = write(tmp_path / "r", "0.png", "1.png"), model(3)
    known.class_names = tuple(names.split())
    if read is None:
        refused("the name of class 0 and the number of another", spec=root, loaded=known, labels=tmp_path / "l.csv")
        (tmp_path / "c.txt").write_text("2\n1\n0\n")
        images = open_images(root, known, labels=tmp_path / "l.csv", classes=tmp_path / "c.txt")
        assert [*labels(images).values()] == [1, 0]
    else:
        assert [*labels(open_images(root, known, labels=tmp_path / "l.csv")).values()] == read


def test_labels_of_an_archive_a_linked_folder_and_one_image(tmp_path):
    root = write(tmp_path / "val", "x1.png", "x2.png")
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "l.csv").write_text("file,label\nval/x1.png,1\nval/x2.png,0\n")
    with tarfile.open(tmp_path / "val.tar", "w") as archive:
        for name in ("x1.png", "x2.png"):
            archive.add(root / name, name)
    both = {"x1.png": 1, "x2.png": 0}
    for spec, read in ((tmp_path / "val.tar", both), (tmp_path / "link", both), (root / "x2.png", {"x2.png": 0})):
        assert labels(open_images(spec, model(), labels=tmp_path / "l.csv")) == read


def test_an_archive_behind_another_and_archives_in_one_are_not_left_out(tmp_path):
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            archive.add(write(tmp_path / name, "x.png"), name)
    (tmp_path / "ab.tar").write_bytes((tmp_path / "a.tar").read_bytes() + (tmp_path / "b.tar").read_bytes())
    refused("another archive follows its end", spec=tmp_path / "ab.tar")
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(tmp_path / "a.tar", "a.tar")
    refused("other files: .tar; unpack", spec=tmp_path / "all.tar")


def test_one_label_is_not_that_of_two_files(tmp_path):
    root = write(tmp_path / "root", "a/1.png", "b/1.png")
    (tmp_path / "l.csv").write_text("filename,label\n1.png,1\n")
    refused("one label, of 1.png, for a/1.png and b/1.png", spec=root, labels=tmp_path / "l.csv")
    (tmp_path / "l.csv").write_text("filename,label\na/1.png,1\nb/1.png,0\n")
    assert labels(open_images(root, model(), labels=tmp_path / "l.csv")) == {"a/1.png": 1, "b/1.png": 0}


def test_hidden_labels_in_a_list_are_left_out(tmp_path):
    (tmp_path / "l.csv").write_text("filename,label\nx1.png,-1\nx2.png,-1\n")
    images = open_images(write(tmp_path / "r", "x1.png", "x2.png"), model(), labels=tmp_path / "l.csv")
    assert not images.labelled
    assert any("hidden" in note for note in images.notes)


def test_links_that_lead_nowhere_are_counted(tmp_path):
    root = write(tmp_path / "root", "a/1.png", "b/1.png")
    (root / "b" / "2.png").symlink_to(tmp_path / "nothing.png")
    images = open_images(root, model())
    assert labels(images) == {"a/1.png": 0, "b/1.png": 1}
    assert "1 link or special file" in " ".join(images.notes)


def test_an_archive_that_is_cut_off(tmp_path):
    root = write(tmp_path / "root", "a/1.png", "b/1.png", "b/2.png")
    (root / "b" / "3.png").symlink_to("2.png")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(root, "some/folder")
        archive.add(root / "a" / "1.png", "../1.png")
    images = open_images(tmp_path / "x.tar", model())
    assert labels(images) == {"a/1.png": 0, "b/1.png": 1, "b/2.png": 1}
    assert "1 link or special file, 1 path out of the archive" in " ".join(images.notes)
    content = (tmp_path / "x.tar").read_bytes()
    for end in range(512, len(content) - 1024, 512):
        (tmp_path / "x.tar").write_bytes(content[:end])
        if content[end : end + 512] != bytes(512):  # else only zeros are missing
            refused("x.tar", spec=tmp_path / "x.tar")


def test_folders_that_are_no_classes_are_told_of(tmp_path):
    deep = write(tmp_path / "deep", "x/y/a/1.png", "x/y/b/1.png")
    images = open_images(deep, model())
    assert not images.labelled
    assert f"{deep}/x/y" in " ".join(images.notes)
    flat = open_images(write(tmp_path / "flat", "1.png"), model())
    assert "--labels" in " ".join(flat.notes)
    few = open_images(write(tmp_path / "few", "3/1.png", "7/1.png"), model(10))
    assert "--classes" in few.note


def test_names_that_are_no_utf8(tmp_path):
    root = write(tmp_path / "root", "a/1.png", "b/1.png")
    os.rename(os.fsencode(root / "b" / "1.png"), os.fsencode(root / "b") + b"/caf\xe9.png")
    images = open_images(root, model())
    assert labels(images) == {"a/1.png": 0, "b/caf\\xe9.png": 1}
    assert json.dumps(images.file(1)).encode("ascii")
    assert len(images.digest) == 64
    os.rename(os.fsencode(root / "b") + b"/caf\xe9.png", os.fsencode(root / "b") + b"/caf\xe8.png")
    assert open_images(root, model()).digest != images.digest


NAMES = ("zèbre", "Ångström", "café", "cat", "Zoo", "10", "2", "a b")


@settings(max_examples=20)
@given(order=st.permutations(NAMES), used=st.sets(st.sampled_from(NAMES), min_size=1), data=st.data())
def test_classes_are_those_of_the_model_by_name(tmp_path_factory, order, used, data):
    """Whatever their order, whichever are missing, however accents are written; a name that it lacks is refused."""
    form = st.sampled_from(("NFC", "NFD"))
    named = {unicodedata.normalize(data.draw(form), name): name for name in sorted(used)}
    root = write(tmp_path_factory.mktemp("x"), *(f"{folder}/1.png" for folder in named))
    known = model(len(order))
    known.class_names = [unicodedata.normalize(data.draw(form), name) for name in order]
    found = labels(open_images(root, known))
    assert {file.rpartition("/")[0]: label for file, label in found.items()} == {
        folder: order.index(name) for folder, name in named.items()
    }
    write(root, "other/1.png")
    refused("none of the model's classes: other;", spec=root, loaded=known)


def test_the_classes_of_training_are_those_of_the_model_and_of_its_file(tmp_path):
    root = write(tmp_path / "train", *(f"{name}/{i}.png" for name in ("b", "a", "c") for i in range(2)))
    net = timm.create_model("test_vit", img_size=32, num_classes=3)
    trained = load(net)
    lipcert.finetune(trained, Batches(open_images(root, trained, purpose="train"), trained, 6), epochs=1, loss="ce")
    lipcert.save(trained, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors")
    assert again.class_names == trained.class_names == ("a", "b", "c")
    assert labels(open_images(write(tmp_path / "val", "c/1.png", "b/1.png"), again)) == {"b/1.png": 1, "c/1.png": 2}
    assert open_images(root / "c" / "1.png", again).class_names == {0: "a", 1: "b", 2: "c"}
    others = open_images(write(tmp_path / "others", "x/1.png", "y/1.png", "z/1.png"), again, purpose="train")
    assert others.class_names == {0: "x", 1: "y", 2: "z"}
    assert any("were a, b, c" in note for note in others.notes)


@settings(max_examples=200)
@given(names=st.lists(st.text("aAb_.é 01290", min_size=1), max_size=8))
def test_natural_order_is_that_of_timm(names):
    assert natural(names) == sorted(sorted(names), key=natural_key)


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_another_order_of_the_classes_is_noticed(classes):
    """Where predictions have it; not for random ones, constant ones, a weak network, or few images."""
    draw = random.Random(classes)
    truth = [draw.randrange(classes) for _ in range(300)]
    order = [*range(1, classes), 0]
    moved = [(y, order[y] if draw.random() < 0.8 else draw.randrange(classes)) for y in truth]
    line = other_order(moved, {0: "first"})
    assert line is not None
    assert "first is 1" in line
    for pairs in (
        [(y, y if draw.random() < 0.3 else draw.randrange(classes)) for y in truth],
        [(y, draw.randrange(classes)) for y in truth],
        [(0 if draw.random() < 0.6 else y, classes - 1) for y in truth],
        moved[:6],
    ):
        assert other_order(pairs, {}) is None


def test_lists_are_for_folders(tmp_path):
    (tmp_path / "c.txt").write_text("a 0\nb 1\n")
    refused("for folders and .tar", spec="torch/mnist", classes=tmp_path / "c.txt")
    flat = write(tmp_path / "flat", "1.png", "2.png")
    refused("no class folders", spec=flat, classes=tmp_path / "c.txt")
    refused("cannot read", spec=flat, labels=tmp_path / "none.csv")


@pytest.mark.parametrize("lines", ["Ångström 1\ncafé 0\n", "1: Ångström\n0: café\n", "café\nÅngström\n"])
def test_accents_are_the_same_composed_and_decomposed(tmp_path, lines):
    """In lists of classes with and without numbers, in lists of labels, and in the names that a model knows."""
    apart, together = (unicodedata.normalize(form, "café Ångström").split() for form in ("NFD", "NFC"))
    root = write(tmp_path / "r", *(f"{name}/{name}.png" for name in apart))
    (tmp_path / "c.txt").write_text(unicodedata.normalize("NFC", lines))
    known = model(2)
    for options in ({"classes": tmp_path / "c.txt"}, {"known": together}):
        known.class_names = tuple(options.pop("known", ()))
        images = open_images(root, known, **options)
        assert {images.file(i)[0]: images[i][1] for i in range(2)} == {"c": 0, "A": 1}
    known.class_names = tuple(together)
    assert "trained for others" not in "".join(open_images(root, known, purpose="train").notes)
    (tmp_path / "l.csv").write_text("file,label\n" + "".join(f"{name}.png,{i}\n" for i, name in enumerate(together)))
    known.class_names = ()
    assert [images[i][1] for i in range(2)] == [
        open_images(root, known, labels=tmp_path / "l.csv")[i][1] for i in (0, 1)
    ]


@pytest.mark.parametrize(
    "text",
    [
        'file,label,notes\n0.png,1,"dark; night"\n1.png,0,""\n',
        'file,label,source\n0.png,1,"https://example.org/a;b\tc"\n1.png,0,x\n',
        'file;label;area\n0.png;1;0,5\n1.png;0;0,7\n',
        'file\tlabel\tnotes\n0.png\t1\ta, b; c\n1.png\t0\t\n',
        'file,label,notes\n0.png,1,"two\nlines"\n1.png,0,\n',
        'sep=;\nfile;label\n0.png;1\n1.png;0\n',
        'file,label\n0.png,1\n1.png,0\n2.png,0;1\n3.png,\n4.png,1\n4.png,0\nTotal\n',
    ],
)  # fmt: skip
def test_the_header_alone_decides_the_delimiter(tmp_path, text):
    root = write(tmp_path / "r", "0.png", "1.png")
    (tmp_path / "l.csv").write_text(text)
    images = open_images(root, model(2), labels=tmp_path / "l.csv")
    assert [images[i][1] for i in range(2)] == [1, 0]


def test_several_labels_of_an_image_are_refused(tmp_path):
    root = write(tmp_path / "r", "0.png", "1.png")
    (tmp_path / "l.csv").write_text("file,label\n0.png,cat;dog\n1.png,dog|eel\n")
    refused("several labels for 0.png", spec=root, labels=tmp_path / "l.csv", loaded=model(2))


def test_of_two_columns_of_labels_the_one_that_is_left_out_is_named(tmp_path):
    root = write(tmp_path / "r", "0.png", "1.png")
    for head, left in (("file,class,label", r"column 3, label, and not by class \(column 2\)"),
                       ("file,label,label", r"column 2, label, and not by label \(column 3\)")):  # fmt: skip
        (tmp_path / "l.csv").write_text(f"{head}\n0.png,1,0\n1.png,0,1\n")
        assert re.search(f"by its {left}", open_images(root, model(2), labels=tmp_path / "l.csv").labels_by)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"../.git/annex/objects/x", "git annex get"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\xff\x0a\0\x10", "JPEG XL"),
        (bytes(128) + b"DICM\2\0", "DICOM"),
        (b"<?xml version='1.0'?>\n<!-- drawn -->\n<svg xmlns='x'/>", "SVG"),
        (b"\x93NUMPY\1\0v\0{", "holds arrays"),
        (b"\x89HDF\r\n\x1a\n", "holds arrays"),
        (b"\x80\x04\x95", "holds arrays"),
        (b"\0\0\x08\3\0\0\x27\x10", "holds arrays"),
        (b"PK\3\4" + bytes(26) + b"x/data.pkl", "holds arrays"),
        (b"", "is empty"),
        (b"PK\x03\x04\x14", "workbook"),
        (b"\xd0\xcf\x11\xe0\xa1", "Office"),
        (b"PAR1\x15\x04", "Parquet"),
    ],
)
def test_images_and_lists_that_are_something_else_are_told_by_their_content(tmp_path, content, says):
    root = write(tmp_path / "r", "a/0.png", "b/1.png")
    for name in ("x.csv", "x.tar", "x.zip", "r/a/0.png"):
        (tmp_path / name).write_bytes(content)
    refused(says, "a/0.png", spec=root)
    for spec in ("x.tar", "x.zip"):
        refused(says, spec, spec=tmp_path / spec)
    for lists in ({"labels": tmp_path / "x.csv"}, {"classes": tmp_path / "x.csv"}):
        refused(says, "x.csv", spec=root, **lists)


def test_folders_of_systems_are_no_classes(tmp_path):
    names = ("__MACOSX", "System Volume Information", "$RECYCLE.BIN", "lost+found", "@eaDir", "#recycle", ".Trash-1000")
    root = write(
        tmp_path / "r", "a/0.png", "b/1.png", "a/@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg", *(f"{x}/2.png" for x in names)
    )
    assert labels(open_images(root, model(2))) == {"a/0.png": 0, "b/1.png": 1}


def test_of_two_members_of_one_name_the_later_one_is_read(tmp_path):
    """As of an archive that tar -r updated."""
    write(tmp_path, "0.png", "1.png")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in ("0.png", "1.png"):
            archive.add(tmp_path / name, "a/x.png")
    images = open_images(tmp_path / "x.tar", model())
    assert [round(float(images[i][0].max()) * 255) for i in range(len(images))] == [1]


def test_images_of_which_pillow_only_warns_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for name, side in (("large", 14), ("huge", 15)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{name}.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_images(tmp_path / "large.png", model())[0][0].shape == (3, 8, 8)
    refused("huge.png", "resize it", spec=tmp_path / "huge.png")
