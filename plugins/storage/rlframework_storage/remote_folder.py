"""A folder in object storage, or in any other file system that fsspec opens by its address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.base.secrets import hide_in_text

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "oci": "ocifs",
    "hf": "huggingface_hub",
}
"""The package that opens addresses with a protocol."""


_TRIAL = "write-test"
"""The file that `check` writes and deletes."""


class StorageError(RLFrameworkError):
    """Files cannot be sent to, or fetched from, object storage. The message names the address."""


class RemoteFolder:
    """The folder at `url`, such as `s3://bucket/run-7` or `file:///mnt/share/run`.

    Credentials are those that fsspec finds, in the environment or in the files of the service. `fs` is a file system of
    fsspec that is already open, and `url` then the path in it. Names are relative to the folder, with `/`. Raises
    `ConfigError` if the address cannot be opened; every error of a method is a `StorageError`.
    """

    def __init__(self, url: str, fs: Any = None) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = (fs, self.url) if fs is not None else _open(self.url)
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._has_folders = not set(protocols) & _PACKAGES.keys()

    def check(self) -> None:
        """Write and delete a small file; a bucket that does not exist, for example, can be listed: it seems empty."""
        try:
            self.write(_TRIAL, b"rlframework deletes this file at once\n")
            self.delete(_TRIAL)
        except StorageError as error:
            raise StorageError(
                f"checkpoints.upload: {error}. The bucket must exist, and the credentials must allow to list, read, "
                "write and delete in it"
            ) from error

    def address(self, name: str) -> str:
        """The address of a file, for messages."""
        return hide_in_text(f"{self.url}/{name}")

    def sizes(self, under: str = "") -> dict[str, int]:
        """The bytes of each file of the folder, or of its subfolder `under`, by name."""
        with self._errors("list", under):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(under) if under else self._root, detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._root.rstrip("/")) + 1
            return {path[start:]: int(facts["size"]) for path, facts in found.items()}

    def read(self, name: str) -> bytes | None:
        """The contents of a small file; None if it does not exist."""
        with self._errors("read", name):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self._errors("write", name):
            self._make_parent(name)
            self._fs.pipe_file(self._path(name), content)

    def send(self, name: str, source: Path) -> None:
        """Copy the local file `source` to `name`."""
        with self._errors("write", name):
            self._make_parent(name)
            self._fs.put_file(str(source), self._path(name))

    def fetch(self, name: str, destination: Path) -> None:
        """Copy the file `name` to the local path `destination`, whose folder exists."""
        with self._errors("read", name):
            self._fs.get_file(self._path(name), str(destination))

    def delete(self, name: str) -> None:
        """Delete a file; one that does not exist is not an error."""
        with self._errors("delete", name):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def delete_empty(self, name: str) -> None:
        """Delete the subfolder `name` if no file is in it; object storage has no folders."""
        if not self._has_folders:
            return
        with self._errors("delete", name):
            self._fs.invalidate_cache()
            if self._fs.isdir(self._path(name)) and not self._fs.find(self._path(name)):
                self._fs.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _make_parent(self, name: str) -> None:
        if self._has_folders:  # in object storage it would create the bucket, also one whose name is misspelt
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _errors(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # each file system has its own classes
            reason = hide_in_text(f"{type(error).__name__}: {error}")
            raise StorageError(f"cannot {action} {self.address(name)}: {reason}") from error


def _open(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    try:
        # fsspec would return the file system of an earlier run in this process, with the credentials of then
        fs, root = url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        remedy = f"install it: pip install {package}" if package else str(error)
        raise ConfigError(f"checkpoints.upload: the package for {protocol}:// is not installed; {remedy}") from error
    except Exception as error:
        reason = hide_in_text(f"{type(error).__name__}: {error}")
        raise ConfigError(f"checkpoints.upload: {hide_in_text(url)} cannot be opened: {reason}") from error
    return fs, str(root)
