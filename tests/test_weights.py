"""Checkpoints as training scripts write them: the right weights and preprocessing, or one line that names the file."""

import argparse
import collections
import copy
import errno
import json
import os

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import resample_abs_pos_embed
from torch import nn

import lipcert
from lipcert.errors import InputError, LipcertError, LoadError
from lipcert.inputs.loading import load
from lipcert.inputs.weights import read_checkpoint

CAIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
NAME, GIVEN = "resnet10t", {"num_classes": 3, "input_size": (3, 32, 32)}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return timm.create_model(NAME, num_classes=3).eval()


class Config(dict):
    """As configurations are: a mapping of its own type."""

    __getattr__ = dict.get


def prefixed(net, prefix):
    return {prefix + key: value.clone() for key, value in net.state_dict().items()}


def same(model, net):
    own = net.state_dict()
    return all(torch.equal(value, own[key]) for key, value in model.net.state_dict().items())


WRAPPED = {
    "plain": lambda net: net.state_dict(),
    "state_dict": lambda net: {"state_dict": net.state_dict(), "best_acc1": np.float64(93.2), "epoch": 3},
    "numpy array": lambda net: {"state_dict": net.state_dict(), "history": np.arange(3.0)},
    "objects beside": lambda net: {"state_dict": net.state_dict(), "config": collections.deque([1])},
    "model_state_dict": lambda net: {"epoch": 1, "model_state_dict": net.state_dict(), "optimizer_state_dict": {}},
    "net": lambda net: {"net": net.state_dict(), "acc": 93.1, "epoch": 3},
    "state and model": lambda net: {"state": {"model": net.state_dict(), "rank": 0}},
    "opacus": lambda net: {"module_state_dict": prefixed(net, "_module."), "privacy_accountant_state_dict": {}},
    "module": lambda net: {"module": net.state_dict(), "dp_world_size": 1},
    "lightning": lambda net: {"state_dict": prefixed(net, "model."), "pytorch-lightning_version": "2.4", "loops": {}},
    "lightning net": lambda net: {"state_dict": {**prefixed(net, "net."), "criterion.weight": torch.ones(3)}},
    "transformers": lambda net: prefixed(net, "timm_model."),
    "parallel": lambda net: prefixed(net, "module."),
    "parallel and compiled": lambda net: prefixed(net, "module._orig_mod."),
    "compiled and parallel": lambda net: prefixed(net, "_orig_mod.module."),
    **{key: lambda net, key=key: {key: net.state_dict()} for key in ("model", "ema", "state_dict_ema", "model_ema")},
    "swa": lambda net: {"n_averaged": torch.tensor(3), **prefixed(net, "module.")},
    "backbone": lambda net: prefixed(net, "module.backbone."),
    "transformer engine": lambda net: {**net.state_dict(), "fc._extra_state": torch.empty(0)},
    "thop": lambda net: {**net.state_dict(), "total_ops": torch.ones(1), "conv1.0.total_params": torch.ones(1)},
    "without counts": lambda net: {k: v for k, v in net.state_dict().items() if "num_batches" not in k},
    "a config": lambda net: {
        "model": net.state_dict(),
        "config": Config(lr=0.1, data=Config(size=[32]), k=collections.deque([1])),
    },
    "epoch as a tensor": lambda net: {"model": net.state_dict(), "epoch": torch.tensor(3)},
    "half": lambda net: {k: v.half() if v.is_floating_point() else v for k, v in net.state_dict().items()},
    "half, and counts": lambda net: {k: v.half() for k, v in net.state_dict().items()},
    "double, and counts": lambda net: {k: v.double() for k, v in net.state_dict().items()},
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_weights_are_those_of_the_file(net, tmp_path, kind):
    torch.save(WRAPPED[kind](net), tmp_path / "w.pth")
    model = load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)
    assert same(model, net) or kind.startswith("half")
    assert model.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "timm_model."])
def test_safetensors_with_and_without_prefixes(net, tmp_path, prefix):
    safetensors.torch.save_file(prefixed(net, prefix), tmp_path / "w.safetensors")
    assert same(load(NAME, checkpoint=tmp_path / "w.safetensors", **GIVEN), net)


def test_tensors_that_safetensors_stores_under_one_of_their_names(net, tmp_path):
    tied = copy.deepcopy(net)
    tied.layer1[0].bn1.weight = tied.bn1.weight = torch.nn.Parameter(torch.rand(64))
    safetensors.torch.save_model(tied, str(tmp_path / "w.safetensors"))
    assert same(load(NAME, checkpoint=tmp_path / "w.safetensors", **GIVEN), tied)


def test_a_configuration_beside_the_weights_is_said_not_to_be_read(net, tmp_path):
    safetensors.torch.save_file(net.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": NAME, "pretrained_cfg": {"mean": [0.1] * 3}}))
    with pytest.warns(UserWarning, match=r"config\.json beside it is not read: mean"):
        load(NAME, checkpoint=tmp_path / "model.safetensors", **GIVEN)
    names = [*net.state_dict()]
    places = {name: f"model-{place % 2 + 1:05}-of-00002.bin" for place, name in enumerate(names)}
    for part in {*places.values()}:
        torch.save({name: net.state_dict()[name] for name in names if places[name] == part}, tmp_path / part)
    (tmp_path / "model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.warns(UserWarning, match="config.json") as said:
        load(NAME, checkpoint=tmp_path / "model.bin.index.json", **GIVEN)
    assert sum("config.json" in str(one.message) for one in said) == 1


def test_the_normaliser_of_robustness(net, tmp_path):
    state = {**prefixed(net, "module.model."), **prefixed(net, "module.attacker.model.")}
    state |= {
        "module.normalizer.new_mean": torch.full((3, 1, 1), 0.25),
        "module.normalizer.new_std": torch.ones(3, 1, 1),
    }
    torch.save({"model": state, "epoch": 3}, tmp_path / "w.pt")
    with pytest.warns(UserWarning, match=r"mean 0\.25, 0\.25, 0\.25; std 1, 1, 1"):
        model = load(NAME, checkpoint=tmp_path / "w.pt", **GIVEN)
    assert same(model, net)
    assert model.mean.flatten().tolist() == [0.25] * 3
    assert model.std.flatten().tolist() == [1.0] * 3
    given = load(NAME, checkpoint=tmp_path / "w.pt", mean=(0.5,) * 3, std=(0.5,) * 3, **GIVEN)
    assert given.mean.flatten().tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("mean", "std", "prefix"),
    [
        ("0.mean", "0.std", "1."),
        ("mu", "sigma", "model."),
        ("pixel_mean", "pixel_std", "model."),
        ("norm.image_mean", "norm.image_std", "model."),
        ("0.means", "0.sds", "1."),
    ],
)
def test_normalisers_in_front_of_the_network(net, tmp_path, mean, std, prefix):
    """As of nn.Sequential(Normalize(), net), and of RobustBench: certified with the default they would be another."""
    numbers = {mean: torch.full((1, 3, 1, 1), 0.25), std: torch.full((1, 3, 1, 1), 0.5)}
    torch.save({**numbers, **prefixed(net, prefix)}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match=rf"{mean} and {std} in it: mean 0\.25"):
        model = load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)
    assert same(model, net)
    assert model.mean.flatten().tolist() == [0.25] * 3
    assert model.std.flatten().tolist() == [0.5] * 3


FRONTS = {
    "0.scale": torch.ones(1, 3, 1, 1),
    "0.weight": torch.ones(3, 1, 1, 1),  # a convolution that normalises
    "denoiser.conv.weight": torch.ones(8, 3, 3, 3),
    "remap.weight": torch.ones(3, 3, 1, 1),  # not that of an "ema"
}


@pytest.mark.parametrize("front", FRONTS)
def test_what_may_change_pixels_in_front_of_the_network_is_not_left_out(net, tmp_path, front):
    others = {"head.weight": torch.ones(3, 512), "head.bias": torch.ones(3), "criterion.weight": torch.ones(3)}
    torch.save({front: FRONTS[front], **others, **prefixed(net, "net.")}, tmp_path / "w.pth")
    with pytest.raises(LoadError, match=rf"{front}, outside net\., may change pixels .* give .* mean= and std="):
        load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)
    with pytest.warns(UserWarning, match=rf"outside net\. left out \({front}"):
        model = load(NAME, checkpoint=tmp_path / "w.pth", mean=0.5, std=0.5, **GIVEN)
    assert same(model, net)
    teacher = {f"teacher.{key}": 2 * value for key, value in net.state_dict().items() if key.startswith("conv1")}
    torch.save({**others, **teacher, **prefixed(net, "net.")}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match=r"outside net\. left out \(head\.weight"):
        load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)


MEAN, STD = [0.2, 0.3, 0.4], [0.1, 0.2, 0.3]
RECORDS = {
    "beside the weights": {"mean": MEAN, "std": STD},
    "lightning": {"hyper_parameters": {"data": {"image_mean": tuple(MEAN), "image_std": torch.tensor(STD)}}},
    "arrays": {"args": argparse.Namespace(mean=np.array(MEAN), std=[np.float64(x) for x in STD])},
    "texts": {"config": {"norm_mean": "0.2,0.3,0.4", "norm_std": "[0.1 0.2 0.3]"}},
}


@pytest.mark.parametrize("kind", RECORDS)
def test_mean_and_std_are_recorded_in_many_forms(net, tmp_path, kind):
    torch.save({"state_dict": net.state_dict(), **RECORDS[kind]}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match=r"mean 0\.2 0\.3 0\.4, std 0\.1 0\.2 0\.3"):
        model = load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)
    assert model.mean.flatten().tolist() == pytest.approx(MEAN)
    assert model.std.flatten().tolist() == pytest.approx(STD)


@pytest.mark.parametrize("record", [{"mean": MEAN}, {"args": {"mean": None, "std": STD}}, {"mean": "ours", "std": STD}])
def test_one_of_mean_and_std_is_not_taken_alone(net, tmp_path, record):
    others = {"loss_mean": 0.3, "loss_std": 0.1, "scores": {"mean": 0.9, "std": 0.02}}
    others["config"] = {"initializer": {"mean": 0.0, "std": 0.02}, "noise_cfg": {"mean": 0.0, "std": 0.1}}
    torch.save({"state_dict": net.state_dict(), **others, **record}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match=r"not both mean and std as numbers.* give mean= and std="):
        model = load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)
    assert model.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert model.std.flatten().tolist() == pytest.approx([0.229, 0.224, 0.225])


def test_what_does_not_fit_says_what_to_do(net, tmp_path):
    def says(state, *expected):
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(LoadError) as caught:
            load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)
        for part in expected:
            assert part in str(caught.value)

    state = net.state_dict()
    says({**state, "fc.weight_g": torch.ones(3, 1)}, "remove weight norm")
    says({**state, "conv1.reparam_conv.weight": torch.ones(1)}, "its branches were fused")
    says({**state, "bn1.aux_bn.0.weight": torch.ones(64)}, "save it without tensors of aux_bn")
    says(timm.create_model(NAME, num_classes=5).state_dict(), "num_classes=5")
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(LoadError, match=r"too many \(fc.*\); give num_classes=3"):
        load(NAME, checkpoint=tmp_path / "w.pth", num_classes=0, features=True)
    says({**state, "fc.weight": state["fc.weight"].to_sparse()}, "fc.weight is no dense")
    says({"optimizer": {"state": {}}, "epoch": 3}, "no state dict, but the keys optimizer, epoch")
    says({"epoch": 3, "model": net, "best": np.float64(0.5)}, "under 'model' a module", "['model'].state_dict()")
    says([state], "no state dict, but a list; if weights are one of its entries", "[NUMBER]")
    says(timm.create_model("test_vit", num_classes=3).state_dict(), "of another network or library")
    says({**state, "conv1.weight._data": torch.ones(1), "conv1.weight._scale": torch.ones(1)}, "quantised weights")
    encoder = {f"encoder.{key}": value for key, value in state.items() if not key.startswith("fc.")}
    head = {"c.0.weight": torch.ones(8, 512), "c.0.bias": torch.ones(8)}
    says(
        {**encoder, **head, "c.2.weight": torch.ones(3, 8), "c.2.bias": torch.ones(3)},
        "if the other tensors are its classifier, build",
        "if it has none, train",
    )
    says({**encoder, "pos_weight": torch.ones(3)}, "without a classifier; train")
    says(timm.create_model(NAME, num_classes=3, in_chans=1).state_dict(), "give in_chans=1")
    says({**encoder, "c.weight": torch.ones(3, 512), "c.bias": torch.ones(3)}, "another name than the model's: rename")
    after_dropout = {key.replace("fc.", "fc.1."): value for key, value in state.items()}
    says(after_dropout, "its classifier has other layers: build the network with them", "save it without them")


def test_names_of_others_are_converted_by_the_filter_that_timm_has_for_them(tmp_path):
    def other(key):  # as torchvision numbers the layers
        return key.replace("denselayer1.norm1", "denselayer1.norm.1").replace("denselayer1.conv1", "denselayer1.conv.1")

    net = timm.create_model("densenet121", num_classes=3)
    state = {other(key): value for key, value in net.state_dict().items() if "num_batches" not in key}
    torch.save(state, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="timm's filter knows them"):
        model = load("densenet121", checkpoint=tmp_path / "w.pth", num_classes=3)
    assert same(model, net)
    given = {"img_size": 32, "patch_size": 4, "embed_dim": 12, "depths": (1, 2), "num_heads": (2, 3), "window_size": 4}
    swin = timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, **given)  # stored as by timm 0.6:
    state = {k.replace("1.down", "0.down").replace("head.fc", "head"): v for k, v in swin.state_dict().items()}
    parts = {f"{key}.relative_position_index": part for key, part in swin.named_modules() if key.endswith(".attn")}
    state |= {key: part.relative_position_index for key, part in parts.items()}
    torch.save({"model_state_dict": state}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="timm's filter knows them; 3 tensors are left out$"):
        model = load("swin_tiny_patch4_window7_224", checkpoint=tmp_path / "w.pth", num_classes=3, **given)
    assert same(model, swin)


@pytest.mark.parametrize("prefix", ["visual.", "module.visual."])
def test_image_towers_of_clip_are_converted_and_trained_by_finetune(tmp_path, prefix):
    given = {"img_size": 32, "patch_size": 16, "embed_dim": 12, "depth": 1, "num_heads": 2}
    net = timm.create_model("vit_base_patch32_clip_224", num_classes=5, **given)
    net.head.bias.data.zero_()
    words = {"head.weight": "proj", "cls_token": "class_embedding", "patch_embed.proj": "conv1", "norm_pre": "ln_pre"}
    words |= {
        "norm.": "ln_post.",
        "blocks.": "transformer.resblocks.",
        "qkv.": "in_proj_",
        "attn.proj": "attn.out_proj",
    }
    words |= {".norm": ".ln_", "fc1": "c_fc", "fc2": "c_proj", "pos_embed": "positional_embedding"}
    state = {f"{prefix.removesuffix('visual.')}logit_scale": torch.tensor(4.0)}
    for key, value in net.state_dict().items():
        name = key
        for ours, theirs in words.items():
            name = name.replace(ours, theirs)
        if key != "head.bias":
            flat = key in ("cls_token", "pos_embed")
            state[prefix + name] = value.squeeze(0).squeeze(0) if flat else value.T if key == "head.weight" else value
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="timm's filter knows them$"):
        assert same(load("vit_base_patch32_clip_224", checkpoint=tmp_path / "w.pth", num_classes=5, **given), net)
    with pytest.warns(UserWarning, match="head.weight is for 5 classes, and the model has 3: it starts at zero"):
        load("vit_base_patch32_clip_224", checkpoint=tmp_path / "w.pth", num_classes=3, new_head=True, **given)


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "module"])
def test_wrappers_of_a_part_of_the_network(net, tmp_path, wrapper):
    """As of torch.compile(net.layer1), whose state dict has its name within those of tensors."""
    state = {key.replace("layer1.", f"layer1.{wrapper}."): value for key, value in net.state_dict().items()}
    torch.save({"model": state}, tmp_path / "w.pth")
    assert same(load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN), net)


def test_weights_of_another_architecture_than_the_one_that_is_named(net, tmp_path):
    """They may fit, and compute something else, as those of a network with another activation."""
    torch.save({"arch": "resnet14t", "state_dict": net.state_dict()}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="are of resnet14t, and not of resnet10t"):
        load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)


def test_two_networks_in_one_file_are_not_chosen_from(net, tmp_path):
    other = {key: value + 1 for key, value in prefixed(net, "teacher.").items()}
    torch.save({**prefixed(net, "student."), **other}, tmp_path / "w.pth")
    with pytest.raises(
        LoadError, match=r"several networks, under student\. and teacher\.|under teacher\. and student\."
    ):
        load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)


@pytest.mark.parametrize(
    "record",
    [
        {"args": {"model": "test_efficientnet", "gp": "max", "bn_eps": 0.5}},
        {
            "hyper_parameters": {
                "model_name": "test_efficientnet",
                "global_pool": "max",
                "model_kwargs": {"bn_eps": 0.5},
            }
        },
        {"arch": "test_efficientnet", "global_pool": "max", "bn_eps": 0.5},
    ],
)
def test_recorded_arguments_that_no_tensor_shows(tmp_path, record):
    net = timm.create_model("test_efficientnet", num_classes=3, global_pool="max", bn_eps=0.5).eval()
    torch.save({"state_dict": net.state_dict(), "num_classes": 3, **record}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="global_pool max"):
        model = lipcert.load(tmp_path / "w.pth")
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(model.net(images), net(images))


def test_recorded_arguments_of_another_network_or_another_kind_are_not_used(tmp_path):
    net = timm.create_model("test_vit", num_classes=3).eval()
    names = ["b", "a", "c"]
    recorded = {"num_classes": 3, "class_names": None, "bn_eps": 1e-5, "model_kwargs": {"pretrained": True}}
    about = {"arch": "resnet18", "global_pool": "max", "class_names": names, "args": argparse.Namespace(**recorded)}
    torch.save({"state_dict": net.state_dict(), **about}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="of resnet18, and not of test_vit"):
        model = lipcert.load("test_vit", checkpoint=tmp_path / "w.pth")
    images = torch.rand(1, 3, 160, 160)
    assert torch.equal(model.net(images), net(images))
    assert model.class_names == tuple(names)
    torch.save({"state_dict": net.state_dict(), **about, "arch": "test_vit", "global_pool": None}, tmp_path / "w.pth")
    assert torch.equal(lipcert.load(tmp_path / "w.pth").net(images), net(images))


def test_what_timms_training_records(tmp_path):
    net = timm.create_model("test_vit", img_size=32, num_classes=2)
    recorded = {
        "model": "test_vit", "num_classes": 2, "img_size": 32, "mean": [0.1] * 3, "std": [0.9] * 3, "crop_pct": 1.0,
        "interpolation": "bilinear", "model_kwargs": {}, "lr": 0.1, "input_size": None,
    }  # fmt: skip
    file = tmp_path / "model_best.pth.tar"
    torch.save({"arch": "test_vit", "state_dict": net.state_dict(), "args": argparse.Namespace(**recorded)}, file)
    with pytest.warns(UserWarning, match=r"num_classes 2.*mean 0\.1 0\.1 0\.1.*crop_pct 1\.0, interpolation bilinear"):
        model = load(file)
    assert model.input_size == (3, 32, 32)
    assert model.mean.flatten().tolist() == pytest.approx([0.1] * 3)
    assert model.std.flatten().tolist() == pytest.approx([0.9] * 3)
    assert (model.data_config["crop_pct"], model.data_config["interpolation"]) == (1.0, "bilinear")
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 2)
    assert model.source == {"name": "test_vit", "arguments": {"num_classes": 2, "img_size": 32}}
    given = load("test_vit", checkpoint=file, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert given.mean.flatten().tolist() == [0.5] * 3
    assert load("test_vit", checkpoint=file, std=(0.5, 1.0, 5.0)).std.flatten().tolist() == [0.5, 1.0, 5.0]
    torch.save({"state_dict": net.state_dict(), "args": {**recorded, "mean": [123.675] * 3}}, file)
    with pytest.raises(InputError, match="divide by 255"):
        load(file)


@pytest.mark.parametrize(
    "recorded",
    [
        {"class_to_idx": {"c": 0, "a": 1, "b": 2}},
        {"idx_to_class": {0: "c", 1: "a", 2: "b"}},
        {"class_names": ["a", "b"], "hyper_parameters": {"classes": ("c", "a", "b")}},
        {"config": {"id2label": {"0": "c", "1": "a", "2": "b"}}, "class_to_idx": {"1": 0, "2": 1, "3": 3}},
        {"args": argparse.Namespace(class_names=["c", "a", "b"], classes=3)},
    ],
)
def test_names_of_classes_that_training_recorded(net, tmp_path, recorded):
    torch.save({"state_dict": net.state_dict(), **recorded}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="classes c, a, b"):
        model = load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)
    assert model.class_names == ("c", "a", "b")
    lipcert.save(model, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").class_names == ("c", "a", "b")


@pytest.mark.parametrize(
    "names", [["a", "b"], ["a", "b", "b"], [0, 1, 2], {"a": 1, "b": 2, "c": 3}, {"a": 0, "b": [1]}]
)
def test_names_that_are_not_those_of_the_classes_are_left_out(net, tmp_path, names):
    torch.save({"state_dict": net.state_dict(), "classes": names}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="names of other classes than the model's: they are left out"):
        assert load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN).class_names == ()


@settings(max_examples=15)
@given(data=st.data())
def test_weights_are_never_matched_by_their_order(tmp_path_factory, data):
    """Names that timm's filter does not know are refused, in the network's order as in any other."""
    file = tmp_path_factory.mktemp("x") / "w.pth"
    items = list(timm.create_model("cait_xxs24_224", **CAIT).state_dict().items())
    if data.draw(st.booleans()):
        items = data.draw(st.permutations(items))
    words = {"q": "query", "k": "key", "v": "value"} if data.draw(st.booleans()) else {"blocks": "layers"}
    torch.save({".".join(words.get(part, part) for part in key.split(".")): value for key, value in items}, file)
    with pytest.raises(LoadError, match=r"does not fit cait_xxs24_224: \d+ tensors? missing .* too many"):
        load("cait_xxs24_224", checkpoint=file, **CAIT)


@pytest.mark.parametrize("change", ["fp8", "fp8 with scales in front", "int8 with scales", "lora", "adapter"])
def test_weights_that_are_not_the_networks_are_refused(net, tmp_path, change):
    state = net.state_dict()
    if change.startswith("fp8"):
        state = {k: v.to(torch.float8_e4m3fn) if v.dim() > 1 else v for k, v in state.items()}
    if change.endswith("in front"):
        state = {**{f"model.{k}": v for k, v in state.items()}, "scales.fc.weight": torch.ones(1)}
    if change.startswith("int8"):
        state = {**state, "fc.weight": state["fc.weight"].to(torch.int8), "fc.weight_scale": torch.ones(1)}
    if change == "lora":
        state = {**state, "fc.lora_A.weight": torch.ones(2, 2)}
    if change == "adapter":
        state = {"base_model.model.fc.lora_A.weight": torch.ones(2, 2)}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(LoadError, match="merge them first" if change in ("lora", "adapter") else "quantised weights"):
        load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_parts_of_a_checkpoint_are_read_by_their_index(net, tmp_path, suffix):
    state = {key: value.contiguous() for key, value in net.state_dict().items()}
    names = [f"model-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    places = {key: names[i % 2] for i, key in enumerate(state)}
    for name in names:
        part = {key: state[key] for key in state if places[key] == name}
        (safetensors.torch.save_file if suffix == "safetensors" else torch.save)(part, tmp_path / name)
    index = tmp_path / f"model.{suffix}.index.json"
    with pytest.raises(LoadError, match=rf"one of several parts .* {index.name}"):
        load(NAME, checkpoint=tmp_path / names[0], **GIVEN)
    index.write_text(json.dumps({"weight_map": places}))
    for one in (index, tmp_path, tmp_path / names[1]):
        assert same(load(NAME, checkpoint=one, **GIVEN), net)
    (tmp_path / names[0]).unlink()
    with pytest.raises(LoadError, match=f"{names[0]}, which is not in its folder"):
        load(NAME, checkpoint=index, **GIVEN)
    for text in ("[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../../etc/passwd"}}', "x"):
        index.write_text(text)
        with pytest.raises(LoadError, match="index"):
            load(NAME, checkpoint=index, **GIVEN)


def test_a_new_head_is_for_other_classes_alone(net, tmp_path):
    file, given = tmp_path / "w.pth", {**GIVEN, "num_classes": 5}
    torch.save(net.state_dict(), file)
    with pytest.raises(LoadError, match=r"fc\.weight is \(\d+, \d+\) in the file and \(5, \d+\)"):
        load(NAME, checkpoint=file, **given)
    with pytest.warns(UserWarning, match=r"fc\.weight is for \d+ classes, and the model has 5: it starts at zero"):
        model = load(NAME, checkpoint=file, new_head=True, **given)
    head = {key for key in net.state_dict() if key.startswith("fc.")}
    assert len(head) == 2
    for key, value in net.state_dict().items():
        loaded = model.net.state_dict()[key]
        assert not loaded.any() if key in head else torch.equal(loaded, value)
    state = {**net.state_dict(), "fc.weight": net.state_dict()["fc.weight"][:, 1:]}
    torch.save(state, file)
    with pytest.raises(LoadError, match="fc.weight is"):
        load(NAME, checkpoint=file, new_head=True, **given)
    torch.save({key: value for key, value in net.state_dict().items() if key not in head}, file)
    with pytest.raises(LoadError, match=r"tensors missing \(fc\.weight.*a backbone without a classifier"):
        load(NAME, checkpoint=file, **given)
    with pytest.warns(UserWarning, match=r"fc\.weight is missing, and the model has 5: it starts at zero"):
        model = load(NAME, checkpoint=file, new_head=True, **given)
    assert not model.net.fc.weight.any()


def test_a_position_embedding_is_resized_as_timm_does_and_it_is_said(tmp_path):
    net = timm.create_model("test_vit", img_size=64, num_classes=2)
    nn.init.normal_(net.pos_embed)
    torch.save({f"module.{key}": value for key, value in net.state_dict().items()}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="resized its position embeddings"):
        model = load("test_vit", checkpoint=tmp_path / "w.pth", img_size=32, num_classes=2)
    expected = resample_abs_pos_embed(net.pos_embed, [2, 2], num_prefix_tokens=net.num_prefix_tokens)
    torch.testing.assert_close(model.net.pos_embed, expected)
    assert torch.equal(model.net.head.weight, net.head.weight)


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_are_told_as_such(net, tmp_path):
    small = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    torch.save(small.state_dict(), tmp_path / "w.pth")
    for source in ({"source": NAME, "checkpoint": tmp_path / "w.pth", **GIVEN}, {"source": tmp_path / "w.pth"}):
        with pytest.raises(LoadError, match="quantised"):
            load(**source)


@pytest.mark.parametrize("kind", ["half", "bfloat16", "double"])
def test_modules_of_other_types(kind):
    net = getattr(timm.create_model("test_vit", img_size=32, num_classes=3), kind)()
    model = load(net)
    assert model.mean.dtype == model.dtype == next(net.parameters()).dtype


def test_exported_modules_are_refused_in_one_line():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    exported = torch.export.export(net, (torch.zeros(1, 3, 2, 2),))
    for one in (exported, exported.module()):
        with pytest.raises(InputError, match="exported program"):
            load(one, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 2, 2))


@pytest.mark.parametrize(
    "given", [{"global_pool": "avg"}, {"drop_rate": 0.1}, {"depth": 2}, {"mlp_ratio": 2.0}, {"dynamic_img_size": True}]
)
def test_modules_with_arguments_of_timm_are_saved(tmp_path, given):
    net = timm.create_model("test_vit", img_size=32, num_classes=3, **given).eval()
    lipcert.save(net, tmp_path / "m.safetensors", arguments=given)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(lipcert.load(tmp_path / "m.safetensors")(images), load(net)(images))


def test_arguments_that_do_not_show_are_given(tmp_path):
    net = timm.create_model("test_vit", img_size=32, num_classes=3, init_values=0.1).eval()
    with pytest.raises(LipcertError, match=r"in which blocks\.0\.ls1 is no LayerScale; .*arguments=\{"):
        lipcert.save(net, tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match="cannot be saved as it is"):
        lipcert.finetune(net, [(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))], eps=0.1, epochs=1, loss="ce")
    lipcert.save(net, tmp_path / "m.safetensors", arguments={"init_values": 0.1})
    assert lipcert.load(tmp_path / "m.safetensors").source["arguments"]["init_values"] == 0.1
    for around in (lambda head: nn.Sequential(nn.Dropout(0.1), head), nn.utils.parametrizations.spectral_norm):
        net = timm.create_model("test_vit", img_size=32, num_classes=3)
        net.head = around(net.head)
        with pytest.raises(LipcertError, match=rf"in which head is no {type(net.head).__name__}; .*merge_and_unload"):
            lipcert.save(net.eval(), tmp_path / "o.safetensors")


@pytest.mark.parametrize(("reader", "name"), [("torch.load", "w.pth"), ("safetensors.safe_open", "w.safetensors")])
def test_what_the_system_does_not_give_is_not_said_to_be_damaged(net, tmp_path, monkeypatch, reader, name):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    (torch.save if name == "w.pth" else safetensors.torch.save_file)(net.state_dict(), tmp_path / name)
    monkeypatch.setattr(reader, stale)
    with pytest.raises(LoadError, match=rf"cannot read .*{name}: {os.strerror(errno.ESTALE)}$"):
        read_checkpoint(tmp_path / name)


def test_weights_on_a_file_system_that_maps_no_files(net, tmp_path, monkeypatch):
    def unmapped(*args, mmap=None, **options):
        if mmap:
            raise RuntimeError("unable to mmap 99 bytes from file <w.pth>: No such device (19)")
        return read(*args, **options)

    read = torch.load
    torch.save(net.state_dict(), tmp_path / "w.pth")
    monkeypatch.setattr(torch, "load", unmapped)
    assert same(load(NAME, checkpoint=tmp_path / "w.pth", **GIVEN), net)
