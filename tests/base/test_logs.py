"""Messages: plain text on stderr unless the program configures logging, without secrets; `--log-level debug`."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlframework.base.errors import ConfigError
from rlframework.base.logs import LEVEL_VARIABLE, debug_span, printable, set_log_level
from rlframework.workers.machine import worker_environment

PROGRAM = """
import logging, sys
from rlframework.base.logs import log_to_stderr
{before}
for _ in range(2):
    log_to_stderr()
{after}
logging.getLogger("rlframework.part").info("50%% \\x1b[2J \\u202e of %s", "it from-outside")
"""
TEXT = "50% \\u001b[2J \\u202e of it ***\n"
LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (\d+) ([^:]+): (.*)")
GROUP = """
from rlframework.base.logs import log_to_stderr
from rlframework.config.sections import WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers.processes import ProcessWorkerGroup

if __name__ == "__main__":
    log_to_stderr()
    spec = WorkerSpec("probe_workers:Probe", {"word": "a-value"})
    config = WorkerGroupConfig(name="processes", num_workers=1)
    group = ProcessWorkerGroup(spec, config, sharding=NamedSharding([0], ["data_parallel"]), device="cpu")
    group.get_all_worker_results(group.run_all_workers_single_data("echo", text="a-value"))
    try:
        group.get_all_worker_results(group.run_all_workers_single_data("fail", kind="Plain"))
    except Exception:
        pass
"""


def stderr_of(program: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != LEVEL_VARIABLE} | variables
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stderr


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("", "", TEXT),
        ("", "logging.warning('from a library')", f"WARNING:root:from a library\n{TEXT}"),
        ("logging.basicConfig(level='INFO')", "", "INFO:rlframework.part:50% \x1b[2J \u202e of it from-outside\n"),
        ("logging.getLogger('rlframework').addHandler(logging.NullHandler())", "", ""),
    ],
    ids=["unconfigured", "library", "root", "logger"],
)
def test_messages_go_to_stderr_unless_the_program_configures_logging(before: str, after: str, shown: str) -> None:
    assert stderr_of(PROGRAM.format(before=before, after=after), HF_TOKEN="from-outside") == shown


def test_control_characters_and_halves_of_characters_are_escaped() -> None:
    assert printable("é漢🙂 שלום\n\t") == "é漢🙂 שלום\n\t"
    assert printable("\x1b]0;t\x07\r\x9b\ud800") == "\\u001b]0;t\\u0007\\u000d\\u009b\\ud800"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["debug", "info"])
def test_calls_of_a_worker_are_shown_in_both_processes(tmp_path: Path, level: str) -> None:
    (tmp_path / "program.py").write_text(GROUP)
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "workers"), os.environ.get("PYTHONPATH", "")])
    program = f"import runpy; runpy.run_path({str(tmp_path / 'program.py')!r}, run_name='__main__')"
    text = stderr_of(program, PYTHONPATH=paths, **{LEVEL_VARIABLE: level})
    lines = [match.groups() for match in map(LINE.match, text.splitlines()) if match]
    if level == "info":
        assert lines == []
        return
    worker = next(process for process, _, message in lines if message == "worker-0: serving calls")
    assert "a-value" not in text
    assert_in_order(
        "\n".join(message for process, _, message in lines if process == worker),
        "serving calls",
        r"rank 0: constructing probe_workers:Probe: begins",
        r"rank 0: constructing probe_workers:Probe: ends after \d+\.\d{3} s",
        r"rank 0: echo: begins",
        r"rank 0: echo: ends after",
        r"rank 0: fail: begins",
        r"rank 0: fail: raises \w+ after",
    )
    assert_in_order(
        "\n".join(message for process, _, message in lines if process != worker),
        f"worker-0: started as process {worker}",
        "calling echo on rank 0",
        r"waiting at most .* for echo of rank 0: begins",
        r"waiting at most .* for echo of rank 0: ends after",
        "calling fail on rank 0",
        "ending the processes of 1 workers",
        f"worker-0: killing process {worker}",
    )


def assert_in_order(text: str, *patterns: str) -> None:
    assert re.search(".*".join(f"(?:{pattern})" for pattern in patterns), text, re.DOTALL), text


def test_workers_get_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "info")
    assert worker_environment(1)[LEVEL_VARIABLE] == "info"
    set_log_level("Debug")
    assert worker_environment(1)[LEVEL_VARIABLE] == "debug"
    with pytest.raises(ConfigError, match=r"'loud'.*debug, info, warning, error"):
        set_log_level("loud")
    assert os.environ[LEVEL_VARIABLE] == "debug"


@pytest.mark.parametrize(("level", "lines"), [("debug", 2), ("info", 0)])
def test_a_span_names_the_class_of_an_exception_alone(caplog: pytest.LogCaptureFixture, level: str, lines: int) -> None:
    logger = logging.getLogger("rlframework.tests")
    caplog.set_level(level.upper(), "rlframework.tests")
    with pytest.raises(ValueError, match="text"), debug_span(logger, "rank %d", 3):
        raise ValueError("text")
    assert len(caplog.messages) == lines
    assert lines == 0 or re.fullmatch(r"rank 3: raises ValueError after \d+\.\d{3} s", caplog.messages[1])
