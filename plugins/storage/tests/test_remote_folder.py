"""Addresses that fsspec opens, and those that are errors."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from faulty_files import FaultyFiles

from rlframework.base.errors import ConfigError
from rlframework_storage.remote_folder import RemoteFolder, StorageError
from rlframework_storage.transfer import complete_checkpoints, fetch, send


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_folder_by_its_address(protocol, tmp_path: Path, make_checkpoint):
    remote = RemoteFolder(f"{protocol}://{tmp_path}/far/run/")
    send(make_checkpoint(4), remote)
    found = complete_checkpoints(remote)
    assert list(found) == ["step-000004"]
    fetch(remote, "step-000004", found["step-000004"], tmp_path / "fetched")
    assert (tmp_path / "fetched" / "model" / "weights").read_bytes() == b"a" * 20
    assert remote.sizes("step-000009") == {}
    remote.delete("step-000009/nothing")


def test_a_package_that_is_missing_is_named(monkeypatch):
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"the package for s3:// is not installed; install it: pip install s3fs"):
        RemoteFolder("s3://bucket/run")


def test_a_protocol_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"checkpoints.upload: nosuch://x cannot be opened: .*nosuch"):
        RemoteFolder("nosuch://x")


def test_a_bucket_that_does_not_exist_is_not_created(make_checkpoint):
    class Buckets(FaultyFiles):
        """Like s3fs: `makedirs` creates the bucket, and files cannot be written without one."""

        protocol = ("s3", "s3a")
        buckets = frozenset({"bucket"})

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            self.buckets |= {path.strip("/").partition("/")[0]}

        def pipe_file(self, path: str, value: bytes, **options: object) -> None:
            if path.strip("/").partition("/")[0] not in self.buckets:
                raise FileNotFoundError("the bucket does not exist")
            super().pipe_file(path, value, **options)

    files = Buckets()
    with pytest.raises(StorageError, match=r"cannot write /buckte/run/step-000001/.*the bucket does not exist"):
        send(make_checkpoint(1), RemoteFolder("/buckte/run", files))
    assert files.buckets == {"bucket"}
    remote = RemoteFolder("/bucket/run", files)
    send(make_checkpoint(1), remote)
    assert list(complete_checkpoints(remote)) == ["step-000001"]
