"""Atomic writes of files and directories: readers see all of it or nothing, whenever the process ends.

Within `writing`, an error of the disk is a `WriteError` that names the path, whichever library reports it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlframework.base.errors import RLFrameworkError, UserError, WriteError

_FREE_SPACE = "free some space, or choose another location"
_DISK = {
    errno.ENOSPC: f"there is no space left on the device; {_FREE_SPACE}",
    errno.EDQUOT: f"the disk quota is exceeded; {_FREE_SPACE}",
    errno.EFBIG: "the file would be larger than allowed; raise the limit of the process (ulimit -f), or choose another "
    "file system",
    errno.EROFS: "the file system is read-only; choose a writable location",
    errno.EIO: "the device reports an input/output error; check the disk, or choose another location",
    errno.ESTALE: "the network file system lost the file; check the mount, or choose another location",
}
"""Reason and remedy, by the number of an error that only a disk causes."""
_REASONS = {
    **_DISK,
    errno.EACCES: "permission denied; choose a writable location",
    errno.EPERM: "permission denied; choose a writable location",
    errno.ENOTDIR: "a component of the path is a file, not a directory; choose another location",
    errno.EEXIST: "a component of the path is a file, not a directory; choose another location",
    errno.ENOENT: "its directory was removed, or cannot be created; choose another location",
    errno.ENAMETOOLONG: "a name in the path is too long; choose a shorter one",
    errno.EISDIR: "it is a directory; choose another name",
}
_TORCH_FAILED = re.compile(r"iostream error|PytorchStreamWriter|inline_container.*unexpected pos")
"""Matches the errors of torch's own writer, which does not say why it failed."""
_TEMPORARY = re.compile(r"(^|/)\.([^/]+)\.[0-9a-f]{12}\.(tmp|old)(?=/|$)")
_BYTES_SHOWN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

LOCK_FILE = ".lock"
"""The file that a process locks in the directory of its run; see `exclusive_directory`."""


def write_atomically(path: str | Path, data: str | bytes, *, private: bool = False) -> None:
    """Write `data` (text as UTF-8) to `path`: readers see either the old content or the new.

    Creates parent directories. A `private` file can be read by its owner only. A full disk or a missing permission is a
    `WriteError`, which leaves the old file unchanged.
    """
    path = Path(path)
    content = data.encode("utf-8") if isinstance(data, str) else data
    new = _beside(path, "tmp")
    with writing(path):
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
    try:
        with writing(path):
            probe = _beside(_existing(path) / path.name, "tmp")
            probe.mkdir()
            probe.rmdir()
    except WriteError as error:
        raise UserError(str(error)) from error


@contextmanager
def replacing_directory(path: str | Path) -> Iterator[Path]:
    """Yield an empty directory next to `path` that replaces `path` when the block ends without an error.

    An existing directory at `path` is moved aside for the swap and then removed. If the block fails, it is kept and the
    new one is removed. A full disk or a missing permission is a `WriteError`.
    """
    replacement = Replacement(path)
    try:
        with writing(path):
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
        with writing(self.path):
            self.folder.mkdir(parents=True)

    def commit(self) -> None:
        """Flush the directory to disk and move it to `path`."""
        self.flush()
        with writing(self.path):
            _swap(self.folder, self.path)
            _sync(self.path.parent)

    def flush(self) -> None:
        """Flush the directory to disk. Its files can be read by those who can read the directory.

        Some libraries, such as safetensors, write files that only their owner can read, whatever the umask.
        """
        with writing(self.path):
            allowed = self.folder.stat().st_mode & 0o666  # of a new directory: what the umask leaves
            for directory, _, names in os.walk(self.folder, topdown=False):
                for name in names:
                    _allow(Path(directory, name), allowed)
                    _sync(Path(directory, name))
                _sync(Path(directory))

    def abandon(self) -> None:
        """Remove what was written; an existing directory at `path` is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)


class AppendedFile:
    """A file to which bytes are appended at once, without a buffer.

    What a full disk does not take is kept, and comes first at the next call: the file always holds a prefix of what was
    written, and all of it once there is space again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._pending = path, bytearray()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def write(self, data: bytes = b"") -> None:
        """Append `data`. Raises a `WriteError` if the disk does not take all of it."""
        self._pending += data
        with writing(self.path):
            while self._pending:
                del self._pending[: self._file.write(self._pending)]

    def close(self) -> None:
        """Append what is left, and close the file."""
        with self._file:
            self.write()


def require_space(path: str | Path, size: int) -> None:
    """Raise a `WriteError` if fewer than `size` bytes are free where `path` would be written."""
    device = shutil.disk_usage(_existing(Path(path).absolute()))
    if device.total and device.free < size:  # some network file systems report a size of 0
        raise WriteError(
            f"cannot write {_final(path)}: it takes at least {size:,} bytes, and {device.free:,} are free on the "
            f"device; {_FREE_SPACE}"
        )


@contextmanager
def writing(path: str | Path | None) -> Iterator[None]:
    """Turn an error of the disk within the context, which writes `path`, into a `WriteError` that says what to do.

    A missing file or permission counts only if it is at `path` or beside it, where temporary files are. None: whatever
    file the context writes, such as the standard output.
    """
    try:
        yield
    except RLFrameworkError:
        raise
    except BaseException as error:
        place = None if path is None else Path(path)
        reason = next((found for one in _errors_in(error) if (found := _reason(one, place))), None)
        if reason is None or isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        what = "a file or the output" if path is None else _final(path)
        raise WriteError(f"cannot write {what}: {reason}") from error


def _errors_in(error: BaseException) -> Iterator[BaseException]:
    """`error`, those of the ranks that an error of torch's distributed checkpoints contains, and their causes."""
    for failure in getattr(error, "failures", {}).values():
        yield from _errors_in(failure[0])
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _reason(error: BaseException, path: Path | None) -> str | None:
    """Why `path` cannot be written, if `error` says so; torch and libraries in Rust report the number in the text."""
    text = str(error)
    number = error.errno or 0 if isinstance(error, OSError) else 0
    for each in () if number else _REASONS:
        if re.search(rf"{re.escape(os.strerror(each))} \((os error )?{each}\)", text):
            number = each
    if not number and "Parent directory" in text:
        number = errno.ENOENT
    if number in _DISK or (number in _REASONS and path is not None and _is_beside(error, path)):
        return _REASONS[number] + (_sizes(path) if number in _BYTES_SHOWN else "")
    if path is not None and isinstance(error, RuntimeError) and _TORCH_FAILED.search(text):
        first_line = text.partition("\n")[0]
        return f"torch reports {first_line!r}, as on a full disk; {_FREE_SPACE}{_sizes(path)}"
    return None


def _is_beside(error: BaseException, path: Path) -> bool:
    """Whether `error` is about a file in the directory of `path`, or about a directory above it."""
    given = getattr(error, "filename", None)
    if isinstance(given, str | bytes):
        place = Path(os.fsdecode(given))
        above = path.parent.is_relative_to(place) or place.parent == _existing(path)
        return above or place.is_relative_to(path.parent)
    names_none = not isinstance(error, OSError) and "/" not in str(error)  # as the tokenizers library
    return names_none or str(path.parent) in str(error) or not os.access(path.parent, os.W_OK)


def _sizes(path: Path | None) -> str:
    if path is None:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f", and a file may have {limit:,}"
    return f" ({shutil.disk_usage(_existing(path.absolute())).free:,} bytes are free{limited})"


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def _final(path: str | Path) -> str:
    """The path without the temporary names that `Replacement` gives to directories while they are written."""
    return _TEMPORARY.sub(r"\1\2", str(path))


@contextmanager
def exclusive_directory(folder: str | Path) -> Iterator[None]:
    """Create `folder` and lock it for this process; raise `UserError` if another process holds the lock.

    The lock is released when the process ends, even by a crash. Not supported: Windows, and network shares without
    locks.
    """
    path = Path(folder) / LOCK_FILE
    with writing(path):
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
    with writing(path):
        os.rename(path, aside)
        _remove(aside)


def remove_temporary(folder: str | Path, name: str = "") -> None:
    """Remove what killed processes left in `folder`, and in its folders, while writing or removing others.

    With `name`, only what they left of `folder / name`.
    """
    for path in [*Path(folder).glob(".*"), *([] if name else Path(folder).glob("*/.*"))]:
        if (match := _TEMPORARY.fullmatch(path.name)) and name in ("", match[2]):
            with writing(path):
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file, a directory, or a link without what it leads to."""
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


def _allow(path: Path, mode: int) -> None:
    """Add the bits of `mode` to the permissions of a file."""
    given = path.lstat().st_mode
    if stat.S_ISREG(given) and given & mode != mode:
        path.chmod(stat.S_IMODE(given) | mode)


def _sync(path: Path) -> None:
    """Flush a file, or the renames in a directory, to disk."""
    if not path.is_symlink():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
