"""Messages appear on stderr as plain text, unless the program has configured logging itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from rlframework.logs import log_to_stderr
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
