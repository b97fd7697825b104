"""Models as directories: a random Llama made on the spot, and what a configuration says of a model's size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlframework.errors import ConfigError, DataError
from rlframework.huggingface.hub import is_path, quiet_hub

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
    """Write a Llama with random weights, fp32, and its tokenizer to the directory `path`; the same for the same seed.

    `intermediate`: width of the feed-forward layers, 4 x `hidden` by default. `kv_heads`: as many as `heads` by
    default. What is at `path` is replaced, all at once. The process's own random state is left as it was.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlframework.files import replacing_directory

    kv_heads = kv_heads or heads
    if hidden % heads or heads % kv_heads:
        raise ConfigError(f"hidden ({hidden}) must divide by heads ({heads}), and heads by kv_heads ({kv_heads})")
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
    """The most tokens that a model takes in a row, by its configuration; None where that names no limit.

    `name` as for `load_tokenizer`. `DataError` where there is no configuration.
    """
    return _size(_text_config(name, trust_remote_code), "max_position_embeddings", "n_positions")


def model_sizes(name: str, trust_remote_code: bool = False) -> tuple[int | None, int | None]:
    """Width of the hidden states and size of the vocabulary, each None where the configuration does not say it."""
    text = _text_config(name, trust_remote_code)
    return _size(text, "hidden_size", "n_embd"), _size(text, "vocab_size")


def _text_config(name: str, trust_remote_code: bool) -> Any:
    """The configuration of the language model of `name`."""
    from transformers import AutoConfig

    try:
        with quiet_hub():
            config = AutoConfig.from_pretrained(
                name, trust_remote_code=trust_remote_code, local_files_only=is_path(name)
            )
    except (OSError, ValueError) as error:
        raise DataError(
            f"no model configuration can be read from {name!r}: there is no such model, or its config.json is broken "
            f"({str(error).partition(chr(10))[0].rstrip('.')}). Check policy.model_name"
        ) from error
    return config.get_text_config()


def _size(config: Any, *keys: str) -> int | None:
    """The first of `keys` that `config` holds a positive number for."""
    sizes = (getattr(config, key, None) for key in keys)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers shows no progress bars, logs errors only, and takes a model to save for what it is.

    It would ask accelerate whether DeepSpeed is around the model, and import all of that for the answer.
    """
    from transformers import modeling_utils
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with patch.object(modeling_utils, "unwrap_model", lambda model, **_: model, create=True):
            yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
