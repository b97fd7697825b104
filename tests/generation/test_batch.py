"""Batches as requests, results as a batch, and the driver's handle on embedded engines, which are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pickle
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted_episodes import END

from rlframework.base.errors import BatchError, BatchTypeError, EngineFault, RefitError, RLFrameworkError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import ParallelismConfig, PolicyConfig
from rlframework.config.sections import GenerationConfig
from rlframework.generation.batch import batch_of, generate, requests_of
from rlframework.generation.driver import Generation, run_in_loop
from rlframework.interfaces.generation import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Incoming,
    SamplingParams,
    WeightSpan,
)
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.interfaces.worker_group import MultiWorkerFuture
from rlframework.workers.dispatch import Dispatch, DispatchingWorkerGroup

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


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_each_row_becomes_a_request(dtype: torch.dtype) -> None:
    config, data = GenerationConfig(max_new_tokens=7, temperature=0.5, top_k=3, top_p=0.9), rows()
    data["input_ids"] = data["input_ids"].to(dtype)
    requests = requests_of(data, config, STOPS)
    assert [request.prompt_ids.tolist() for request in requests] == [[5], [PAD, 6, PAD]]
    assert {request.prompt_ids.dtype for request in requests} == {torch.int64}
    assert [request.seed for request in requests] == [-(2**63), 2**63 - 1]
    assert [request.max_new_tokens for request in requests] == [7, 7]
    assert {request.sampling for request in requests} == {SamplingParams(0.5, 3, 0.9, STOPS)}
    assert all(request.sampling.greedy for request in requests_of(rows(), config, STOPS, temperature=0.0))


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
    prompts = [torch.tensor([5]), torch.tensor([PAD, 6, PAD]), torch.tensor([5, 6])]
    results = [result("a", [4, 2], [-0.5, -1.0]), result("b", [PAD], [-2.0], "length"), result("c", [], [], "aborted")]
    batch = batch_of(results, prompts, PAD)
    assert batch["output_ids"].tolist() == [[5, 4, 2, PAD], [PAD, 6, PAD, PAD], [5, 6, PAD, PAD]]
    assert batch["logprobs"].tolist() == [[0, -0.5, -1.0, 0], [0, 0, 0, -2.0], [0, 0, 0, 0]]
    assert batch["generation_lengths"].tolist() == [2, 1, 0]
    assert batch["unpadded_sequence_lengths"].tolist() == [3, 4, 2]
    assert batch["truncated"].tolist() == [False, True, True]
    dtypes = {name: value.dtype for name, value in batch.items()}
    assert dtypes == {
        "output_ids": torch.int64,
        "generation_lengths": torch.int64,
        "unpadded_sequence_lengths": torch.int64,
        "logprobs": torch.float32,
        "truncated": torch.bool,
    }


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


class Group(DispatchingWorkerGroup):
    """Workers on a grid; each completes a row of length n by n tokens, `5 + first token`, and an end below three."""

    def __init__(self, data_parallel: int, tensor_parallel: int = 1) -> None:
        parallelism = ParallelismConfig(tensor=tensor_parallel)
        super().__init__(policy_sharding(data_parallel * tensor_parallel, parallelism))
        self.requests: list[list[GenerationRequest]] = [[] for _ in range(self.sharding.size)]
        self.finished = 0

    def _run(self, method_name: str, plan: Dispatch) -> MultiWorkerFuture:
        answer = getattr(self, f"_{method_name}")
        results = [answer(rank, **kwargs) for rank, kwargs in zip(plan.called, plan.kwargs, strict=True)]
        return MultiWorkerFuture(results, plan.returned, plan.called)

    def _finish_generation(self, rank: int) -> bool:
        self.finished += 1
        return True

    def _exchange(self, rank: int, requests: Any, abort_ids: Any, timeout: float) -> Incoming:
        self.requests[rank] += requests
        return Incoming([completed(request) for request in requests])

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        by_rank = dict(zip(future.called_workers or [], future.futures, strict=True))
        return [by_rank[rank] for rank in future.return_from_workers or []]

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        return True


def completed(request: GenerationRequest) -> GenerationResult:
    count = len(request.prompt_ids)
    tokens, ends = [5 + int(request.prompt_ids[0])] * count, count < 3
    tokens += [END] * ends
    reason: FinishReason = "stop" if ends else "length"
    spans = (WeightSpan(0, len(tokens), 1),)
    return GenerationResult(request.request_id, torch.tensor(tokens), -torch.ones(len(tokens)), reason, spans)


@pytest.fixture
def make(tiny: Any) -> Any:
    """Return a handle on the engines of a group, whose limits are those of the tiny model."""

    def of(group: Group, **settings: Any) -> Generation:
        config = SimpleNamespace(generation=GenerationConfig(**settings), policy=PolicyConfig(model_name=tiny.path))
        policy: Any = SimpleNamespace(worker_group=group, config=config)
        return Generation(policy, tiny.tokenizer)

    return of


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [5]), (2, [3, 2]), (4, [2, 1, 1, 1]), (7, [1, 1, 1, 1, 1, 0, 0])])
def test_rows_come_back_in_order(make: Any, tiny: Any, batch: Any, ranks: int, sizes: list[int]) -> None:
    """Each rank gets adjacent rows, also where it may have one at a time."""
    for settings in ({}, {"max_in_flight": 1}):
        group = Group(ranks)
        output = make(group, **settings).generate(batch([[3], [4, 4], [5, 5, 5], [6], [7]]), greedy=True)
        pad = int(tiny.tokenizer.pad_token_id)
        expected = [[3, 8, END], [4, 4, 9, 9, END], [5, 5, 5, 10, 10, 10], [6, 11, END], [7, 12, END]]
        assert [len(each) for each in group.requests] == sizes
        assert output["output_ids"].tolist() == [row + [pad] * (6 - len(row)) for row in expected]
        assert output["unpadded_sequence_lengths"].tolist() == [3, 5, 6, 3, 3]
        assert output["truncated"].tolist() == [False, False, True, False, False]
        assert output["logprobs"][1].tolist() == [0, 0, -1, -1, -1, 0]
        assert all(request.sampling.greedy for each in group.requests for request in each)


def test_only_the_first_rank_of_a_replica_gets_requests(make: Any, batch: Any) -> None:
    group = Group(2, tensor_parallel=2)
    assert make(group).generate(batch([[3], [4], [5]])).size == 3
    assert [len(each) for each in group.requests] == [2, 0, 1, 0]


def test_tokens_of_several_versions_or_of_another_than_the_committed_one_are_rejected(make: Any, batch: Any) -> None:
    class Versions(Group):
        def _exchange(self, rank: int, requests: Any, abort_ids: Any, timeout: float) -> Incoming:
            found = super()._exchange(rank, requests, abort_ids, timeout).results
            spans = [(WeightSpan(0, len(each.token_ids), 4 + rank),) for each in found]
            return Incoming([dataclasses.replace(each, spans=own) for each, own in zip(found, spans, strict=True)])

    class Committed(Generation):
        weights_version = 5

    prompts = batch([[3], [4, 4]])
    assert make(Versions(1)).generate(prompts).size == 2
    with pytest.raises(RefitError, match=r"weights of versions \[4, 5\], but the batch needs a single version"):
        make(Versions(2)).generate(prompts)
    remote = make(Versions(1))
    remote.__class__ = Committed
    with pytest.raises(EngineFault, match="version 4; the weights of all engines are version 5"):
        remote.generate(prompts)


def test_a_tensor_is_sent_without_the_batch_it_is_a_view_of() -> None:
    ids = torch.arange(100_000).view(100, 1000)
    request = GenerationRequest("a", ids[1, :5], 7, 4, media={"images": ids[0, :2]})
    sent = pickle.dumps(request, protocol=5)
    received = pickle.loads(sent)  # noqa: S301 - sent by this test
    assert len(sent) < 2000
    assert (received.prompt_ids.tolist(), received.seed) == (ids[1, :5].tolist(), 7)


def test_the_calls_around_a_rollout_and_no_rows(make: Any) -> None:
    group = Group(2)
    generation = make(group)
    assert generation.prepare_for_generation()
    with pytest.raises(BatchError, match="generate got no rows"):
        generation.generate(BatchedDataDict({"input_ids": torch.zeros(0, 3), "input_lengths": torch.zeros(0)}))
    assert generation.finish_generation()
    assert generation.shutdown()
    assert group.finished == 2


def test_an_interrupt_of_a_cell_ends_what_it_waits_for():
    """A notebook has a loop in the main thread, so the task has another thread, which would go on."""
    main, ended = threading.main_thread(), []

    async def task():
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(threading.current_thread() is not main)

    def interrupt():
        while sys._current_frames()[main.ident].f_code.co_name != "wait":  # for the result
            time.sleep(0.01)
        signal.pthread_kill(main.ident, signal.SIGINT)

    async def cell():
        with pytest.raises(KeyboardInterrupt):
            run_in_loop(task())

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(cell())
    assert ended == [True]
