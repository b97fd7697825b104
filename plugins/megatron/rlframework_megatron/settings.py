"""Translate a transformers configuration to megatron-core's, and reject models that would compute something else.

`architectures` describes the models; what a description does not know is rejected.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from rlframework.base.errors import DataError, NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.engine import length_dependent
from rlframework_megatron.architectures import SLIDING, architecture, expert_count, is_sparse, value_of
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.names import GIVES_SCORES, head_size, require_convertible
from rlframework_megatron.parallel import Sizes
from rlframework_megatron.upstream import TransformerConfig

INSTEAD = "Set policy.backend to dtensor"


def transformer_config(
    model_config: Any,
    config: PolicyConfig,
    section: MegatronConfig,
    sizes: Sizes,
    device: torch.device,
    *,
    grouped: bool = False,
) -> TransformerConfig:
    """Megatron-core's configuration for `model_config`; `grouped`: experts use grouped matrix multiplication."""
    require_same_function(model_config)
    found = architecture(model_config)
    activation = getattr(model_config, found.activation)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    return TransformerConfig(
        num_layers=model_config.num_hidden_layers,
        hidden_size=model_config.hidden_size,
        ffn_hidden_size=model_config.intermediate_size,
        num_attention_heads=model_config.num_attention_heads,
        num_query_groups=model_config.num_key_value_heads,
        kv_channels=head_size(model_config),
        layernorm_epsilon=model_config.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=nn.functional.silu if activation == "silu" else ACT2FN[activation].forward,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=value_of(model_config, found.qkv_bias),
        qk_layernorm=found.head_norms == "head",  # their gradients are summed over tensor ranks
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        sequence_parallel=sizes.sequence and sizes.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        calculate_per_token_loss=True,  # the loss is divided by neither microbatches nor ranks
        bias_dropout_fusion=False,
        bias_activation_fusion=section.fused_activation and on_gpu and activation == "silu",
        masked_softmax_fusion=False,  # of megatron-core's attention, which is not used
        gradient_accumulation_fusion=section.fused_gradient_accumulation and on_gpu,
        apply_rope_fusion=False,  # Transformer Engine's, not verified
        cuda_graph_scope=[],
        # the interleaved schedule's default silently gives wrong numbers over gloo
        batch_p2p_comm=on_gpu and sizes.virtual == 1,
        overlap_p2p_comm=sizes.virtual > 1,
        batch_p2p_sync=False,  # waits for the GPU at each transfer, for versions of torch before 2
        **_recomputation(config.activation_checkpointing, grouped=grouped),
        **(_expert_settings(model_config, grouped=grouped) if _has_experts(model_config) else {}),
    )


def _recomputation(mode: bool | str, *, grouped: bool) -> dict[str, Any]:
    """Megatron-core's settings for `policy.activation_checkpointing`.

    With `selective`, our norms and `RecomputedMLP` recompute: megatron-core's own recomputation of norms fails without
    Transformer Engine. Activations of experts that are not grouped are kept.
    """
    if not mode:
        return {}
    if mode == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe_act"] if grouped else []}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _has_experts(model_config: Any) -> bool:
    return any(is_sparse(model_config, layer) for layer in range(model_config.num_hidden_layers))


def _expert_settings(model_config: Any, *, grouped: bool) -> dict[str, Any]:
    """Megatron-core's settings for a mixture of experts: top-k routing without capacity limits."""
    mixture = architecture(model_config).mixture
    assert mixture is not None
    found = {
        "num_moe_experts": expert_count(model_config),
        "moe_ffn_hidden_size": getattr(model_config, mixture.width),
        "moe_layer_freq": [int(is_sparse(model_config, layer)) for layer in range(model_config.num_hidden_layers)],
        "moe_grouped_gemm": grouped,
        "moe_router_topk": model_config.num_experts_per_tok,
        # a softmax over the chosen experts equals the full softmax renormalised over them
        "moe_router_pre_softmax": not value_of(model_config, mixture.normalized),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",  # allows different numbers of tokens per rank
    }
    if mixture.shared:
        size = model_config.shared_expert_intermediate_size
        found |= {"moe_shared_expert_intermediate_size": size, "moe_shared_expert_gate": True}
    return found


def embedding_scale(model_config: Any, dtype: torch.dtype) -> float:
    """The factor of the embeddings, rounded to `dtype` where transformers does so."""
    key = architecture(model_config).embedding_scale
    if key == "sqrt":
        return float(torch.tensor(model_config.hidden_size**0.5).to(dtype))
    return 1.0 if key is None else float(getattr(model_config, key))


def require_same_function(model_config: Any) -> None:
    """Raise `NotSupported` if this backend's GPTModel would not compute the same function as transformers."""
    require_convertible(model_config)
    kind, found = model_config.model_type, architecture(model_config)
    if unknown := _unknown_settings(model_config):
        raise NotSupported(
            f"the megatron backend does not support the settings {unknown} of the {kind} model's configuration. "
            f"{INSTEAD}"
        )
    if (activation := getattr(model_config, found.activation)) not in ACT2FN:
        raise NotSupported(f"the {kind} model has the activation {activation!r}, which is not known. {INSTEAD}")
    normalized = found.mixture is not None and value_of(model_config, found.mixture.normalized)
    if normalized and _has_experts(model_config) and model_config.num_experts_per_tok == 1:
        raise NotSupported(
            f"megatron-core does not train routers that choose one expert and divide its weight by itself, as this "
            f"{kind} model's do (num_experts_per_tok is 1). {INSTEAD}"
        )
    layers = set(getattr(model_config, "layer_types", None) or ())
    if found.windows == "layer_types" and layers - {"full_attention", SLIDING}:
        raise NotSupported(
            f"the megatron backend supports layers with full and sliding attention; the {kind} model has "
            f"{sorted(layers)}. {INSTEAD}"
        )


def _unknown_settings(model_config: Any) -> dict[str, Any]:
    """Settings of the configuration's class that its description does not know, unless they have their defaults."""
    found = architecture(model_config)
    known = found.known_keys - set(found.fixed) | {field.name for field in dataclasses.fields(PretrainedConfig)}
    defaults = {field.name: field.default for field in dataclasses.fields(model_config) if field.name not in known}
    defaults |= dict.fromkeys(found.fixed)
    settings = {name: getattr(model_config, name, default) for name, default in defaults.items()}
    return {name: value for name, value in settings.items() if (value or None) != (defaults[name] or None)}


def require_axes(model_config: Any, sizes: Sizes) -> None:
    """Raise `NotSupported` if the model cannot be split along the axes of `sizes`."""
    kind, mixture = model_config.model_type, architecture(model_config).mixture
    if mixture is not None and mixture.stacked and sizes.tensor * sizes.expert > 1:
        raise NotSupported(
            f"the experts of a {kind} model are not split by the megatron backend: set policy.parallelism.tensor and "
            "expert to 1"
        )
    if sizes.context > 1 and (ropes := length_dependent(model_config)):
        raise NotSupported(
            f"the {kind} model has rotary embeddings {sorted(ropes)}, whose frequencies depend on the length of a row; "
            "set policy.parallelism.context to 1"
        )


def as_reward_model(model_config: Any, head: str) -> None:
    """Mark `model_config` as that of a model with a `head` of one number; raise `DataError` unless it has one label."""
    if model_config.num_labels != 1:
        raise DataError(
            f"policy.head={head} requires a model whose head has one label, and this one has "
            f"{model_config.num_labels}: num_labels in its config.json must be 1"
        )
    setattr(model_config, GIVES_SCORES, True)


def require_experts(model_config: Any, sizes: Sizes, *, router_loss: bool) -> None:
    """Raise `NotSupported` for expert options on a dense model, or experts combined with unsupported axes."""
    kind = model_config.model_type
    if not _has_experts(model_config):
        if sizes.expert > 1 or router_loss:
            raise NotSupported(
                f"the {kind} model has no experts; set policy.parallelism.expert to 1 and policy.router_aux_loss_coef "
                "to 0"
            )
        return
    if sizes.tensor > 1 and not sizes.sequence:
        raise NotSupported(
            f"a mixture of experts such as this {kind} model supports tensor parallelism only with "
            "policy.parallelism.sequence set to true"
        )
    if router_loss and sizes.tensor * sizes.context * sizes.pipeline > 1:
        raise NotSupported(
            "policy.router_aux_loss_coef above 0 requires whole layers and sequences on each worker: set "
            "policy.parallelism.tensor, context and pipeline to 1"
        )
