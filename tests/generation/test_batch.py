"""A batch as requests, and results as a batch: keys, shapes, dtypes, padding and reasons to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.base.errors import BatchError, BatchTypeError, RLFrameworkError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.generation.batch import batch_of, generate, requests_of
from rlframework.interfaces.generation import FinishReason, GenerationRequest, GenerationResult, SamplingParams

PAD = 9
STOPS = frozenset({2, PAD})


def rows() -> BatchedDataDict[Any]:
    """Two prompts, of one and three tokens; the second has the pad token among its own."""
    ids = torch.tensor([[5, PAD, PAD], [PAD, 6, PAD]])
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.tensor([1, 3]), "seeds": torch.tensor([-(2**63), 2**63 - 1])}
    )


def result(name: str, tokens: list[int], logprobs: list[float], reason: FinishReason = "stop") -> GenerationResult:
    return GenerationResult(name, torch.tensor(tokens, dtype=torch.int64), torch.tensor(logprobs), reason, ())


def test_each_row_becomes_a_request():
    config = GenerationConfig(max_new_tokens=7, temperature=0.5, top_k=3, top_p=0.9)
    requests = requests_of(rows(), config, STOPS)
    assert [request.prompt_ids.tolist() for request in requests] == [[5], [PAD, 6, PAD]]
    assert {request.prompt_ids.dtype for request in requests} == {torch.int64}
    assert [request.seed for request in requests] == [-(2**63), 2**63 - 1]
    assert [request.max_new_tokens for request in requests] == [7, 7]
    assert {request.sampling for request in requests} == {SamplingParams(0.5, 3, 0.9, STOPS)}


def test_greedy_requests_have_temperature_zero():
    assert all(request.sampling.greedy for request in requests_of(rows(), GenerationConfig(), STOPS, temperature=0.0))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_prompts_of_other_integers_are_converted(dtype: torch.dtype) -> None:
    data = rows()
    data["input_ids"] = data["input_ids"].to(dtype)
    for request, expected in zip(
        requests_of(data, GenerationConfig(), STOPS), requests_of(rows(), GenerationConfig(), STOPS), strict=True
    ):
        assert request.prompt_ids.dtype == torch.int64
        assert torch.equal(request.prompt_ids, expected.prompt_ids)


def test_a_temperature_that_is_no_number_is_rejected_in_the_driver():
    """In a worker it would end all of them."""
    with pytest.raises(BatchTypeError, match=r"^temperature is 'hot'; it must be a number"):
        requests_of(rows(), GenerationConfig(), STOPS, temperature="hot")


def test_ids_of_requests_are_unique_across_calls():
    names = [request.request_id for _ in range(2) for request in requests_of(rows(), GenerationConfig(), STOPS)]
    assert len(set(names)) == 4


@pytest.mark.parametrize("lengths", [[0, 3], [1, 4]])
def test_a_length_outside_the_columns_is_rejected(lengths):
    data = rows()
    data["input_lengths"] = torch.tensor(lengths)
    with pytest.raises(BatchError, match="must be between 1 and 3"):
        requests_of(data, GenerationConfig(), STOPS)


def test_results_become_a_batch():
    """Of tokens and log-probabilities, at the places of the tokens, with padding behind them."""
    prompts = [torch.tensor([5]), torch.tensor([PAD, 6, PAD])]
    batch = batch_of([result("a", [4, 2], [-0.5, -1.0]), result("b", [PAD], [-2.0])], prompts, PAD)
    assert set(batch) == {
        "output_ids",
        "generation_lengths",
        "unpadded_sequence_lengths",
        "logprobs",
        "truncated",
    }
    assert batch["output_ids"].tolist() == [[5, 4, 2, PAD], [PAD, 6, PAD, PAD]]
    assert batch["logprobs"].tolist() == [[0, -0.5, -1.0, 0], [0, 0, 0, -2.0]]
    assert batch["generation_lengths"].tolist() == [2, 1]
    assert batch["unpadded_sequence_lengths"].tolist() == [3, 4]
    dtypes = {name: value.dtype for name, value in batch.items()}
    assert dtypes == {
        "output_ids": torch.int64,
        "generation_lengths": torch.int64,
        "unpadded_sequence_lengths": torch.int64,
        "logprobs": torch.float32,
        "truncated": torch.bool,
    }


def test_only_a_stop_token_leaves_a_row_whole():
    reasons: list[FinishReason] = ["stop", "length", "aborted"]
    results = [result(reason, [4], [-0.5], reason) for reason in reasons]
    assert batch_of(results, [torch.tensor([5])] * 3, PAD)["truncated"].tolist() == [False, True, True]


def test_a_row_without_tokens_is_its_prompt():
    batch = batch_of([result("a", [], [], "aborted")], [torch.tensor([5, 6])], PAD)
    assert batch["output_ids"].tolist() == [[5, 6]]
    assert batch["generation_lengths"].tolist() == [0]
    assert batch["logprobs"].tolist() == [[0, 0]]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_log_probabilities_that_are_not_finite_are_rejected(value):
    with pytest.raises(RLFrameworkError, match="not finite"):
        batch_of([result("a", [4], [value])], [torch.tensor([5])], PAD)


class Engine:
    """Returns results one by one, the last request's first; with `broken` fails after the first."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.open, self.aborted = broken, [], []

    def submit(self, requests: list[GenerationRequest]) -> None:
        self.open += requests

    def poll(self, timeout: float | None) -> list[GenerationResult]:
        if self.broken and len(self.open) == 1:
            raise RuntimeError("out of order")
        request = self.open.pop()
        return [result(request.request_id, [int(request.prompt_ids[0]), 2], [-0.5, -1.0])]

    def abort(self, names: list[str]) -> None:
        self.aborted += names


def test_results_come_back_in_the_order_of_the_rows():
    engine: Any = Engine()
    batch = generate(engine, rows(), GenerationConfig(), STOPS, PAD)
    assert batch["output_ids"].tolist() == [[5, 5, 2, PAD, PAD], [PAD, 6, PAD, PAD, 2]]
    assert not engine.aborted


def test_a_failure_aborts_all_requests():
    engine: Any = Engine(broken=True)
    with pytest.raises(RuntimeError, match="out of order"):
        generate(engine, rows(), GenerationConfig(), STOPS, PAD)
    assert len(engine.aborted) == 2
