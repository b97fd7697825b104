"""The matrices of LoRA adapters as weights of the model: which layers have them, and which rank holds what.

Like `names`, everything is computed from the configuration, without a model or communication. An adapter belongs to a
linear layer of transformers, such as `q_proj`, although megatron-core fuses several of these in one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlframework.base.errors import ConfigError
from rlframework.config.policy import LoraConfig
from rlframework.engine import A, B
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.names import Weight, model_weights, owner_of
from rlframework_megatron.weight_layout import COLUMNS, REPLICATED, ROWS

MODULE = "adapter"
"""The name of the module with the adapters of a linear layer, inside that layer."""


def linear_weights(config: Any) -> list[Weight]:
    """The matrices of the linear layers that can have adapters: not those of experts, embedding, router and head."""
    return [
        weight
        for weight in model_weights(config)
        if weight.layout.split is not None
        and not weight.layout.is_padded
        and weight.expert is None
        and len(weight.shape) == 2
    ]


def adapted_weights(config: Any, lora: LoraConfig) -> list[Weight]:
    """The matrices of the layers that `lora` names; raise `ConfigError` for a name that matches none."""
    linear = linear_weights(config)
    if lora.adapts_all_linear:
        return linear
    for target in lora.target_modules:
        if not any(_matches(weight, target) for weight in linear):
            known = ", ".join(sorted({kind_of(weight) for weight in linear})) or "none"
            raise ConfigError(
                f"policy.lora.target_modules names {target!r}, which is not a linear layer of the {config.model_type} "
                f"model; layers that can have adapters: {known}"
            )
    return [weight for weight in linear if any(_matches(weight, target) for target in lora.target_modules)]


def adapter_weights(config: Any, lora: LoraConfig) -> list[Weight]:
    """The adapters' matrices A `[rank, in]` and B `[out, rank]`, under their external names."""
    return [matrix for weight in adapted_weights(config, lora) for matrix in _matrices(weight, lora.rank)]


def _matrices(weight: Weight, rank: int) -> Iterator[Weight]:
    """A and B for `weight`. Tensor ranks split B like its rows, or A like its columns, and replicate the other."""
    if weight.layout == COLUMNS:
        layouts = COLUMNS, REPLICATED
    else:
        layouts = REPLICATED, weight.layout if weight.layout.joins_layers else ROWS
    rows, columns = weight.shape
    layer, module = layer_of(weight), weight.parameter.removesuffix(".weight")
    for end, shape, layout in zip((A, B), ((rank, columns), (rows, rank)), layouts, strict=True):
        name = f"{module}.{MODULE}.{parameter_name(weight, end)}"
        yield Weight(layer + end, shape, name, layout, weight.layer)


def require_adapters_on_each_stage(config: Any, lora: LoraConfig, coordinates: Coordinates) -> None:
    """Raise `ConfigError` if a pipeline stage would have no adapter: it would have nothing to train."""
    stages = {owner_of(weight, config, coordinates).stage for weight in adapted_weights(config, lora)}
    if missing := set(range(coordinates.pipeline_size)) - stages:
        raise ConfigError(
            f"policy.lora.target_modules names no layer of pipeline stage {min(missing)}, so it would train nothing; "
            "name layers of all stages, or set policy.parallelism.pipeline to 1"
        )


def layer_of(weight: Weight) -> str:
    """The path of a weight's layer in transformers, such as `model.layers.0.self_attn.q_proj`."""
    return weight.name.removesuffix(".weight")


def kind_of(weight: Weight) -> str:
    """The last component of the path of a weight's layer, such as `q_proj`."""
    return layer_of(weight).rpartition(".")[2]


def parameter_name(weight: Weight, end: str) -> str:
    """The name of the parameter with the matrix `end` (`A` or `B`) for `weight`, inside the module `MODULE`."""
    return f"{kind_of(weight)}{end.removesuffix('.weight').replace('.', '_')}"


def _matches(weight: Weight, target: str) -> bool:
    return f".{layer_of(weight)}".endswith(f".{target}")
