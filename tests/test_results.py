"""Result files: rows survive whatever stops a run, and rows of different runs never meet."""

import errno
import json
import math
import os
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipcert
from lipcert.certifier import Certificates
from lipcert.errors import InputError
from lipcert.inputs import files
from lipcert.inputs.data import Batch, Images, image_hash
from lipcert.inputs.files import replacing
from lipcert.results import ResultFile, Tally, read_rows, rows, shard_path, shards_of, share, wilson

RUN = {
    "model": {"source": {"name": "x", "arguments": {"sizes": (1, 2)}}, "recipe": [], "weights_hash": "0" * 64},
    "eps": 0.1,
    "method": "gloro",
    "attack": None,
    "dtype": "float64",
    "data": {"spec": "x", "images": 6, "labelled": True},
    "lipcert": "1",
    "eps_typed": "0.1",
}


def row(index: int, **changes):
    known = {"index": index, "label": 1, "predicted": 1, "correct": True, "margin": 0.5, "radius": 0.1 * index}
    return {**known, "certified": index > 1, "method": "gloro", "rigor": "deterministic", "seconds": 0.5, **changes}


def certificates(labels=None, **changes):
    known = {
        "predicted": torch.tensor([1, 2]),
        "margin": torch.tensor([0.5, 0.25], dtype=torch.float64),
        "radius": torch.tensor([0.1, 1 / 3], dtype=torch.float64),
        "certified": torch.tensor([False, True]),
        "method": ("global", "gloro"),
        "rigor": ("deterministic",) * 2,
    }
    return Certificates(**{**known, **changes}, labels=labels, eps=0.2)


def test_rows_with_labels():
    labels = torch.tensor([1, 0])
    found = rows(Batch((7, 9), torch.zeros(2, 1, 1, 1), labels), certificates(labels), seconds=3.0)
    keys = [
        "index",
        "file",
        "image",
        "label",
        "predicted",
        "correct",
        "margin",
        "radius",
        "certified",
        "method",
        "rigor",
    ]
    assert list(found[0]) == [*keys, "attacked", "attack_distance", "seconds"]
    black = image_hash(torch.zeros(1, 1, 1))
    first = [7, None, black, 1, 1, True, 0.5, 0.1, False, "global", "deterministic", None, None, 1.5]
    assert list(found[0].values()) == first
    second = [9, None, black, 0, 2, False, 0.25, 1 / 3, True, "gloro", "deterministic", None, None, 1.5]
    assert list(found[1].values()) == second
    assert all(type(a) is type(b) for a, b in zip(found[0].values(), first, strict=True))


def test_hashes_tell_images_apart():
    """By value and by shape; 8-bit pixels give the same in every way to write them."""
    image = torch.arange(12).view(3, 2, 2) / 255
    others = [image.flip(0), image.view(3, 4, 1), image.nextafter(torch.ones(1)), image[:1]]
    assert len({image_hash(x) for x in (image, *others)}) == 5
    assert image_hash(image) == image_hash(image.double()) == image_hash(image.permute(2, 1, 0).permute(2, 1, 0))
    assert re.fullmatch(r"[0-9a-f]{32}", image_hash(image))


def test_rows_with_an_attack():
    distance = torch.tensor([0.25, math.inf], dtype=torch.float64)
    seen = certificates(attacked=torch.tensor([True, False]), attack_distance=distance)
    found = rows(Batch((0, 1), torch.zeros(2, 1, 1, 1), None), seen, seconds=1.0)
    assert [(r["attacked"], r["attack_distance"]) for r in found] == [(True, 0.25), (False, None)]


def test_rows_without_labels():
    found = rows(Batch((0, 1), torch.zeros(2, 1, 1, 1), None), certificates(), seconds=1.0)
    assert "label" not in found[0]
    assert "correct" not in found[0]


def test_radii_and_margins_that_json_does_not_know():
    odd = torch.tensor([math.inf, math.nan], dtype=torch.float64)
    radius = torch.tensor([math.inf, 0.0], dtype=torch.float64)
    found = rows(Batch((0, 1), torch.zeros(2, 1, 1, 1), None), certificates(margin=odd, radius=radius), seconds=1.0)
    assert [r["margin"] for r in found] == [None, None]
    assert [r["radius"] for r in found] == [sys.float_info.max, 0.0]
    json.dumps(found, allow_nan=False)


@given(st.floats(min_value=0, allow_infinity=False))
def test_a_written_radius_is_the_radius(radius):
    tensor = torch.tensor([radius, radius], dtype=torch.float64)
    found = rows(Batch((0, 1), torch.zeros(2, 1, 1, 1), None), certificates(radius=tensor), seconds=1.0)
    assert json.loads(json.dumps(found[0]))["radius"] == radius


def test_tally():
    tally = Tally([row(0), row(1, correct=False), row(2), row(3, correct=False), row(4, method="global")])
    assert (len(tally), tally.correct, tally.certified, tally.certified_correct) == (5, 3, 3, 2)
    assert (tally.accuracy, tally.certified_accuracy) == (0.6, 0.4)
    assert tally.median_radius == 0.2
    assert tally.methods == {"gloro": 4, "global": 1}
    assert tally.counts()["certified_accuracy"] == 0.4


def test_tally_of_attacks():
    tally = Tally([row(0, attacked=True), row(1, attacked=False), row(2, attacked=False, correct=False)])
    assert (tally.broken, tally.withstood, tally.accuracy_under_attack) == (1, 1, 1 / 3)
    assert tally.counts()["attacked"] == 1
    assert tally.counts()["accuracy_under_attack"] == 1 / 3
    tally.add(row(3))
    assert tally.accuracy_under_attack is None
    assert "attacked" not in Tally([row(0)]).counts()


def test_tally_without_labels():
    bare = [{k: v for k, v in row(i).items() if k not in ("label", "correct")} for i in range(3)]
    tally = Tally(bare)
    assert (tally.accuracy, tally.certified_accuracy, tally.certified) == (None, None, 1)
    assert tally.median_radius == 0.1
    assert "accuracy" not in tally.counts()
    assert Tally().median_radius is None


def written(path, indices, description=RUN):
    with ResultFile(path, description) as file:
        for index in indices:
            file.append(row(index))
    return path


def test_rows_are_on_the_disk_at_once(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultFile(path, RUN) as file:
        for index in range(3):
            file.append(row(index))
            assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == list(range(index + 1))
        assert json.loads(file.summary_path.read_text())["complete"] is False
    summary = json.loads((tmp_path / "r.summary.json").read_text())
    assert summary["complete"] is True
    assert summary["counts"]["images"] == 3
    assert summary["eps_typed"] == "0.1"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.jsonl", "r.summary.json"]


def test_a_stopped_run_keeps_its_rows(tmp_path):
    path = tmp_path / "r.jsonl"
    file = ResultFile(path, RUN)
    file.append(row(4))
    file.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert json.loads((tmp_path / "r.summary.json").read_text())["complete"] is False
    with ResultFile(path, RUN) as file:
        assert file.done == {4}
        assert len(file.tally) == 1
        file.append(row(5))
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [4, 5]


@settings(max_examples=30)
@given(data=st.data())
def test_a_half_written_row_is_cut_off(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("r") / "r.jsonl", range(3))
    content = path.read_bytes()
    kept = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:kept])
    whole = content[: kept + 1].count(b"\n")  # a row without its line break is whole
    with ResultFile(path, RUN) as file:
        assert file.done == set(range(whole))
        for index in range(whole, 3):
            file.append(row(index))
    assert path.read_bytes() == content


@pytest.mark.parametrize("key", ["model", "eps", "method", "attack", "dtype", "data", "lipcert"])
def test_rows_of_another_run_are_left_alone(tmp_path, key):
    path = written(tmp_path / "r.jsonl", range(2))
    before = path.read_bytes()
    with pytest.raises(InputError, match=f"a run with another .*{key}.*--out"):
        ResultFile(path, {**RUN, key: {"labelled": False} if key == "data" else "other"})
    assert path.read_bytes() == before
    ResultFile(path, {**RUN, "eps_typed": "10/100"}).__exit__(None)


class Named(Images):
    """Images of one pixel, which follows from their names."""

    def __init__(self, names, limit):
        super().__init__("x", total=len(names), limit=limit)
        self.names = names

    def file(self, index):
        return self.names[self._place(index)]

    def _read(self, index):
        return torch.full((1, 1, 1), ord(self.file(index)) / 255), 1


@settings(max_examples=50)
@given(count=st.integers(4, 12), limits=st.tuples(st.integers(2, 12), st.integers(2, 12)), data=st.data())
def test_rows_stand_whatever_images_are_removed(tmp_path_factory, count, limits, data):
    """Each row that is kept is about the image with its number, and no number is given twice."""
    path, names = tmp_path_factory.mktemp("r") / "r.jsonl", [chr(97 + i) for i in range(count)]
    first, removed = Named(names, limits[0]), data.draw(st.sets(st.sampled_from(names), max_size=count - 1))
    description = {**RUN, "data": {**RUN["data"], "images": count}}

    def complete(images):
        with ResultFile(path, {**description, "limit": images.limit}, images) as file:
            for batch in images.batches(1, only={*images.order} - file.done):
                file.append(row(batch.indices[0], file=batch.files[0], image=batch.hashes[0]))
        return {one["file"]: one for one in map(json.loads, path.read_text().splitlines())}

    before = complete(first)
    second = Named([name for name in names if name not in removed], limits[1])
    if 2 * len(before.keys() & removed) > len(before):
        with pytest.raises(InputError, match="other images"):
            complete(second)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = complete(second)
    assert {name: one for name, one in before.items() if name not in removed}.items() <= after.items()
    assert len({one["index"] for one in after.values()}) == len(after)
    for one in after.values():
        (batch,) = second.singly({one["index"]})
        assert (batch.files[0], batch.hashes[0]) == (one["file"], one["image"])


def test_a_file_has_one_writer_and_a_summary_of_its_own(tmp_path):
    with ResultFile(tmp_path / "run.v1.jsonl", RUN):
        with pytest.raises(InputError, match="another process is writing .*run.v1.jsonl"):
            ResultFile(tmp_path / "run.v1.jsonl", RUN)
        with ResultFile(tmp_path / "run.v2.jsonl", RUN) as other:
            assert other.summary_path.name == "run.v2.summary.json"
    with pytest.raises(InputError, match="run.v1 cannot hold the rows; .* ends in .jsonl"):
        ResultFile(tmp_path / "run.v1", RUN)


def test_the_seconds_of_a_run_are_those_of_all_its_starts(tmp_path):
    """They are not known of a run that was killed, whose last start nobody has timed."""

    def stated():
        return json.loads((tmp_path / "r.summary.json").read_text())["seconds"]

    path = written(tmp_path / "r.jsonl", [1])
    first = stated()
    written(path, [2])
    assert 0 < first < stated()
    killed = ResultFile(path, RUN)
    assert stated() is None
    killed._close()
    written(path, [3])
    assert stated() is None


def test_without_locks_two_processes_do_not_mix_rows(tmp_path, monkeypatch):
    """The first to write a row keeps the file, with its summary; the other ends with a line."""
    if (fcntl := files.fcntl) is not None:
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    path = tmp_path / "r.jsonl"
    with ResultFile(path, RUN) as first:
        second = ResultFile(path, {**RUN, "eps": 0.2, "eps_typed": "0.2"})
        first.append(row(1))
        with pytest.raises(InputError, match="another process is writing"):
            second.append(row(2))
        second.__exit__(InputError)
        assert json.loads(first.summary_path.read_text())["eps"] == RUN["eps"]
        first.append(row(3))
    assert [one["index"] for one in read_rows(path, RUN)] == [1, 3]


@pytest.mark.parametrize(
    ("missing", "code"),
    [
        ("chmod", errno.EPERM),
        *(("replace", code) for code in (errno.EPERM, errno.EBUSY, errno.EIO, errno.EXDEV)),
        ("flock", errno.EIO),
    ],
)
def test_what_a_mount_lacks_loses_no_result(tmp_path, monkeypatch, missing, code):
    """Mode bits, a rename over a file that exists or is mounted itself, locks."""

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.fcntl if missing == "flock" else os, missing, refuse, raising=False)
    monkeypatch.setattr(Path, "chmod", refuse)
    path = written(tmp_path / "r.jsonl", range(2))
    assert json.loads((tmp_path / "r.summary.json").read_text())["counts"]["images"] == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.jsonl", "r.summary.json"]
    (tmp_path / "target").touch()
    (tmp_path / "r.summary.json").unlink()
    (tmp_path / "r.summary.json").symlink_to("target")
    if missing == "replace":  # nothing is written through a link
        path.unlink()
        with pytest.raises(InputError, match="cannot write"):
            ResultFile(path, RUN)
        assert not (tmp_path / "target").read_bytes()


def test_what_a_file_system_takes_in_parts_is_written_whole(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, content[:7]))
    assert [one["index"] for one in read_rows(written(tmp_path / "r.jsonl", range(3)), RUN)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127])
def test_a_file_may_have_the_longest_name(tmp_path, name):
    with replacing(tmp_path / name) as partial:
        partial.write_text("x")
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_file_in_a_folder_that_takes_no_other_is_written(tmp_path, monkeypatch):
    """As one file that is mounted into a container."""
    (tmp_path / "r").touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    with replacing(tmp_path / "r") as partial:
        assert partial.parent != tmp_path
        partial.write_text("x")
    assert (tmp_path / "r").read_text() == "x"


def test_rows_of_other_versions_and_preprocessing_are_left_alone(tmp_path):
    known = {**RUN, "preprocessing": {"crop_pct": 0.9}, "environment": {"torch": "2", "timm": "1", "platform": "x"}}
    path = written(tmp_path / "r.jsonl", range(2), known)
    for name in ("torch", "timm"):
        with pytest.raises(InputError, match=f"a run with another {name}.*--out"):
            ResultFile(path, {**known, "environment": {**known["environment"], name: "other"}})
    with pytest.raises(InputError, match="other preprocessing"):
        ResultFile(path, {**known, "preprocessing": {"crop_pct": 1.0}})
    ResultFile(path, {**known, "environment": {**known["environment"], "platform": "y"}}).__exit__(None)


def test_a_smaller_run_does_not_complete_a_larger_one_that_was_stopped(tmp_path):
    def state():
        summary = json.loads((tmp_path / "r.summary.json").read_text())
        return summary["limit"], summary["complete"]

    path = tmp_path / "r.jsonl"
    file = ResultFile(path, {**RUN, "limit": None})
    file.append(row(0))
    file.__exit__(KeyboardInterrupt)
    assert state() == (None, False)
    written(path, [1], {**RUN, "limit": 2})
    assert state() == (None, False)
    written(path, [2], {**RUN, "limit": None})
    assert state() == (None, True)
    written(path, [], {**RUN, "limit": 2})
    assert state() == (None, True)


def test_the_larger_limit_of_two_starts_stays(tmp_path):
    path = written(tmp_path / "r.jsonl", range(3), {**RUN, "limit": 3})
    for limit, stated in ((1, 3), (5, 5), (None, None), (5, None)):
        written(path, [], {**RUN, "limit": limit})
        assert json.loads((tmp_path / "r.summary.json").read_text())["limit"] == stated


def test_rows_without_their_summary_are_left_alone(tmp_path):
    path = written(tmp_path / "r.jsonl", range(2))
    before = path.read_bytes()
    (tmp_path / "r.summary.json").unlink()
    with pytest.raises(InputError, match="another --out"):
        ResultFile(path, RUN)
    assert path.read_bytes() == before


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        ResultFile(tmp_path / "file" / "r.jsonl", RUN)
    written(tmp_path / "new" / "folder" / "r.jsonl", [1])
    assert len(read_rows(tmp_path / "new" / "folder" / "r.jsonl", RUN)) == 1
    with pytest.raises(InputError, match="is a folder"):
        ResultFile(tmp_path, RUN)


def test_shards_have_files_of_their_own(tmp_path):
    path = tmp_path / "a.b.jsonl"
    shards = [shard_path(path, part, 2) for part in range(2)]
    assert [shard.name for shard in shards] == ["a.b.shard-1-of-2.jsonl", "a.b.shard-2-of-2.jsonl"]
    assert shard_path(path, 0, 1) == path
    written(shards[0], [5, 1])
    written(shards[1], [0, 4])
    (tmp_path / "axb.shard-1-of-2.jsonl").write_text("not of this run")
    assert shards_of(path) == shards
    found = [row for shard in shards for row in read_rows(shard, RUN)]
    with pytest.raises(InputError, match="a run with another"):
        read_rows(shards[0], {**RUN, "eps": 0.2})
    written(path, [4])
    with ResultFile(path, RUN) as file:
        file.absorb(found, [5, 4, 3, 2, 1, 0])
    assert [r["index"] for r in read_rows(path, RUN)] == [4, 5, 1, 0]
    assert len(file.tally) == 4


def test_reading_rows_changes_no_file(tmp_path):
    path = written(tmp_path / "r.jsonl", range(2))
    with path.open("a") as file:
        file.write('{"half')
    before = path.read_bytes()
    assert [r["index"] for r in read_rows(path, RUN)] == [0, 1]
    assert path.read_bytes() == before
    assert read_rows(tmp_path / "none.jsonl", RUN) == []


def test_no_images_have_no_share() -> None:
    assert share(0, 0) == "0 of 0"
    assert wilson(0, 0) == (0.0, 1.0)


def test_labels_belong_to_a_file_of_results(tmp_path):
    model = lipcert.load(None)
    images, labels = torch.rand(2, *model.input_size), torch.tensor([1, 2])
    path = lipcert.certify(model, images, labels, eps=0.1, method="gloro").save(tmp_path / "r.jsonl")
    other = lipcert.certify(model, images, labels + 1, eps=0.1, method="gloro")
    with pytest.raises(InputError, match="another label of image 0"):
        other.save(path)
    assert [row["label"] for row in map(json.loads, path.read_text().splitlines())] == [1, 2]
