"""The temporary folder of a worker group: libraries leave files in TMPDIR when the processes of workers are killed.

It is removed when the group ends, or by the next group on this machine if the driver was killed: the driver holds a
lock on the folder for as long as it lives.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlframework.files import writing

PREFIX = "rlframework-"
_NEW = 60.0
"""Seconds within which a folder counts as new: its owner may not have locked it yet."""


class TemporaryFolder:
    """A new folder in `parent` (default: the system's for temporary files) that only this user can read."""

    def __init__(self, parent: str | None = None) -> None:
        place = Path(parent or tempfile.gettempdir())
        with writing(place / PREFIX):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in place.glob(f"{PREFIX}*"):
            with suppress(OSError):  # it is in use, or another user's
                _remove_abandoned(path)

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """`given`, with temporary files in this folder, and compiled kernels where torch keeps them for later runs."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container may run under a number without a name
            user = str(os.getuid())
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user}")
        return {"TORCHINDUCTOR_CACHE_DIR": cache, **given, "TMPDIR": str(self.path)}

    def remove(self) -> None:
        """Remove the folder. The processes that write to it have ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(path: Path) -> None:
    """Remove the folder if it is this user's and nobody holds its lock; an `OSError` otherwise."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(folder)
        if found.st_uid == os.getuid() and time.time() - found.st_mtime > _NEW:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(folder)
