"""Models of transformers, with eyes or without: their configuration, and loading them whole or without weights.

What a kind of model can do is tried in `abilities`; weights are read in pieces by `files`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import DataError
from rlframework.models.reward import score_every_token

logger = logging.getLogger(__name__)


def load_model(config: PolicyConfig, attention: str | None) -> Any:
    """The model with fp32 weights on the CPU; a `DataError` that says what is missing when it cannot be loaded.

    A vision-language model is taken where its configuration is none of a causal language model alone. `attention`: a
    name of transformers; None: the model's own choice.
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
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise _cannot_be_loaded(config, error) from error
    if found["missing_keys"]:  # transformers has drawn random numbers for them, in each process others
        raise _cannot_be_loaded(config, f"it lacks {sorted(found['missing_keys'])[:3]}")
    model.config.use_cache = False
    return ready(model.eval(), config.head)


def load_whole(config: PolicyConfig, attention: str | None) -> Any:
    """As `load_model`, for an engine that would rather have read pieces and could not, which is logged."""
    model = load_model(config, attention)
    logger.warning(
        "%s is no directory of safetensors named as %s names its weights: every process held a whole copy to load it",
        config.model_name,
        type(model).__name__,
    )
    return model


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
    """A `DataError` when `tokenizer` has tokens that `model`, or one with so many embeddings, has none for."""
    rows, tokens = model if isinstance(model, int) else model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if tokens > rows:
        raise DataError(
            f"the tokenizer has {tokens} tokens and the model embeddings for {rows}: they do not belong together; "
            "check policy.tokenizer_name"
        )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it, modules keep the parameters that they make on the meta device; buffers have their values."""
    ordinary = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        ordinary(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = ordinary  # type: ignore[method-assign]


def empty_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """The model of `model_config` in evaluation mode, its parameters fp32 and on the meta device."""
    keys = {} if attention is None else {"attn_implementation": attention}
    with _parameters_on_meta():
        model = auto_class(model_config, config.head).from_config(
            model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **keys
        )
    model.config.use_cache = False
    return ready(model.eval(), config.head)
