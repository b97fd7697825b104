"""Mutants of requests: lost, returned late or twice, not aborted, not paused, not rejected."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from rlframework.base.errors import RequestError
from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.generation_engine.changes import around_observed, broken_requests, broken_results
from rlframework_conformance.mutants.mutant import around, mutant, result

_IN_FLIGHT = frozenset({Capability.IN_FLIGHT_UPDATE})


@mutant("returned_twice", "A result comes back again with the next poll.")
@around(GenerationEngine.poll)
def _returned_twice(poll: Any, engine: Any, timeout: float | None = 0.0) -> Any:
    again, engine.again = getattr(engine, "again", []), poll(timeout)
    return [*again, *engine.again]


@mutant("returned_together", "Requests come back when all are finished.")
@around(GenerationEngine.poll)
def _returned_together(poll: Any, _: Any, timeout: float | None = 0.0) -> Any:
    results = poll(timeout)
    while more := poll(timeout) if timeout else []:
        results += more
    return results


@mutant("poll_without_timeout", "`poll` does not return before a request is finished.")
@around(GenerationEngine.poll)
def _without_timeout(poll: Any, _: Any, timeout: float | None = 0.0) -> Any:
    return poll(None)


@mutant("poll_waits_for_nothing", "`poll` waits for its timeout although there is no request.")
@around(GenerationEngine.poll)
def _waits(poll: Any, _: Any, timeout: float | None = 0.0) -> Any:
    started = time.monotonic()
    results = poll(timeout)
    if not results and timeout:
        time.sleep(max(0.0, timeout - (time.monotonic() - started)))
    return results


@mutant("prefix_of_the_session", "The cached prefix of a session is used without comparing its tokens.")
@broken_requests
def _prefix_of_the_session(engine: Any, request: GenerationRequest) -> Mapping[str, Any]:
    if request.session_id is None:
        return {}
    cached = vars(engine).setdefault("cached_prompts", {}).setdefault(request.session_id, request.prompt_ids)
    count = min(len(cached), len(request.prompt_ids))
    return {"prompt_ids": torch.cat((cached[:count], request.prompt_ids[count:]))}


# -- cancellation ------------------------------------------------------------------------------------------------------


@mutant("abort_ignored", "Aborted requests are completed.")
@around(GenerationEngine.abort)
def _abort_ignored(*_: Any) -> None: ...


@mutant("abort_of_all", "Aborting a request aborts those beside it.")
@around_observed(GenerationEngine.abort)
def _abort_of_all(abort: Any, engine: Any, request_ids: Collection[str]) -> None:
    abort(engine.asked.keys() if engine.asked.keys() & set(request_ids) else request_ids)


@mutant("aborted_tokens_lost", "Aborted requests come back without the tokens they have.")
@broken_results
def _aborted_tokens_lost(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    if result.finish_reason != "aborted":
        return {}
    return {"token_ids": result.token_ids[:0], "logprobs": result.logprobs[:0], "spans": ()}


@mutant("aborted_as_length", "Aborted requests are reported as ended by their length.")
@broken_results
def _aborted_as_length(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {"finish_reason": "length"} if result.finish_reason == "aborted" else {}


# -- pauses ------------------------------------------------------------------------------------------------------------


@mutant("pause_ignored", "Requests are served while paused.", needs=_IN_FLIGHT)
@around(GenerationEngine.pause)
def _pause_ignored(*_: Any) -> None: ...


@mutant("pause_drops_requests", "A pause aborts the requests that it should keep.", needs=_IN_FLIGHT)
@around(GenerationEngine.pause)
def _pause_drops(pause: Any, *_: Any) -> None:
    pause("abort")


@mutant("pause_keeps_requests", "A pause keeps the requests that it should abort.", needs=_IN_FLIGHT)
@around(GenerationEngine.pause)
def _pause_keeps(pause: Any, *_: Any) -> None:
    pause("keep")


# -- rejections --------------------------------------------------------------------------------------------------------


@mutant("half_a_call_accepted", "The requests before one that is rejected are accepted.")
@around(GenerationEngine.submit)
def _half_accepted(submit: Any, _: Any, requests: Sequence[GenerationRequest]) -> None:
    for request in requests:
        submit([request])


@mutant("rejected_without_a_name", "The error does not say which request is rejected.")
@around(GenerationEngine.submit)
def _without_name(submit: Any, _: Any, requests: Sequence[GenerationRequest]) -> None:
    try:
        submit(requests)
    except RequestError:
        raise RequestError("a request cannot be served") from None


@mutant("rejection_ends_all", "A rejected request ends those in progress.")
@around_observed(GenerationEngine.submit)
def _rejection_ends_all(submit: Any, engine: Any, requests: Sequence[GenerationRequest]) -> None:
    try:
        submit(requests)
    except RequestError:
        engine.abort(engine.asked.keys())
        raise


MUTANTS = (
    mutant("results_overwritten", "Of the requests that finish at the same time, only one comes back.")(
        result(GenerationEngine.poll, lambda results: results[-1:])
    ),
    mutant("aborted_requests_lost", "Aborted requests do not come back.")(
        result(
            GenerationEngine.poll, lambda results: [result for result in results if result.finish_reason != "aborted"]
        )
    ),
    mutant("unknown_tokens_replaced", "Tokens outside the vocabulary are replaced.")(
        broken_requests(lambda engine, request: {"prompt_ids": request.prompt_ids.clamp(0, 15)})
    ),
    mutant("long_prompts_cut", "Prompts that are too long are truncated.")(
        broken_requests(lambda engine, request: {"prompt_ids": request.prompt_ids[-100:]})
    ),
)
