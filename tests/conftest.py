"""A run small enough for tests: a tiny Llama, a simple task or one-digit addition, a few steps."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server, point_at
from short_runs import short_run


@pytest.fixture(scope="session")
def make_config(tiny_llama: Path):
    """`make_config(folder, algorithm, *overrides)`: like `run_config`, in `folder`, for fixtures of wider scope."""
    return partial(short_run, tiny_llama)


@pytest.fixture
def run_config(make_config: Any, tmp_path: Path):
    """`run_config(algorithm, *overrides)`: the configuration of a short run in `tmp_path`."""
    return partial(make_config, tmp_path)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory):
    """An S3 server on this machine; `s3` is what tests use."""
    missing = [name for name in ("s3fs", "moto", "flask_cors") if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install s3fs 'moto[s3]' flask flask-cors")
    server = S3Server(tmp_path_factory.mktemp("s3") / "log.txt")
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    """An S3 server with the empty bucket `bucket`, which `s3://` addresses use."""
    point_at(s3_server, monkeypatch)
    s3_server.reset("bucket")
    return s3_server
