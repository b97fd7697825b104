"""Addresses that fsspec opens, and those that are errors."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from rlframework.errors import ConfigError
from rlframework.storage.remote_folder import RemoteFolder
from rlframework.storage.transfer import complete_checkpoints, fetch, send


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
    def missing(*_: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"the package for s3:// is not installed; install it: pip install s3fs"):
        RemoteFolder("s3://bucket/run")


def test_a_protocol_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"checkpoints.upload: nosuch://x cannot be opened: .*nosuch"):
        RemoteFolder("nosuch://x")
