"""Find out what an architecture supports before loading any weights: from its configuration, or on a tiny random model.

The tiny model has the same classes and flags, and enough layers to contain every layer type.
"""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.models import attention as row_attention
from rlframework.models.loading import is_loadable, new_model
from rlframework.policy.head.patch import require_known_formula

VOCABULARY = 1024
KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
LENGTHS = 9, 7
"""Tokens of the probed sequences."""
BINDING = 3
BINDING_SIZES = ("sliding_window", "attention_chunk_size", "window_size", "index_topk")
"""Sizes that limit what a token sees. In a tiny model they are `BINDING`, so that the probed sequences exceed them."""


def tiny_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """Build a small model of the architecture of `model_config` on the CPU, with equal random weights in every process.

    It is narrow if the architecture allows it, and otherwise of full width with few layers. Its windows and chunks are
    short. All its weights matter. Raises `NotSupported` if no model of a few tokens can be built from `model_config`.
    """
    for narrow in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                model = new_model(config, _small(model_config, narrow), attention)
                _randomize_weights(model)
                with torch.no_grad():
                    model(input_ids=torch.arange(4)[None], use_cache=False)
            except Exception as error:  # noqa: BLE001 - configurations reject sizes in any way
                reason = error
                continue
            return model
    said = next(iter(str(reason).strip().splitlines()), "")[:300]
    raise NotSupported(
        f"a {model_config.model_type} model cannot be trained: no small one can be built to find out what it supports "
        f"({type(reason).__name__}: {said}); set policy.model_name to a model of another kind, or remove the cause"
    ) from reason


def probe_packing(config: PolicyConfig, model_config: Any, device: torch.device, attention: str) -> bool:
    """Return whether rows may be packed, after registering the core's packed attention; probes only if it matters.

    `attention`: `policy.<backend>.attention`, or "auto" if the section has no such key. Raises `NotSupported` for a
    model whose head cannot be replaced, that is random in training or whose rows depend on padding, and if packing or
    context parallelism is required but not possible.
    """
    row_attention.register()
    model = tiny_model(config, model_config, None if attention == "auto" else attention)
    if config.head == "language":
        require_known_formula(model)
    require_saved_kind(model, model_config)
    require_rows_of_their_own(model)
    require_gradients(model)
    required = config.batching.packs or config.parallelism.context > 1
    if not required and config.batching.chosen and device.type == "cpu":  # nothing depends on it
        return False
    can_pack = attention in ("auto", "sdpa") and supports_packing(model)
    if required and not can_pack:
        chosen = "" if attention == "auto" else f" with policy.{config.backend}.attention={attention}"
        raise NotSupported(
            f"{type(model).__name__}{chosen} does not keep packed sequences apart; set policy.batching.mode to dynamic "
            "or auto, and policy.parallelism.context to 1"
        )
    return can_pack


def require_saved_kind(model: Any, model_config: Any) -> None:
    """Raise `NotSupported` if transformers does not load what `model` would be saved as."""
    if type(model.config) is not type(model_config) and not is_loadable(model.config):
        raise NotSupported(
            f"a {model_config.model_type} model cannot be trained: transformers saves its language model as "
            f"{model.config.model_type}, which it does not load; set policy.model_name to a model of another kind"
        )


def require_gradients(model: Any) -> None:
    """Raise `NotSupported` if the logits of `model` in evaluation mode have no gradients."""
    try:
        _logits(model, _rows(model)[0][None]).sum().backward()
    except Exception as error:
        raise NotSupported(
            f"{type(model).__name__} has no gradients without its noise of training ({type(error).__name__}); set "
            "policy.model_name to a model of another kind"
        ) from error
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def require_rows_of_their_own(model: Any) -> None:
    """Raise `NotSupported` if the logits of a row depend on padding at its right, or are random in training."""
    rows = _rows(model)
    longest = max(len(row) for row in rows)
    padded = torch.stack([nn.functional.pad(row, (0, longest - len(row)), value=int(row[0])) for row in rows])
    together = _logits(model, padded)
    model.train()
    twice = [_logits(model, padded) for _ in range(2)]
    model.eval()
    if not torch.equal(*twice) or not _close(twice[0], together):
        raise NotSupported(
            f"{type(model).__name__} computes something else in training than in evaluation, so its log-probabilities "
            "are not those that are trained; set what makes it random (noise, dropout) to 0 in its config.json"
        )
    alone = [_logits(model, row[None])[0] for row in rows]
    if not all(_close(found[: len(row)], row) for found, row in zip(together, alone, strict=True)):
        raise NotSupported(
            f"{type(model).__name__} is not supported: the logits of a row depend on the tokens after it, or on padding"
        )


def _rows(model: Any) -> tuple[Tensor, Tensor]:
    """Two rows of token ids, longer than the windows and chunks of a tiny model."""
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.get_input_embeddings().weight.device
    first, second = torch.linspace(3, vocabulary - 1, sum(LENGTHS), device=device).long().split(LENGTHS)
    return first, second


def _logits(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
    logits: Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    return logits


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def supports_packing(model: Any) -> bool:
    """Return True if `model`, a tiny one, keeps the sequences of a packed row apart, probed with two short ones.

    Models that mix tokens by means other than attention (convolutions, linear attention), or encode positions as an
    attention bias, do not. Two short sequences would not show the effect of unknown layer types.
    """
    if set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS:
        return False
    first, second = _rows(model)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(first.device)
    layout = row_attention.Segments([0, len(first), len(first) + len(second)])
    try:
        with row_attention.attention(model.config):
            row = torch.cat((first, second))[None]
            packed = _logits(model, row, position_ids=positions, row_layout=layout)[0]
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        RuntimeError,
        NotSupported,
    ):  # models reject it in many ways
        return False
    return _close(packed, torch.cat([_logits(model, ids[None])[0] for ids in (first, second)]))


def _small(model_config: Any, narrow: bool) -> Any:
    """Reduce to the layers needed to contain every layer type, at least two, and to one group of attention heads.

    Windows and chunks become shorter than the probed sequences.
    """
    small = copy.deepcopy(model_config)
    text = small.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    layers = min(int(text.num_hidden_layers), max([2, *(kinds.index(kind) + 1 for kind in kinds)]))
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if kinds:
        changes["layer_types"] = text.layer_types[:layers]
    changes |= {name: BINDING for name in BINDING_SIZES if (getattr(text, name, None) or 0) > BINDING}
    if narrow:
        changes |= _narrow(text)
    if text.vocab_size > VOCABULARY:
        changes["vocab_size"] = VOCABULARY
    for section in (small, text):
        if (getattr(section, "pad_token_id", None) or 0) >= min(text.vocab_size, VOCABULARY):
            section.pad_token_id = 0
    for name, value in changes.items():
        with suppress(AttributeError, NotImplementedError):  # a property that other keys decide
            setattr(text, name, value)
            if small is not text and name == "vocab_size":
                small.vocab_size = value
    return small


def _narrow(text: Any) -> dict[str, Any]:
    """The sizes of one group of attention heads."""
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = {"num_attention_heads": heads // groups, "hidden_size": heads // groups * size}
    if hasattr(text, "num_key_value_heads"):
        sizes["num_key_value_heads"] = 1
    names = ("intermediate_size", "moe_intermediate_size")
    return sizes | {name: 64 for name in names if getattr(text, name, None)}


@torch.no_grad()
def _randomize_weights(model: nn.Module) -> None:
    """Draw weights large enough that each matters: a fresh model's outputs hardly depend on the context."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[-1]))
        else:  # biases, norms, time constants: around their initial values
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def require_splittable(config: Any) -> None:
    """Raise `NotSupported` if a model of the transformers `config` cannot be sharded along the sequence; load nothing.

    What does not show in the configuration, `supports_packing` detects.
    """
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
    name, text = getattr(model_class, "__name__", type(config).__name__), config.get_text_config()
    found = ""
    if text is not config:
        found = f"multimodal models ({name})"
    elif not getattr(model_class, "_supports_attention_backend", not known):
        found = f"{name}: its attention cannot be replaced by ours"
    elif layers := set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS:
        found = f"layers of type {sorted(layers)} ({name})"
    if found:
        raise NotSupported(
            f"context parallelism (policy.parallelism.context) does not support {found}; set "
            "policy.parallelism.context to 1"
        )
