"""Find out what an architecture supports before loading any weights: from its configuration, or on a tiny random model.

The tiny model has the same classes and flags, and enough layers to contain every layer type.
"""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rlframework.config.policy import PolicyConfig
from rlframework.errors import NotSupported
from rlframework.models import attention as row_attention
from rlframework.models.loading import new_model
from rlframework.policy.head.patch import probe_ids, require_plain_head

VOCABULARY = 1024
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
CHANGING_ROPES = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies depend on the longest position in a forward, which differs between ranks."""


def tiny_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """Build a small model of the architecture of `model_config` on the CPU, with equal random weights in every process.

    It is narrow if the architecture allows it, and otherwise of full width with few layers.
    """
    rejected = (RuntimeError, ValueError, AssertionError, TypeError, IndexError, AttributeError)
    for narrow in (True, False):
        with torch.random.fork_rng(devices=[]), suppress(*(rejected if narrow else ())):
            torch.manual_seed(0)
            model = new_model(config, _small(model_config, narrow), attention)
            with torch.no_grad():
                model(input_ids=torch.arange(4)[None], use_cache=False)
            return model
    raise AssertionError("the second attempt returns or raises")


def probe_packing(config: PolicyConfig, model_config: Any, device: torch.device, attention: str) -> bool:
    """Return whether rows may be packed, after registering the core's packed attention; probes only if it matters.

    `attention`: `policy.<backend>.attention`, or "auto" if the section has no such key. Raises `NotSupported` for a
    model whose head cannot be replaced, and if packing or context parallelism is required but not possible.
    """
    row_attention.register()
    model = tiny_model(config, model_config, None if attention == "auto" else attention)
    if config.head == "language":
        require_plain_head(model)
    mode = config.batching.mode
    required = mode == "packed" or config.parallelism.context > 1
    if not required and mode != "auto" and device.type == "cpu":  # nothing depends on it
        return False
    _randomize_weights(model)
    can_pack = attention in ("auto", "sdpa") and supports_packing(model)
    if required and not can_pack:
        chosen = "" if attention == "auto" else f" with policy.{config.backend}.attention={attention}"
        raise NotSupported(
            f"{type(model).__name__}{chosen} does not keep packed sequences apart; set policy.batching.mode to dynamic "
            "or auto, and policy.parallelism.context to 1"
        )
    return can_pack


@torch.no_grad()
def supports_packing(model: Any) -> bool:
    """Return True if `model` keeps the sequences of a packed row apart, probed with two short ones.

    Models that mix tokens by means other than attention (convolutions, linear attention), or encode positions as an
    attention bias, do not. Two short sequences would not show the effect of unknown layer types (chunked attention).
    """
    if set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS:
        return False
    first, second = probe_ids(model).split([4, 2])
    positions = torch.cat((torch.arange(4), torch.arange(2)))[None].to(first.device)
    separate = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in (first, second)]
    try:
        with row_attention.attention(model.config):
            packed = model(
                input_ids=torch.cat((first, second))[None],
                position_ids=positions,
                row_layout=row_attention.Segments([0, 4, 6]),
                use_cache=False,
            ).logits[0]
    except (TypeError, ValueError, KeyError, AttributeError, NotSupported):  # models reject it in many ways
        return False
    return torch.allclose(packed, torch.cat(separate), rtol=1e-3, atol=1e-3)


def _small(model_config: Any, narrow: bool) -> Any:
    """Reduce to the layers needed to contain every layer type, at least two; and to one group of attention heads."""
    small = copy.deepcopy(model_config)
    text = small.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    text.num_hidden_layers = min(int(text.num_hidden_layers), max([2, *(kinds.index(kind) + 1 for kind in kinds)]))
    if kinds:
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    for section in (small, text):
        section.pad_token_id = None  # may exceed the small vocabulary
        if text.vocab_size > VOCABULARY:
            section.vocab_size = VOCABULARY
    if not narrow:
        return small
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = heads // groups
    if hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = 1
    text.hidden_size = text.num_attention_heads * size
    for name in ("intermediate_size", "moe_intermediate_size"):
        if getattr(text, name, None):
            setattr(text, name, 64)
    return small


@torch.no_grad()
def _randomize_weights(model: nn.Module) -> None:
    """Draw weights large enough that attention matters: a fresh model's outputs hardly depend on the context."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[-1]))


def require_splittable(config: Any) -> None:
    """Raise `NotSupported` if a model of the transformers `config` cannot be sharded along the sequence; load nothing.

    What does not show in the configuration, `supports_packing` detects.
    """
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
    name, text = getattr(model_class, "__name__", type(config).__name__), config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]  # one, or one per layer type
    found = ""
    if text is not config:
        found = f"multimodal models ({name})"
    elif not getattr(model_class, "_supports_attention_backend", not known):
        found = f"{name}: its attention cannot be replaced by ours"
    elif layers := set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS:
        found = f"layers of type {sorted(layers)} ({name})"
    elif getattr(text, "attn_logit_softcapping", None) is not None:
        found = f"soft-capped attention scores ({name})"
    elif ropes := {str(part.get("rope_type")) for part in parts} & CHANGING_ROPES:
        found = f"rotary embeddings whose frequencies depend on the length: {sorted(ropes)}"
    if found:
        raise NotSupported(
            f"context parallelism (policy.parallelism.context) does not support {found}; set "
            "policy.parallelism.context to 1"
        )
