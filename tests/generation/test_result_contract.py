"""Results that break the contract of generation engines are rejected, with the engine, the request and the fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stub_engines import FakeEngine, run, until

from rlframework.base.errors import EngineFault
from rlframework.generation.client import GenerationClient
from rlframework.generation.result_contract import Answer, ResultContract
from rlframework.interfaces.generation import (
    GenerationRequest,
    GenerationResult,
    Incoming,
    Outgoing,
    SamplingParams,
    WeightSpan,
)

END, OTHER_END = 1, 2
CONTRACT = ResultContract("mine", vocabulary=15, version=lambda: 7)
SPANS = (WeightSpan(0, 3, 7),)


def asked(name: str = "r", most: int = 3, stops: set[int] | None = None) -> GenerationRequest:
    sampling = SamplingParams(stop_token_ids=frozenset({END} if stops is None else stops))
    return GenerationRequest(name, torch.tensor([5]), 0, most, sampling)


def answered(name: str = "r", ids: list[int] | None = None, **changed: Any) -> GenerationResult:
    tokens = torch.tensor([4, 9, 6] if ids is None else ids, dtype=torch.int64)
    spans = (WeightSpan(0, len(tokens), 7),) if len(tokens) else ()
    return replace(GenerationResult(name, tokens, -torch.ones(len(tokens)), "length", spans), **changed)


def logprobs(*values: float) -> torch.Tensor:
    return torch.tensor(values)


GARBAGE: dict[str, tuple[dict[str, Any], str]] = {
    "more tokens than max_new_tokens": ({"ids": [4, 9, 6, 8]}, "4 tokens; the request allows max_new_tokens=3"),
    "no token": ({"ids": []}, "it has no token, with finish_reason 'length'"),
    "stop without a stop token": ({"finish_reason": "stop"}, "'stop', and 0 of its tokens end a completion"),
    "length with a stop token": ({"ids": [4, 9, END]}, "'length', and 1 of its tokens end a completion"),
    "tokens after a stop token": ({"ids": [4, END, 9]}, "'length', and 1 of its tokens"),
    "two stop tokens": ({"ids": [END, 4, END], "finish_reason": "stop"}, "'stop', and 2 of its tokens"),
    "unknown reason": ({"finish_reason": "eos"}, "finish_reason is 'eos'; it must be one of aborted, length, stop"),
    "no reason": ({"finish_reason": None}, "finish_reason is None"),
    "aborted by nobody": ({"finish_reason": "aborted"}, "aborted, but nobody has aborted the request"),
    "log-probability above 0": ({"logprobs": logprobs(-1, 0.5, -1)}, "of token 1 is 0.5; it must be finite and at"),
    "NaN": ({"logprobs": logprobs(-1, -1, float("nan"))}, "token 2 is nan; .* Either the engine is wrong, or the pol"),
    "minus infinity": ({"logprobs": logprobs(-torch.inf, -1, -1)}, "token 0 is -inf"),
    "fewer log-probabilities": ({"logprobs": logprobs(-1.0, -1.0)}, "3 tokens and 2 log-probabilities"),
    "log-probabilities in another dtype": ({"logprobs": -torch.ones(3).double()}, "logprobs is torch.float64 of shape"),
    "log-probabilities with gradients": ({"logprobs": torch.zeros(3, requires_grad=True)}, "cpu, with gradients"),
    "log-probabilities as a list": ({"logprobs": [-1.0, -1.0, -1.0]}, "logprobs is a list; it must be a tensor"),
    "tokens in another dtype": ({"token_ids": torch.tensor([4, 9, 6]).int()}, "token_ids is torch.int32 of shape"),
    "tokens with two dimensions": ({"token_ids": torch.tensor([[4, 9, 6]])}, r"of shape \(1, 3\)"),
    "a token outside the vocabulary": ({"ids": [4, 15, 6]}, "token 1 is 15; the model's tokens are 0 to 14"),
    "a negative token": ({"ids": [4, 9, -1]}, "token 2 is -1"),
    "no spans": ({"spans": ()}, "its spans are empty; they must cover its 3 tokens"),
    "short spans": ({"spans": (WeightSpan(0, 2, 7),)}, r"0 to 2 \(version 7\); they must cover its 3 tokens"),
    "spans beyond the end": ({"spans": (WeightSpan(0, 4, 7),)}, "they must cover its 3 tokens"),
    "spans with a gap": ({"spans": (WeightSpan(0, 1, 7), WeightSpan(2, 3, 7))}, "they must follow each other"),
    "overlapping spans": ({"spans": (WeightSpan(0, 2, 7), WeightSpan(1, 3, 7))}, "they must follow each other"),
    "an empty span": ({"spans": (WeightSpan(0, 0, 7), *SPANS)}, "none of them empty"),
    "spans that begin late": ({"spans": (WeightSpan(1, 3, 7),)}, "from token 0"),
    "spans of another type": ({"spans": [(0, 3, 7)]}, r"spans is \[\(0, 3, 7\)\]; it must be a tuple of WeightSpan"),
    "a span without a version": ({"spans": (WeightSpan(0, 3, None),)}, "it must be a tuple of WeightSpan"),  # type: ignore[arg-type]
    "another version": ({"spans": (WeightSpan(0, 3, 6),)}, "version 6; the weights of all engines are version 7"),
    "a version beside the right one": ({"spans": (WeightSpan(0, 1, 8), WeightSpan(1, 3, 7))}, "weights version 8"),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_result_that_breaks_the_contract_is_rejected(garbage: str) -> None:
    changed, message = GARBAGE[garbage]
    wrong = answered("wrong", **changed)
    answers = [
        Answer(asked(), answered(), False),
        Answer(asked("wrong"), wrong, False),
        Answer(asked(), answered(), False),
    ]
    with pytest.raises(EngineFault, match=f"(?s)result of request 'wrong' is wrong: .*{message}"):
        CONTRACT.check(answers)


@pytest.mark.parametrize(
    ("request_", "result", "aborted"),
    [
        (asked(), answered(ids=[4, END], finish_reason="stop"), False),
        (asked(stops={END, OTHER_END}), answered(ids=[OTHER_END], finish_reason="stop"), False),
        (asked(stops=set()), answered(ids=[END, END, 14]), False),
        (asked(), answered(ids=[], finish_reason="aborted"), True),
        (asked(), answered(ids=[4], finish_reason="aborted"), True),
        (asked(), answered(), True),  # it had finished before the engine got to know
        (asked(), answered(logprobs=logprobs(0.0, 1e-6, -80.0)), False),  # certain, up to rounding
        (asked(), answered(ids=[4, 9]), False),  # at the last position of the model
    ],
)
def test_sound_results_pass(request_: GenerationRequest, result: GenerationResult, aborted: bool) -> None:
    """Alone, and beside requests with other stop tokens."""
    answer = Answer(request_, result, aborted)
    CONTRACT.check([answer])
    CONTRACT.check([Answer(asked(stops={3}), answered(), False), answer])
    ResultContract().check([answer])


def test_stop_tokens_are_those_of_each_request() -> None:
    pairs = [(asked("a", stops={4}), answered("a")), (asked("b", stops={5}), answered("b"))]
    with pytest.raises(EngineFault, match=r"request 'a' .*stop tokens \[4\]"):
        CONTRACT.check([Answer(request, result, False) for request, result in pairs])


class Garbage(FakeEngine):
    """Returns what `change` makes of the results of an exchange."""

    def __init__(self, change: Callable[[list[GenerationResult]], Any]) -> None:
        super().__init__()
        self._change = change

    def _serve(self, lane: int, out: Outgoing) -> Incoming:
        incoming = super()._serve(lane, out)
        return replace(incoming, results=self._change(incoming.results))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda results: [replace(each, spans=()) for each in results], "request 'r' is wrong: its spans are empty"),
        (lambda results: None, "poll returned a NoneType; it must return a list"),
        (lambda results: [None], "poll returned None; each result must be a GenerationResult"),
        (lambda results: [replace(each, request_id=7) for each in results], "each result must be a GenerationResult"),
        (lambda results: [replace(each, request_id="else") for each in results], "'else', which it does not have"),
        (lambda results: results * 2, "which it does not have, or did so twice"),
    ],
)
def test_the_error_names_engine_and_plugin_and_says_what_to_do(change: Any, message: str) -> None:
    client = GenerationClient([Garbage(change)], limit=9, contract=ResultContract("mine"))
    with pytest.raises(EngineFault, match=rf"(?s)^fake engine \('mine'\) broke .*{message}.*conformance mine`"):
        run(lambda: client.generate(asked()))  # type: ignore[arg-type, return-value]


def test_results_that_nobody_awaits_are_not_checked() -> None:
    """Those of a cancelled request: the engine may have aborted it anywhere."""
    engine = Garbage(lambda results: [replace(each, spans=()) if each.request_id == "r" else each for each in results])
    engine._polls = 2
    client = GenerationClient([engine], limit=9)

    async def test() -> None:
        task = asyncio.ensure_future(client.generate(asked()))
        await until(lambda: engine.seen)
        task.cancel()
        assert (await client.generate(asked("other"))).request_id == "other"
        await client.drain()

    run(test)
