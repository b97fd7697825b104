"""`--log-level debug` shows the boundaries of processes and threads in order; without it none of them is shown."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlframework.base.errors import ConfigError
from rlframework.base.logs import LEVEL_VARIABLE, debug_span, set_log_level
from rlframework.workers.machine import worker_environment

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


def stderr_of(command: list[str], level: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != LEVEL_VARIABLE}
    environment |= {LEVEL_VARIABLE: level} if level else {}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1] / "workers"), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
    return done.stderr


def assert_in_order(text: str, *patterns: str) -> None:
    place = 0
    for pattern in patterns:
        match = re.compile(pattern).search(text, place)
        assert match, f"{pattern!r} is not after character {place} of\n{text}"
        place = match.end()


@pytest.mark.slow
def test_the_calls_of_a_worker_process_are_shown_in_both_processes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(GROUP)
    text = stderr_of([str(tmp_path / "program.py")], "debug")
    lines = [match.groups() for match in map(LINE.match, text.splitlines()) if match]
    worker = next(process for process, _, message in lines if message == "worker-0: serving calls")
    of_worker = "\n".join(message for process, _, message in lines if process == worker)
    assert_in_order(
        of_worker,
        "serving calls",
        r"rank 0: constructing probe_workers:Probe: begins",
        r"rank 0: constructing probe_workers:Probe: ends after \d+\.\d{3} s",
        r"rank 0: echo: begins",
        r"rank 0: echo: ends after",
        r"rank 0: fail: begins",
        r"rank 0: fail: raises \w+ after",
    )
    of_driver = "\n".join(message for process, _, message in lines if process != worker)
    assert_in_order(
        of_driver,
        f"worker-0: started as process {worker}",
        "calling echo on rank 0",
        r"waiting at most .* for echo of rank 0: begins",
        r"waiting at most .* for echo of rank 0: ends after",
        "calling fail on rank 0",
        "ending the processes of 1 workers",
        f"worker-0: killing process {worker}",
    )
    assert "a-value" not in text
    assert LINE.search(stderr_of([str(tmp_path / "program.py")], None)) is None


@pytest.mark.slow
@pytest.mark.parametrize("shown", [True, False], ids=["debug", "default"])
def test_the_threads_and_refits_of_an_asynchronous_run(tiny_llama: Path, tmp_path: Path, shown: bool) -> None:
    values = {
        "output_dir": str(tmp_path / "run"),
        "device": "cpu",
        "algorithm": {"name": "grpo", "num_steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4},
        "environment": {"name": "addition", "digits": 1},
        "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 8},
        "generation": {"max_new_tokens": 3, "workers": {"group": "processes"}},
        "observers": {"console": False, "tensorboard": False, "curve": False},
    }
    values["algorithm"]["async"] = {"max_staleness": 1}  # type: ignore[index]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    option = ["--log-level", "debug"] if shown else []
    text = stderr_of(["-m", "rlframework.cli", *option, "train", str(tmp_path / "run.yaml")], None)
    if not shown:
        assert not any(LINE.match(line) for line in text.splitlines())
        return
    assert_in_order(
        text,
        "generation engine 0: starting in worker group processes: begins",
        "worker-0: serving calls",  # a worker that inherits the level
        "generation engine 0: starting in worker group processes: ends",
        "refit: begins",
        "refit: asking the trainer and 1 engines for their state",
        r"refit: sending the weights of version \d+ by \w+: begins",
        "attempt of update_weights_from_.*: begins",
        r"refit: sending the weights of version \d+ by \w+: ends",
        "refit: comparing the checksums",
        "refit: probing the engines: ends",
        "refit: ends",
        "rollouts: starting the thread",
        "episodes: starting the thread",
        "step 1: waiting for its groups: ends",
        "step 1: stopping generation.*: ends",
        "rollouts: their thread ends; raised: nothing",
        "generation engine 0: shutting down: ends",
    )


def test_workers_get_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "info")
    assert worker_environment(1)[LEVEL_VARIABLE] == "info"
    set_log_level("Debug")
    assert worker_environment(1)[LEVEL_VARIABLE] == "debug"


def test_an_unknown_level_is_an_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "warning")
    with pytest.raises(ConfigError, match=r"'loud'.*debug, info, warning, error"):
        set_log_level("loud")
    assert os.environ[LEVEL_VARIABLE] == "warning"


@pytest.mark.parametrize(("level", "lines"), [("debug", 2), ("info", 0)])
def test_a_span_names_the_class_of_an_exception_and_not_its_text(
    caplog: pytest.LogCaptureFixture, level: str, lines: int
) -> None:
    logger = logging.getLogger("rlframework.tests")
    caplog.set_level(level.upper(), "rlframework.tests")
    with pytest.raises(ValueError, match="text"), debug_span(logger, "rank %d", 3):
        raise ValueError("text")
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == lines
    assert lines == 0 or re.fullmatch(r"rank 3: raises ValueError after \d+\.\d{3} s", shown[1])
