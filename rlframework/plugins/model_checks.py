"""What several backends find out of a configuration by the same words: for the `check` of their records. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
"""What of a model tensor parallelism deals out, by the names of its configuration."""


def model_config(model_name: str) -> dict[str, Any]:
    """The config.json of a model directory; nothing for a name on the hub, which the workers look at."""
    try:
        found = json.loads((Path(model_name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # told by whoever reads the model
        return {}
    return found if isinstance(found, dict) else {}


def indivisible(model: Mapping[str, Any], tensor: int) -> str | None:
    """What of a model, as its configuration says, `tensor` workers cannot share; None where they can."""
    for name, what in DIVIDED.items():
        size = model.get(name)
        if isinstance(size, int) and size % tensor:
            return f"the model has {size} {what}, which policy.parallelism.tensor={tensor} does not divide"
    return None


def attention_problems(config: RunConfig, key: str, attention: str, device: str) -> Iterator[Problem]:
    """What `attention`, a name of transformers that the backend's `key` has, does not go with."""
    if config.policy.parallelism.context > 1 and attention not in ("auto", "sdpa"):
        message = f"context parallelism has an attention of its own, and does not do {attention}."
        yield Problem(key, message, "Set it to auto.")
    if attention != "flash_attention_2":
        return
    if device != "cuda":
        yield Problem(key, f"flash_attention_2 needs a GPU, and the device is {device}.", "Set it to auto.")
    elif find_spec("flash_attn") is None:
        yield Problem(key, "flash_attention_2 needs the package flash-attn.", "Install it, or set it to auto.")
    if config.policy.precision == "float32":
        hint = "Set policy.precision to bfloat16, or the attention to auto."
        yield Problem(key, "flash_attention_2 does not compute in float32.", hint)


def lora_problems(config: RunConfig) -> Iterator[Problem]:
    """What adapters do not go with under any backend."""
    policy = config.policy
    if policy.lora is None:
        return
    if not policy.lora.target_modules:
        message = "there are no layers to put adapters around."
        yield Problem("policy.lora.target_modules", message, "Name some, or take the section out.")
    if policy.head == "score":
        yield Problem("policy.lora", "a reward model is not trained.", "Take the section out.")
    if config.checkpoints.format != "portable":
        message = "adapters are small, and are saved in the portable form only."
        yield Problem("checkpoints.format", message, "Set it to portable.")
