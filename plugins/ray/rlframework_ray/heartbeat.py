"""`Heartbeat`: notices workers that no longer answer although no connection was closed: their machine is off or cut off
from the network, or their process is stopped.

Every `PERIOD` seconds it connects to the port at which each worker accepts calls, and waits for the first byte of the
reply to an HTTP/2 greeting. Threads of Ray in C++ send it, which need neither Python's interpreter lock nor the thread
that computes, so a worker that is busy for minutes answers. A connection that is refused or closed is an answer, too:
Ray itself reports processes that have ended.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Mapping

PERIOD = 2.0
"""Seconds between two attempts."""
TIMEOUT = 4.0
"""Seconds to wait for each answer."""
ATTEMPTS = 3
"""Attempts without an answer, one after the other, until a worker counts as silent: after 18 seconds at most.

They are counted, rather than seconds, so that a driver that was suspended itself takes no worker for a silent one.
"""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The preface of HTTP/2 and empty settings."""
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


class Heartbeat:
    """Watches the workers at `addresses`, host and port by rank, in a thread of its own until `stop`."""

    def __init__(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        self._addresses = dict(addresses)
        self._unanswered = dict.fromkeys(addresses, 0)
        self._stopped = False
        if addresses:
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def is_silent(self, rank: int) -> bool:
        """Whether the worker has not answered lately. It may answer again."""
        return self._unanswered.get(rank, 0) >= ATTEMPTS

    def stop(self) -> None:
        """End the thread, within seconds."""
        self._stopped = True

    def _run(self) -> None:
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        while not self._stopped:
            await asyncio.sleep(PERIOD)
            answers = await asyncio.gather(*(_answers(*address) for address in self._addresses.values()))
            for rank, answered in zip(self._addresses, answers, strict=True):
                self._unanswered[rank] = 0 if answered else self._unanswered[rank] + 1


async def _answers(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(TIMEOUT):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_GREETING)
                await reader.read(1)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _UNREACHABLE
    return True
