"""Load transformers models, text-only or multimodal: a full copy, no weights, or slices of the safetensors files.

`described_weights` compares the files with the model that `config.json` describes. Slices are not supported for
quantised files, other formats and other names; `pretrained_weights` then loads a full copy. `probing` finds out what a
model supports.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput

from rlframework.base.errors import DataError, NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.hub import check_model_files, local_files_only
from rlframework.huggingface.model_directories import invalid_config, quiet_transformers, read_config
from rlframework.models.described_weights import (
    ModelFiles,
    has_a_head,
    new_head_hint,
    new_weights,
    number_of_layers,
    other_shape,
    require_finite,
    unused_weights,
    weights_folder,
)
from rlframework.models.file_weights import FileLayout, by_file_names, named_tensors
from rlframework.models.rotary import rotate_by_sequence
from rlframework.policy.checkpoint.pickles import without_code
from rlframework.policy.head.patch import output_head


@contextmanager
def replacing(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set `attributes` of `owner` and restore them on exit; raise `AttributeError` if it lacks one of them.

    An attribute that `owner` inherits from its class is removed again. Other threads see the replacements too.
    """
    for name in attributes:
        getattr(owner, name)
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


logger = logging.getLogger(__name__)


def load_model(config: PolicyConfig, attention: str | None) -> Any:
    """Load the model with fp32 weights on the CPU; raise `DataError` with the reason if that fails.

    Loads a vision-language model if the configuration is not that of a causal language model. `attention`: a name in
    transformers; None for the model's default.
    """
    transformers.utils.logging.disable_progress_bar()
    model_config = load_config(config)
    try:
        with (
            quiet_transformers() if new_weights(config) else nullcontext(),  # it would report the new head as missing
            nullcontext() if config.trust_remote_code else without_code(config.model_name),
        ):
            model, found = auto_class(model_config, config.head).from_pretrained(
                config.model_name,
                config=model_config,
                dtype=torch.float32,
                attn_implementation=attention or _needed_attention(model_config),
                trust_remote_code=config.trust_remote_code,
                local_files_only=local_files_only(config.model_name),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below
            )
    except Exception as error:
        raise _cannot_be_loaded(config, f"{type(error).__name__}: {error}") from error
    # transformers initialized these at random, differently in each process
    if other := sorted(found["mismatched_keys"]):
        name, shape, wanted = other[0]
        raise _cannot_be_loaded(config, other_shape("it", name, shape, wanted, model_config))
    missing = set(found["missing_keys"]) - new_weights(config)
    if missing:
        raise _cannot_be_loaded(
            config, f"it lacks {sorted(missing)[:3]}{number_of_layers(model_config)}{new_head_hint(missing)}"
        )
    if unused := unused_weights(found["unexpected_keys"], model, config.head):
        raise _cannot_be_loaded(
            config, f"it has {unused[:3]}, which its config.json does not describe{number_of_layers(model_config)}"
        )
    for name, weight in model.named_parameters():
        require_finite(weight, name, config.model_name)
    model = _prepared(model, config.head)
    _start_new_head(config, model, found["missing_keys"])
    return model


def _start_new_head(config: PolicyConfig, model: Any, missing: Collection[str]) -> None:
    """Set the weights of a new head to zeros; raise `DataError` if the files have one, so that they are not `missing`.

    transformers has initialized them at random.
    """
    for name in new_weights(config):
        if name not in missing:
            raise has_a_head(config.model_name)
        nn.init.zeros_(model.get_parameter(name))


def new_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """Build the model of `model_config` with random fp32 weights, in evaluation mode; see `load_model`."""
    attention = attention or _needed_attention(model_config)
    keys = {} if attention is None else {"attn_implementation": attention}
    model = auto_class(model_config, config.head).from_config(
        model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **keys
    )
    return _prepared(model, config.head)


def _needed_attention(model_config: Any) -> str | None:
    """Return `eager` for a model with soft caps of scores, which older versions of transformers leave out of `sdpa`."""
    return "eager" if getattr(model_config.get_text_config(), "attn_logit_softcapping", None) else None


def empty_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """Build the model as `new_model` does, with its parameters on the meta device; buffers keep their values."""
    register_parameter = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register_parameter(module, name, parameter)

    with replacing(nn.Module, register_parameter=on_meta):
        return new_model(config, model_config, attention)


def load_config(config: PolicyConfig) -> Any:
    """Load the configuration of the model, with dropout disabled; the files in a directory must have its weights."""
    model_config = read_config(config.model_name, config.trust_remote_code)
    if not getattr(model_config, "auto_map", None) and _language_class(model_config) is None:
        raise _cannot_be_loaded(config, f"unrecognized configuration class {type(model_config).__name__}")
    try:
        model_config.get_text_config()
    except ValueError as error:
        raise NotSupported(
            f"a {model_config.model_type} model cannot be trained: it has several language models; set "
            "policy.model_name to a model with one"
        ) from error
    disable_dropout(model_config)
    if new_weights(config):
        model_config.num_labels = 1
    if (folder := Path(config.model_name)).is_dir():
        _require_generation_config(folder)
        if not getattr(model_config, "quantization_config", None):
            _require_described(config, model_config)
    return model_config


def _require_generation_config(folder: Path) -> None:
    """Raise `DataError` for a `generation_config.json` that cannot be used, or saved with the trained model."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        found = transformers.GenerationConfig.from_pretrained(folder)
        found.validate()
        found.to_json_string()
    except Exception as error:
        raise DataError(f"{path} is invalid ({type(error).__name__}: {shorten(str(error), 300)})") from error
    ends = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    if not all(end is None or (type(end) is int and end >= 0) for end in ends):
        raise DataError(f"{path}: eos_token_id must be one or more token ids, not {found.eos_token_id!r:.80}")


def _require_described(config: PolicyConfig, model_config: Any) -> None:
    """Raise `DataError` unless the safetensors files have the weights of the model of `model_config`, if any has them.

    Files with other names of weights are left to transformers, which converts them.
    """
    folder = weights_folder(config.model_name)
    if folder is None:
        return
    check_model_files(folder)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = auto_class(model_config, config.head).from_config(
                copy.deepcopy(model_config), dtype=torch.float32, trust_remote_code=config.trust_remote_code
            )
    except Exception as error:
        if "meta" in str(error):  # it reads values while it is built; it is compared when it is loaded as a whole
            return
        raise invalid_config(config.model_name, error) from error
    try:
        layout = FileLayout.of(model)
    except Exception as error:  # noqa: BLE001 - such a kind is rejected by name, or loaded and compared as a whole
        logger.debug("the files of %s are not compared before they are loaded: %r", config.model_name, error)
        return
    prefix, new = f"{model.base_model_prefix}.", new_weights(config)
    files = ModelFiles(folder, layout.weights, prefix, layout.other_names, model_config, new=new)
    if not files.missing:
        files.require_used(model, model_config, config.head)


def _cannot_be_loaded(config: PolicyConfig, why: object) -> DataError:
    return DataError(
        f"policy.model_name={config.model_name!r} cannot be loaded as a causal language model: {why!s:.1000}"
    )


def auto_class(config: Any, head: str = "language") -> Any:
    """Return the transformers auto class for a model of `config` with a `head` (a value of `policy.head`).

    Of vision-language models with another head, a class with the same interface.
    """
    if head != "language":
        from rlframework.models.vision_heads import scoring_class

        return scoring_class(config) or transformers.AutoModelForSequenceClassification
    return _language_class(config) or transformers.AutoModelForCausalLM


def is_loadable(config: Any) -> bool:
    """Return True if transformers loads models of `config`, with language models or by the code next to it."""
    return _language_class(config) is not None


def _language_class(config: Any) -> Any | None:
    """Return the auto class that knows `config`, directly or by the code next to it."""
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

    A reward or value model gives a number for each token, `[n, L, 1]`, and `HeadPatch` selects tokens.
    transformers' own forward would find it by the padding id, which may be the end-of-sequence token, and does not
    support packed rows. Raises `DataError` for several labels.
    """
    model.eval().config.use_cache = False
    model._weight_conversions = None  # of the files it was loaded from: the names of weights do not depend on them
    model.train = partial(_train, model)
    rotate_by_sequence(model)
    if head == "language":
        return model
    score = output_head(model)
    if score.weight.shape[0] != 1:
        raise DataError(
            f"policy.head={head} needs a model whose head has one label, but the head of {type(model).__name__} has "
            f"{score.weight.shape[0]}: num_labels in its config.json must be 1. For a new head on a language "
            "model, set policy.head_init=zeros"
        )

    def forward(**inputs: Any) -> Any:
        hidden: Tensor = model.base_model(**inputs).last_hidden_state
        return SequenceClassifierOutput(logits=model.score(hidden))

    model.forward = forward
    return model


def _train(model: Any, mode: bool = True) -> Any:
    """`Module.train` of a model: only layers with activation checkpointing are switched, which look at their mode.

    Everything else stays in evaluation mode, so that nothing is random in training: what is trained is what is scored.
    """
    nn.Module.train(model, False)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = mode
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
    """Raise `DataError` if `tokenizer` has an id beyond the embeddings of `model`, which may be their number."""
    rows = model if isinstance(model, int) else model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        raise DataError(
            f"the tokenizer has a token with the id {largest} and the model embeddings for {rows}: they do not belong "
            "together; check policy.tokenizer_name"
        )


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the layers that FSDP gathers one at a time: modules of the classes that the model says not to split.

    For a multimodal model, only those of its language model. All ranks must run a layer to gather it, and not every
    rank has an image for the vision tower, so the vision weights are gathered with the root's.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    text = model.get_decoder() if is_multimodal(model) else model
    embeddings = text.get_input_embeddings()  # may be tied to the head, which the root gathers
    layers = [module for module in text.modules() if type(module).__name__ in names]
    return [layer for layer in layers if all(module is not embeddings for module in layer.modules())]


def pretrained_weights(
    layout: FileLayout, model: Any, config: PolicyConfig, attention: str | None
) -> Mapping[str, Tensor]:
    """Return the weights of `config.model_name` under their names in files; each is read on access.

    `layout`: of `model`. If the files cannot be read by slice, loads a full copy as `load_model` does, and logs that.
    """
    folder = None if getattr(model.config, "quantization_config", None) else weights_folder(config.model_name)
    if folder is not None:
        prefix, new = f"{model.base_model_prefix}.", new_weights(config)
        files = ModelFiles(folder, layout.weights, prefix, layout.other_names, new=new)
        if not files.missing:
            files.require_used(model, model.config, config.head)
            return files
    whole = load_model(config, attention)
    logger.warning(
        "%s is not a directory of safetensors files with the weight names of %s: every process loaded a full copy",
        config.model_name,
        type(whole).__name__,
    )
    return by_file_names(whole, named_tensors(whole))


def modules_of_part(model: Any, part: str) -> tuple[nn.Module, ...]:
    """Return the modules of `part`, "vision" (the image encoder) or "language" (decoder, embedding and head).

    A projector that is a module of its own, as in LLaVA, belongs to neither part; the Qwen-VL kinds have it in the
    encoder. Raises `NotSupported` for a model without such a part.
    """
    encoder = model.get_encoder(modality="image") if is_multimodal(model) else model
    if encoder is model or encoder is model.base_model:
        raise NotSupported(
            f"{type(model).__name__} has no image encoder; remove policy.freeze, and set policy.lora.part to all"
        )
    return (encoder,) if part == "vision" else (model.get_decoder(), model.get_output_embeddings())


def freeze_part(model: Any, part: str) -> None:
    """Freeze all parameters of `part`; see `modules_of_part`. Repeat after sharding, which replaces parameters."""
    for module in modules_of_part(model, part):
        module.requires_grad_(False)


def trains_images_only(config: PolicyConfig) -> bool:
    """Return True if rows of text train nothing, because the language model is frozen."""
    return config.freeze == "language" or (config.lora is not None and config.lora.part == "vision")
