"""A remote folder in memory that fails on request, and checkpoints of three files."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_files import FaultyFiles

from rlframework.storage.remote_folder import RemoteFolder


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
