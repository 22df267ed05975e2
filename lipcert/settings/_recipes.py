"""Recipes of fine-tuning: settings that go together, for a kind of network, with their source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lipcert.errors import InputError
from lipcert.settings._certify import parse_eps
from lipcert.settings._fields import one_of

# Noise levels of Cohen et al. 2019, each up to the ε that it is used for there.
_SIGMAS = ((0.25, 0.25), (0.75, 0.5))
_LARGEST_SIGMA = 1.0


class Recipe(NamedTuple):
    """Settings and options of the training images for one ``kind`` of network."""

    kind: str
    settings: Mapping[str, Any]
    images: Mapping[str, Any]


RECIPES: dict[str, Recipe] = {
    "vit": Recipe(
        "after convert --norm smooth",
        # Norms of cifar10-vit; loss after Goodfellow et al. 2015, section 4; Muon of Jordan et al. 2024.
        {
            "loss": "adversarial",
            "optimizer": "muon",
            "lr": 0.01,
            "temperature": "auto",
            "ramp": (0.0, 1.4, 1 / 3),  # more than ε makes up for the remainders
            # Curvature enters squared: queries, keys and what stands in front of an activation are held lower.
            "max_norm": {"*": 1.0, "*.norm?": 0.5, "*.fc1": 0.8, "patch_embed*": 1.5, "*.q": 0.3, "*.k": 0.3},
        },
        {"crop": "flip", "batch_size": 128},
    ),
    "liresnet": Recipe(
        "for gloro",  # loss and schedule of ε: Hu et al. 2023, appendix B.1; Muon in place of NAdam for short runs
        {"loss": "emma", "optimizer": "muon", "lr": 0.01, "amp": "bfloat16", "channels_last": True},
        {"crop": "shift", "batch_size": 256},
    ),
    "noise": Recipe(
        "for smoothing",  # noise of the level that is certified: Cohen et al. 2019, section 3.3
        {"loss": "noise", "lr": 1e-4, "epochs": 2},
        {"crop": "resized", "batch_size": 64},
    ),
    "cnn": Recipe(
        "for local",  # Huang et al. 2021, table 3
        {"loss": "local-b", "optimizer": "adam", "lr": 1e-3, "schedule": "exponential"},
        {"crop": "shift", "batch_size": 256},
    ),
}


def recipe_settings(name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe; given settings replace its own."""
    one_of("recipe", name, tuple(RECIPES))
    own = dict(RECIPES[name].settings)
    if asked.get("loss", own["loss"]) != own["loss"]:
        raise InputError(f"the recipe {name} is for the loss {own['loss']}; leave out recipe, or loss")
    if own["loss"] == "noise":
        eps = asked.get("eps", 36 / 255)
        eps = parse_eps(eps) if isinstance(eps, str) else eps
        own["sigma"] = next((sigma for largest, sigma in _SIGMAS if eps <= largest), _LARGEST_SIGMA)
    return {**own, **asked}
