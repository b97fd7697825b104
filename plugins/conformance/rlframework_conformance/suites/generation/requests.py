"""Requests: each comes back once, with a result that does not depend on when, in which order or beside what it ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rlframework.base.errors import NotSupported, RequestError
from rlframework.interfaces.generation import GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.generation.engine_harness import (
    POSITIONS,
    PROMPTS,
    VOCABULARY,
    GenerationHarness,
    requests_of,
    tokens_of,
)
from rlframework_conformance.suites.generation.results import require_spans

SEEDS = (11, 2**62, 5, -3, 0, 7, 5, 2**33 + 7, 4)
LONG = 60
"""Tokens of a completion that is still in progress after a few calls of `poll(0)`."""
_SOON = 10.0  # seconds for a call that has nothing to wait for
_STEPS = 3  # calls of `poll(0)`, each of which computes at least one token
_UNDECLARED: dict[Capability, dict[str, dict[str, Any]]] = {
    Capability.COLLECTIVE_REFIT: {
        "init_collective": {"ip": "127.0.0.1", "port": 29_500, "world_size": 2},
        "update_weights_from_collective": {},
    },
    Capability.IPC_REFIT: {"update_weights_from_ipc_handles": {"ipc_handles": {}}},
    Capability.EMBEDDED_GENERATION: {"attach": {"model": torch.nn.Linear(1, 1), "version": 1}},
    Capability.IN_FLIGHT_UPDATE: {"pause": {}},
}
"""Calls that need a capability."""


class Requests(Suite):
    """`submit`, `poll` and `abort`."""

    @holds(9)
    def test_each_request_comes_back_once(self, harness: GenerationHarness) -> None:
        """Each request must come back once, in whatever way calls of submit and poll alternate; then its id is free."""
        engine, requests = harness.engine(), requests_of(PROMPTS, max_new_tokens=6)
        names = [request.request_id for request in requests]
        for count in (1, len(requests)):
            results: dict[str, GenerationResult] = {}
            for first in range(0, len(requests), count):
                engine.submit(requests[first : first + count])
                harness.keep(results, engine.poll(0.0), names)
            rest = [request for request in requests if request.request_id not in results]
            for result in harness.collect(engine, rest):
                harness.keep(results, [result], names)
            harness.equal("polling without requests", engine.poll(0.0), [])

    @holds(9)
    def test_a_result_does_not_depend_on_the_requests_beside_it(self, harness: GenerationHarness) -> None:
        """A sample must not depend on other requests or on their order, log-probabilities up to rounding."""
        engine = harness.engine()
        whole = harness.complete(engine, PROMPTS, SEEDS, max_new_tokens=12)
        order = [4, 7, 0, 8, 2, 6, 1, 5, 3]
        turned = _complete_rows(harness, engine, order)
        harness.require_same("in another order", turned, [whole[row] for row in order])
        for row in (0, 2, 7):
            harness.require_same("alone", _complete_rows(harness, engine, [row]), [whole[row]])

    @holds(9)
    def test_a_result_does_not_depend_on_when_it_is_submitted(self, harness: GenerationHarness) -> None:
        """A sample must not depend on the requests in progress when it is submitted, nor on their sampling."""
        engine = harness.engine()
        whole = harness.complete(engine, PROMPTS, SEEDS, max_new_tokens=12)
        requests = requests_of(PROMPTS, SEEDS, max_new_tokens=12)
        others = requests_of(PROMPTS, prefix="other.", max_new_tokens=9, temperature=0.0)
        results: dict[str, GenerationResult] = {}
        unfinished = [request.request_id for request in (*requests, *others)]
        for request, other in zip(reversed(requests), others, strict=True):
            engine.submit([other, request])
            harness.keep(results, engine.poll(0.0), unfinished)
        rest = [request for request in (*requests, *others) if request.request_id not in results]
        results |= {result.request_id: result for result in harness.collect(engine, rest)}
        harness.require_same("submitted one after the other", [results[one.request_id] for one in requests], whole)
        greedy = [results[one.request_id] for one in others]
        harness.require_greedy("greedy requests beside sampled ones", PROMPTS, greedy, harness.plain())

    @holds(9)
    def test_a_result_does_not_depend_on_how_requests_are_batched(self, harness: GenerationHarness) -> None:
        """A sample must not depend on `batch_size`, the number of requests decoded at a time."""
        whole = harness.complete(harness.engine(batch_size=256), PROMPTS, SEEDS, max_new_tokens=12)
        for batch_size in (1, 4):
            split = harness.complete(harness.engine(batch_size=batch_size), PROMPTS, SEEDS, max_new_tokens=12)
            harness.require_same(f"batch_size {batch_size}", split, whole)

    @holds(9)
    def test_a_session_does_not_change_results(self, harness: GenerationHarness) -> None:
        """Requests of one session, each with its predecessor's completion in the prompt, must be as if alone."""
        engine, prompt = harness.engine(), [7, 2, 13] * 12
        for turn in range(3):
            prompts = [prompt, [*prompt[:-1], 5]]
            results = harness.complete(
                engine, prompts, max_new_tokens=8, temperature=0.0, stop=(), session=True, prefix=f"{turn}."
            )
            harness.require_greedy(f"turn {turn}", prompts, results, harness.plain(), ends=())
            prompt = [*prompt, *tokens_of(results[0]), 12]

    @holds(9)
    def test_poll_returns_what_has_finished(self, harness: GenerationHarness) -> None:
        """A request must come back when it is finished, not when those beside it are."""
        engine = harness.engine()
        (long,) = requests_of([[5]], prefix="long.", max_new_tokens=LONG, stop=())
        (short,) = requests_of([[6]], prefix="short.", max_new_tokens=1)
        engine.submit([long, short])
        first = [result.request_id for result in engine.poll(60.0)]
        harness.equal("requests that the first poll returns", first, [short.request_id])
        harness.collect(engine, [long])

    @holds(9)
    def test_poll_ends_in_time(self, harness: GenerationHarness) -> None:
        """`poll(0)` must advance by some tokens, not by a whole request; without requests `poll` must not wait."""
        engine, (request,) = harness.engine(), requests_of([[5]], max_new_tokens=LONG, stop=())
        engine.submit([request])
        harness.equal("requests that poll(0) finishes at once", engine.poll(0.0), [])
        finished = [result for _ in range(LONG) for result in engine.poll(0.0)]
        harness.equal(f"requests of {LONG} tokens that {LONG} calls of poll(0) finish", len(finished), 1)
        started = time.monotonic()
        engine.poll(2 * _SOON)
        waited = time.monotonic() - started
        harness.require(waited < _SOON, "poll without requests returns immediately", got=waited)

    @holds(9)
    def test_aborted_requests_return_the_tokens_they_have(self, harness: GenerationHarness) -> None:
        """The next poll must return aborted requests with the tokens they have; the others must not change.

        Unknown and finished ids are ignored.
        """
        engine, prompts = harness.engine(), PROMPTS[:4]
        whole = harness.complete(engine, prompts, max_new_tokens=LONG, stop=())
        engine.abort(["0", "unknown"])
        requests = requests_of(prompts, max_new_tokens=LONG, stop=())
        engine.submit(requests[:3])
        _advance(harness, engine)
        engine.submit(requests[3:])
        engine.abort(["1", "3"])
        aborted = {result.request_id: result for result in engine.poll(0.0)}
        harness.equal("requests that the poll after abort returns", sorted(aborted), ["1", "3"])
        for name, result in aborted.items():
            _require_part(harness, result, whole[int(name)])
        harness.require(len(aborted["1"].token_ids) >= _STEPS, "an aborted request returns the tokens it has")
        rest = harness.collect(engine, [requests[0], requests[2]])
        harness.require_same("beside aborted requests", rest, [whole[0], whole[2]])

    @holds(9, Capability.IN_FLIGHT_UPDATE)
    def test_paused_requests_go_on_where_they_were(self, harness: GenerationHarness) -> None:
        """Between pause("keep") and resume nothing must be served, but requests accepted and aborted; afterwards all
        must go on as if there had been no pause. Both calls may be repeated.
        """
        engine, prompts = harness.engine(), PROMPTS[:4]
        whole = harness.complete(engine, prompts, max_new_tokens=LONG, stop=())
        requests = requests_of(prompts, max_new_tokens=LONG, stop=())
        engine.submit(requests[:3])
        _advance(harness, engine)
        engine.pause("keep")
        engine.pause("keep")
        engine.submit(requests[3:])
        harness.equal("results while paused", [engine.poll(0.0) for _ in range(LONG)], [[]] * LONG)
        engine.abort(["1"])
        aborted = engine.poll(0.0)
        harness.equal("aborted while paused", [result.request_id for result in aborted], ["1"])
        _require_part(harness, aborted[0], whole[1])
        engine.resume()
        engine.resume()
        rest = harness.collect(engine, [requests[0], requests[2], requests[3]])
        harness.require_same("after a pause", rest, [whole[0], whole[2], whole[3]])

    @holds(9, Capability.IN_FLIGHT_UPDATE)
    def test_a_pause_can_abort_all_requests(self, harness: GenerationHarness) -> None:
        """The poll after pause("abort") must return all requests with the tokens they have; new ones are served."""
        engine, prompts = harness.engine(), PROMPTS[:3]
        whole = harness.complete(engine, prompts, max_new_tokens=LONG, stop=())
        engine.submit(requests_of(prompts, max_new_tokens=LONG, stop=()))
        _advance(harness, engine)
        engine.pause("abort")
        aborted = {result.request_id: result for result in engine.poll(0.0)}
        harness.equal("requests that the poll after the pause returns", sorted(aborted), ["0", "1", "2"])
        for name, result in aborted.items():
            _require_part(harness, result, whole[int(name)])
        engine.resume()
        again = harness.complete(engine, prompts, max_new_tokens=LONG, stop=())
        harness.require_same("after a pause that aborted all", again, whole)

    @holds(8)
    def test_requests_that_cannot_be_served_are_rejected_by_name(self, harness: GenerationHarness) -> None:
        """Such a request must raise a `RequestError` that names it, and none of the same call is accepted.

        Requests in progress must not be affected.
        """
        engine, prompts = harness.engine(), PROMPTS[:2]
        whole = harness.complete(engine, prompts, max_new_tokens=LONG, stop=())
        requests = requests_of(prompts, max_new_tokens=LONG, stop=())
        engine.submit(requests)
        _advance(harness, engine)
        for what, bad in _bad_requests().items():
            (good,) = requests_of([[5]], prefix="good.")
            error = harness.raises(RequestError, _submit(engine, [good, bad]), what)
            harness.require(f"'{bad.request_id}'" in str(error), f"{what}: the error names the request", got=str(error))
        harness.require_same("beside rejected requests", harness.collect(engine, requests), whole)


def _bad_requests() -> dict[str, GenerationRequest]:
    """Return requests that no engine of these models can serve; "0" is the id of one in progress."""
    (in_use,) = requests_of([[5]])
    prompts = {
        "a token beyond the vocabulary": [5, VOCABULARY],
        "a negative token": [-1, 5],
        "a prompt that leaves no position": [5] * POSITIONS,
    }
    bad = {what: requests_of([prompt], prefix="bad.")[0] for what, prompt in prompts.items()}
    return {"an id in use": in_use, **bad}


def _submit(engine: Any, requests: Sequence[GenerationRequest]) -> Callable[[], None]:
    return lambda: engine.submit(requests)


def _complete_rows(harness: GenerationHarness, engine: Any, rows: Sequence[int]) -> list[GenerationResult]:
    prompts, seeds = [PROMPTS[row] for row in rows], [SEEDS[row] for row in rows]
    return harness.complete(engine, prompts, seeds, max_new_tokens=12)


def _advance(harness: GenerationHarness, engine: Any) -> None:
    """Compute some tokens of requests that are far from finished."""
    for _ in range(_STEPS):
        harness.equal(f"requests of {LONG} tokens that finish at once", engine.poll(0.0), [])


def _require_part(harness: GenerationHarness, result: GenerationResult, whole: GenerationResult) -> None:
    """Require an aborted request to have the first tokens of the whole completion."""
    count, name = len(result.token_ids), result.request_id
    harness.equal(f"finish_reason of the aborted request {name}", result.finish_reason, "aborted")
    harness.equal(f"tokens of the aborted request {name}", tokens_of(result), tokens_of(whole)[:count])
    harness.require(count < LONG, "an aborted request is not finished", got=count)
    expected = torch.as_tensor(whole.logprobs[:count])
    harness.values(f"log-probabilities of the aborted request {name}", result.logprobs, expected)
    require_spans(harness, result)


class Rejections(Suite):
    """Calls that need a capability which the record does not declare."""

    @holds(8)
    def test_calls_that_are_not_declared_are_rejected(self, harness: GenerationHarness) -> None:
        """Undeclared calls must raise `NotSupported`; ignoring them would leave old weights in use."""
        engine = harness.engine()
        for capability, calls in _UNDECLARED.items():
            if capability not in harness.record.capabilities:
                for name, arguments in calls.items():
                    harness.raises(NotSupported, partial(getattr(engine, name), **arguments), name)
