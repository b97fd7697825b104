"""The tokens that end a completion: those of the tokenizer, of the model and of the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlframework.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig


def configured_stop_tokens(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the end-of-sequence token of `tokenizer` and the stop tokens and stop strings of `config`.

    Raises `ConfigError` for a stop string that is not a single token and a stop token outside the vocabulary.
    """
    size = len(tokenizer)
    for token in config.stop_token_ids:
        if not 0 <= token < size:
            raise ConfigError(
                f"generation.stop_token_ids: {token} is not a token of the tokenizer; its tokens are 0 to {size - 1}"
            )
    strings = [_single_token(tokenizer, text) for text in config.stop_strings]
    return frozenset([*_as_ids(tokenizer.eos_token_id), *config.stop_token_ids, *strings])


def model_stop_tokens(generation_config: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens of a transformers `GenerationConfig`; none if it is None."""
    return frozenset(_as_ids(getattr(generation_config, "eos_token_id", None)))


def saved_stop_tokens(model_name: str) -> frozenset[int]:
    """Return the end-of-sequence tokens in the model's `generation_config.json`; none without that file."""
    from transformers import GenerationConfig

    try:
        return model_stop_tokens(GenerationConfig.from_pretrained(model_name))
    except OSError:  # most small models have none
        return frozenset()


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(token) for token in value]


def _single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    known = tokenizer.get_vocab()
    if text in known:
        return int(known[text])
    ids: list[int] = _try_encode(tokenizer, text)
    if len(ids) != 1 or tokenizer.decode(ids) != text:
        raise ConfigError(
            f"generation.stop_strings: {text!r} is not a single token of the tokenizer "
            + (f"but {len(ids)} ({tokenizer.convert_ids_to_tokens(ids)})" if ids else "(it has no token for it)")
            + "; give strings of one token, or use generation.stop_token_ids"
        )
    return ids[0]


def _try_encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises bare Exception
        if "Missing [UNK] token" not in str(error):
            raise
        return []
