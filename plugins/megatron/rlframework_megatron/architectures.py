"""Descriptions of the model types that this backend trains. A new one is an entry of `ARCHITECTURES`. Imports no torch.

A description says how a model differs from Llama. A key of a configuration that its description does not know must have
its default, or the model is rejected; see `settings.require_same_function`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Key = str | bool
"""The name of a key of the configuration, or a constant."""


@dataclass(frozen=True)
class Norms:
    """Names in files of the norms around attention and MLP; None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts.

    `block`: the name of the layer's mixture in files; `router`: that of its router there. `projections`: those of an
    expert's gate, up and down matrices. `count` and `width`: keys of the number of experts and of the width of one.
    `normalized`: whether the weights of the chosen experts are divided by their sum. `all_layers`: whether each layer
    is a mixture; otherwise `decoder_sparse_step` and `mlp_only_layers` decide. `shared`: whether there is a shared
    expert with a gate. `stacked`: the experts are tensors of all experts, with biases and clamped activations, as in
    gpt-oss; they cannot be split.
    """

    block: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    normalized: Key = "norm_topk_prob"
    all_layers: bool = False
    shared: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Architecture:
    """A model type; `name`: as the documentation calls it.

    `norm`: how RMSNorm applies its weight: `rounded`, after rounding to the precision of the model; `exact`, before;
    `offset`, before, and increased by 1. `head_norms`: queries and keys are normalized per head, or over all heads.
    `windows`: sliding windows of the layers of `layer_types`, or of all. `scale`: the key of the factor of the scores,
    or of its inverse square, `inverse_square_scale`. `embedding_scale`: the key of the embedding's factor; `sqrt`: the
    root of the hidden size. `formula`: keys of the formula of the logits, see `LogitFormula`. `unrotated`: the key of a
    list whose zeros are layers without rotary embeddings. `fixed`: keys that must be false or None.
    """

    name: str
    qkv_bias: Key = False
    output_bias: Key = False
    mlp_bias: Key = False
    activation: str = "hidden_act"
    norm: Literal["rounded", "exact", "offset"] = "rounded"
    norms: Norms = Norms()
    head_norms: Literal["head", "all"] | None = None
    windows: Literal["layer_types", "all"] | None = None
    scale: str | None = None
    inverse_square_scale: str | None = None
    softcap: str | None = None
    sinks: bool = False
    embedding_scale: str | None = None
    residual_scale: str | None = None
    formula: tuple[str, ...] = ()
    unrotated: str | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    mixture: Mixture | None = None
    fixed: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()

    @property
    def known_keys(self) -> frozenset[str]:
        """The keys of a configuration that this backend understands."""
        own = [self.qkv_bias, self.output_bias, self.mlp_bias, self.scale, self.inverse_square_scale, self.softcap]
        own += [self.activation, self.embedding_scale, self.residual_scale, self.unrotated, *self.formula, *self.fixed]
        found = COMMON_KEYS | set(self.without_effect) | {key for key in own if isinstance(key, str)}
        if self.windows is not None:
            found |= {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"}
        if (mixture := self.mixture) is not None:
            found |= {mixture.count, mixture.width, "num_experts_per_tok"} | MIXTURE_KEYS
            found |= {mixture.normalized} if isinstance(mixture.normalized, str) else set()
            found |= set() if mixture.all_layers else {"decoder_sparse_step", "mlp_only_layers"}
            found |= {"shared_expert_intermediate_size"} if mixture.shared else set()
            found |= {"swiglu_alpha", "swiglu_limit"} if mixture.stacked else set()
        return frozenset(found)


COMMON_KEYS = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
        *("rope_parameters", "original_max_position_embeddings", "pad_token_id"),
        *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pretraining_tp"),
        *("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"),  # no dropout in this framework
    }
)
"""Keys that every description knows; those of the last lines change nothing."""

MIXTURE_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Keys of mixtures that change nothing: noise is off, and the loss is `policy.router_aux_loss_coef`."""

AROUND = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND_GLM = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
GEMMA: dict[str, Any] = {
    **BIASES,
    "norm": "offset",
    "embedding_scale": "sqrt",
    "fixed": ("use_bidirectional_attention",),
}
GEMMA_2: dict[str, Any] = {
    **GEMMA,
    "activation": "hidden_activation",
    "norms": AROUND,
    "windows": "layer_types",
    "inverse_square_scale": "query_pre_attn_scalar",
    "formula": ("final_logit_softcapping",),
}
OLMO: dict[str, Any] = {**BIASES, "norm": "exact", "norms": AFTER, "head_norms": "all"}

ARCHITECTURES: dict[str, Architecture] = {
    "gemma": Architecture("Gemma", **GEMMA),
    "gemma2": Architecture("Gemma 2", **GEMMA_2, softcap="attn_logit_softcapping"),
    "gemma3_text": Architecture(
        "Gemma 3 (text)", **GEMMA_2, head_norms="head", without_effect=("attn_logit_softcapping",)
    ),
    "glm": Architecture("GLM", qkv_bias="attention_bias", fused_gate_up=True),
    "glm4": Architecture("GLM-4", qkv_bias="attention_bias", fused_gate_up=True, norms=AROUND_GLM),
    "gpt_oss": Architecture(
        "gpt-oss",
        **BIASES,
        norm="exact",
        windows="layer_types",
        sinks=True,
        mixture=Mixture(
            router="router",
            count="num_local_experts",
            width="intermediate_size",
            normalized=True,
            all_layers=True,
            stacked=True,
        ),
        without_effect=("hidden_act",),
    ),
    "granite": Architecture(
        "Granite",
        **BIASES,
        mlp_bias="mlp_bias",
        scale="attention_multiplier",
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        formula=("logits_scaling",),
    ),
    "llama": Architecture("Llama", **BIASES, mlp_bias="mlp_bias"),
    "ministral": Architecture("Ministral", windows="layer_types"),
    "mistral": Architecture("Mistral", windows="all"),
    "mixtral": Architecture(
        "Mixtral",
        windows="all",
        mixture=Mixture(
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            count="num_local_experts",
            width="intermediate_size",
            normalized=True,
            all_layers=True,
        ),
    ),
    "olmo2": Architecture("OLMo 2", **OLMO),
    "olmo3": Architecture("OLMo 3", **OLMO, windows="layer_types"),
    "phi3": Architecture("Phi-3", windows="all", fused_qkv=True, fused_gate_up=True),
    "qwen2": Architecture("Qwen2", qkv_bias=True, windows="layer_types"),
    "qwen2_moe": Architecture("Qwen2-MoE", qkv_bias="qkv_bias", windows="layer_types", mixture=Mixture(shared=True)),
    "qwen3": Architecture("Qwen3", **BIASES, head_norms="head", windows="layer_types"),
    "qwen3_moe": Architecture("Qwen3-MoE", **BIASES, head_norms="head", windows="all", mixture=Mixture()),
    "seed_oss": Architecture(
        "Seed-OSS", qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias"
    ),
    "smollm3": Architecture(
        "SmolLM3",
        **BIASES,
        mlp_bias="mlp_bias",
        windows="layer_types",
        unrotated="no_rope_layers",
        without_effect=("no_rope_layer_interval",),
    ),
}
"""The supported values of `model_type`."""


SLIDING = "sliding_attention"
"""The layer type of layers with sliding windows."""


def architecture(config: Any) -> Architecture:
    """The description of the model of a transformers `config`, which must be supported."""
    return ARCHITECTURES[config.model_type]


def value_of(config: Any, key: Key) -> bool:
    """Whether the configuration sets `key`."""
    return key if isinstance(key, bool) else bool(getattr(config, key))


def fits_plain_layers(config: Any) -> bool:
    """Whether megatron-core's layers compute the model with our attention; otherwise parts of a layer are ours."""
    found = architecture(config)
    ours = found.norm != "rounded" or found.norms != Norms() or found.head_norms == "all" or found.sinks
    ours = ours or found.residual_scale is not None or (found.mixture is not None and found.mixture.stacked)
    return not ours and not any(value_of(config, key) for key in (found.output_bias, found.mlp_bias))


def expert_count(config: Any) -> int:
    """The number of experts of a mixture, 0 for a dense model."""
    mixture = architecture(config).mixture
    return 0 if mixture is None else int(getattr(config, mixture.count) or 0)


def is_sparse(config: Any, layer: int) -> bool:
    """Whether the layer has experts."""
    mixture = architecture(config).mixture
    if mixture is None or not expert_count(config):
        return False
    if mixture.all_layers:
        return True
    return layer not in config.mlp_only_layers and (layer + 1) % int(config.decoder_sparse_step) == 0


def window_of(config: Any, layer: int) -> int | None:
    """The number of tokens that a token of the layer attends to, including itself; None: all before it."""
    windows = architecture(config).windows if getattr(config, "use_sliding_window", True) else None
    sliding = windows == "all" or (windows == "layer_types" and config.layer_types[layer] == SLIDING)
    return int(config.sliding_window) if sliding and getattr(config, "sliding_window", None) else None


def score_scale(config: Any) -> float | None:
    """The factor of attention scores; None: the inverse root of the head size."""
    found = architecture(config)
    if found.inverse_square_scale is not None:
        return 1.0 / math.sqrt(getattr(config, found.inverse_square_scale))
    return None if found.scale is None else float(getattr(config, found.scale))
