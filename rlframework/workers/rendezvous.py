"""Where the workers of a group find each other to form a process group, heard by nobody else.

`init_method="tcp://..."` has rank 0 listen at all addresses of its machine. Here it listens at the one in its context:
loopback, or on several machines the address that its node has in the cluster.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from rlframework.interfaces.worker_group import WorkerContext

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_WAITING = 1024
"""Connections that may wait until they are taken: all ranks come at once."""


def process_store(context: WorkerContext) -> TCPStore:
    """The store for `torch.distributed.init_process_group(store=..., rank=..., world_size=...)`.

    Rank 0 serves it at `context.master_addr` and `master_port`, the others connect, for `context.deadline` seconds.
    """
    from torch._C._distributed_c10d import TCPStore

    address, port = context.master_addr, context.master_port
    served = None
    if context.rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        served = socket.create_server((address, port), family=family, backlog=_WAITING).detach()  # the store closes it
    else:
        _wait_until_served(address, port, context.deadline)
    return TCPStore(
        address,
        port,
        world_size=context.world_size,
        is_master=context.rank == 0,
        timeout=timedelta(seconds=context.deadline),
        wait_for_workers=False,
        master_listen_fd=served,
    )


def _wait_until_served(address: str, port: int, seconds: float) -> None:
    """Until somebody listens there; a `TimeoutError` when time is over.

    The store would ask once, and where rank 0 is not up yet sleep for up to a second before it asks again.
    """
    until, pause = time.monotonic() + seconds, 0.002
    while (left := until - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), left).close()
            return
        except OSError:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.05)
    raise TimeoutError(
        f"rank 0 did not serve the process group at {address}:{port} within {seconds:g} s (deadlines.call): did it "
        "fail, or is that address out of reach from here?"
    )
