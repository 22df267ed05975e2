"""Builds timm networks and turns every failure of timm and the hub into one line."""

from __future__ import annotations

import contextlib
import difflib
import http.client
import inspect
import logging
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import timm
import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from torch import nn

import lipcert.networks  # noqa: F401  (adds its architectures to timm's registry)
from lipcert.errors import LoadError, as_given, first_line, shortened
from lipcert.inputs.sources import FOLDER, HUB, unknown

PROBE_SECONDS = 5.0
_NETWORK_ERRORS = (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled)
_COMMON = ("num_classes", "in_chans", "img_size", "patch_size", "embed_dim", "depth", "num_heads", "global_pool")

# Arguments of timm.create_model that select weights and do not change the network.
WEIGHT_ARGUMENTS = frozenset({"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"})


def is_configured(name: str) -> bool:
    """Whether there is a configuration (mean, std, image size) for a timm name, a hub id or a ``local-dir:``.

    Raises:
        LoadError: timm has no such architecture, or no weights with the tag of this name.
    """
    if name.startswith((*HUB, FOLDER)):
        return True
    if not timm.is_model(name):
        raise LoadError(unknown(name, timm.list_models()))
    architecture, _, tag = name.partition(".")
    configured = False
    with contextlib.suppress(RuntimeError):  # timm's, for a tag that it does not have
        configured = timm.models.get_pretrained_cfg(name) is not None
    if tag and not configured:
        tagged = [n for n in timm.list_models(f"{architecture}.*", pretrained=True) if n.startswith(f"{architecture}.")]
        raise LoadError(f"timm has no weights called {name!r}; it has {', '.join(tagged) or 'none for this network'}")
    return configured


def create_net(name: str, *, pretrained: bool, arguments: Mapping[str, Any]) -> nn.Module:
    """Calls ``timm.create_model`` and reports every failure in one line."""
    is_configured(name)
    try:
        with _hub() if pretrained or name.startswith(HUB) else contextlib.nullcontext():
            return timm.create_model(name, pretrained=pretrained, **arguments)
    except Exception as error:
        raise LoadError(_explain(name, arguments, error)) from error


def takes_size(name: str) -> bool:
    """Whether timm's architecture has an argument ``img_size``, without which its weights are those of another size."""
    if name.startswith((*HUB, FOLDER)) or not timm.is_model(name):
        return False
    with contextlib.suppress(Exception), torch.device("meta"):
        net = timm.create_model(name)
        return "img_size" in inspect.signature(type(net).__init__).parameters
    return False


def rebuild_recipe(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The name and arguments that rebuild the network without its weights: ``{"name": ..., "arguments": ...}``.

    A hub id or folder is replaced by the architecture and arguments in its configuration. Call it after
    :func:`create_net`, when the configuration is in the hub's cache.
    """
    explicit = {key: value for key, value in arguments.items() if value is not None and key not in WEIGHT_ARGUMENTS}
    if not name.startswith((*HUB, FOLDER)):
        return {"name": name, "arguments": explicit}
    if name.startswith(FOLDER):
        config, architecture, saved = load_model_config_from_path(name.removeprefix(FOLDER))
    else:
        cache = {"cache_dir": arguments["cache_dir"]} if arguments.get("cache_dir") else {}
        with _hub():
            config, architecture, saved = load_model_config_from_hf(name.partition(":")[2], **cache)
    implied = {key: config[key] for key in ("num_classes", "global_pool") if config.get(key) is not None}
    if config.get("input_size"):
        implied["in_chans"] = config["input_size"][0]
        if config.get("fixed_input_size"):
            implied["img_size"] = list(config["input_size"][1:])
    return {"name": architecture, "arguments": {**implied, **(saved or {}), **explicit}}


@contextlib.contextmanager
def _hub() -> Iterator[None]:
    """Makes the hub's client use its cache or fail at once if the hub is unreachable, without a minute of retries."""
    logger, offline = logging.getLogger("huggingface_hub"), hub_constants.HF_HUB_OFFLINE
    level = logger.level
    logger.setLevel(logging.ERROR)
    hub_constants.HF_HUB_OFFLINE = offline or not hub_answers()
    try:
        yield
    finally:
        hub_constants.HF_HUB_OFFLINE = offline
        logger.setLevel(level)


def hub_answers() -> bool:
    """Whether anything, including a proxy, answers at the hub's address; the hub's client checks TLS."""
    request = urllib.request.Request(hub_constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except (OSError, http.client.HTTPException) as error:  # an answer that is an error is one, too
        return isinstance(error, urllib.error.HTTPError) or isinstance(getattr(error, "reason", None), ssl.SSLError)
    return True


def _explain(name: str, arguments: Mapping[str, Any], error: Exception) -> str:
    message = shortened(first_line(error), 300)
    if is_network_error(error):
        remedy = f"give the timm name and a file with its weights as {as_given('checkpoint=')}"
        return f"cannot download {name}: no network, or the model hub is unreachable; {remedy}"
    authorities = os.environ.get("SSL_CERT_FILE")
    if authorities and isinstance(error, FileNotFoundError) and not (error.filename or os.path.exists(authorities)):
        return f"cannot download {name}: SSL_CERT_FILE names {authorities}, which is not there: correct or unset it"
    if isinstance(error, hub_errors.HfHubHTTPError):
        return f"the hub does not give out {name}: {message}; check the name, or log in if it is gated"
    if "No pretrained weights exist" in message:
        remedy = f"give a file with {as_given('checkpoint=')}, or {as_given('pretrained=False', '--no-pretrained')}"
        return f"timm has no pretrained weights for {name}; {remedy} for random ones"
    listing = shortened(", ".join(f"{key}={value!r}" for key, value in arguments.items()), 300)
    wrong = re.search(r"unexpected keyword argument '(\w+)'", message)
    close = difflib.get_close_matches(wrong[1], _COMMON, n=1) if wrong else []
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"timm cannot {f'build {name} with {listing}' if arguments else f'load {name}'}: {message}{meant}"


def is_network_error(error: BaseException | None) -> bool:
    """Whether an error was caused by an unreachable network and not by a server's answer."""
    while error is not None:
        network = isinstance(error, (*_NETWORK_ERRORS, urllib.error.URLError, ConnectionError, TimeoutError))
        if network and not isinstance(error, urllib.error.HTTPError):
            return True
        error = error.__cause__ or error.__context__
    return False
