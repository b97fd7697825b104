"""Atomic writes of files and directories: readers see all of it or nothing, whenever the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlframework.errors import UserError

_NO_SPACE = {
    errno.ENOSPC: "there is no space left on the device; free some space, or choose another location",
    errno.EDQUOT: "the disk quota is exceeded; free some space, or choose another location",
}
_REASONS = {
    **_NO_SPACE,
    errno.EACCES: "permission denied; choose a writable location",
    errno.EPERM: "permission denied; choose a writable location",
    errno.EROFS: "the file system is read-only; choose a writable location",
    errno.ENOTDIR: "a component of the path is a file, not a directory; choose another location",
    errno.EEXIST: "a component of the path is a file, not a directory; choose another location",
    errno.ENOENT: "a parent directory is missing and cannot be created; choose another location",
    errno.ENAMETOOLONG: "a name in the path is too long; choose a shorter one",
    errno.EISDIR: "it is a directory; choose another name",
}

LOCK_FILE = ".lock"
"""The file that a process locks in the directory of its run; see `exclusive_directory`."""


def write_atomically(path: str | Path, data: str | bytes, *, private: bool = False) -> None:
    """Write `data` (text as UTF-8) to `path`: readers see either the old content or the new.

    Creates parent directories. A `private` file can be read by its owner only. A full disk or a missing permission is a
    `UserError`, which leaves the old file unchanged.
    """
    path = Path(path)
    content = data.encode("utf-8") if isinstance(data, str) else data
    new = _beside(path, "tmp")
    with _user_errors(path, _REASONS):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            mode = 0o600 if private else 0o666  # from the start, or a reader could open it before
            with open(new, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def check_writable(path: str | Path) -> None:
    """Raise `UserError` if a directory `path` could not be created or written to; nothing is left behind.

    This is tested by writing to the nearest existing directory, because reported permissions are not reliable for root,
    network shares and pseudo file systems.
    """
    path = Path(path).absolute()
    with _user_errors(path, _REASONS):
        place = next(place for place in (path, *path.parents) if os.path.lexists(place))
        probe = _beside(place / path.name, "tmp")
        probe.mkdir()
        probe.rmdir()


def check_new_folder(folder: Path, given: str) -> None:
    """Raise `UserError` if `folder` is not writable or not empty; the message begins with `given`."""
    try:
        check_writable(folder)
    except UserError as error:
        raise UserError(f"{given}: {error}") from error
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{given}: the folder is not empty, and nothing is overwritten. Give another folder, or empty this one"
        )


@contextmanager
def replacing_directory(path: str | Path) -> Iterator[Path]:
    """Yield an empty directory next to `path` that replaces `path` when the block ends without an error.

    An existing directory at `path` is moved aside for the swap and then removed. If the block fails, it is kept and the
    new one is removed. A full disk or a missing permission is a `UserError`.
    """
    replacement = Replacement(path)
    try:
        with reporting_full_disk(path):
            yield replacement.folder
        replacement.commit()
    except BaseException:
        replacement.abandon()
        raise


class Replacement:
    """Like `replacing_directory`, with explicit calls: write to `folder`, then `commit` or `abandon`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = _beside(self.path, "tmp")
        with _user_errors(self.path, _REASONS):
            self.folder.mkdir(parents=True)

    def commit(self) -> None:
        """Flush the directory to disk and move it to `path`."""
        with _user_errors(self.path, _REASONS):
            for directory, _, names in os.walk(self.folder, topdown=False):
                for name in names:
                    _sync(Path(directory, name))
                _sync(Path(directory))
            _swap(self.folder, self.path)
            _sync(self.path.parent)

    def abandon(self) -> None:
        """Remove what was written; an existing directory at `path` is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)


def reporting_full_disk(path: str | Path) -> AbstractContextManager[None]:
    """Within the context, turn a full disk into a `UserError` that names `path`."""
    return _user_errors(Path(path), _NO_SPACE)


@contextmanager
def exclusive_directory(folder: str | Path) -> Iterator[None]:
    """Create `folder` and lock it for this process; raise `UserError` if another process holds the lock.

    The lock is released when the process ends, even by a crash. Not supported: Windows, and network shares without
    locks.
    """
    path = Path(folder) / LOCK_FILE
    with _user_errors(path, _REASONS):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise UserError(
                f"another process is running in {str(folder)!r}; wait for it, stop it, or choose another output_dir"
            ) from error
        yield


def remove_directory(path: str | Path) -> None:
    """Remove a directory atomically: it either exists in full under its name or not at all."""
    aside = _beside(Path(path), "old")
    os.rename(path, aside)
    _remove(aside)


def remove_temporary_directories(folder: str | Path) -> None:
    """Remove temporary directories that killed processes left in `folder` while writing or removing others."""
    for path in Path(folder).glob(".*"):
        if path.suffix in (".tmp", ".old") and path.is_dir():
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a directory, or a link without what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _beside(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex[:12]}.{suffix}"


def _swap(new: Path, path: Path) -> None:
    """Move `new` to `path`; if that fails after the old directory was moved aside, restore it."""
    if not os.path.lexists(path):
        os.rename(new, path)
        return
    aside = _beside(path, "old")
    os.rename(path, aside)
    try:
        os.rename(new, path)
    except BaseException:
        os.rename(aside, path)
        raise
    _remove(aside)


@contextmanager
def _user_errors(path: Path, reasons: Mapping[int, str]) -> Iterator[None]:
    """Turn operating-system errors while writing `path` into a `UserError` that says what to do."""
    try:
        yield
    except OSError as error:
        reason = reasons.get(error.errno or 0)
        if reason is None:
            raise
        raise UserError(f"cannot write {path}: {reason}") from error


def _sync(path: Path) -> None:
    """Flush a file, or the renames in a directory, to disk."""
    if not path.is_symlink():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
