"""The files of the leaderboard, what is made of them, and the command that fills one."""

import copy
import json
from pathlib import Path

import pytest
from commands import run

from benchmarks import make_leaderboard
from benchmarks.make_measurements import shown
from lipcert.results import _reading

AGAIN = "run python -m benchmarks.make_leaderboard"
SCHEMA = json.loads((make_leaderboard.FILES / "schema.json").read_text())


def test_page_and_pictures_are_what_the_files_say() -> None:
    entries = make_leaderboard.read()
    assert make_leaderboard.PAGE.read_text() == make_leaderboard.page(entries), AGAIN
    assert {entry["data"] for entry in entries.values()} == {*make_leaderboard.TEST_IMAGES}
    for data in make_leaderboard.TEST_IMAGES:
        drawn = shown((make_leaderboard.PAGE.parent / make_leaderboard.picture_of(data)).read_text())
        there = make_leaderboard.points(entries, data)
        assert drawn == {title: [[*point] for point in some] for title, some in there.items()}, AGAIN


def test_shares_fall_as_eps_grows_and_no_attack_is_below_the_certified_share() -> None:
    for name, entry in make_leaderboard.read().items():
        shares = [entry["certified"][eps] for eps in sorted(entry["certified"], key=make_leaderboard.parse_eps)]
        assert shares == sorted(shares, reverse=True), name
        assert entry["clean"] is None or entry["clean"] >= shares[0], name
        assert all(entry["certified"].get(eps, 0) <= share for eps, share in entry.get("attacked", {}).items()), name
        assert entry["images"] is None or entry["images"] <= make_leaderboard.TEST_IMAGES[entry["data"]], name


def test_figures_without_a_bound_stand_apart_and_are_not_drawn() -> None:
    entries = make_leaderboard.read()
    without = [entry for entry in entries.values() if entry["certificate"]["guarantee"] == "none"]
    apart = [*make_leaderboard.parts(without)]
    assert [entry for _, some in apart for entry in some] == without
    assert all("no bound" in title for title, _ in apart)
    drawn = [title for data in make_leaderboard.TEST_IMAGES for title in make_leaderboard.points(entries, data)]
    assert not any("no bound" in title for title in drawn)


def test_no_two_entries_are_of_one_network() -> None:
    names = [(entry["data"], entry["network"]) for entry in make_leaderboard.read().values()]
    assert len(names) == len({*names})


def test_entries_of_checkpoints_that_come_with_lipcert_say_what_their_table_says() -> None:
    assets = make_leaderboard.ROOT / "lipcert" / "assets" / "certified.json"
    table = {row["name"]: row for row in json.loads(assets.read_text())}
    entries = {Path(name).stem: entry for name, entry in make_leaderboard.read().items()}
    for name, row in table.items():
        if name.startswith("cifar10"):
            assert entries[name]["certified"][row["eps"]] == pytest.approx(100 * row["certified"])
            assert entries[name]["clean"] == pytest.approx(100 * row["clean"])
            assert entries[name]["parameters"] == row["parameters"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry: entry.pop("clean"), "lacks clean"),
        (lambda entry: entry.update(clean=True), "clean is True"),
        (lambda entry: entry.update(clean=101), "clean is 101"),
        (lambda entry: entry.update(data="MNIST"), "data is 'MNIST', not CIFAR-10"),
        (lambda entry: entry.update(certified={}), "certified is empty"),
        (lambda entry: entry.update(certified={"36/255": "66"}), "36/255 is '66'"),
        (lambda entry: entry.update(notes="x"), "has notes"),
        (lambda entry: entry.update(network=""), "network is ''"),
        (lambda entry: entry["certificate"].update(guarantee="sure"), "guarantee is 'sure'"),
        (lambda entry: entry["source"].update(url="http://x"), "url is 'http://x'"),
        (lambda entry: entry.update(extra_data="no"), "extra_data is 'no'"),
    ],
)
def test_what_the_schema_does_not_allow_is_named(change, words) -> None:
    entry = copy.deepcopy(next(iter(make_leaderboard.read().values())))
    assert [*make_leaderboard.problems(entry, SCHEMA)] == []
    change(entry)
    (problem,) = make_leaderboard.problems(entry, SCHEMA)
    assert words in problem


def test_an_entry_is_written_by_verify_and_completed_by_hand() -> None:
    run("certify", "--eps", "36/255,0.3", "--limit", "3", "--method", "gloro", "--out", "r.jsonl", "-q")
    entry = Path("leaderboard/cifar-10/mine.json")
    run("verify", "bundled", "r.jsonl", "--entry", entry)
    found = json.loads(entry.read_text())
    results = _reading.read_run(Path("r.jsonl"))
    assert found["certified"] == {
        "36/255": round(100 * results.certified_at(36 / 255) / 3, 2),
        "0.3": round(100 * results.certified_at(0.3) / 3, 2),
    }
    assert found["clean"] == round(100 * results.correct / 3, 2)
    assert found["verified"]["recomputed"] == found["verified"]["rows"] == found["images"] == 3
    assert found["verified"]["weights"] == results.weights_hash
    assert [*make_leaderboard.problems(found, SCHEMA)] != []  # what the run cannot know
    found |= {"network": "mine", "data": "CIFAR-10", "extra_data": False, "source": {"text": "me"}, "clean": 0.0}
    assert [*make_leaderboard.problems(found, SCHEMA)] == []
    found["certificate"]["kind"] = "global"
    entry.write_text(json.dumps(found))
    run("verify", "bundled", "r.jsonl", "--entry", entry)
    again = json.loads(entry.read_text())
    assert again["clean"] == round(100 * results.correct / 3, 2)
    assert (again["network"], again["certificate"]["kind"]) == ("mine", "global")


def test_an_entry_states_every_eps_that_the_run_was_asked_for() -> None:
    run("certify", "--eps", "1e-7,1e-6", "--limit", "2", "--method", "staged", "--out", "r.jsonl", "-q")
    run("verify", "bundled", "r.jsonl", "--entry", "mine.json")
    assert json.loads(Path("mine.json").read_text())["certified"].keys() == {"1e-7", "1e-6"}


def test_an_entry_that_cannot_be_written_is_refused_before_rows_are_recomputed() -> None:
    run("certify", "--eps", "36/255", "--limit", "2", "--method", "gloro", "--out", "r.jsonl", "-q")
    assert "takes a JSON file" in run("verify", "bundled", "r.jsonl", "--entry", "mine", code=2).stderr
    Path("bad.json").write_text("[")
    assert "cannot be read" in run("verify", "bundled", "r.jsonl", "--entry", "bad.json", code=2).stderr
    assert Path("bad.json").read_text() == "["
    Path("list.json").write_text("[]")
    assert "is no entry" in run("verify", "bundled", "r.jsonl", "--entry", "list.json", code=2).stderr
