"""Tokenizers: a character tokenizer for small tasks, and loading, templating and fingerprinting any other."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, cast

from rlframework.base.errors import DataError
from rlframework.huggingface import hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_GENERATION_TAG = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
_PATIENCE = 60.0
"""Seconds to wait for the trial on a machine that is busy; its own limit counts the time that it computes."""


def read_chat_template(given: str) -> str:
    """Return `given` if it is Jinja text (contains `{{` or `{%`), else the content of the file `given`.

    Raises a `DataError` if the file cannot be read; see `check_chat_template` for the text.
    """
    if "{{" in given or "{%" in given:
        return given
    path = Path(given).expanduser()
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait
            raise OSError(22, "it is not a file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"policy.chat_template: {given!r} is not UTF-8 text ({error.reason})") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"policy.chat_template: {given!r} cannot be read ({reason}); give a file with a Jinja template, or the "
            "template as text"
        ) from error


@lru_cache(maxsize=16)
def check_chat_template(text: str, where: str) -> None:
    """Raise a `DataError` that begins with `where` unless `text` is a Jinja template that ends in time when rendered.

    It is tried in a process of its own, which takes a tenth of a second.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from rlframework.huggingface import template_trial

    plain = _GENERATION_TAG.sub("", text)  # transformers marks assistant turns with a tag that Jinja does not know
    try:
        ImmutableSandboxedEnvironment(extensions=[loopcontrols]).from_string(plain)
    except TemplateSyntaxError as error:
        raise DataError(f"{where}: not a valid Jinja template, line {error.lineno}: {error}") from error
    except Exception as error:
        raise DataError(f"{where}: not a valid Jinja template ({type(error).__name__}: {error})") from error
    command = [sys.executable, "-P", str(template_trial.__file__)]
    given = plain.encode("utf-8", "surrogatepass")
    try:
        code = subprocess.run(command, input=given, capture_output=True, timeout=_PATIENCE).returncode
    except subprocess.TimeoutExpired:
        code = -1
    if code < 0:
        raise DataError(f"{where}: rendering a short conversation takes more than {template_trial.SECONDS} s")
    if code == template_trial.TOO_MUCH:
        raise DataError(f"{where}: rendering a short conversation takes more than {template_trial.MEMORY >> 20} MiB")


PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"


def character_tokenizer(alphabet: Iterable[str], *, bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which each character of `alphabet` is one token.

    Ids: `<pad>` 0, `<eos>` 1, `<bos>` 2 if `bos` is true (it is then prepended to every text), followed by the
    characters in the given order. There is no unknown token: encoding any other character raises. Decoding is exact.
    Saves and loads like any Hugging Face tokenizer. Raises a `DataError` for an empty alphabet or repeated characters.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = list(alphabet)
    if not characters or any(len(c) != 1 for c in characters) or len(set(characters)) != len(characters):
        raise DataError(f"the alphabet must be one or more distinct single characters; received {characters!r}")
    names = [PAD, EOS, *([BOS] if bos else []), *characters]
    tokenizer: Any = Tokenizer(models.WordLevel({token: index for index, token in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 2)])
    special = {"pad_token": PAD, "eos_token": EOS, **({"bos_token": BOS} if bos else {})}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def load_tokenizer(
    name: str, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or hub repository; without a pad token, it pads with end-of-sequence.

    `chat_template` (see `read_chat_template`) replaces the tokenizer's own. A name that looks like a path is never
    looked up on the hub, and a hub that does not answer is an error within seconds. Raises a `DataError` if no
    tokenizer can be loaded, or if it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    hub.announce_hub_request(name)
    if not hub.is_path(name):
        hub.require_available(name)
    try:
        with hub.quiet_hub():
            loaded: Any = AutoTokenizer.from_pretrained(
                name, trust_remote_code=trust_remote_code, local_files_only=hub.local_files_only(name)
            )
            loaded("")
            if loaded.vocab_size <= 1:  # transformers makes an empty tokenizer from a config.json alone
                raise ValueError("its vocabulary is empty")
    except BaseException as error:  # files that make no sense raise anything; panics of tokenizers are not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {shorten(str(error), 300)}"
        unreachable = "" if hub.is_path(name) else f", or the hub cannot be reached ({reason})"
        files = f", or its tokenizer.json is invalid ({reason})" if os.path.isdir(name) else ""
        raise DataError(
            f"no tokenizer can be loaded from {name!r}: there is no such model directory here, or it lacks the "
            f"tokenizer's files{files}{unreachable}. Check policy.model_name and policy.tokenizer_name"
        ) from error
    if loaded.eos_token_id is None:
        raise DataError(
            f"the tokenizer of {name!r} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    if loaded.pad_token_id is None:
        loaded.pad_token = loaded.eos_token
    if chat_template is not None:
        loaded.chat_template = read_chat_template(chat_template)
    where = f"the chat template of {name!r}" if chat_template is None else "policy.chat_template"
    templates = loaded.chat_template or ()
    for template in templates.values() if isinstance(templates, dict) else [templates] if templates else ():
        if not isinstance(template, str):
            raise DataError(f"{where} must be text, not {template!r:.80}")
        check_chat_template(template, where)
    return cast("PreTrainedTokenizerBase", loaded)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 32 hexadecimal digits that are equal exactly if two tokenizers encode conversations to the same ids.

    Covers vocabulary, rules, special tokens and chat template, but not the settings of padding and truncation.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules = {name: rules[name] for name in sorted(rules.keys() - {"padding", "truncation"})}
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": sorted(tokenizer.get_vocab().items())}
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template]
    text = json.dumps([rules, special], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
