"""Which tokens end a completion: the tokenizer's, the model's own, and those of the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlframework.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig


def configured_ends(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end token of `tokenizer`, and the stop tokens and stop strings of `config`.

    A stop string that is not one token, or a stop token that is not in the vocabulary, is a `ConfigError`.
    """
    size = len(tokenizer)
    for token in config.stop_token_ids:
        if not 0 <= token < size:
            raise ConfigError(
                f"generation.stop_token_ids: {token} is no token of the tokenizer; they go from 0 to {size - 1}"
            )
    strings = [_single_token(tokenizer, text) for text in config.stop_strings]
    return frozenset([*_as_ids(tokenizer.eos_token_id), *config.stop_token_ids, *strings])


def model_ends(generation_config: Any) -> frozenset[int]:
    """The end tokens of a transformers `GenerationConfig`, which holds one, several or none; none without a config."""
    return frozenset(_as_ids(getattr(generation_config, "eos_token_id", None)))


def saved_ends(model_name: str) -> frozenset[int]:
    """The end tokens in the `generation_config.json` beside the model; none where there is no such file."""
    from transformers import GenerationConfig

    try:
        return model_ends(GenerationConfig.from_pretrained(model_name))
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
            f"generation.stop_strings: {text!r} is not one token of the tokenizer "
            + (f"but {len(ids)} ({tokenizer.convert_ids_to_tokens(ids)})" if ids else "(it has no token for it)")
            + "; give strings of one token, or stop_token_ids"
        )
    return ids[0]


def _try_encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises bare Exception
        if "Missing [UNK] token" not in str(error):
            raise
        return []
