"""An asynchronous run leaves nothing among temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rlframework.plugins.configure import config_yaml

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder whose path is short enough for the sockets below it."""
    with TemporaryDirectory(prefix="rlf-", dir="/tmp") as path:
        yield Path(path)


def test_an_asynchronous_run_leaves_nothing_in_tmpdir(run_config: Any, tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "run.yaml"
    options = ("algorithm.num_steps=2", "algorithm.async={max_staleness: 1}", "generation.workers.group=processes")
    config = run_config("grpo", *options, "algorithm.validation={at_start: false, at_end: false, every: 0}")
    file.write_text(config_yaml(config))
    command = [sys.executable, "-m", "rlframework.cli", "train", str(file)]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    ended = subprocess.run(command, env=environment, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert os.listdir(folder) == []
