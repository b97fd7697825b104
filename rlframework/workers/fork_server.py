"""Prepares the process that workers are forked from, which imports this module last.

It freezes the garbage collector: otherwise the first collection in a worker would write to every object created by the
imports, and so copy memory that all workers share until it is written to. And it removes its socket when it ends, which
multiprocessing leaves to the driver, and a killed driver leaves behind.

It ignores SIGTERM, as it ignores SIGINT: one that is sent to all processes of a group, as by `timeout` or a job
scheduler, is handled by the driver, whose workers end with the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


def remove_socket(server_pid: int) -> None:
    """Remove the socket and its folder, unless this process was forked from the server."""
    if os.getpid() != server_pid:
        return
    server: Any = forkserver._forkserver
    address = Path(server._forkserver_address)
    with contextlib.suppress(OSError):  # the driver has removed them, or the folder has other files
        address.unlink()
        address.parent.rmdir()


atexit.register(remove_socket, os.getpid())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gc.collect()
gc.freeze()
