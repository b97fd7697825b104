"""Determine the sizes of a model from its configuration, on the meta device, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.huggingface.hub import local_files_only, quiet_hub
from rlframework.huggingface.model_directories import quiet_transformers

if TYPE_CHECKING:
    from rlframework.config.policy import LoraConfig, PolicyConfig


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model: parameters, those with a gradient (`trained`), layers, and widths per token."""

    parameters: int
    trained: int
    largest_block: int
    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int

    def activation_bytes(self, width: int) -> int:
        """Bytes that one layer saves for the backward of one token, with `width` bytes per number.

        Counted for a Llama layer: both norms save their input and two fp32 intermediates; attention saves query,
        output, the copy of the output for the projection, keys and values; the MLP saves four intermediate widths.
        """
        norms = 4 * self.hidden * 4 + 2 * self.hidden * width
        return norms + (3 * self.hidden + 2 * self.key_value + 4 * self.intermediate) * width


def model_size(config: PolicyConfig) -> ModelSize:
    """The sizes of the model `policy.model_name`. Leaves the process's random states unchanged."""
    import torch
    from transformers import AutoConfig

    local = local_files_only(config.model_name)
    with quiet_hub():
        found = AutoConfig.from_pretrained(
            config.model_name, trust_remote_code=config.trust_remote_code, local_files_only=local
        )
    with torch.random.fork_rng(devices=[]), torch.device("meta"), quiet_transformers():
        model = _auto_class(found).from_config(found, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
    text = found.get_text_config()
    hidden = _first(text, "hidden_size", "n_embd")
    heads = _first(text, "num_attention_heads", "n_head")
    head = _first(text, "head_dim") or hidden // max(heads, 1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(
        parameters=parameters,
        trained=parameters if config.lora is None else _adapters(model, config.lora),
        largest_block=_largest_block(model),
        layers=_first(text, "num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=_intermediate(text) or 4 * hidden,
        key_value=head * (_first(text, "num_key_value_heads") or heads),
        vocabulary=_first(text, "vocab_size"),
    )


def _auto_class(config: Any) -> Any:
    """The Auto class of transformers that builds a text-generating model from `config`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    own_code = getattr(config, "auto_map", None) or {}
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def _intermediate(text: Any) -> int:
    """The MLP width that one token passes through; for a mixture of experts, the total over its top-k experts."""
    experts, each = _first(text, "num_experts_per_tok"), _first(text, "moe_intermediate_size")
    return experts * each if experts and each else _first(text, "intermediate_size", "n_inner")


def _first(config: Any, *names: str) -> int:
    """The first positive integer in `config` among `names`; else 0."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _largest_block(model: Any) -> int:
    """The most parameters that a sharding engine gathers at once: a layer's, or those of embedding and head."""
    from torch.nn import ModuleList

    lists = [module for module in model.modules() if isinstance(module, ModuleList)]
    blocks: list[int] = [sum(p.numel() for p in block.parameters()) for blocks in lists for block in blocks]
    inside = {id(p) for blocks in lists for p in blocks.parameters()}
    ends: int = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    return max([ends, *blocks])


def _adapters(model: Any, config: LoraConfig) -> int:
    from torch.nn import Linear

    return sum(
        config.rank * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and any(f".{name}".endswith(f".{end}") for end in config.target_modules)
    )
