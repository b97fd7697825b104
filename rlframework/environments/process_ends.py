"""Run a program that ends with its parent: `python -P process_ends.py PROGRAM ARGUMENTS...` (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable


def end_together(descriptors: Iterable[int]) -> None:
    """End this process with its parent, and everything in its process group with this process. Linux only.

    The kernel does the first even while no thread of this process can run. A child, which closes its `descriptors`,
    does the second: it outlives this process long enough to kill the processes that were started in its group.
    """
    if sys.platform != "linux":
        return
    when_parent_ends, parent = 1, os.getpid()
    prctl = ctypes.CDLL(None).prctl
    prctl(when_parent_ends, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if os.fork() == 0:
        try:
            for descriptor in descriptors:
                os.close(descriptor)
            prctl(when_parent_ends, signal.SIGTERM)
            if os.getppid() == parent:
                signal.sigwait({signal.SIGTERM})
        finally:
            os.killpg(0, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    end_together((0, 1, 2))
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")
