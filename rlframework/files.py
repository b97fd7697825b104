"""Writing so that a file or a directory is there whole or not at all, whenever the process ends."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlframework.errors import UserError

_NO_SPACE = {
    errno.ENOSPC: "there is no space left on the device; free some, or write somewhere else",
    errno.EDQUOT: "the disk quota is used up; free some space, or write somewhere else",
}
_REASONS = {
    **_NO_SPACE,
    errno.EACCES: "permission denied; choose a place that you may write to",
    errno.EPERM: "permission denied; choose a place that you may write to",
    errno.EROFS: "the file system is read-only; choose a place that you may write to",
    errno.ENOTDIR: "a part of the path is a file, not a directory; choose another place",
    errno.EEXIST: "a part of the path is a file, not a directory; choose another place",
    errno.ENOENT: "a directory of the path is missing and cannot be made; choose another place",
    errno.ENAMETOOLONG: "a name in the path is too long; choose a shorter one",
    errno.EISDIR: "it is a directory",
}


def write_atomically(path: str | Path, data: str | bytes) -> None:
    """Write `data` (text as UTF-8) to `path`: readers see the old content or the new, never a part.

    Makes the directories above `path`. A full disk or a missing permission is a `UserError`; the old file is then as
    before.
    """
    path = Path(path)
    content = data.encode("utf-8") if isinstance(data, str) else data
    new = _beside(path, "tmp")
    with _told(path, _REASONS):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with new.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def check_writable(path: str | Path) -> None:
    """`UserError` where a directory `path` could not be made, or could not be written to; nothing is left behind.

    It is tried, in the nearest directory that is there: what the system says about permissions does not hold for root,
    network shares and pseudo file systems.
    """
    path = Path(path).absolute()
    with _told(path, _REASONS):
        place = next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())
        probe = _beside(place / path.name, "tmp")
        probe.mkdir()
        probe.rmdir()


@contextmanager
def replacing_directory(path: str | Path) -> Iterator[Path]:
    """Yield an empty directory beside `path` that becomes `path` when the block ends without an error.

    A directory that was at `path` is moved aside for the swap and removed after it; when the block fails it stays, and
    the new one is removed. A full disk or a missing permission is a `UserError`.
    """
    replacement = Replacement(path)
    try:
        with telling_no_space(path):
            yield replacement.folder
        replacement.commit()
    except BaseException:
        replacement.abandon()
        raise


class Replacement:
    """`replacing_directory` where beginning and end are calls of their own: `folder` is written to, then `commit`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = _beside(self.path, "tmp")
        with _told(self.path, _REASONS):
            self.folder.mkdir(parents=True)

    def commit(self) -> None:
        """Make the directory last through a power failure, and put it where `path` is."""
        with _told(self.path, _REASONS):
            for directory, _, names in os.walk(self.folder, topdown=False):
                for name in names:
                    _sync(Path(directory, name))
                _sync(Path(directory))
            _swap(self.folder, self.path)
            _sync(self.path.parent)

    def abandon(self) -> None:
        """Remove what was written; what was at `path` stays."""
        shutil.rmtree(self.folder, ignore_errors=True)


def telling_no_space(path: str | Path) -> AbstractContextManager[None]:
    """Inside, a full disk is a `UserError` that names `path`."""
    return _told(Path(path), _NO_SPACE)


@contextmanager
def alone_in(folder: str | Path) -> Iterator[None]:
    """Hold `folder`, which is made, for this process while the block runs; a `UserError` where another one does.

    The lock ends with the process, however that ends. Left out: Windows, and network shares without locks.
    """
    path = Path(folder) / ".lock"
    with _told(path, _REASONS):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with path.open("a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not a Unix: nothing is held
            pass
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise UserError(
                f"another process is running in {str(folder)!r} now; wait for it, end it, or take another output_dir"
            ) from error
        yield


def remove_directory(path: str | Path) -> None:
    """Remove a directory so that under its own name there is all of it or nothing."""
    aside = _beside(Path(path), "old")
    os.rename(path, aside)
    shutil.rmtree(aside)


def remove_leftovers(folder: str | Path) -> None:
    """Remove what killed processes left of directories that they were writing or removing in `folder`."""
    for path in Path(folder).glob(".*"):
        if path.suffix in (".tmp", ".old") and path.is_dir():
            shutil.rmtree(path)


def _beside(path: Path, suffix: str) -> Path:
    """A name in the same directory that nobody else uses."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex[:12]}.{suffix}"


def _swap(new: Path, path: Path) -> None:
    """Put `new` where `path` is. When that fails after the old one was moved aside, the old one goes back."""
    if not path.exists() and not path.is_symlink():
        os.rename(new, path)
        return
    aside = _beside(path, "old")
    os.rename(path, aside)
    try:
        os.rename(new, path)
    except BaseException:
        os.rename(aside, path)
        raise
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    else:
        aside.unlink()


@contextmanager
def _told(path: Path, reasons: Mapping[int, str]) -> Iterator[None]:
    """Turn the operating system's refusals to write `path` into a `UserError` that says what to do."""
    try:
        yield
    except OSError as error:
        reason = reasons.get(error.errno or 0)
        if reason is None:
            raise
        raise UserError(f"cannot write {path}: {reason}") from error


def _sync(path: Path) -> None:
    """Make what was written to a file, or the renames in a directory, last through a power failure."""
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
