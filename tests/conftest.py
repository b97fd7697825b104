"""A run small enough for tests: a tiny Llama, a simple task or one-digit addition, a few steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from short_runs import short_run


@pytest.fixture(scope="session")
def make_config(tiny_llama: Path):
    """`make_config(folder, algorithm, *overrides)`: like `run_config`, in `folder`, for fixtures of wider scope."""
    return partial(short_run, tiny_llama)


@pytest.fixture
def run_config(make_config: Any, tmp_path: Path):
    """`run_config(algorithm, *overrides)`: the configuration of a short run in `tmp_path`."""
    return partial(make_config, tmp_path)
