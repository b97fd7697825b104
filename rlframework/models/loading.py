"""Load transformers models, text-only or multimodal: the configuration, a full copy, or a model without weights.

`probing` finds out what a model supports; `files` reads shards of weights.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import DataError
from rlframework.huggingface.hub import local_files_only
from rlframework.policy.head.patch import output_head


def load_model(config: PolicyConfig, attention: str | None) -> Any:
    """Load the model with fp32 weights on the CPU; raise `DataError` with the reason if that fails.

    Loads a vision-language model if the configuration is not that of a causal language model. `attention`: a name in
    transformers; None for the model's default.
    """
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model_config = load_config(config)
    try:
        model, found = auto_class(model_config, config.head).from_pretrained(
            config.model_name,
            config=model_config,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            local_files_only=local_files_only(config.model_name),
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise _cannot_be_loaded(config, error) from error
    if found["missing_keys"]:  # transformers initialized them at random, differently in each process
        raise _cannot_be_loaded(config, f"it lacks {sorted(found['missing_keys'])[:3]}")
    return _prepared(model, config.head)


def new_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """Build the model of `model_config` with random fp32 weights, in evaluation mode; see `load_model`."""
    keys = {} if attention is None else {"attn_implementation": attention}
    model = auto_class(model_config, config.head).from_config(
        model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **keys
    )
    return _prepared(model, config.head)


def empty_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """Build the model as `new_model` does, with its parameters on the meta device; buffers keep their values."""
    register_parameter = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register_parameter(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta):
        return new_model(config, model_config, attention)


def load_config(config: PolicyConfig) -> Any:
    """Load the configuration of the model, with dropout disabled."""
    from transformers import AutoConfig

    try:
        model_config = AutoConfig.from_pretrained(
            config.model_name,
            trust_remote_code=config.trust_remote_code,
            local_files_only=local_files_only(config.model_name),
        )
    except (OSError, ValueError) as error:
        raise _cannot_be_loaded(config, error) from error
    if not getattr(model_config, "auto_map", None) and _language_class(model_config) is None:
        raise _cannot_be_loaded(config, f"unrecognized configuration class {type(model_config).__name__}")
    disable_dropout(model_config)
    return model_config


def _cannot_be_loaded(config: PolicyConfig, why: object) -> DataError:
    return DataError(f"policy.model_name={config.model_name!r} cannot be loaded as a causal language model: {why}")


def auto_class(config: Any, head: str = "language") -> Any:
    """Return the transformers auto class for a model of `config` with a `head` (a value of `policy.head`)."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if head == "score" else _language_class(config) or AutoModelForCausalLM


def _language_class(config: Any) -> Any | None:
    """Return the auto class that knows `config`, directly or by the code next to it."""
    import transformers

    own_code = getattr(config, "auto_map", None) or {}
    for name, mapping in (
        ("AutoModelForCausalLM", transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
        ("AutoModelForImageTextToText", transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    ):
        if type(config) in mapping or name in own_code:
            return getattr(transformers, name)
    return None


def _prepared(model: Any, head: str) -> Any:
    """Return `model` in evaluation mode, without a cache, with a forward that gives logits for each token.

    A reward model gives the score of each token, `[n, L, 1]`: its head runs inside the model's forward, where FSDP has
    gathered its weight, and `HeadPatch` selects the last token of each sequence. transformers' own forward would find
    it by the padding id, which may be the end-of-sequence token, and does not support packed rows. Raises `DataError`
    for several labels.
    """
    model.eval().config.use_cache = False
    if head == "language":
        return model
    score = output_head(model)
    if score.weight.shape[0] != 1:
        raise DataError(
            f"policy.head=score needs a model whose head has one label, but the head of {type(model).__name__} has "
            f"{score.weight.shape[0]}: num_labels in its config.json must be 1"
        )

    def forward(**inputs: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        hidden: Tensor = model.base_model(**inputs).last_hidden_state
        return SequenceClassifierOutput(logits=model.score(hidden))

    model.forward = forward
    return model


def is_multimodal(model: Any) -> bool:
    """Return True if `model` takes more than text, so that its language model is only a submodule."""
    return model.config.get_text_config() is not model.config


def disable_dropout(config: Any) -> None:
    """Set every dropout probability in `config` and its nested configurations to 0.

    The training step and scoring must compute the same log-probabilities.
    """
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and not name.startswith("_"):
            disable_dropout(value)


def require_vocabulary(model: Any, tokenizer: Any) -> None:
    """Raise `DataError` if `tokenizer` has more tokens than `model` has embeddings; `model` may be their number."""
    rows, tokens = model if isinstance(model, int) else model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if tokens > rows:
        raise DataError(
            f"the tokenizer has {tokens} tokens and the model embeddings for {rows}: they do not belong together; "
            "check policy.tokenizer_name"
        )


def checkpoint_activations(model: Any) -> None:
    """Enable activation checkpointing: keep only the inputs of the layers and recompute the rest in the backward."""
    # newer versions of transformers use the first name, older ones the second
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the layers that FSDP gathers one at a time: modules of the classes that the model says not to split.

    For a multimodal model, only those of its language model. All ranks must run a layer to gather it, and not every
    rank has an image for the vision tower, so the vision weights are gathered with the root's.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    text = model.get_decoder() if is_multimodal(model) else model
    return [module for module in text.modules() if type(module).__name__ in names]
