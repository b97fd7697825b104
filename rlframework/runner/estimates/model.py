"""The sizes of a model from its configuration: parameters are counted on the meta device, and nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.huggingface.hub import is_path, quiet_hub
from rlframework.huggingface.model_directories import quiet_transformers

if TYPE_CHECKING:
    from rlframework.config.policy import LoraConfig, PolicyConfig


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model; widths are of one token. `trained`: parameters with a gradient."""

    parameters: int
    trained: int
    largest_block: int
    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int

    def activation_bytes(self, width: int) -> int:
        """What the backward of one layer keeps of one token, in bytes, with numbers of `width` bytes.

        Counted on the layer of a Llama: both norms keep what goes in and two stages of it (these in fp32), attention
        its query, output and their copy for the projection, and keys and values; the feed-forward part four widths.
        """
        norms = 4 * self.hidden * 4 + 2 * self.hidden * width
        return norms + (3 * self.hidden + 2 * self.key_value + 4 * self.intermediate) * width


def model_size(config: PolicyConfig) -> ModelSize:
    """The sizes of the model that `policy.model_name` names. The process's random states are left as they were."""
    import torch
    from transformers import AutoConfig

    local = is_path(config.model_name)
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
    """The class of transformers that makes a model that writes text of `config`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    own_code = getattr(config, "auto_map", None) or {}
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def _intermediate(text: Any) -> int:
    """Width of the feed-forward part that one token goes through; of a mixture, of the experts that it is given."""
    experts, each = _first(text, "num_experts_per_tok"), _first(text, "moe_intermediate_size")
    return experts * each if experts and each else _first(text, "intermediate_size", "n_inner")


def _first(config: Any, *names: str) -> int:
    """The first of `names` that `config` holds a positive number for; else 0."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _largest_block(model: Any) -> int:
    """Parameters of the largest part that an engine which shards weights makes whole at once: a layer, or the ends."""
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
