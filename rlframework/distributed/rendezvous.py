"""Where the workers of a group find each other to form a process group, heard by nobody else.

`init_method="tcp://..."` has rank 0 listen at all addresses of its machine. Here it listens at the one in its context:
loopback, or on several machines the address that its node has in the cluster.
"""

from __future__ import annotations

import socket
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
    return TCPStore(
        address,
        port,
        world_size=context.world_size,
        is_master=context.rank == 0,
        timeout=timedelta(seconds=context.deadline),
        wait_for_workers=False,
        master_listen_fd=served,
    )
