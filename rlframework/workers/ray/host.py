"""The `WorkerHost` that is a Ray actor: what it answers is packed, as what it is asked is; see `transport`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlframework.workers.failures import HostFailure
from rlframework.workers.ray import transport
from rlframework.workers.worker_host import WorkerHost


class RayWorkerHost(WorkerHost):
    """See `WorkerHost`. Arguments are unpacked by Ray, on their way in."""

    def call_packed(self, packed: tuple[str, bool, Sequence[str], list[Any], Sequence[int]], *stored: Any) -> Any:
        """`WorkerHost.call` with its arguments in one; `stored` are values that go to the places at its end."""
        method_name, wants_result, names, values, places = packed
        for place, value in zip(places, stored, strict=True):
            values[place] = value
        result = self.call(method_name, wants_result, names, *values)
        if isinstance(result, HostFailure) or not transport.is_worth_packing(result):
            return result
        try:
            return transport.Packed(result)
        except TypeError as error:
            return HostFailure.of(error)
