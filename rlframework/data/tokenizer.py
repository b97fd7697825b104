"""Tokenizers: one made of single characters for small tasks, and loading any Hugging Face one with plain errors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from rlframework.data.hub import is_path, quiet_hub, tell_of_hub
from rlframework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"


def character_tokenizer(alphabet: Iterable[str], *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer in which each character of `alphabet` is one token.

    Ids: `<pad>` 0, `<eos>` 1, `<bos>` 2 where `bos` is true (it is then put before every text), and the characters in
    the order given. There is no unknown token: a text with another character is refused. Decoding gives the text back
    exactly. Writes and reads as an ordinary Hugging Face tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = list(alphabet)
    if not characters or any(len(c) != 1 for c in characters) or len(set(characters)) != len(characters):
        raise DataError(f"the alphabet must be different single characters, at least one; given {characters!r}")
    names = [PAD, EOS, *([BOS] if bos else []), *characters]
    tokenizer: Any = Tokenizer(models.WordLevel({token: index for index, token in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 2)])
    special = {"pad_token": PAD, "eos_token": EOS, **({"bos_token": BOS} if bos else {})}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory, or of a name on the hub. Without a pad token, the end token serves as one.

    The hub is not asked for a name that looks like a path. `DataError` where there is none, or where it has no end
    token.
    """
    from transformers import AutoTokenizer

    local = is_path(name)
    tell_of_hub(name)
    try:
        with quiet_hub():
            loaded: Any = AutoTokenizer.from_pretrained(
                name, trust_remote_code=trust_remote_code, local_files_only=local
            )
    except (OSError, ValueError) as error:
        hub = "" if local else f", or the hub cannot be reached ({_first_line(error)})"
        files = f" ({_first_line(error)})" if os.path.isdir(name) else ""
        raise DataError(
            f"no tokenizer can be loaded from {name!r}: there is no such model directory here, or it lacks the "
            f"tokenizer's files{files}{hub}. Check policy.model_name and policy.tokenizer_name"
        ) from error
    if loaded.eos_token_id is None:
        raise DataError(f"the tokenizer of {name!r} has no end token (eos_token); set one in its tokenizer_config.json")
    if loaded.pad_token_id is None:
        loaded.pad_token = loaded.eos_token
    return cast("PreTrainedTokenizerBase", loaded)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
