"""Models that context parallelism does not support, detected from the configuration before loading weights."""

from __future__ import annotations

from typing import Any

from rlframework.errors import NotSupported

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
CHANGING_ROPES = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies depend on the longest position in a forward, which differs between ranks."""

CANNOT = "context parallelism (policy.parallelism.context) does not support"
REMEDY = "set policy.parallelism.context to 1"


def require_splittable(config: Any) -> None:
    """Raise `NotSupported` if a model of the transformers `config` cannot be sharded along the sequence; load nothing.

    Layers that mix tokens by means other than attention do not show in the configuration;
    `probing.supports_packing` detects them.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
    name, text = getattr(model_class, "__name__", type(config).__name__), config.get_text_config()
    if text is not config:
        raise NotSupported(f"{CANNOT} multimodal models ({name}); {REMEDY}")
    if not getattr(model_class, "_supports_attention_backend", not known):
        raise NotSupported(f"{CANNOT} {name}: its attention cannot be replaced by ours; {REMEDY}")
    layers = set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS
    if layers:
        raise NotSupported(f"{CANNOT} layers of type {sorted(layers)} ({name}); {REMEDY}")
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise NotSupported(f"{CANNOT} soft-capped attention scores ({name}); {REMEDY}")
    ropes = _rope_kinds(getattr(text, "rope_parameters", None) or {}) & CHANGING_ROPES
    if ropes:
        raise NotSupported(
            f"{CANNOT} rotary embeddings whose frequencies depend on the length: {sorted(ropes)}; {REMEDY}"
        )


def _rope_kinds(parameters: Any) -> set[str]:
    """Return the `rope_type`s in `rope_parameters`: one for all layers, or one per layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    own = parameters.get("rope_type")
    return set().union(*map(_rope_kinds, nested), {str(own)} if own else set())
