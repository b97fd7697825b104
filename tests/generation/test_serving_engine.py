"""The requests of any engine, with one that adds tokens at every other step; torch's state after a library's start."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlframework.base.errors import EngineNotReady, RequestError
from rlframework.config.sections import GenerationConfig
from rlframework.generation.requests import RowLimits, ServingLimits
from rlframework.generation.serving import Collected, ServingEngine, torch_restored
from rlframework.interfaces.generation import GenerationRequest, SamplingParams, WeightSpan


class EveryOther(ServingEngine[Collected]):
    """Counts steps; the tokens of a request are 0, 1, 2 and so on."""

    def __init__(self) -> None:
        super().__init__(GenerationConfig(), None, model_name="none", device="cpu", precision="float32")  # type: ignore[arg-type]
        self.limits = ServingLimits(RowLimits((64,)), 24)
        self.steps, self.withdrawn = 0, list[str]()

    def accepted(self, request: GenerationRequest) -> Collected:
        return Collected(request)

    def step(self, version: int) -> bool:
        self._waiting.clear()
        self.steps += 1
        if self.steps % 2:
            return False
        for name, served in list(self._served.items()):
            served.add(version, [len(served.tokens)], [-1.0])
            if len(served.tokens) == served.request.max_new_tokens:
                self.finish(name, "length")
        return True

    def withdraw(self, names: Collection[str]) -> None:
        self.withdrawn += names


def request(name: str, tokens: int = 3, **given: Any) -> GenerationRequest:
    return GenerationRequest(name, torch.tensor([1]), 0, tokens, **given)


@pytest.fixture
def engine() -> EveryOther:
    made = EveryOther()
    made.weight_state.commit(1)
    return made


def test_a_temperature_that_the_engine_does_not_take_is_rejected_with_those_that_it_takes(engine):
    engine.limits = replace(engine.limits, temperatures=(0.5, 2.0))
    engine.submit([request(f"{one}", sampling=SamplingParams(one)) for one in (0.0, 0.5, 2.0)])
    for one in (0.4, 2.5, float("nan")):
        with pytest.raises(RequestError, match=f"'wrong' has temperature={one}; it must be 0, or 0.5 to 2"):
            engine.submit([request("wrong", sampling=SamplingParams(one))])


def test_a_poll_without_time_takes_the_steps_that_a_token_needs(engine):
    engine.submit([request("a")])
    assert engine.poll(0) == []
    assert (engine.steps, engine._served["a"].tokens) == (2, [0])
    assert engine.poll(0) == []
    assert engine.steps == 4


def test_a_poll_without_limit_returns_what_finishes_first_and_then_nothing_more(engine):
    engine.submit([request("a", 3), request("b", 1)])
    (first,) = engine.poll(None)
    (second,) = engine.poll(None)
    assert [(one.request_id, one.token_ids.tolist(), one.finish_reason) for one in (first, second)] == [
        ("b", [0], "length"),
        ("a", [0, 1, 2], "length"),
    ]
    assert (second.token_ids.dtype, second.logprobs.dtype) == (torch.int64, torch.float32)
    assert engine.poll(None) == []
    assert engine.steps == 6


def test_spans_are_those_of_the_versions_with_which_tokens_were_sampled(engine):
    engine.submit([request("a", 4)])
    engine.poll(0)
    engine.weight_state.commit(2)
    engine.poll(0)
    engine.poll(0)
    engine.weight_state.commit(5)
    (result,) = engine.poll(None)
    assert result.spans == (WeightSpan(0, 1, 1), WeightSpan(1, 3, 2), WeightSpan(3, 4, 5))


def test_only_requests_that_were_begun_are_withdrawn_and_each_aborted_one_ends_once(engine):
    engine.submit([request("a"), request("b")])
    engine.poll(0)
    engine.submit([request("c")])
    engine.abort(["c", "a", "a", "unknown"])
    assert engine.withdrawn == ["a"]
    assert [(one.request_id, one.token_ids.tolist(), one.spans, one.finish_reason) for one in engine.poll()] == [
        ("c", [], (), "aborted"),
        ("a", [0], (WeightSpan(0, 1, 1),), "aborted"),
    ]
    assert list(engine._served) == ["b"]


def test_nothing_is_computed_while_paused_or_without_weights(engine):
    engine.submit([request("a", 1)])
    engine.pause()
    engine.weight_state.fail("for a reason")
    assert engine.poll(None) == []
    engine.resume()
    with pytest.raises(EngineNotReady, match="for a reason"):
        engine.poll(None)
    assert engine.steps == 0
    engine.pause("abort")
    assert [one.finish_reason for one in engine.poll(None)] == ["aborted"]


def test_of_requests_with_a_wrong_one_none_is_accepted(engine):
    with pytest.raises(RequestError, match="'b' was submitted before"):
        engine.submit([request("b"), request("b")])
    with pytest.raises(RequestError, match="token 24"):
        engine.submit([request("a"), GenerationRequest("b", torch.tensor([24]), 0, 1)])
    assert not engine._served
    assert not engine._waiting


def test_requests_that_begin_again_wait_in_their_order_without_the_tokens_that_they_had(engine):
    engine.submit([request("a"), request("b")])
    engine.poll(0)
    engine.submit([request("c")])
    engine.begin_again()
    assert engine.withdrawn == ["a", "b"]
    assert [(name, served.tokens) for name, served in engine._served.items()] == [("a", []), ("b", []), ("c", [])]
    assert list(engine._waiting) == ["a", "b", "c"]
    assert [(one.request_id, one.token_ids.tolist()) for one in engine.poll(None)] == [
        ("a", [0, 1, 2]),
        ("b", [0, 1, 2]),
        ("c", [0, 1, 2]),
    ]


def start_badly() -> None:
    with torch_restored():
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_num_threads = print  # type: ignore[assignment]
        torch.manual_seed(3)
        warnings.warn("torch will change", FutureWarning, stacklevel=1)  # tests fail on warnings that are shown
        raise RuntimeError("it does not start")


def test_threads_their_setter_and_random_numbers_are_restored_after_an_error():
    threads, set_threads, state = torch.get_num_threads(), torch.set_num_threads, torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="it does not start"):
        start_badly()
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_threads)
    assert torch.equal(torch.random.get_rng_state(), state)
