"""What belongs together: rows and the code that made them, claims and what is measured again."""

import copy
import json
from pathlib import Path

import pytest
import torch
from commands import run
from PIL import Image
from torch import nn

import lipcert
from lipcert.certifier import Certifier
from lipcert.errors import InputError
from lipcert.graph import identity_of_code
from lipcert.graph._trace import Trace
from lipcert.inputs.data import open_images
from lipcert.results import Tally, read_run
from lipcert.results.description import describe
from lipcert.results.progress import certify_to_file
from lipcert.results.verify import check_model
from lipcert.settings import CertifySettings
from lipcert.smoothing import Denoised, Smoothing

SIZE = (1, 4, 4)


class Net(nn.Module):
    """Linear, with a step before it that is code alone."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.step(x.flatten(1)))


def loaded(step, denoiser=None):
    torch.manual_seed(0)
    model = lipcert.load(Net(step), mean=(0.0,), std=(1.0,), input_size=SIZE)
    return model if denoiser is None else Denoised(model, denoiser, "mine")


class Denoiser(nn.Module):
    def __init__(self, strength):
        super().__init__()
        self.strength = strength

    def forward(self, x):
        return x * self.strength


CONSTANT = torch.linspace(0.5, 1.5, 16)
SAME = lambda x: 0.5 * x  # noqa: E731
OTHERS = {
    "another number": lambda x: 5.0 * x,
    "a number that no example shows": lambda x: 0.5 * x.clamp(max=1.5),
    "another operation": lambda x: 0.5 * x.abs(),
    "another order": lambda x: (x * 0.5).roll(1, 1),
    "a constant": lambda x: 0.5 * x * CONSTANT,
    "another constant": lambda x: 0.5 * x * (CONSTANT + 1e-6),
}


def test_the_same_code_has_the_same_identity():
    assert identity_of_code(loaded(SAME)) == identity_of_code(loaded(lambda x: 0.5 * x))
    equal = CONSTANT.clone()
    assert identity_of_code(loaded(OTHERS["a constant"])) == identity_of_code(loaded(lambda x: 0.5 * x * equal))


def test_every_change_of_the_code_changes_the_identity():
    known = [identity_of_code(loaded(step))[0] for step in (SAME, *OTHERS.values())]
    known.append(identity_of_code(loaded(SAME, Denoiser(0.9)))[0])
    known.append(identity_of_code(loaded(SAME, Denoiser(0.8)))[0])
    assert len(set(known)) == len(known)


def test_which_of_two_weights_is_read_changes_the_identity():
    """As with averaged weights beside the others, which give nearly the same logits."""
    model = loaded(SAME)
    model.net.ema = copy.deepcopy(model.net.head)
    known = identity_of_code(model)
    model.net.forward = lambda x: model.net.ema(0.5 * x.flatten(1))
    assert identity_of_code(model)[1] == known[1]
    assert identity_of_code(model)[0] != known[0]


def test_computed_tensors_have_other_numbers_than_weights():
    """Also where tensors are listed twice, as mean and std are."""
    digests = set()
    for computed in (True, False):
        weight, last = torch.ones(2), torch.ones(2)
        with Trace((weight, weight, weight, last)) as trace:
            negative = weight.neg()
            (negative if computed else last).abs()
        digests.add(trace.digest.digest())
    assert len(digests) == 2


def test_another_type_or_a_weight_keeps_the_operations():
    """Weights have a hash of their own."""
    model = loaded(SAME)
    with torch.no_grad():
        model.net.head.weight.mul_(2)
    assert identity_of_code(model)[0] == identity_of_code(loaded(SAME))[0]
    assert identity_of_code(model)[1] != identity_of_code(loaded(SAME))[1]


@pytest.fixture
def pictures():
    Path("images").mkdir()
    for i in range(3):
        Image.new("L", (4, 4), 40 + 60 * i).save(f"images/{i}.png")


def start(model, method="gloro", out="r.jsonl"):
    noise = {"sigma": 0.25, "samples": 1000, "all_samples": True} if method == "smoothing" else {}
    settings = CertifySettings(0.01, method, **noise)
    certifier = (Smoothing if noise else Certifier)(model, settings)
    images = open_images("images", model)
    return certify_to_file(certifier, images, describe(model, images, certifier), Path(out))


@pytest.mark.parametrize("method", ["gloro", "smoothing"])
@pytest.mark.parametrize("name", OTHERS)
def test_no_run_goes_on_with_other_code(name, method, pictures):
    start(loaded(SAME), method)
    start(loaded(lambda x: 0.5 * x), method)
    with pytest.raises(InputError, match="a run with another"):
        start(loaded(OTHERS[name]), method)
    with pytest.raises(InputError, match="other code"):
        check_model(read_run(Path("r.jsonl")), loaded(OTHERS[name]))


def test_no_run_goes_on_behind_another_denoiser(pictures):
    start(loaded(SAME, Denoiser(0.9)), "smoothing")
    with pytest.raises(InputError, match="a run with another"):
        start(loaded(SAME, Denoiser(0.8)), "smoothing")


def test_logits_that_differ_by_rounding_belong_to_the_same_run(pictures):
    start(loaded(SAME))
    path = Path("r.summary.json")
    summary = json.loads(path.read_text())

    def scaled(factor):
        logits = [[factor * z for z in one] for one in summary["example_logits"]]
        path.write_text(json.dumps(summary | {"example_logits": logits}))

    scaled(1 + 1e-6)
    start(loaded(SAME))
    scaled(2)
    with pytest.raises(InputError, match="logits on the example images"):
        start(loaded(SAME))


# Rows of a smoothed classifier are confirmed by the draws that are counted again, never by those that are claimed.

NOISE = ("--sigma", "0.16", "--eps", "0.51", "--samples", "10000", "--all-samples")


@pytest.fixture
def smoothed(pictures, monkeypatch):
    """A white image, whose first pixel decides: its smoothed radius is ½ exactly; and a function that changes it."""
    Path("step.py").write_text(
        "import torch\n"
        "class Step(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return (x[:, :1, :1, :1] > 0.5).to(x.dtype).expand_as(x)\n"
        "def make(*given, **named): return Step()\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("white").mkdir()
    Image.new("L", (8, 8), 255).save("white/a.png")
    given = ("bundled", "--denoiser", "step:make")
    run("certify", *given, "--data", "white", "--method", "smoothing", *NOISE, "--out", "r.jsonl")
    row = json.loads(Path("r.jsonl").read_text())

    def changed(count, predicted=None, radius=None):
        plan = Smoothing(lipcert.load(), 0.51, sigma=0.16, samples=10000, all_samples=True).plan
        more = {"count": count, "radius": plan.radius(count, 10000) if radius is None else radius}
        more |= {"predicted": row["predicted"] if predicted is None else predicted}
        now = row | more | {"certified": more["radius"] > 0.51, "abstained": more["radius"] == 0}
        Path("r.jsonl").write_text(json.dumps(now) + "\n")
        path = Path("r.summary.json")
        summary = json.loads(path.read_text())
        path.write_text(json.dumps(summary | {"counts": Tally([now]).counts()}))
        return ("verify", *given, "r.jsonl", "--all", "--json")

    return row, changed


def test_a_count_within_what_rounding_changes_confirms_no_larger_radius(smoothed):
    row, changed = smoothed
    assert 0 < row["radius"] < 0.5
    for count in (row["count"] + 2, min(10000, row["count"] + 11)):
        result = run(*changed(count), code=1)
        said = json.loads(result.stdout)
        assert (said["refuted"], said["unsettled"]) == (0, 1)
        assert f"{row['count']} found" in said["objections"][0]


def test_a_smaller_claim_is_confirmed(smoothed):
    row, changed = smoothed
    run(*changed(row["count"]))
    run(*changed(row["count"] - 5))
    run(*changed(row["count"], radius=row["radius"] / 2))


def test_a_count_beyond_what_rounding_changes_is_refuted(smoothed):
    row, changed = smoothed
    said = json.loads(run(*changed(row["count"] - 100), code=1).stdout)
    assert (said["refuted"], said["unsettled"]) == (1, 0)
    said = json.loads(run(*changed(row["count"] - 5, radius=row["radius"]), code=1).stdout)
    assert "the claimed draws give" in said["objections"][0]


def test_another_class_is_refuted(smoothed):
    row, changed = smoothed
    said = json.loads(run(*changed(row["count"], predicted=row["predicted"] + 1), code=1).stdout)
    assert said["refuted"] == 1
