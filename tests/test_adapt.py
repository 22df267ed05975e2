"""Layer-wise adaptation of swapped attention, on images held out from the fit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import lipcert
import lipcert.surgery._adapt as adapting
from lipcert.cli import app
from lipcert.errors import InputError
from lipcert.inputs.artifact import read_metadata
from lipcert.model import Model
from lipcert.surgery import L2Attention, adapt, convert

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
SWIN = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 12, "depths": (2,), "num_heads": (2,)}


def tiny(name: str = "vit_tiny_patch16_224", **arguments: Any) -> Any:
    torch.manual_seed(0)
    chosen: dict[str, Any] = {**(SWIN if name.startswith("swin") else VIT), **arguments}
    net = timm.create_model(name, **chosen)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    size = chosen["img_size"]
    return Model(net, mean=(0.5,) * 3, std=(0.25,) * 3, input_size=(3, size, size))


def images(model: Model, count: int) -> Tensor:
    """Smooth ones, so that held-out images are like those of the fit."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(coarse, model.input_size[1:], mode="bilinear").clamp(0, 1)


def outputs(model: Model, path: str, batch: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into a module and comes out."""
    found: list[tuple[Tensor, Tensor]] = []
    handle = model.net.get_submodule(path).register_forward_hook(lambda m, args, out: found.append((args[0], out)))
    with torch.no_grad():
        model(batch)
    handle.remove()
    return found[0]


@pytest.mark.parametrize(
    ("name", "norm"), [("vit_tiny_patch16_224", "keep"), ("swin_tiny_patch4_window7_224", "smooth")]
)
def test_adaptation_lowers_the_held_out_error(name: str, norm: Any) -> None:
    model = tiny(name)
    batch = images(model, 24)
    pretrained = copy.deepcopy(model)
    convert(model, norm=norm, images=batch, adaptation=True)
    done = model.conversion.adaptation
    assert (done.images, done.held_out) == (18, 6)
    assert len(done.layers) == 2
    assert all(layer.adapted and layer.error_after < 0.9 * layer.error_before for layer in done.layers)
    assert done.logits_after < done.logits_before
    for layer in done.layers:
        wanted = outputs(pretrained, layer.path, batch[18:])
        kwargs = {} if name.startswith("vit") else {"mask": pretrained.net.get_submodule(layer.path[:-5]).attn_mask}
        with torch.no_grad():
            found = model.net.get_submodule(layer.path)(wanted[0], **kwargs)
        assert float((found - wanted[1]).norm() / wanted[1].norm()) == pytest.approx(layer.error_after, rel=1e-4)
    with torch.no_grad():
        a, b = model(batch[18:]), pretrained(batch[18:])
    assert float(((a - b).norm(dim=1) / b.norm(dim=1)).median()) == pytest.approx(done.logits_after, rel=1e-4)


def test_only_attention_changes_and_the_pretrained_model_stays() -> None:
    pretrained = tiny()
    batch = images(pretrained, 16)
    model = convert(copy.deepcopy(pretrained), images=batch[:12])
    model.net.blocks[0].attn.proj.weight = pretrained.net.blocks[0].attn.proj.weight  # shared, as convert leaves it
    before = {name: value.clone() for name, value in model.state_dict().items()}
    old = {name: value.clone() for name, value in pretrained.state_dict().items()}
    adapt(model, pretrained, batch)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    trained = ("attn.q.weight", "attn.v_weight", "attn.v_bias", "attn.proj.weight", "attn.proj.bias")
    assert changed == {f"net.blocks.{block}.{name}" for block in (0, 1) for name in trained}
    assert all(torch.equal(value, old[name]) for name, value in pretrained.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_bound_holds_with_the_new_weights() -> None:
    model = tiny(depth=1)
    batch = images(model, 16)
    convert(model, images=batch, adaptation=True)
    assert model.conversion.adaptation.layers[0].adapted
    model.double()
    bound = lipcert.lipschitz(model)
    assert bound.finite
    attention = next(module for module in model.modules() if isinstance(module, L2Attention))
    tokens = outputs(model, "blocks.0.attn", batch[:1].double())[0]
    constant = float(attention.lipschitz(tuple(tokens.shape[1:])).value)
    flat = torch.autograd.functional.jacobian(lambda x: attention(x).flatten(), tokens).reshape(tokens.numel(), -1)
    norm = float(torch.linalg.matrix_norm(flat, 2))
    assert 0 < norm <= constant
    image = batch[:1].double()
    whole = torch.autograd.functional.jacobian(lambda x: model(x).flatten(), image).reshape(-1, image.numel())
    assert float(torch.linalg.matrix_norm(whole, 2)) <= float(bound.value)


def test_first_weights_are_kept_where_the_held_out_error_does_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "_RATE", 1e3)
    plain, model = tiny(), tiny()
    batch = images(model, 16)
    convert(plain, images=batch[:12])
    convert(model, images=batch, adaptation=True)
    done = model.conversion.adaptation
    assert not any(layer.adapted for layer in done.layers)
    assert all(layer.error_after == layer.error_before for layer in done.layers)
    assert done.logits_after == done.logits_before
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_all_first_weights_are_kept_where_the_logits_move_further(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([0.1, 0.2])
    monkeypatch.setattr(adapting, "_moved", lambda logits, wanted: next(figures))
    plain, model = tiny(), tiny()
    batch = images(model, 16)
    convert(plain, images=batch[:12])
    convert(model, images=batch, adaptation=True)
    done = model.conversion.adaptation
    assert (done.logits_before, done.logits_after) == (0.1, 0.1)
    assert not any(layer.adapted for layer in done.layers)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_a_weight_in_several_places_stays() -> None:
    model = tiny()
    first, second = (block.attn for block in model.net.blocks)
    second.proj.weight = first.proj.weight
    shared = first.proj.weight.clone()
    convert(model, images=images(model, 16), adaptation=True)
    assert all(layer.adapted for layer in model.conversion.adaptation.layers)
    assert model.net.blocks[0].attn.proj.weight is model.net.blocks[1].attn.proj.weight
    assert torch.equal(model.net.blocks[0].attn.proj.weight, shared)


def test_an_error_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    batch = images(model, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model, images=batch, adaptation=True, progress=stop)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(isinstance(module, L2Attention) for module in model.modules())
    assert model.recipe == []


def test_an_adapted_model_is_saved_and_loaded(tmp_path: Any) -> None:
    model = lipcert.load("vit_tiny_patch16_224", pretrained=False, **VIT)
    batch = images(model, 16)
    convert(model, images=batch, adaptation=True)
    lipcert.save(model, tmp_path / "a.safetensors")
    again = lipcert.load(tmp_path / "a.safetensors")
    assert torch.equal(again(batch), model(batch))


def test_bad_input() -> None:
    model = tiny()
    with pytest.raises(InputError, match="2 images"):
        convert(model, images=images(model, 1), adaptation=True)
    with pytest.raises(InputError, match="2 images"):
        convert(model, adaptation=True)
    other = tiny(depth=1)
    converted = convert(tiny())
    with pytest.raises(InputError, match=r"no module blocks\.1\.attn"):
        adapt(converted, other, images(model, 4))


def test_the_command_adapts_on_data(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pictures = tmp_path / "images"
    pictures.mkdir()
    for number, image in enumerate(images(tiny(), 16)):
        pixels = (255 * image.permute(1, 2, 0)).byte().numpy()
        Image.fromarray(pixels).save(pictures / f"{number:02}.png")
    arguments = " ".join(f"{key}={value}" for key, value in VIT.items())
    command = ["convert", "vit_tiny_patch16_224", "--no-pretrained", "--model-args", arguments, "--data", "images"]
    result = CliRunner().invoke(app, [*command, "--out", "a.safetensors"])
    assert result.exit_code == 0, result.output
    facts = dict(line.split("\t", 1) for line in result.stdout.splitlines() if "\t" in line)
    assert facts["attention adapted"].endswith("of 2 on 12 images")
    assert facts["change of logits, held out"].endswith("on 4 held-out images")
    adaptation = read_metadata("a.safetensors")["facts"]["adaptation"]
    assert [layer["path"] for layer in adaptation["layers"]] == ["blocks.0.attn", "blocks.1.attn"]
    assert adaptation["logits_after"] <= adaptation["logits_before"]
    result = CliRunner().invoke(app, [*command, "--attention", "keep", "--out", "b.safetensors"])
    assert "adapted" not in result.stdout
    assert "adaptation" not in read_metadata("b.safetensors")["facts"]
