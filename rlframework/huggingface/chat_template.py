"""Chat templates: reading the configured one, and checking that a template is valid and ends in time."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from rlframework.base.errors import DataError

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
