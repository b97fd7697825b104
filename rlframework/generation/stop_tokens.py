"""The tokens that end a completion: resolved once, by the driver, and sent with each request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError, DataError
from rlframework.huggingface.model_directories import first_size, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig

_LOG = logging.getLogger(__name__)


def stop_tokens(
    config: GenerationConfig, tokenizer: PreTrainedTokenizerBase, model_name: str, trust_remote_code: bool = False
) -> frozenset[int]:
    """Return the end-of-sequence tokens of `tokenizer` and of the model, and the stop tokens and strings of `config`.

    The model's are those in its `generation_config.json` or, without that file, in its `config.json`. Raises
    `ConfigError` for a stop string that is not a single token, and for a stop token outside the vocabulary. Those of
    the model outside its own vocabulary are left out, with a warning.
    """
    size = len(tokenizer)
    for token in config.stop_token_ids:
        if not 0 <= token < size:
            raise ConfigError(
                f"generation.stop_token_ids: {token} is not a token of the tokenizer; its tokens are 0 to {size - 1}"
            )
    strings = {_single_token(tokenizer, text) for text in config.stop_strings}
    return frozenset(
        {*end_tokens(tokenizer), *_end_tokens_of_model(model_name, trust_remote_code), *config.stop_token_ids, *strings}
    )


def end_tokens(owner: Any) -> set[int]:
    """Return the end-of-sequence tokens of a tokenizer or a transformers `GenerationConfig`."""
    found = owner.eos_token_id
    return set() if found is None else {found} if isinstance(found, int) else set(found)


def _end_tokens_of_model(name: str, trust_remote_code: bool) -> set[int]:
    import transformers

    try:
        tokens = end_tokens(transformers.GenerationConfig.from_pretrained(name))
    except OSError:  # most small models have no such file
        tokens = end_tokens(transformers.GenerationConfig.from_model_config(read_config(name, trust_remote_code)))
    return _of_vocabulary(tokens, name, trust_remote_code) if tokens else tokens


def _of_vocabulary(tokens: set[int], name: str, trust_remote_code: bool) -> set[int]:
    """Return those of the model's `tokens` that it can sample; warn of the others, which end nothing."""
    try:
        config = read_config(name, trust_remote_code)
    except DataError:  # a folder with other files alone
        return tokens
    size = first_size(config.get_text_config(), "vocab_size")
    unknown = {token for token in tokens if size is not None and not 0 <= token < size}
    if unknown:
        _LOG.warning(
            "%s has the end-of-sequence tokens %s, but its tokens are 0 to %d: they are ignored",
            name,
            sorted(unknown),
            (size or 0) - 1,
        )
    return tokens - unknown


def _single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    known = tokenizer.get_vocab()
    if text in known:
        return int(known[text])
    ids: list[int] = []
    try:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises bare Exception
        if "Missing [UNK] token" not in str(error):
            raise
    if len(ids) != 1 or tokenizer.decode(ids) != text:
        raise ConfigError(
            f"generation.stop_strings: {text!r} is not a single token of the tokenizer "
            + (f"but {len(ids)} ({tokenizer.convert_ids_to_tokens(ids)})" if ids else "(it has no token for it)")
            + "; give strings of one token, or use generation.stop_token_ids"
        )
    return ids[0]
