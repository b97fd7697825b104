"""Loading a Hugging Face causal LM and splitting it over workers with FSDP2.

One process in fp32 keeps the plain module: there is nothing to split or cast, and generation can share it. Left out:
tensor and context parallelism, loading without a whole copy on every process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import DataError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(config: PolicyConfig, attention: str) -> nn.Module:
    """The model with fp32 weights on the CPU; a `DataError` that says what is missing when it cannot be loaded."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model_name,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"policy.model_name={config.model_name!r} cannot be loaded as a causal language model: {error}"
        ) from error
    _silence_dropout(model)
    model.config.use_cache = False
    return model


def _silence_dropout(model: nn.Module) -> None:
    """Log-probabilities of the step and of scoring must be those of one function, so no dropout anywhere."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  # a type checker takes modules' attributes for tensors


def checkpoint_activations(model: Any) -> None:
    """Keep only the inputs of the blocks and compute the rest again in the backward."""
    # the first name is transformers' newer one, the second its older
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that FSDP gathers one at a time: the modules whose classes the model says not to split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(model: nn.Module, mesh: Any, precision: str, reshard_after_forward: bool) -> nn.Module:
    """`fully_shard` each block and then the whole. Forward in `precision`; gradients are reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layer_policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=layer_policy, reshard_after_forward=reshard_after_forward)
    root_policy = replace(layer_policy, output_dtype=torch.float32)
    # the root is used again at once in the backward, and the head's weight must stay whole until then
    fully_shard(model, mesh=mesh, mp_policy=root_policy, reshard_after_forward=False)
    return model
