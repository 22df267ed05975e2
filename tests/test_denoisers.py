"""Denoisers in front of a network: against their definition, by name on the command line, in artifacts; sigma auto."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import read_summary, run, timeless
from scipy.fft import dctn, idctn
from torch import Tensor, nn

import lipcert
from lipcert.cli._certifying import _show_network
from lipcert.denoisers import NAMES, Denoised, Natural, denoiser_named
from lipcert.denoisers._dct import _THRESHOLD
from lipcert.denoisers._natural import WEIGHTS
from lipcert.errors import InputError
from lipcert.inputs.artifact import weights_hash
from lipcert.inputs.data import open_images
from lipcert.report._card import _command
from lipcert.results import read_run
from lipcert.settings import CertifySettings
from lipcert.smoothing import Smoothing, choose_sigma, from_lattice, noise
from lipcert.smoothing._binomial import posterior_above

EPS = 36 / 255
VERIFY = ("verify", "bundled", "r.jsonl", "--all")
smoothed = partial(run, "certify", "--eps", "36/255", "--method", "smoothing", "--samples", "200")


def small(channels: int = 3, side: int = 16) -> lipcert.Model:
    torch.manual_seed(0)
    size = (channels, side, side)
    return lipcert.load("test_resnet", pretrained=False, num_classes=4, in_chans=channels, input_size=size)


def told(name: str, size: tuple[int, int, int], sigma: float) -> nn.Module:
    denoiser = denoiser_named(name, size).eval().requires_grad_(False)
    denoiser.sigma = sigma
    return denoiser


def noisy(sigma: float, size: tuple[int, int, int] = (3, 40, 40)) -> tuple[Tensor, Tensor]:
    """A smooth image with an edge, with noise and without, each of shape (1, C, H, W)."""
    channels, height, width = size
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    planes = [0.3 + 0.3 * x * (i + 1) / channels + 0.3 * (y > 0.5) for i in range(channels)]
    clean = torch.stack(planes)[None]
    return clean + from_lattice(noise(0, 0, range(1), size, sigma)), clean


def by_definition(image: Tensor, sigma: float) -> Tensor:
    """The denoiser dct on one image, block by block."""
    channels, height, width = image.shape
    colours = dctn(np.eye(channels), axes=0, norm="ortho") if channels == 3 else np.eye(channels)
    planes = np.einsum("kc,chw->khw", colours, image.double().numpy())
    pad = np.pad(planes, ((0, 0), (6, 6 + height % 2), (6, 6 + width % 2)), mode="reflect")
    sums, weights = np.zeros_like(pad), np.zeros_like(pad)
    for c in range(channels):
        for i in range(0, pad.shape[1] - 7, 2):
            for j in range(0, pad.shape[2] - 7, 2):
                block = dctn(pad[c, i : i + 8, j : j + 8], norm="ortho")
                kept = np.where(np.abs(block) > _THRESHOLD * sigma, block, 0)
                kept[0, 0] = block[0, 0]
                weight = 1 / max(1, np.count_nonzero(kept))
                sums[c, i : i + 8, j : j + 8] += weight * idctn(kept, norm="ortho")
                weights[c, i : i + 8, j : j + 8] += weight
    found = (sums / weights)[:, 6 : 6 + height, 6 : 6 + width]
    return torch.from_numpy(np.einsum("kc,khw->chw", colours, found))


@pytest.mark.parametrize("size", [(3, 12, 10), (1, 8, 9), (3, 11, 8)])
def test_dct_is_what_it_says(size: tuple[int, int, int]) -> None:
    image = torch.rand(size, generator=torch.Generator().manual_seed(0))
    found = told("dct", size, 0.15).double()(image[None].double())[0]
    torch.testing.assert_close(found, by_definition(image, 0.15), rtol=0, atol=1e-6)


def test_dct_of_images_without_any_coefficient() -> None:
    """Black, and grey, which has no colour at all, also in half precision."""
    for dtype in (torch.float32, torch.bfloat16):
        denoiser = told("dct", (3, 16, 16), 0.25).to(dtype)
        for value in (0.0, 0.5):
            images = torch.full((2, 3, 16, 16), value, dtype=dtype)
            torch.testing.assert_close(denoiser(images), images, rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sigma", [0.12, 0.25, 0.5])
def test_denoisers_remove_noise(name: str, sigma: float) -> None:
    size = (3, 45, 42)
    images, clean = noisy(sigma, size)
    for dtype in (torch.float32, torch.bfloat16):
        found = told(name, size, sigma).to(dtype)(images.to(dtype)).float()
        assert found.shape == images.shape
        assert (found - clean).square().mean() < 0.2 * sigma**2


def test_the_shipped_network_is_small() -> None:
    assert WEIGHTS.stat().st_size < 4e6
    weights = sum(value.numel() for value in Natural((3, 8, 8)).parameters())
    assert WEIGHTS.stat().st_size == pytest.approx(2 * weights, rel=0.01), "half precision"


def test_a_denoiser_is_told_the_noise_of_the_run() -> None:
    model = Denoised(small(), "dct")
    before = model.denoiser.sigma
    for sigma in (0.25, 0.5):
        denoiser = Smoothing(model, EPS, sigma=sigma).model.denoiser
        assert denoiser.sigma == sigma
    assert model.denoiser.sigma == before, "the certifier has a copy"


def test_names_in_runs_and_artifacts(tmp_path: Path) -> None:
    """Rows without a denoiser, with one, and with the other do not mix; an artifact holds it."""
    hashes = {weights_hash(model) for model in (small(), *(Denoised(small(), name) for name in NAMES))}
    assert len(hashes) == 3
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for name in NAMES:
        model = Denoised(small(), name)
        lipcert.save(model, tmp_path / f"{name}.safetensors")
        again = lipcert.load(tmp_path / f"{name}.safetensors")
        assert isinstance(again, Denoised)
        assert again.recipe == model.recipe == [{"step": "denoise", "denoiser": name}]
        assert weights_hash(again) == weights_hash(model)
        settings: dict[str, Any] = {"sigma": 0.25, "samples": 100, "all_samples": True}
        counts = [Smoothing(one, EPS, **settings).run(images).count for one in (model, again)]
        assert torch.equal(*counts)
        with pytest.raises(InputError, match="has a denoiser in front already"):
            Denoised(again, "dct")


def test_a_named_denoiser_on_the_command_line(tmp_path: Path) -> None:
    four, denoised = ("--sigma", "0.25", "--limit", "4", "--out", "r.jsonl"), ("--denoiser", "dct")
    smoothed(*four, *denoised)
    rows = (tmp_path / "r.jsonl").read_text().splitlines()
    (tmp_path / "r.jsonl").write_text("\n".join(rows[:2]) + "\n")
    assert "a run with another model" in smoothed(*four, code=2).stderr
    assert "continuing after 2 images" in smoothed(*four, *denoised).stderr
    run(*VERIFY, *denoised)
    assert "rows about a model with a denoiser in front; give --denoiser dct too" in run(*VERIFY, code=2).stderr
    lipcert.report(tmp_path / "r.jsonl", card=tmp_path / "README.md")
    card = (tmp_path / "README.md").read_text()
    assert "denoiser=dct" in card
    assert "returns the class that the network, with the denoiser dct in front, predicts most often" in card
    assert "denoiser | dct, in front of the network" in card
    assert "the class that the network, with its denoiser in front where one is named, predicts most often" in card


def test_the_weights_of_a_denoiser_are_said_to_be_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = small()
    for one, words in ((model, "M parameters, "), (Denoised(model, "natural"), "M parameters with the denoiser, ")):
        _show_network(one, CertifySettings(EPS))
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(("name", "size"), [("natural", (1, 16, 16)), ("natural", (3, 4, 16)), ("dct", (1, 16, 7))])
def test_images_that_a_denoiser_does_not_take(name: str, size: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match=f"the denoiser {name} takes images of"):
        denoiser_named(name, size)


def test_denoisers_are_for_smoothing() -> None:
    said = run("certify", "--eps", "1/255", "--denoiser", "dct", "--method", "gloro", code=2).stderr
    assert said.splitlines()[-1].endswith("use it with --method smoothing")
    said = run("certify", "bundled", "--eps", "1/255", "--denoiser", "dct", code=2).stderr
    assert said.splitlines() == [
        "images: 20 of 120 bundled images; --limit 120 for all",
        "lipcert: this denoiser is for noise of a known sigma; use it with --method smoothing",
    ]


def test_a_module_of_ones_own_under_a_known_name_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the denoiser is code of your own"):
        lipcert.save(Denoised(small(), nn.Identity(), "dct"), tmp_path / "a.safetensors")


def test_sigma_auto_looks_at_other_images(monkeypatch) -> None:
    auto = partial(smoothed, "--sigma", "auto", "--out", "r.jsonl", "--limit")
    said = auto("6").stderr
    announced, line = [line for line in said.splitlines() if line.startswith("sigma: ")]
    assert announced.startswith("sigma: choosing it on 48 images outside the run, up to ")
    summary = read_summary()
    choice = summary["sigma_choice"]
    assert line.startswith(f"sigma: {summary['sigma']:g}, chosen on 48 images outside the run")
    assert (choice["sigma"], choice["images"], choice["labelled"]) == (summary["sigma"], 48, True)
    assert max(choice["shares"], key=choice["shares"].get) == f"{choice['sigma']:g}"
    assert len(choice["shares"]) > 2
    said = auto("6").stderr
    assert "as chosen for r.jsonl" in said
    assert "continuing after 6 images" in said
    assert "continuing after 6 images" in auto("20").stderr
    run(*VERIFY)
    monkeypatch.setattr("sys.argv", ["lipcert", *auto.args, "20"])
    auto("20")
    again = shlex.split(_command(read_run(Path("r.jsonl"))))  # as the card has it
    run(*(word.replace("r.jsonl", "again.jsonl") for word in again[1:]))
    assert timeless("again.jsonl") == timeless("r.jsonl")
    choice["indices"] = choice["indices"][1::2]  # as if the images between them had been taken out, too
    Path("r.summary.json").write_text(json.dumps({**read_summary(), "sigma_choice": choice}))
    assert "not as sigma is chosen" in run(*VERIFY, code=1).stderr


def test_the_other_images_are_not_those_of_the_run() -> None:
    model = lipcert.load(None)
    total = open_images(None, model).total
    assert total is not None
    for limit, expected in ((6, 10), (total - 4, 4), (total, 0)):
        images = open_images(None, model, limit=limit)
        others = images.others(10)
        found = () if others is None else others.indices
        assert len({*found}) == expected
        assert images.order is not None
        assert not {*found} & {*images.order}


class HalfSpace(nn.Module):
    """Class 0 where the first pixel is above ½: it has Φ(distance/σ) of the draws."""

    def forward(self, x: Tensor) -> Tensor:
        margin = x[:, 0, 0, 0] - 0.5
        return torch.stack([margin, -margin], 1)


def test_a_chosen_sigma_is_small_where_the_network_has_one_border() -> None:
    """The share of draws falls with σ, but slower than what is needed; far away, images are certified for all σ."""
    model = lipcert.load(HalfSpace(), mean=(0.0,), std=(1.0,), input_size=(1, 2, 2))
    images = torch.full((40, 1, 2, 2), 0.5)
    images[:, 0, 0, 0] += 0.4
    labels = torch.zeros(40, dtype=torch.int64)
    lines: list[str] = []
    choice = choose_sigma(model, images, labels, "0.1", progress=lines.append)
    assert len(lines) == len(choice.shares)
    assert choice.shares[choice.sigma] == max(choice.shares.values())
    assert choice.shares == choose_sigma(model, images, labels, 0.1).shares
    assert choice.shares == choose_sigma(model, images, None, 0.1).shares, "all draws are of one class"
    with pytest.raises(InputError, match="at least 8, and there are 7"):
        choose_sigma(model, images[:7], labels[:7], 0.1)
    with pytest.raises(InputError, match="choose_sigma"):
        lipcert.certify(model, images, labels, eps=0.1, method="smoothing", sigma="auto")


def test_the_probability_above_a_threshold() -> None:
    for count, p in ((16, 0.88), (10, 0.5), (0, 0.3)):
        grid = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
        density = grid**count * (1 - grid) ** (16 - count)
        assert posterior_above(count, 16, p) == pytest.approx(float(density[grid > p].sum() / density.sum()), abs=1e-3)
    assert math.isclose(posterior_above(16, 16, 0.88), 1 - 0.88**17)


class _Stub(nn.Module):
    """The interface of diffusers' UNet2DModel: predicts the noise of x_t at a time step."""

    def __init__(self, noise: Tensor):
        super().__init__()
        self.noise = noise

    def forward(self, sample: Tensor, timestep: int) -> Any:
        return SimpleNamespace(sample=self.noise.expand_as(sample))


def test_the_adapter_of_a_diffusion_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a UNet that knows the noise, the one step of the how-to's adapter gives the clean image."""
    page = (Path(__file__).parents[1] / "docs/how-to/a-diffusion-model-as-denoiser.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S)
    assert code is not None
    diffusers: Any
    try:
        import diffusers
    except ImportError:
        diffusers = ModuleType("diffusers")
        diffusers.DDPMScheduler = diffusers.UNet2DModel = object
        monkeypatch.setitem(sys.modules, "diffusers", diffusers)
    names: dict[str, Any] = {}
    exec(code[1], names)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    clean, noise = torch.rand(1, 3, 16, 16), torch.randn(1, 3, 16, 16)
    sigma = 0.5
    adapter = names["OneStep"](_Stub(noise), alphas, sigma)
    assert (1 - adapter.kept) / adapter.kept == pytest.approx((2 * sigma) ** 2, rel=0.02)
    torch.testing.assert_close(adapter(clean + sigma * noise), clean, rtol=0, atol=0.03)
    model = lipcert.SmoothedClassifier(small(), sigma, adapter)
    assert model(torch.rand(1, 3, 16, 16), samples=4).sum() == 1
    if hasattr(diffusers, "__version__"):
        tiny = diffusers.UNet2DModel(
            sample_size=16,
            block_out_channels=(8,),
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
            layers_per_block=1,
            norm_num_groups=4,
        )
        model = lipcert.SmoothedClassifier(small(), sigma, names["OneStep"](tiny, alphas, sigma))
        assert model(torch.rand(1, 3, 16, 16), samples=4).sum() == 1
