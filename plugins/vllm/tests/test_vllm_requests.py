"""The requests of the engine around a runtime that fails where it is told to. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from rlframework.errors import EngineNotReady
from rlframework.generation.requests import ServingLimits
from rlframework.generation.row_limits import RowLimits
from rlframework.interfaces.generation import GenerationRequest
from rlframework_vllm.config import VllmGenerationConfig
from rlframework_vllm.engine import VllmEngine


class Failing:
    """A runtime that rejects `broken` requests, and gives others one token."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.broken: set[str] = set()

    def add(self, request: GenerationRequest, *_: Any) -> None:
        if request.request_id in self.broken:
            raise RuntimeError("no room")
        assert request.request_id not in self.added, "added twice"
        self.added.append(request.request_id)

    def step(self) -> Any:
        return [(name, [3], [-1.0], "length") for name in self.added]

    def abort(self, names: Collection[str]) -> None:
        self.added = [name for name in self.added if name not in names]

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> VllmEngine:
    made = VllmEngine(VllmGenerationConfig(name="vllm"), None, model_name="none", device="cpu", precision="float32")
    made._started = Failing()
    made._limits = ServingLimits(RowLimits((64,)), 24)
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


def test_a_closed_engine_serves_nothing(engine):
    engine.close()
    with pytest.raises(EngineNotReady, match="the engine was closed"):
        engine.poll()
