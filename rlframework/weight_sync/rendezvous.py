"""Forming the process group of a refit: its ranks meet at a store that rank 0 serves, and connect to each other.

gloo listens at a port of its own, and tells connections apart by the small number that each begins with. Another
program that connects in that moment and sends this number (0, for one) counts as a rank, without an error. So the ranks
try their connections, report the outcome in the store, and connect again at other ports if one of them has failed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

_BACKLOG = 1024  # connections the store's socket queues before accepting them: all receivers connect at once
_FIRST_ATTEMPT = 3.0  # seconds to connect once all ranks are there; each further attempt gets twice as long
_DONE, _FAILED = b"1", b"0"


def serve_store(ip: str, port: int, rank: int, size: int, seconds: float, listening: socket.socket | None) -> Any:
    """Return the store at `ip` and `port`, which rank 0 serves, at the socket `listening` if it is given."""
    untyped: Any = dist
    served = None
    if rank == 0:
        bound = listening or socket.create_server((ip, port), family=_family(ip))
        bound.listen(_BACKLOG)
        served = bound.detach()  # the store closes it
    return untyped.TCPStore(
        ip,
        port,
        world_size=size,
        is_master=rank == 0,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=served,
    )


@dataclass(frozen=True)
class _Meeting:
    """The ranks of a group at their store, until the time `until` of `time.monotonic`."""

    store: Any
    rank: int
    size: int
    until: float

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least a millisecond: 0 means no limit to torch."""
        return max(self.until - time.monotonic(), 0.001)

    @property
    def ended(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.until

    def exchange(self, topic: str, mine: bytes) -> list[bytes]:
        """Return what each rank says about `topic`; raise a RuntimeError that names the ranks that say nothing."""
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], mine)
        try:
            self.store.wait(keys, timedelta(seconds=self.left))
        except dist.DistStoreError as late:
            silent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise RuntimeError(f"ranks {silent} have not answered ({topic})") from late
        return [self.store.get(key) for key in keys]


def connect_cpus(store: Any, rank: int, size: int, address: str, seconds: float) -> Any:
    """Form a group with gloo, listening at `address`; every later wait has `seconds` too.

    Raises a RuntimeError if a rank is missing, or the ranks are not connected within `seconds`.
    """
    meeting, problem = _Meeting(store, rank, size, time.monotonic() + seconds), ""
    for attempt in count():
        if problem and meeting.ended:
            break
        meeting.exchange(f"attempt {attempt}: present", _DONE)
        limit = min(_FIRST_ATTEMPT * 2**attempt, meeting.left)
        group, problem = _attempt(store, attempt, rank, size, address, limit)
        answers = meeting.exchange(f"attempt {attempt}: connected", _FAILED if problem else _DONE)
        if _FAILED not in answers:
            group._set_default_timeout(timedelta(seconds=seconds))
            return group
        failed = [other for other, answer in enumerate(answers) if answer == _FAILED]
        problem = f"attempt {attempt} failed on ranks {failed}: {problem or 'see there'}"
    raise RuntimeError(f"the ranks met, but did not connect; {problem}")


def _attempt(store: Any, attempt: int, rank: int, size: int, address: str, seconds: float) -> tuple[Any, str]:
    """Connect within `seconds` and try the connections; return the group and "", or None and what went wrong."""
    untyped: Any = dist
    timeout = timedelta(seconds=seconds)
    options = untyped.ProcessGroupGloo._Options()
    options._timeout = timeout
    try:
        options._devices = [untyped.ProcessGroupGloo.create_device(hostname=address)]
        group = untyped.ProcessGroupGloo(untyped.PrefixStore(f"gloo {attempt}", store), rank, size, options)
        tried = torch.ones(1, dtype=torch.int64)  # a sum and a broadcast, as in a refit, use all its connections
        group.allreduce(tried).wait(timeout)
        group.broadcast(tried, 0).wait(timeout)
    except RuntimeError as error:
        return None, first_line(error)
    return (group, "") if int(tried) == size else (None, f"the sum of {size} ones was {int(tried)}")


def connect_gpus(store: Any, rank: int, size: int, seconds: float) -> Any:
    """Form a group with NCCL, which waits for missing ranks without limit, and ends the process on errors."""
    untyped: Any = dist
    _Meeting(store, rank, size, time.monotonic() + seconds).exchange("present", _DONE)
    options = untyped.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * seconds + 60)  # only a reserve: waits have a deadline of their own
    with _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):  # its watchdog reports an error, and does not abort
        return untyped.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable that a library reads during the block."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def own_address(ip: str, port: int) -> str:
    """Return this machine's address on the route to the sender, where the other ranks can reach this process."""
    with socket.socket(_family(ip), socket.SOCK_DGRAM) as probe:
        probe.connect((ip, port))  # UDP: sends nothing
        return str(probe.getsockname()[0])


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def first_line(error: Exception) -> str:
    """Return the first line of a message, or the type of an error without one."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
