"""`PrivateRay`: the folder and the processes of a Ray that this process starts, which end with it however it ends.

A watcher, a process of its own, waits until the driver ends or is killed; then it kills Ray's processes and removes the
folder. Ray's own processes are in the watcher's process group, which signals to the driver's group do not reach. The
workers, which Ray puts into groups of their own, inherit the environment variable `MARK` with the folder's path.

Driver and watcher own the folder: if both were killed, or the machine was restarted, the next start removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from select import select

import psutil

MARK = "RAY_RLFRAMEWORK_FOLDER"
"""Environment variable of each process of a private Ray: the path of its folder."""
_PREFIX = "rl-ray-"
_SOCKET = f"/{_PREFIX}12345678/r/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
_LONGEST_PARENT = (107 if sys.platform == "linux" else 103) - len(_SOCKET)
"""In characters: the path of a Unix socket has a fixed maximum length."""
_NOTICE = 1.0
"""Seconds after which a driver is found dead whose end of the pipe another process has kept open."""
_KILL_WAIT = 10.0


class PrivateRay:
    """A new folder with mode 0700 for a Ray that is about to be started, and the watcher that ends this Ray.

    `temp_dir` is what to start Ray with; its processes have to be started in the process group `group` and inherit the
    variable in `environment`. Folders are created in RAY_TMPDIR, or in the system's temporary directory; `OSError` or
    `WriteError` is raised where that fails. With `log_dir`, Ray's session is in a folder there, which stays.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        from rlframework.workers.temporary import TemporaryFolder  # the watcher runs this file without the package

        self._owned = TemporaryFolder(str(folders_parent()), _PREFIX, end_processes)
        self.folder = self._owned.path
        self.temp_dir = self.folder / "r"  # Ray opens it to all users, but not the folder around it
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
            self.temp_dir.symlink_to(Path(tempfile.mkdtemp(prefix=f"{_PREFIX}logs-", dir=log_dir.resolve())) / "r")
            self.temp_dir.resolve().mkdir()
        self.environment = {MARK: str(self.folder)}
        # a pipe of the driver that the watcher kept open would delay whoever reads the driver's output to its end
        self._watcher = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._owned.lock,),
            cwd="/",
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ},
            process_group=0,
        )
        self.group = self._watcher.pid

    def end(self) -> None:
        """Kill what still runs of this Ray, and remove its folder."""
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that even SIGKILL does not end is in the way
            self._watcher.wait(2 * _KILL_WAIT)
        if self.folder.exists():  # the watcher was killed
            end_processes(self.folder)
        self._owned.remove()


def folders_parent() -> Path:
    """Where folders are created: RAY_TMPDIR, or else the system's temporary directory if its path is short enough."""
    named = os.environ.get("RAY_TMPDIR")
    parent = Path(named or tempfile.gettempdir()).resolve()
    if len(str(parent)) <= _LONGEST_PARENT:
        parent.mkdir(parents=True, exist_ok=True)
        return parent
    if named:
        raise OSError(
            f"RAY_TMPDIR={named} is {len(str(parent))} characters long, but Ray's sockets need a path of at most "
            f"{_LONGEST_PARENT}: set it to a shorter one, for example a folder in /tmp"
        )
    return Path("/tmp")


def end_processes(folder: Path, group: int = -1) -> None:
    """Kill the processes of the Ray in `folder`, also those in the process group `group`, and remove the folder."""
    until = time.monotonic() + _KILL_WAIT
    quiet = 0
    while quiet < 2 and time.monotonic() < until:  # twice, because a process may just have started another one
        found = list(processes_of(folder, group))
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        quiet = 0 if found else quiet + 1
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path, group: int) -> Iterator[psutil.Process]:
    """The processes of the Ray in `folder`, and all others in the process group `group`; without this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            other = process.pid != os.getpid() and process.uids().real == os.getuid()
            alive = other and process.status() != psutil.STATUS_ZOMBIE
            if alive and (os.getpgid(process.pid) == group or process.environ().get(MARK) == str(folder)):
                yield process


def watch(driver: int, folder: Path) -> None:
    """Wait until the process `driver`, the parent of this one, closes standard input or is gone; then end its Ray."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == driver and not select([sys.stdin], [], [], _NOTICE)[0]:
        pass
    end_processes(folder, os.getpid())


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]))
