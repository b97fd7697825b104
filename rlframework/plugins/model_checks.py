"""Configuration checks that several backends share, for the `check` of their records. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlframework.config.sections import RunConfig
from rlframework.plugins.types import Problem

DIVIDED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "units of the MLP",
}
"""Model dimensions that tensor parallelism shards, by key of the model's config.json."""

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by its dtype."""


def model_config(model_name: str) -> dict[str, Any]:
    """Return the config.json of a model directory; empty for a name on the Hub, which the workers check."""
    try:
        found = json.loads((Path(model_name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported when the model is loaded
        return {}
    return found if isinstance(found, dict) else {}


def head_size(model: Mapping[str, Any]) -> int:
    """Return the size of an attention head of the model whose config.json this is; 0: it has other keys than most."""
    return int(model.get("head_dim") or (model.get("hidden_size") or 0) // (model.get("num_attention_heads") or 1))


def token_cache_bytes(model: Mapping[str, Any], width: int) -> int:
    """Return the bytes of the keys and values of one token, with `width` bytes per number; 0 as for `head_size`."""
    heads = model.get("num_key_value_heads") or model.get("num_attention_heads") or 0
    return int(2 * (model.get("num_hidden_layers") or 0) * heads * head_size(model) * width)


def sequence_cache_bytes(model: Mapping[str, Any], precision: str, tokens: int | None, block: int) -> int:
    """Return the bytes of the keys and values of a sequence of `tokens` in blocks; None: of all positions."""
    positions = tokens or model.get("max_position_embeddings") or 0
    return token_cache_bytes(model, WIDTHS[precision]) * (positions + block)


def indivisible(model: Mapping[str, Any], tensor: int) -> str | None:
    """Describe the dimension of the model that is not divisible by `tensor`, or return None if there is none."""
    for name, what in DIVIDED.items():
        if isinstance(size := model.get(name), int) and size % tensor:
            return f"the model has {size} {what}, not divisible by policy.parallelism.tensor={tensor}"
    return None


def attention_problems(config: RunConfig, key: str, attention: str, device: str) -> Iterator[Problem]:
    """Yield conflicts of `attention`, the transformers attention implementation set at the backend's `key`."""
    if config.policy.parallelism.context > 1 and attention not in ("auto", "sdpa"):
        message = f"context parallelism has its own attention, and does not support {attention}."
        yield Problem(key, message, "Set it to auto.")
    if attention != "flash_attention_2":
        return
    if device != "cuda":
        yield Problem(key, f"flash_attention_2 needs a GPU, but the device is {device}.", "Set it to auto.")
    elif find_spec("flash_attn") is None:
        message = "flash_attention_2 needs the package flash-attn."
        yield Problem(key, message, "Install it, or set it to auto.", installation=True)
    if config.policy.precision == "float32":
        hint = "Set policy.precision to bfloat16, or the attention to auto."
        yield Problem(key, "flash_attention_2 does not support float32.", hint)


def image_problems(
    config: RunConfig, model: Mapping[str, Any], kinds: Collection[str], engine: str, hint: str
) -> Iterator[Problem]:
    """Yield a problem if the model, whose config.json this is, takes images or must, and is not of the tested `kinds`.

    `kinds`: values of `model_type`.
    """
    kind = model.get("model_type")
    if ("vision_config" in model or config.environment.images is not None) and kind not in kinds:
        message = f"of the models that take images, {engine} was tested with {', '.join(kinds)}, not with {kind}."
        yield Problem("policy.model_name", message, hint)


def lora_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings that are incompatible with LoRA adapters in every backend."""
    policy = config.policy
    if policy.lora is None:
        return
    if not policy.lora.target_modules:
        message = "there are no layers to adapt."
        yield Problem("policy.lora.target_modules", message, "Name some, or remove the section.")
    if policy.head != "language":
        message = f"adapters would leave the head of policy.head={policy.head} untrained."
        yield Problem("policy.lora", message, "Remove the section, to train all weights.")
