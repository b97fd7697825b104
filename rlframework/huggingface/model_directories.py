"""Model directories: write a Llama with random weights, read a model's sizes, and check what a save may replace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError, DataError, UserError
from rlframework.base.files import replacing_directory
from rlframework.huggingface.hub import local_files_only, quiet_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_llama(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    max_positions: int = 512,
    tied: bool = True,
    init_std: float = 0.02,
    seed: int = 0,
) -> Path:
    """Write a Llama with random fp32 weights and its tokenizer to the directory `path`, and return `path`.

    The weights depend on the arguments alone; the random state of the process is not changed. `intermediate` is the
    width of the feed-forward layers (default: 4 x `hidden`), `kv_heads` the number of key and value heads (default:
    `heads`). A model that exists at `path` is replaced atomically. Raises a `ConfigError` for sizes that do not divide,
    and a `UserError` if `path` holds other files.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    check_replaceable(path)
    kv_heads = kv_heads or heads
    if hidden % heads or heads % kv_heads:
        raise ConfigError(f"hidden ({hidden}) must be a multiple of heads ({heads}), heads of kv_heads ({kv_heads})")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate or 4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=init_std,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with replacing_directory(path) as directory, quiet_transformers():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return Path(path)


def model_positions(name: str, trust_remote_code: bool = False) -> int | None:
    """Return the longest sequence, in tokens, that a model's configuration allows, or None if it sets no limit.

    `name` as in `load_tokenizer`. Raises a `DataError` if the configuration cannot be read.
    """
    return first_size(text_config(name, trust_remote_code), "max_position_embeddings", "n_positions")


def model_sizes(name: str, trust_remote_code: bool = False) -> tuple[int | None, int | None]:
    """Return the hidden size and the vocabulary size, each None if the configuration does not have it."""
    text = text_config(name, trust_remote_code)
    return first_size(text, "hidden_size", "n_embd"), first_size(text, "vocab_size")


def text_config(name: str, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model, of a multimodal one that of its language model. See `model_positions`."""
    config = read_config(name, trust_remote_code)
    try:
        return config.get_text_config()
    except Exception as error:
        raise invalid_config(name, error) from error


def read_config(name: str, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model as transformers reads it. See `model_positions`."""
    from transformers import AutoConfig

    try:
        with quiet_hub():
            config = AutoConfig.from_pretrained(
                name, trust_remote_code=trust_remote_code, local_files_only=local_files_only(name)
            )
            config.to_dict()
    except Exception as error:
        raise invalid_config(name, error) from error
    return config


def invalid_config(name: str, error: Exception) -> DataError:
    """Return the error for a `config.json` of which transformers makes no model; its classes raise any exception."""
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return DataError(
        f"no model configuration can be read from policy.model_name={name!r}: there is no such model, or its "
        f"config.json is invalid ({kind}{shorten(str(error), 300)})"
    )


def first_size(config: Any, *keys: str) -> int | None:
    """Return the first positive integer in a model's `config` among `keys`, or None.

    A size that differs between layers, which transformers reports by a RuntimeError, is none.
    """
    for key in keys:
        with suppress(RuntimeError):
            size = getattr(config, key, None)
            if isinstance(size, int) and size > 0:
                return size
    return None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers below errors, hide its progress bars, and skip its check for wrapped models when saving.

    That check asks accelerate whether DeepSpeed wraps the model, which imports DeepSpeed.
    """
    from transformers import modeling_utils
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    unwrap = modeling_utils.unwrap_model
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    modeling_utils.unwrap_model = lambda model, **_: model  # type: ignore[assignment]
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


_SAVED = re.compile(
    r"""
    ((adapter|generation|image_processor|preprocessor|processor|tokenizer|video_preprocessor)_)?config\.json
    | (model|adapter_model|pytorch_model)([.-][\w.-]+)?\.(safetensors|bin)(\.index\.json)?
    | tokenizer\.json | (tokenizer|spiece|spm|sentencepiece)(\.bpe)?\.model
    | (special_tokens_map|added_tokens|vocab|normalizer)\.json | vocab\.txt | merges\.txt
    | chat_template\.(jinja|json)
    | (configuration|modeling|tokenization|processing|image_processing)_\w+\.py
    | base\.json | checksums\.json | training\.json | save\.json | random\.safetensors
    | native\.json | \.metadata | __\d+_\d+\.distcp
    """,
    re.VERBOSE,
)
"""Names that transformers, peft and checkpoints write into the directory of a model, an adapter or an optimizer."""
_LISTED = 5


def check_replaceable(path: str | Path) -> None:
    """Raise `UserError` if a save to the directory `path` would delete what no save wrote; nothing is touched.

    A directory may be missing, empty, or hold only files with the names that a save gives.
    """
    folder = Path(path)
    if folder.name in ("", ".."):
        raise UserError(f"cannot save to {str(path)!r}: give the name of a directory for the files, such as 'trained'")
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UserError(f"cannot save to {str(path)!r}: it is a file, and a save is a directory; give another name")
    if foreign := sorted(entry.name for entry in folder.iterdir() if not _is_saved(entry)):
        more = f" and {len(foreign) - _LISTED} more" if len(foreign) > _LISTED else ""
        raise UserError(
            f"cannot save to {str(path)!r}: the directory would be replaced, and it holds files that no save wrote "
            f"({', '.join(foreign[:_LISTED])}{more}); give another directory, or move these away"
        )


def _is_saved(entry: Path) -> bool:
    if entry.is_dir():
        native = entry.name == "engine" and (entry.parent / "native.json").is_file()
        templates = entry.name == "additional_chat_templates"
        return native or (templates and all(each.suffix == ".jinja" for each in entry.iterdir()))
    return _SAVED.fullmatch(entry.name) is not None
