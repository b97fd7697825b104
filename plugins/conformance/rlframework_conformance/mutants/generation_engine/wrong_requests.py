"""Mutants of requests: lost, returned late or twice, not aborted, not paused, not rejected."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlframework.base.errors import RequestError
from rlframework.interfaces.generation import GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.generation_engine.changes import (
    broken_poll,
    broken_requests,
    broken_results,
    observed,
)
from rlframework_conformance.mutants.mutant import mutant

_ONCE = "test_each_request_comes_back_once"
_FINISHED = "test_poll_returns_what_has_finished"
_TIME = "test_poll_ends_in_time"
_SESSION = "test_a_session_does_not_change_results"
_ABORT = "test_aborted_requests_return_the_tokens_they_have"
_PAUSE = "test_paused_requests_go_on_where_they_were"
_PAUSE_ABORT = "test_a_pause_can_abort_all_requests"
_REJECT = "test_requests_that_cannot_be_served_are_rejected_by_name"
_IN_FLIGHT = frozenset({Capability.IN_FLIGHT_UPDATE})


@mutant("returned_twice", "A result comes back again with the next poll.", _ONCE)
@broken_poll
def _returned_twice(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
    again, engine.again = getattr(engine, "again", []), sound(timeout)
    return [*again, *engine.again]


@mutant("results_overwritten", "Of the requests that finish at the same time, only one comes back.", _ONCE)
@broken_poll
def _overwritten(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
    return list(sound(timeout)[-1:])


@mutant("returned_together", "Requests come back when all are finished.", _FINISHED)
@broken_poll
def _returned_together(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
    results: list[GenerationResult] = sound(timeout)
    while more := sound(timeout) if timeout else []:
        results += more
    return results


@mutant("poll_without_timeout", "`poll` does not return before a request is finished.", _TIME)
@broken_poll
def _without_timeout(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
    return list(sound(None))


@mutant("poll_waits_for_nothing", "`poll` waits for its timeout although there is no request.", _TIME)
@broken_poll
def _waits(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
    started = time.monotonic()
    results: list[GenerationResult] = sound(timeout)
    if not results and timeout:
        time.sleep(max(0.0, timeout - (time.monotonic() - started)))
    return results


@broken_requests
def _with_prefix_of_session(engine: Any, request: GenerationRequest) -> Mapping[str, Any]:
    """Take the tokens of the session's first prompt for those of this prompt, without comparing them."""
    if request.session_id is None:
        return {}
    cached = engine.__dict__.setdefault("cached_prompts", {}).setdefault(request.session_id, request.prompt_ids)
    count = min(len(cached), len(request.prompt_ids))
    return {"prompt_ids": torch.cat((cached[:count], request.prompt_ids[count:]))}


_session_not_compared = mutant(
    "prefix_of_the_session", "The cached prefix of a session is used without comparing its tokens.", _SESSION
)(_with_prefix_of_session)


# -- cancellation ------------------------------------------------------------------------------------------------------


@mutant("abort_ignored", "Aborted requests are completed.", _ABORT)
def _abort_ignored(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def abort(self, request_ids: Collection[str]) -> None: ...

    return Broken


@mutant("abort_of_all", "Aborting a request aborts those beside it.", _ABORT)
def _abort_of_all(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def abort(self, request_ids: Collection[str]) -> None:
            super().abort(self.asked.keys() if self.asked.keys() & set(request_ids) else request_ids)

    return Broken


@mutant("aborted_requests_lost", "Aborted requests do not come back.", _ABORT)
@broken_poll
def _aborted_lost(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
    return [result for result in sound(timeout) if result.finish_reason != "aborted"]


@mutant("aborted_tokens_lost", "Aborted requests come back without the tokens they have.", _ABORT)
@broken_results
def _aborted_tokens_lost(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    if result.finish_reason != "aborted":
        return {}
    return {"token_ids": result.token_ids[:0], "logprobs": result.logprobs[:0], "spans": ()}


@mutant("aborted_as_length", "Aborted requests are reported as ended by their length.", _ABORT)
@broken_results
def _aborted_as_length(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {"finish_reason": "length"} if result.finish_reason == "aborted" else {}


# -- pauses ------------------------------------------------------------------------------------------------------------


@mutant("pause_ignored", "Requests are served while paused.", _PAUSE, _PAUSE_ABORT, needs=_IN_FLIGHT)
def _pause_ignored(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def pause(self, mode: str = "keep") -> None: ...

    return Broken


@mutant("pause_drops_requests", "A pause aborts the requests that it should keep.", _PAUSE, needs=_IN_FLIGHT)
def _pause_drops(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def pause(self, mode: str = "keep") -> None:
            super().pause("abort")

    return Broken


@mutant("pause_keeps_requests", "A pause keeps the requests that it should abort.", _PAUSE_ABORT, needs=_IN_FLIGHT)
def _pause_keeps(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def pause(self, mode: str = "keep") -> None:
            super().pause("keep")

    return Broken


# -- rejections --------------------------------------------------------------------------------------------------------


@mutant("half_a_call_accepted", "The requests before one that is rejected are accepted.", _REJECT)
def _half_accepted(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            for request in requests:
                super().submit([request])

    return Broken


@mutant("rejected_without_a_name", "The error does not say which request is rejected.", _REJECT)
def _without_name(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            try:
                super().submit(requests)
            except RequestError:
                raise RequestError("a request cannot be served") from None

    return Broken


@mutant("unknown_tokens_replaced", "Tokens outside the vocabulary are replaced.", _REJECT)
def _unknown_tokens_replaced(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            super().submit([replace(request, prompt_ids=request.prompt_ids.clamp(0, 15)) for request in requests])

    return Broken


_long_prompts_cut = mutant("long_prompts_cut", "Prompts that are too long are truncated.", _REJECT)(
    broken_requests(lambda engine, request: {"prompt_ids": request.prompt_ids[-100:]})
)


@mutant("rejection_ends_all", "A rejected request ends those in progress.", _REJECT)
def _rejection_ends_all(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            try:
                super().submit(requests)
            except RequestError:
                self.abort(self.asked.keys())
                raise

    return Broken
