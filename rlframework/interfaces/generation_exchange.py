"""An exchange of the driver with a worker that hosts an engine: requests and aborts in, results and rejections out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rlframework.base.errors import RequestError
from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult


@dataclass(frozen=True)
class Outgoing:
    """Requests to submit to an engine, in order, and the ids of those to abort."""

    requests: tuple[GenerationRequest, ...] = ()
    abort_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Incoming:
    """Finished requests, and by request id why others were rejected."""

    results: list[GenerationResult] = field(default_factory=list)
    rejected: dict[str, RequestError] = field(default_factory=dict)


def submit_each(
    engine: GenerationEngine, requests: Sequence[GenerationRequest], abort_ids: Collection[str] = ()
) -> dict[str, RequestError]:
    """Abort the requests of `abort_ids` and submit `requests`; return by id why some of them were rejected.

    A rejected request does not affect the others. Errors are returned, because one that is raised ends the worker.
    """
    if abort_ids:
        engine.abort(abort_ids)
    if not requests:
        return {}
    try:
        engine.submit(requests)
    except RequestError as error:
        if len(requests) == 1:
            return {requests[0].request_id: error}
        rejected: dict[str, RequestError] = {}
        for request in requests:
            rejected |= submit_each(engine, [request])
        return rejected
    return {}
