"""Verification: true rows stand, and no claim that is larger than the truth does."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from commands import read_rows, read_summary, refused, run
from PIL import Image

from lipcert.certifier import _nominal
from lipcert.errors import InputError
from lipcert.inputs.artifact import save
from lipcert.inputs.data import open_images
from lipcert.inputs.loading import load
from lipcert.results import Tally, certifier_for, read_run
from lipcert.results import verify as verification
from lipcert.results.verify import check_model, sample, verify

EPS = "1e-6"


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """Results of the bundled model, some rows of which an attack has cut short."""
    folder = tmp_path_factory.mktemp("certified")
    settings = ["certify", "--eps", EPS, "--method", "gloro", "--limit", "6"]
    run(*settings, "--out", folder / "r.jsonl")
    return read_rows(folder / "r.jsonl"), read_summary(folder / "r.summary.json")


@pytest.fixture(scope="module")
def certifier_of():
    """A certifier of the bundled model for each settings; what is verified is what is read and compared."""
    made = {}

    def of(model, settings):
        if repr(settings) not in made:
            made[repr(settings)] = certifier_for(model, settings)
        return made[repr(settings)]

    return of


@pytest.fixture
def results(certified, certifier_of, monkeypatch):
    """A copy of them to change, and a function that verifies it."""
    monkeypatch.setattr(verification, "certifier_for", certifier_of)
    rows, summary = json.loads(json.dumps(certified))

    def write():
        Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("r.summary.json").write_text(json.dumps(summary))

    def verified(*arguments, code=0):
        write()
        return run("verify", "bundled", "r.jsonl", "--all", *arguments, code=code)

    write()
    verified.write = write
    return rows, summary, verified


def test_true_rows_stand(results):
    rows, summary, verified = results
    assert 0 < summary["counts"]["certified"] <= 6
    result = verified()
    follows = "next\tlipcert report r.jsonl --html r.html\n"
    assert result.stdout == f"rows\t6\nconfirmed\t6 of 6 recomputed\n{follows}"
    assert json.loads(verified("--json").stdout) == {
        "verified": 6,
        "rows": 6,
        "refuted": 0,
        "unsettled": 0,
        "objections": [],
    }
    assert (
        run("verify", "bundled", "r.jsonl", "--sample", "3").stdout
        == f"rows\t6\nconfirmed\t3 of 3 recomputed\n{follows}"
    )


def test_a_proof_of_rounding_is_not_claimed_without_one(monkeypatch):
    monkeypatch.setattr(_nominal, "_LARGEST_RATIO", 0.0)  # no proof is tried
    run("certify", "--eps", EPS, "--limit", "1", "--out", "r.jsonl", "--method", "gloro")
    assert '"rounding": "checked"' in (text := Path("r.jsonl").read_text())
    for other, word in (('"rounding": "proved"', "proved"), ('"none": null', "not stated")):
        Path("r.jsonl").write_text(text.replace('"rounding": "checked"', other))
        assert f"rounding {word} is claimed and checked found" in run("verify", "bundled", "r.jsonl", code=1).stderr
    Path("r.jsonl").write_text(text.replace("checked", "hoped"))
    assert "neither proved nor checked" in run("verify", "bundled", "r.jsonl", code=2).stderr


def test_smaller_claims_stand(results):
    rows, summary, verified = results
    assert max(row["radius"] for row in rows) > 2e-6
    row = max(rows, key=lambda row: row["radius"])
    row["radius"] *= 0.9
    row["seconds"] = 1e9
    summary["counts"] = Tally(rows).counts()
    verified()


CHANGES = [
    ("radius", lambda row: row["radius"] * 1.001, "is claimed and only"),
    ("predicted", lambda row: (row["predicted"] + 1) % 10, "prediction"),
    ("label", lambda row: (row["label"] + 1) % 10, "label"),
    ("image", lambda row: "0" * 32, "another image"),
    ("file", lambda row: "0.png", "file 0.png is claimed and None found"),
    ("margin", lambda row: row["margin"] * 1.01, "margin"),
    ("margin", lambda row: None, "margin"),
    ("correct", lambda row: not row["correct"], "contradict"),
    ("certified", lambda row: not row["certified"], "contradict each other"),
    ("rigor", lambda row: "estimate", "which method"),
    ("rigor", lambda row: "probabilistic(1e-9)", "which method gloro does not give"),
    ("method", lambda row: "exact", "which a run of method 'gloro' does not use"),
    ("method", lambda row: "anchored", "which a run of method 'gloro' does not use"),
    ("attacked", lambda row: True, "an attack broke it"),
]


def test_a_radius_that_rounding_could_raise_above_eps_is_unsettled(results):
    rows, summary, verified = results
    radius = max(row["radius"] for row in rows)
    summary["further_eps"] = [repr(radius * (1 + 5e-7))]
    next(row for row in rows if row["radius"] == radius)["radius"] *= 1 + 9e-7
    result = verified(code=1)
    assert "unsettled\t1" in result.stdout
    assert "is claimed, and radius " in result.stderr


@pytest.mark.parametrize("first", range(0, len(CHANGES), 5))
def test_false_rows_fall(results, first):
    """Each for its own reason; the last row, which nobody changed, stands."""
    rows, _, verified = results
    changed = list(zip(rows, CHANGES[first : first + 5], strict=False))
    for row, (name, change, _) in changed:
        row[name] = change(row)
    result = verified(code=1)
    assert result.stdout.endswith(f"confirmed\t{6 - len(changed)} of 6 recomputed\n")
    for row, (*_, word) in changed:
        line = next(line for line in result.stderr.splitlines() if f"image {row['index']}:" in line)
        assert word in line


def counted(rows, summary):
    """A forger who counts again what he has changed."""
    for row in rows:
        row["certified"] = row["radius"] > summary["eps"]
    summary["counts"] = Tally(rows).counts()


def smaller_eps(rows, summary):
    summary["eps"] = 1e-9
    counted(rows, summary)


def fewer_rows(rows, summary):
    del rows[3:5]
    counted(rows, summary)


def fewer_rows_and_a_lower_limit(rows, summary):
    fewer_rows(rows, summary)
    summary["limit"] = len(rows)


def fewer_rows_of_a_run_that_did_not_finish(rows, summary):
    fewer_rows(rows, summary)
    summary["complete"] = False


def fewer_rows_as_if_sigma_were_chosen_there(rows, summary):
    summary["sigma_choice"] = {"indices": [row["index"] for row in rows[3:5]]}
    fewer_rows_and_a_lower_limit(rows, summary)


def no_labels(rows, summary):
    for row in rows:
        del row["label"], row["correct"]
    counted(rows, summary)


def swapped_images(rows, summary):
    rows[0]["image"], rows[1]["image"] = rows[1]["image"], rows[0]["image"]


def swapped_rows(rows, summary):
    rows[0]["index"], rows[1]["index"] = rows[1]["index"], rows[0]["index"]


def attack_in_the_rows(rows, summary):
    rows[0] |= {"attacked": True, "attack_distance": 1e-6}
    rows[0] |= {"radius": 0.0}
    counted(rows, summary)


def attack_in_rows_and_summary(rows, summary):
    summary["attack"] = {"name": "pgd-l2", "version": "1", "settings": {"steps": 2, "restarts": 1, "seed": 0}}
    for row in rows:
        row |= {"attacked": False, "attack_distance": 0.05}
    counted(rows, summary)


def put(value, *path):
    """A forgery of one entry of the summary, to a value or a function of what is there."""

    def forge(rows, summary):
        *outer, last = path
        for key in outer:
            summary = summary[key]
        summary[last] = value(summary[last]) if callable(value) else value

    return forge


FORGERIES = {
    "smaller eps": (smaller_eps, "the summary says that ε was 1e-6, and that it is 1e-09"),
    "larger eps": (put("36/255", "eps_typed"), "the summary says that ε was 36/255, and that it is 1e-06"),
    "unreadable eps": (put("none", "eps_typed"), "which is not a radius"),
    "accuracy": (put(0.99, "counts", "certified_accuracy"), "the summary counts 0.99 for certified accuracy"),
    "median": (put(lambda radius: 2 * radius, "counts", "median_radius"), "for median radius, the rows"),
    "one more certified": (put(lambda count: count + 1, "counts", "certified"), "for certified, the rows"),
    "methods": (put({"exact": 6}, "counts", "methods"), "for methods, the rows"),
    "fewer rows": (
        fewer_rows,
        "the run is about 6 images: 2 without a row; a run is confirmed once it is complete",
    ),
    "fewer rows and a lower limit": (
        fewer_rows_and_a_lower_limit,
        "the run is about 4 images: 1 without a row, and 1 row about others",
    ),
    "fewer rows of a run that did not finish": (
        fewer_rows_of_a_run_that_did_not_finish,
        "the run is about 6 images: 2 without a row",
    ),
    "fewer rows as if sigma were chosen there": (
        fewer_rows_as_if_sigma_were_chosen_there,
        "the run leaves out images, and not as sigma is chosen on them",
    ),
    "no labels": (no_labels, "label None is claimed"),
    "swapped images": (swapped_images, "it is another image than the one that was certified"),
    "swapped rows": (swapped_rows, "it is another image than the one that was certified"),
    "attack in the rows": (attack_in_the_rows, "the summary says that the attack was None, and rows differ"),
    "attack in rows and summary": (attack_in_rows_and_summary, "attack_distance = 0.05 is claimed and None found"),
    "bound": (
        put(lambda log10: log10 - 1, "bound", "log10"),
        "the summary's bound differs from what is recomputed, log10",
    ),
    "budget": (
        put(lambda gain: gain + 0.5, "bound", "layers", 0, "log10_gain"),
        "the summary's bound differs from what is recomputed, layers",
    ),
    "crop": (
        put(0.5, "preprocessing", "crop_pct"),
        "the summary's preprocessing differs from what is recomputed, crop_pct: 0.5 is claimed",
    ),
    "more images": (
        put(lambda count: count + 1, "data", "images"),
        "the summary's data differs from what is recomputed, images",
    ),
    "other images": (put("0" * 64, "data", "digest"), "the summary's data differs from what is recomputed, digest"),
    "architecture": (
        put("vit_large_patch16_224", "model", "source", "name"),
        "the summary's model differs from what is recomputed, source, name",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_results_fall(results, forgery):
    rows, summary, verified = results
    forge, said = FORGERIES[forgery]
    forge(rows, summary)
    result = verified(code=1)
    lines = [line for line in result.stderr.splitlines() if said in line]
    assert lines, result.stderr
    assert all(line.startswith("lipcert: ") for line in lines)


# What a report can see without the model, it refuses to print.
SEEN = ["smaller eps", "larger eps", "unreadable eps", "accuracy", "median", "one more certified", "methods"]
SEEN += ["attack in the rows"]


@pytest.mark.parametrize("forgery", SEEN)
def test_reports_refuse_what_rows_contradict(results, forgery):
    rows, summary, verified = results
    forge, said = FORGERIES[forgery]
    forge(rows, summary)
    verified.write()
    assert said in refused("report", "r.jsonl")


def test_attacks_are_run_again(short_attack):
    run("certify", "--eps", "1", "--method", "gloro", "--limit", "2", "--attack", "--out", "r.jsonl")
    assert "2 of 2 recomputed" in run("verify", "bundled", "r.jsonl").stdout
    (first, second) = read_rows()
    changes = {"attack_distance": first["attack_distance"] * (2 if first["attacked"] else 0.5)}
    changes["attacked"] = changes["attack_distance"] <= 1
    rows = [{**first, **changes}, second]
    summary = read_summary()
    Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("r.summary.json").write_text(json.dumps({**summary, "counts": Tally(rows).counts()}))
    line = run("verify", "bundled", "r.jsonl", code=1).stderr
    assert f"image {first['index']}: attack" in line
    assert "is claimed and" in line


def test_rows_that_an_attack_cut_short_stand(results):
    """As where an attack has left them to gloro: anchored would find more, with a failure probability."""
    rows, summary, verified = results
    summary |= {"method": "staged", "eps": 0.1, "eps_typed": "0.1", "limit": 1}
    summary["attack"] = {"name": "autoattack-l2", "version": "x", "settings": {}}
    rows[1:] = []
    rows[0] |= {"attacked": True, "attack_distance": 0.05}
    counted(rows, summary)
    result = verified()
    assert "confirmed\t1 of 1" in result.stdout
    assert "the results of autoattack-l2 are not recomputed" in result.stderr


def folder_of_images(name, shift=0, count=3):
    for index in range(count):
        path = Path(name) / f"{index % 2}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = [(37 * index + 11 * i + shift) % 256 for i in range(64)]
        image = Image.new("RGB", (8, 8))
        image.putdata([(value, value, value) for value in pixels])
        image.save(path)


def test_images_that_have_changed():
    """The same path and names, and other content: nothing is mixed, and nothing stands."""
    folder_of_images("images")
    command = ["certify", "bundled", "--eps", EPS, "--method", "gloro", "--data", "images", "--out", "r.jsonl"]
    run(*command)
    assert sorted(row["file"] for row in read_rows()) == [
        "0/0.png",
        "0/2.png",
        "1/1.png",
    ]
    assert "3 of 3" in run("verify", "bundled", "r.jsonl").stdout
    Path("images").rename("moved")
    assert "3 of 3" in run("verify", "bundled", "r.jsonl", "--data", "moved").stdout
    folder_of_images("images", shift=1)
    before = Path("r.jsonl").read_bytes(), Path("r.summary.json").read_bytes()
    refused = run(*command, code=2).stderr.splitlines()[-1]
    assert refused == "lipcert: r.jsonl holds rows about other images than the data has now (3); give another --out"
    assert (Path("r.jsonl").read_bytes(), Path("r.summary.json").read_bytes()) == before
    result = run("verify", "bundled", "r.jsonl", code=1)
    assert result.stderr.count("it is another image than the one that was certified") == 3


@pytest.mark.parametrize(
    "noise", [[], ["--method", "smoothing", "--sigma", "0.5", "--samples", "100", "--all-samples"]]
)
def test_images_that_are_gone_take_only_their_rows_along(noise):
    """Whatever is removed, however the folder is called: the others keep number, noise and place in the shuffle."""
    folder_of_images("images", count=12)
    command = ["certify", "--eps", EPS, *(noise or ["--method", "gloro"]), "bundled", "--out", "r.jsonl"]
    run(*command[:-1], "all.jsonl", "--data", "images")
    run(*command, "--data", "images", "--limit", "6")
    before = {row["file"]: row for row in read_rows()}
    first, second = [*before][:2]
    unseen = next(file for i in range(12) if (file := f"{i % 2}/{i}.png") not in before)
    for file in (first, second, unseen):
        Path("images", file).unlink()
    Path("images").rename("elsewhere")
    with pytest.warns(UserWarning, match="removed or changed since: 2 of"):
        run(*command, "--data", "elsewhere", "--limit", "8")
    after = {row["file"]: row for row in read_rows()}
    assert {file: row for file, row in before.items() if file not in (first, second)}.items() <= after.items()
    assert len({row["index"] for row in after.values()}) == len(after) in (5, 6)
    assert "nothing shows that the others were not selected" in run("verify", "bundled", "r.jsonl", code=1).stderr
    with pytest.warns(UserWarning, match="removed or changed since: 3 of"):
        run(*command[:-1], "all.jsonl", "--data", "elsewhere")
    assert "9 of 9" in run("verify", "bundled", "all.jsonl").stdout


def test_images_on_which_sigma_was_chosen_stay_out_whatever_is_removed():
    folder_of_images("images", count=60)
    command = ["certify", "bundled", "--data", "images", "--eps", "0.2", "--method", "smoothing", "--sigma", "auto"]
    command += ["--samples", "50", "--out", "r.jsonl", "--limit"]
    run(*command, "4")
    chosen_on = read_summary()["sigma_choice"]["files"]
    seen = {*chosen_on, *(row["file"] for row in read_rows())}
    for file in (max({f"{i % 2}/{i}.png" for i in range(60)} - seen), chosen_on[0]):
        Path("images", file).unlink()
    run(*command, "12")
    assert len(read_rows()) == 11
    assert {row["file"] for row in read_rows()}.isdisjoint(chosen_on)
    assert "not as sigma is chosen" not in run("verify", "bundled", "r.jsonl", code=1).stderr


def test_buffers_that_no_state_dict_holds(results):
    model = load(None)
    model.net.register_buffer("shift", torch.ones(1), persistent=False)
    with pytest.raises(InputError, match="other buffers"):
        check_model(read_run(Path("r.jsonl")), model)


def test_one_part_of_a_run_is_no_run(results):
    for name in ("r.jsonl", "r.summary.json"):
        Path(name).rename(name.replace("r.", "r.shard-1-of-2."))
    assert "put the parts together" in run("verify", "bundled", "r.shard-1-of-2.jsonl", code=1).stderr


def test_rows_about_other_models_are_refused(results):
    torch.manual_seed(0)
    other = load("vit_tiny_patch16_224", pretrained=False, img_size=8, patch_size=4, depth=1, num_classes=10)
    save(other, "other.safetensors")
    result = run("verify", "other.safetensors", "r.jsonl", code=2)
    assert result.stdout == ""
    arguments = " ".join(f"{name}={value}" for name, value in load(None).source["arguments"].items())
    assert result.stderr == (
        "note: the weights are random: train them (lipcert finetune), or start from a model with trained weights\n"
        "lipcert: r.jsonl holds rows about other weights; give the model that was certified, which was made with "
        f"{arguments}\n"
    )


def test_other_files_of_a_run(results):
    """As the shell completes them."""
    for command in (["verify", "bundled"], ["report"]):
        told = run(*command, "r.summary.json", code=2).stderr
        assert told == "lipcert: r.summary.json is the summary of a run; give the file of its rows, r.jsonl\n"
        Path("r.html").touch()
        assert "r.html is no file of rows; give one that lipcert" in run(*command, "r.html", code=2).stderr
    folder = Path.cwd().name
    told = run("verify", "bundled", f"../{folder}", code=2).stderr
    assert told == f"lipcert: ../{folder} is a folder; give a file of rows in it: r.jsonl\n"


def test_images_that_have_moved(results):
    summary = read_summary()
    summary["data"]["spec"] = "/mnt/before/images"
    Path("r.summary.json").write_text(json.dumps(summary))
    told = run("verify", "bundled", "r.jsonl", code=2).stderr
    assert told.startswith("lipcert: the images are no longer at /mnt/before/images; say where: lipcert ")
    assert told.endswith(" --data IMAGES\n")


def test_images_that_are_not_there(results):
    rows, _, verified = results
    rows[0]["index"] = 10**6
    assert "image 1000000" in verified(code=2).stderr
    assert "at least 1" in run("verify", "bundled", "r.jsonl", "--sample", "0", code=2).stderr
    assert "give one of them" in run("verify", "bundled", "r.jsonl", "--all", "--sample", "3", code=2).stderr


def test_nobody_knows_before_which_rows_are_recomputed(results):
    results = read_run(Path("r.jsonl"))
    drawn = set()
    for _ in range(40):
        random.seed(0)
        drawn.add(tuple(row["index"] for row in sample(results, 3)))
    assert len(drawn) > 1
    assert len({*itertools.chain(*drawn)}) == 6


def test_from_python(results):
    model = load(None)
    results = read_run(Path("r.jsonl"))
    verdicts = list(verify(results, model, open_images(None, model), count=3))
    assert [verdict.objection for verdict in verdicts] == [None] * 3
    assert len({verdict.index for verdict in verdicts}) == 3
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    with pytest.raises(InputError, match="other weights"):
        check_model(results, model)
