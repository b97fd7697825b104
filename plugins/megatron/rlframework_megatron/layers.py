"""Specifications of a model's layers for megatron-core: its own with our attention and norms, and ours between them.

Layers are Transformer Engine's or of megatron-core's local specification; see `uses_transformer_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.base.errors import ConfigError
from rlframework_megatron.architectures import architecture, fits_plain_layers, is_sparse, value_of
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.core_attention import CoreAttention, Rotary
from rlframework_megatron.experts import BiasedRouter, StackedExperts
from rlframework_megatron.norms import NORMS, AllHeadsNorm, RMSNorm
from rlframework_megatron.recomputed_mlp import RecomputedMLP
from rlframework_megatron.upstream import (
    ColumnParallelLinear,
    IdentityOp,
    ModuleSpec,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)


class BiasedColumns(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core carries no types
    """A layer with a bias whatever the configuration, which has one setting for all layers of megatron-core."""

    def __init__(self, *arguments: Any, bias: bool = True, **more: Any) -> None:
        super().__init__(*arguments, bias=True, **more)


class BiasedRows(RowParallelLinear):  # type: ignore[misc]
    """Like `BiasedColumns`."""

    def __init__(self, *arguments: Any, bias: bool = True, **more: Any) -> None:
        super().__init__(*arguments, bias=True, **more)


class Residual(nn.Module):
    """Adds the output of attention or MLP to the residual, after a norm, if any, and times `factor`."""

    def __init__(self, config: TransformerConfig, norm: type[RMSNorm] | None, factor: float) -> None:
        super().__init__()
        self.norm = None if norm is None else norm(config, config.hidden_size, config.layernorm_epsilon)
        self._factor = factor

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function, as megatron-core expects; there is no dropout, and nothing to fuse."""
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        output = output if bias is None else output + bias
        output = output if self.norm is None else self.norm(output)
        return residual + (output if self._factor == 1.0 else output * self._factor)


def uses_transformer_engine(section: MegatronConfig, device: torch.device, model_config: Any) -> bool:
    """Whether to use Transformer Engine's layers; raise `ConfigError` if they are requested but cannot be used."""
    wanted, installed = section.transformer_engine, find_spec("transformer_engine") is not None
    plain = fits_plain_layers(model_config)
    if wanted == "auto":
        return installed and device.type == "cuda" and plain
    if wanted == "true" and not (installed and device.type == "cuda"):
        raise ConfigError(
            f"policy.megatron.transformer_engine=true requires a GPU and the package transformer_engine; the device is "
            f"{device.type} and the package is {'installed' if installed else 'not installed'}. Set it to auto"
        )
    if wanted == "true" and not plain:
        raise ConfigError(
            f"policy.megatron.transformer_engine=true does not support the parts of a {model_config.model_type} layer "
            "that megatron-core's do not have. Set it to auto"
        )
    return wanted == "true"


def block(
    model_config: Any, core_config: TransformerConfig, coordinates: Coordinates, chunk: int, rotary: Rotary
) -> TransformerBlockSubmodules:
    """The layers of one chunk and the final norm."""
    starts = coordinates.first_layers(model_config.num_hidden_layers)
    virtual_stage = chunk * coordinates.pipeline_size + coordinates.pipeline_rank
    layers = range(starts[virtual_stage], starts[virtual_stage + 1])
    specs = [_layer_spec(model_config, core_config, layer, rotary, fused=coordinates.fused) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=NORMS[architecture(model_config).norm])


def _layer_spec(
    model_config: Any, core_config: TransformerConfig, layer: int, rotary: Rotary, *, fused: bool
) -> ModuleSpec:
    """A layer with our attention and norms. `fused`: Transformer Engine's."""
    sparse = is_sparse(model_config, layer)
    experts = core_config.num_moe_experts if sparse else None
    spec = _fused_layer_spec(core_config, experts) if fused else _local_layer_spec(model_config, core_config, experts)
    spec.submodules.self_attention.submodules.core_attention = CoreAttention.of(model_config, rotary)
    _set_head_norms(spec.submodules.self_attention.submodules, model_config)
    if not sparse:
        mlp = spec.submodules.mlp
        mlp.params = {**mlp.params, "ffn_hidden_size": core_config.ffn_hidden_size}
        if core_config.recompute_granularity == "selective":
            # not a ModuleSpec, for which megatron-core warns of classes that it does not know
            parts = {"params": mlp.params, "submodules": mlp.submodules}
            spec.submodules.mlp = SimpleNamespace(module=RecomputedMLP, **parts)
    return spec


def _fused_layer_spec(core_config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Transformer Engine's layer; norms that it does not fuse are ours."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=core_config.qk_layernorm
    )
    if experts is not None:
        spec.submodules.pre_mlp_layernorm = RMSNorm
    return spec


def _set_head_norms(attention: Any, model_config: Any) -> None:
    found = architecture(model_config)
    if found.head_norms == "head":
        attention.q_layernorm = attention.k_layernorm = NORMS[found.norm]
    elif found.head_norms == "all":
        heads, groups = model_config.num_attention_heads, model_config.num_key_value_heads
        attention.q_layernorm = ModuleSpec(module=AllHeadsNorm, params={"heads": heads})
        attention.k_layernorm = ModuleSpec(module=AllHeadsNorm, params={"heads": groups})


def _local_layer_spec(model_config: Any, core_config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """The layer of megatron-core's local specification, with the parts of the architecture."""
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=core_config.qk_layernorm, normalization="RMSNorm")
    found, parts = architecture(model_config), spec.submodules
    norm, norms = NORMS[found.norm], found.norms
    parts.input_layernorm = IdentityOp if norms.before_attention is None else norm
    parts.pre_mlp_layernorm = IdentityOp if norms.before_mlp is None else norm
    factor = 1.0 if found.residual_scale is None else float(getattr(model_config, found.residual_scale))
    for name, after in (("self_attn_bda", norms.after_attention), ("mlp_bda", norms.after_mlp)):
        if after is not None or factor != 1.0:
            params = {"config": core_config, "norm": None if after is None else norm, "factor": factor}
            setattr(parts, name, ModuleSpec(module=Residual, params=params))
    if value_of(model_config, found.output_bias):
        parts.self_attention.submodules.linear_proj = BiasedRows
    if experts is None and value_of(model_config, found.mlp_bias):
        parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = BiasedColumns, BiasedRows
    if experts is not None and found.mixture is not None and found.mixture.stacked:
        defaults = {"alpha": 1.702, "limit": 7.0}  # of transformers without these keys, until 5.22
        activation = {key: getattr(model_config, f"swiglu_{key}", value) for key, value in defaults.items()}
        parts.mlp.submodules.experts = ModuleSpec(module=StackedExperts, params=activation)
        parts.mlp.submodules.router = BiasedRouter
    return spec
