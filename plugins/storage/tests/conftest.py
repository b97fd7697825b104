"""A remote folder in memory that fails on request, and checkpoints of three files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from faulty_files import FaultyFiles
from s3_server import S3Server, point_at

from rlframework_storage.remote_folder import RemoteFolder


@pytest.fixture(autouse=True)
def no_files() -> None:
    """All file systems in memory share their files, which are those of other tests too."""
    FaultyFiles.store.clear()
    FaultyFiles.pseudo_dirs[:] = [""]


@pytest.fixture
def files():
    return FaultyFiles()


@pytest.fixture
def remote(files) -> RemoteFolder:
    return RemoteFolder("/bucket/run", files)


@pytest.fixture
def make_checkpoint(tmp_path: Path):
    """`make_checkpoint(step, fill)`: a folder with files of 10, 20 and 30 bytes."""

    def make(step: int, fill: bytes = b"a") -> Path:
        folder = tmp_path / "local" / f"step-{step:06d}"
        for name, size in (("run.json", 10), ("model/weights", 20), ("optimizer/moments", 30)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(fill * size)
        return folder

    return make


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
