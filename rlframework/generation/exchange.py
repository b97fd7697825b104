"""One exchange between a client and an engine: requests and aborts in, results and rejections out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlframework.errors import RequestError
from rlframework.interfaces.generation import GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from rlframework.interfaces.generation import GenerationEngine


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


def submit_each(engine: GenerationEngine, requests: Sequence[GenerationRequest]) -> dict[str, RequestError]:
    """Submit `requests`; return by id why some were rejected, which does not affect the others."""
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


def exchange(
    engine: GenerationEngine, requests: Sequence[GenerationRequest], abort_ids: Collection[str], timeout: float
) -> Incoming:
    """Submit `requests`, abort those of `abort_ids`, and serve until some finish or `timeout` seconds have passed."""
    rejected = submit_each(engine, requests) if requests else {}
    if abort_ids:
        engine.abort(abort_ids)
    # do not delay the report of a rejection
    return Incoming(engine.poll(0.0 if rejected else timeout), rejected)
