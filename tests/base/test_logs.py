"""Messages appear on stderr as plain text, unless the program has configured logging itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlframework.base.logs import printable

PROGRAM = """
import logging, sys
from rlframework.base.logs import log_to_stderr
{before}
for _ in range(2):
    log_to_stderr()
{after}
logging.getLogger("rlframework.part").info("50%% of %s", "it")
"""


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("", "", "50% of it\n"),
        ("", "logging.warning('from a library')", "WARNING:root:from a library\n50% of it\n"),
        ("logging.basicConfig(level='INFO')", "", "INFO:rlframework.part:50% of it\n"),
        ("logging.getLogger('rlframework').addHandler(logging.NullHandler())", "", ""),
    ],
    ids=["unconfigured", "library", "root", "logger"],
)
def test_messages_go_to_stderr_unless_the_program_configures_logging(before: str, after: str, shown: str) -> None:
    program = PROGRAM.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == shown


def test_messages_have_no_secrets_and_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "from-outside")
    program = PROGRAM.replace("50%% of", "50%% \\x1b[2J \\u202e from-outside of").format(before="", after="")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "50% \\u001b[2J \\u202e *** of it\n"


@pytest.mark.slow
@given(st.text())
def test_printable_json_is_the_same_value(text: str) -> None:
    shown = printable(json.dumps(text, ensure_ascii=False))
    assert json.loads(shown) == text
    shown.encode()  # it can be sent as UTF-8
    assert printable(shown) == shown


def test_text_and_line_breaks_are_printed_as_they_are() -> None:
    assert printable("é漢🙂 שלום\n\t") == "é漢🙂 שלום\n\t"
    assert printable("\x1b]0;t\x07\r\x9b\ud800") == "\\u001b]0;t\\u0007\\u000d\\u009b\\ud800"
