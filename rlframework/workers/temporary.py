"""`TemporaryFolder`: a folder that is removed when its owner ends, or by the next owner if the process was killed.

An owner holds a lock on its folder for as long as it lives. A worker group has one, because libraries leave files in
TMPDIR when the processes of workers are killed.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rlframework.base.files import writing

PREFIX = "rlf-workers-"
_RANDOM = "[a-z0-9_]" * 8
"""Matches the end of a name that `tempfile.mkdtemp` has made."""


class TemporaryFolder:
    """A new folder in `parent` (default: the system's for temporary files) that only this user can read.

    Calls `clear` with each abandoned folder there whose name starts with `prefix`: nobody has locked it. A process that
    inherits the descriptor `lock` owns the folder, too.
    """

    def __init__(
        self, parent: str | None = None, prefix: str = PREFIX, clear: Callable[[Path], object] = shutil.rmtree
    ) -> None:
        place = Path(parent or tempfile.gettempdir())
        with writing(place / prefix):
            self.path, self.lock = _locked_folder(place, prefix)
        for path in place.glob(f"{prefix}{_RANDOM}"):
            with suppress(OSError):  # it is in use, or another user's
                _clear_abandoned(path, clear)

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """`given`, with temporary files in this folder, and compiled kernels where torch keeps them for later runs."""
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(_kernels()))
        return {"TORCHINDUCTOR_CACHE_DIR": cache, **given, "TMPDIR": str(self.path)}

    def remove(self) -> None:
        """Remove the folder, and torch's for compiled kernels if it has none. The processes that write have ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # it has kernels, or there is none: torch creates it when it is imported
            _kernels().rmdir()
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def _kernels() -> Path:
    """The folder where torch keeps compiled kernels, unless `TORCHINDUCTOR_CACHE_DIR` names another."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder with mode 0700, and a descriptor that locks it."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError, BlockingIOError):  # another process has taken it for an abandoned one
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists():
                    return path, folder
            except OSError:
                os.close(folder)
                raise
            os.close(folder)


def _clear_abandoned(path: Path, clear: Callable[[Path], object]) -> None:
    """Call `clear` if a process of this user has made the folder; an `OSError` if somebody holds its lock."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(folder)
        if found.st_uid == os.getuid() and found.st_mode & 0o777 == 0o700:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clear(path)
    finally:
        os.close(folder)
