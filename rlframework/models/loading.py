"""Load transformers models, text-only or multimodal: a full copy, no weights, or slices of the safetensors files.

Files may omit the base model's prefix, store a tied weight under the head's name, and have weights as `save_pretrained`
writes them or as the model has them in memory: the experts of a mixture one by one or stacked. Not supported: quantised
files, other formats and other names; `pretrained_weights` then loads a full copy. `probing` finds out what a model
supports.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput

from rlframework.config.policy import PolicyConfig
from rlframework.errors import DataError, NotSupported
from rlframework.huggingface.hub import local_files_only
from rlframework.models.file_weights import FileLayout, FileWeight, by_file_names
from rlframework.models.named_tensors import named_tensors
from rlframework.models.replacing import replacing
from rlframework.models.rotary import rotate_by_sequence
from rlframework.policy.checkpoint.manifest import require_inside
from rlframework.policy.checkpoint.saved import Saved, SavedTensors
from rlframework.policy.head.patch import output_head

logger = logging.getLogger(__name__)


def load_model(config: PolicyConfig, attention: str | None) -> Any:
    """Load the model with fp32 weights on the CPU; raise `DataError` with the reason if that fails.

    Loads a vision-language model if the configuration is not that of a causal language model. `attention`: a name in
    transformers; None for the model's default.
    """
    transformers.utils.logging.disable_progress_bar()
    model_config = load_config(config)
    try:
        for index in Path(config.model_name).glob("*.index.json"):  # transformers opens whatever these name
            for name in json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values():
                require_inside(name)
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

    with replacing(nn.Module, register_parameter=on_meta):
        return new_model(config, model_config, attention)


def load_config(config: PolicyConfig) -> Any:
    """Load the configuration of the model, with dropout disabled."""
    try:
        model_config = transformers.AutoConfig.from_pretrained(
            config.model_name,
            trust_remote_code=config.trust_remote_code,
            local_files_only=local_files_only(config.model_name),
        )
    except (OSError, ValueError) as error:
        raise _cannot_be_loaded(config, error) from error
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
    return model_config


def _cannot_be_loaded(config: PolicyConfig, why: object) -> DataError:
    return DataError(f"policy.model_name={config.model_name!r} cannot be loaded as a causal language model: {why}")


def auto_class(config: Any, head: str = "language") -> Any:
    """Return the transformers auto class for a model of `config` with a `head` (a value of `policy.head`)."""
    if head == "score":
        return transformers.AutoModelForSequenceClassification
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

    A reward model gives the score of each token, `[n, L, 1]`, and `HeadPatch` selects the last token of each sequence.
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
            f"policy.head=score needs a model whose head has one label, but the head of {type(model).__name__} has "
            f"{score.weight.shape[0]}: num_labels in its config.json must be 1"
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
    """Raise `DataError` if `tokenizer` has more tokens than `model` has embeddings; `model` may be their number."""
    rows, tokens = model if isinstance(model, int) else model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if tokens > rows:
        raise DataError(
            f"the tokenizer has {tokens} tokens and the model embeddings for {rows}: they do not belong together; "
            "check policy.tokenizer_name"
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


# -- slices of files ---------------------------------------------------------------------------------------------------


def weights_folder(model_name: str) -> Path | None:
    """Return the directory with the safetensors files of `model_name`, downloading if necessary; None without files."""
    folder = Path(model_name)
    if not folder.is_dir():
        try:
            patterns = ["model*.safetensors", "*.json"]
            local = local_files_only(model_name)
            folder = Path(snapshot_download(model_name, allow_patterns=patterns, local_files_only=local))
        except (OSError, ValueError) as error:
            raise DataError(
                f"policy.model_name={model_name!r} is not a directory and cannot be downloaded: {error}"
            ) from error
    return folder if any(folder.glob("model*.safetensors")) else None


class ModelFiles(Saved):
    """The `weights` of a model in the safetensors files of `folder`, by name.

    `prefix`: the base model's, with its dot, which files may omit or add. `other_names`: of tied weights. `missing`:
    the weights that the files lack. Raises `DataError` for a weight of another shape.
    """

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, FileWeight],
        prefix: str,
        other_names: Mapping[str, Sequence[str]],
    ) -> None:
        self._files = SavedTensors(folder)
        located: dict[str, FileWeight] = {}
        for name, weight in weights.items():
            if stored := self._stored(prefix, name, *other_names.get(name, ())):
                located[name] = FileWeight(name, stored, weight.shape, weight.shape)
            elif stored := self._stored(prefix, weight.source):
                located[name] = replace(weight, source=stored)
            else:
                continue
            if (found := self._files.shape(stored)) != located[name].whole:
                raise DataError(
                    f"{folder} has {stored} with shape {found}, but its config.json describes a model with shape "
                    f"{located[name].whole}"
                )
        self.missing = [name for name in weights if name not in located]
        super().__init__(folder, located)

    def _stored(self, prefix: str, *names: str) -> str | None:
        """Return the first of `names`, with the `prefix` or without, that the files have."""
        candidates = (form for name in names for form in (name, name.removeprefix(prefix), prefix + name))
        return next((name for name in candidates if name in self._files), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return tuple(self._entries[name].shape)

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.read_slice`."""
        part: FileWeight = self._entries[name]
        if not part.is_part:
            return self._files.read_slice(part.source, where)
        rows = slice(where[0].start + part.start, where[0].stop + part.start)
        if part.expert is None:
            return self._files.read_slice(part.source, (rows, *where[1:]))
        return self._files.read_slice(part.source, (slice(part.expert, part.expert + 1), rows, *where[1:]))[0]


def pretrained_weights(
    layout: FileLayout, model: Any, config: PolicyConfig, attention: str | None
) -> Mapping[str, Tensor]:
    """Return the weights of `config.model_name` under their names in files; each is read on access.

    `layout`: of `model`. If the files cannot be read by slice, loads a full copy as `load_model` does, and logs that.
    """
    folder = None if getattr(model.config, "quantization_config", None) else weights_folder(config.model_name)
    if folder is not None:
        files = ModelFiles(folder, layout.weights, f"{model.base_model_prefix}.", layout.other_names)
        if not files.missing:
            return files
    whole = load_model(config, attention)
    logger.warning(
        "%s is not a directory of safetensors files with the weight names of %s: every process loaded a full copy",
        config.model_name,
        type(whole).__name__,
    )
    return by_file_names(whole, named_tensors(whole))
