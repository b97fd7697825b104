"""The requests of the engine around a runtime that fails where it is told to. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.base.errors import EngineNotReady, WorkerError
from rlframework.generation.requests import RowLimits, ServingLimits
from rlframework.interfaces.generation import FinishReason, GenerationRequest, WeightReport, WeightSpan
from rlframework.weight_sync.receiver import ReceivesWeights
from rlframework_vllm import engine as engine_module
from rlframework_vllm.config import VllmGenerationConfig
from rlframework_vllm.engine import VllmEngine


class Failing:
    """A runtime that rejects `broken` requests, and gives others a token in each step."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.versions: dict[str, int] = {}
        self.broken: set[str] = set()
        self.calls: list[Any] = []
        self.reason: FinishReason | None = "length"
        self.prompt = [1]

    def add(self, request: GenerationRequest, tokens: int, top_k: int, version: int, places: Any) -> None:
        if request.request_id in self.broken:
            raise RuntimeError("no room")
        assert request.request_id not in self.added, "added twice"
        self.added.append(request.request_id)
        self.versions[request.request_id] = version

    def step(self) -> Any:
        return [(name, [3], [-1.0], self.reason, self.prompt) for name in self.added]

    def abort(self, names: Collection[str]) -> None:
        self.added = [name for name in self.added if name not in names]

    def sleep(self, *, weights: bool) -> None:
        assert not self.added, "vLLM cannot release the cache of requests"
        self.calls.append(("sleep", weights))

    def wake(self, tags: Collection[str]) -> None:
        self.calls.append(("wake", sorted(tags)))

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> VllmEngine:
    made = VllmEngine(VllmGenerationConfig(name="vllm"), None, model_name="none", device="cpu", precision="float32")
    made._started = Failing()
    made.limits = ServingLimits(RowLimits((64,)), 24)
    made.weight_state.commit(1)
    made.submit([GenerationRequest(name, torch.tensor([1]), 0, 1) for name in ("a", "b", "c")])
    return made


def test_an_id_that_is_aborted_twice_ends_once(engine):
    engine.abort(["a", "a"])
    assert [result.request_id for result in engine.poll()] == ["a"]


def test_requests_that_were_added_before_one_failed_are_not_added_again(engine):
    engine._started.broken = {"b"}
    with pytest.raises(RuntimeError, match="no room"):
        engine.poll()
    engine.abort(["b"])
    results = engine.poll() + engine.poll()
    assert sorted((result.request_id, result.finish_reason) for result in results) == [
        ("a", "length"),
        ("b", "aborted"),
        ("c", "length"),
    ]


def test_a_prompt_that_vllm_changed_is_an_error(engine):
    engine._started.prompt = [1, 1]
    with pytest.raises(WorkerError, match="changed the prompt of request 'a'"):
        engine.poll()


def test_cached_prefixes_belong_to_the_version_with_which_a_request_begins(engine):
    engine._started.reason = None
    engine.poll(0)
    engine.weight_state.commit(2)
    engine.submit([GenerationRequest("d", torch.tensor([1]), 0, 1)])
    engine.poll(0)
    assert engine._started.versions == {"a": 1, "b": 1, "c": 1, "d": 2}


@pytest.fixture
def on_gpu(engine, monkeypatch) -> VllmEngine:
    """The engine on a GPU with 1000 free bytes, while "a" and "b" have a token and "c" waits."""
    engine.refit_device = torch.device("cuda")
    monkeypatch.setattr(engine, "_free", lambda: 1000)
    engine.abort(["c"])
    engine.poll()
    engine._started.reason = None
    engine.poll()
    engine.submit([GenerationRequest("c", torch.tensor([1]), 0, 1)])
    assert [len(served.tokens) for served in engine._served.values()] == [1, 1, 0]
    return engine


def test_unfinished_requests_begin_again_after_the_cache_was_released(on_gpu):
    on_gpu.release(("kv_cache",))
    assert on_gpu._started.calls == [("sleep", False)]
    on_gpu._started.reason = "length"
    results = [result for _ in range(3) for result in on_gpu.poll()]
    assert on_gpu._started.calls == [("sleep", False), ("wake", ["kv_cache"])]
    assert [(result.request_id, result.token_ids.tolist(), result.finish_reason) for result in results] == [
        ("a", [3], "length"),
        ("b", [3], "length"),
        ("c", [3], "length"),
    ]


def test_unfinished_requests_wait_for_the_weights_that_were_released(on_gpu):
    on_gpu.release()
    with pytest.raises(EngineNotReady, match="its weights were released"):
        on_gpu.poll()
    on_gpu.abort(["b"])
    assert [(result.request_id, len(result.token_ids)) for result in on_gpu.poll()] == [("b", 0)]
    on_gpu.weight_state.commit(2)
    on_gpu._started.reason = "length"
    spans = {result.request_id: result.spans for result in on_gpu.poll()}
    assert spans == {"a": (WeightSpan(0, 1, 2),), "c": (WeightSpan(0, 1, 2),)}
    assert on_gpu._started.calls == [("sleep", True), ("wake", ["kv_cache", "weights"])]


def test_a_closed_engine_serves_nothing(engine):
    engine.close()
    with pytest.raises(EngineNotReady, match="the engine was closed"):
        engine.poll()


def test_the_start_of_vllm_is_reported_once_with_its_time(monkeypatch):
    made = VllmEngine(VllmGenerationConfig(name="vllm"), None, model_name="none", device="cpu", precision="float32")
    times = iter((100.0, 107.0))
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(engine_module, "Runtime", Failing)
    monkeypatch.setattr(made, "_arguments", dict)
    monkeypatch.setattr(ReceivesWeights, "finish_weight_update", lambda self: WeightReport(1))
    assert isinstance(made._vllm, Failing)
    assert [made.finish_weight_update().start_seconds for _ in range(2)] == [7.0, 0.0]
