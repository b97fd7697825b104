"""A Hugging Face causal LM, with eyes or without: loading it whole, what it can do, and FSDP2 over its blocks.

`building` puts it together. Elsewhere: `loading` (each process reads its pieces), `tensor_parallel` and
`context_parallel`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import DataError, NotSupported
from rlframework.policy.head import probe_ids
from rlframework_dtensor import attention as segments
from rlframework_dtensor.context_limits import KNOWN_LAYERS
from rlframework_dtensor.experts import experts_of
from rlframework_dtensor.mesh import Mesh
from rlframework_dtensor.reward import score_every_token

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(config: PolicyConfig, attention: str | None) -> Any:
    """The model with fp32 weights on the CPU; a `DataError` that says what is missing when it cannot be loaded.

    A vision-language model is taken where its configuration is none of a causal language model alone. `attention`: a
    name of transformers; None: the model's own choice.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    model_config = load_config(config)
    try:
        model, found = auto_class(model_config, config.head).from_pretrained(
            config.model_name,
            config=model_config,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise _cannot_be_loaded(config, error) from error
    if found["missing_keys"]:  # transformers has drawn random numbers for them, in each process others
        raise _cannot_be_loaded(config, f"it lacks {sorted(found['missing_keys'])[:3]}")
    model.config.use_cache = False
    return ready(model.eval(), config.head)


def load_config(config: PolicyConfig) -> Any:
    """The configuration of the model alone, without dropout."""
    from transformers import AutoConfig

    try:
        model_config = AutoConfig.from_pretrained(config.model_name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _cannot_be_loaded(config, error) from error
    _require_language_model(config, model_config)
    silence_dropout(model_config)
    return model_config


def _require_language_model(config: PolicyConfig, model_config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if not getattr(model_config, "auto_map", None) and all(type(model_config) not in mapping for mapping in known):
        raise _cannot_be_loaded(config, f"Unrecognized configuration class {type(model_config).__name__}")


def _cannot_be_loaded(config: PolicyConfig, why: object) -> DataError:
    return DataError(f"policy.model_name={config.model_name!r} cannot be loaded as a causal language model: {why}")


def auto_class(config: Any, head: str = "language") -> Any:
    """The class of transformers that makes the model of `config` with a `head` as `policy.head` names it."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if head == "score":
        return AutoModelForSequenceClassification
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or "AutoModelForImageTextToText" in own_code:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def ready(model: Any, head: str) -> Any:
    """`model` itself, made by `auto_class`, with logits of each token."""
    return score_every_token(model) if head == "score" else model


def is_multimodal(model: Any) -> bool:
    """Whether `model` takes more than text: its language model is only a part of it."""
    return model.config.get_text_config() is not model.config


def silence_dropout(config: Any) -> None:
    """No dropout of any name, nested configurations included.

    The log-probabilities of the step and those of scoring must be of one function.
    """
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and not name.startswith("_"):
            silence_dropout(value)


def require_vocabulary(model: Any, tokenizer: Any) -> None:
    """A `DataError` when `tokenizer` has tokens that `model` has no embedding for."""
    rows, tokens = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if tokens > rows:
        raise DataError(
            f"the tokenizer has {tokens} tokens and the model embeddings for {rows}: they do not belong together; "
            "check policy.tokenizer_name"
        )


@torch.no_grad()
def packs(model: Any) -> bool:
    """Whether `model` keeps the sequences of a packed row apart: tried on two short ones.

    Models whose layers mix tokens by other means than attention (convolutions, linear attention), or which place
    tokens by a bias, do not. Nor do kinds of attention that `segments` does not know, such as in chunks: what they do
    to sequences longer than the two would not be seen.
    """
    if set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS:
        return False
    first, second = probe_ids(model).split([4, 2])
    positions = torch.cat((torch.arange(4), torch.arange(2)))[None].to(first.device)
    alone = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in (first, second)]
    try:
        with segments.attention(model.config, segments.SEGMENTS):
            together = model(
                input_ids=torch.cat((first, second))[None],
                position_ids=positions,
                segments=segments.Segments([0, 4, 6]),
                use_cache=False,
            ).logits[0]
    except (TypeError, ValueError, KeyError, AttributeError, NotSupported):  # a model says "no" in many ways
        return False
    return torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-3)


def checkpoint_activations(model: Any) -> None:
    """Keep only the inputs of the blocks and compute the rest again in the backward."""
    # the first name is transformers' newer one, the second its older
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def decoder_layers(model: Any) -> list[nn.Module]:
    """The blocks that FSDP gathers one at a time: the modules whose classes the model says not to split.

    Of a multimodal model those of its language model only. A block is gathered by all ranks when it runs, and not all
    ranks may have an image for a vision tower; so its weights go with the root's.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    text = model.get_decoder() if is_multimodal(model) else model
    return [module for module in text.modules() if type(module).__name__ in names]


def shard(model: nn.Module, mesh: Mesh, config: PolicyConfig, reshard_after_forward: bool) -> nn.Module:
    """`fully_shard` each block and then the whole, in CPU memory with `policy.offload.parameters`.

    Forward in `policy.precision`; gradients are reduced in fp32. Experts that are spread are sharded by themselves,
    over the ranks that have the same ones.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    layer_policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32)
    on_cpu: dict[str, Any] = {}
    if config.offload.parameters:
        on_cpu["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type == "cuda")
    settings = {"mp_policy": layer_policy, "reshard_after_forward": reshard_after_forward, **on_cpu}
    for module in experts_of(model) if mesh.sizes.expert > 1 else ():
        fully_shard(module, mesh=mesh.expert_fsdp, **settings)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh.fsdp, **settings)
    root_policy = replace(layer_policy, output_dtype=torch.float32)
    # the root is used again at once in the backward, and the head's weight must stay whole until then
    fully_shard(model, mesh=mesh.fsdp, mp_policy=root_policy, reshard_after_forward=False, **on_cpu)
    return model
