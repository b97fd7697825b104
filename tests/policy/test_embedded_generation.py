"""The weights that the embedded engine uses are those of the policy, in their current version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_refits import TinyEngine, TinyModel

from rlframework.base.errors import RefitError, UserError
from rlframework.config.sections import GenerationConfig
from rlframework.interfaces.generation import GenerationRequest, WeightReport
from rlframework.policy.embedded_generation import EmbeddedGeneration
from rlframework.policy.scoring import Scoring, SnapshotReference
from rlframework.policy.shared_state import Residency, TrainingProgress

REQUEST = GenerationRequest("one", torch.tensor([3, 4]), 0, 1)


class Served(TinyEngine):
    """Built like the engine of a plugin."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class OneBehind(Served):
    """Finishes an update with the version before."""

    def finish_weight_update(self) -> WeightReport:
        report = super().finish_weight_update()
        return WeightReport(report.version - 1, report.checksums, report.dropped_tokens)


class ShardedEngine:
    """A training engine whose embedded engine gets a copy of the weights."""

    device, tokenizer, context = torch.device("cpu"), None, SimpleNamespace(world_size=1)
    config = SimpleNamespace(model_name="tiny", precision="float32", head="language")

    def __init__(self) -> None:
        self.model = TinyModel(seed=0)

    def whole_model(self) -> None:
        return None

    def weight_specs(self) -> Any:
        return {name: SimpleNamespace(shape=tuple(one.shape), dtype=one.dtype) for name, one in self.snapshot().items()}

    def gather_weights(self, specs: Any) -> Any:
        return self.snapshot().items()

    def generating(self) -> Any:
        return torch.no_grad()

    def snapshot(self) -> Any:
        return {name: one.clone() for name, one in self.model.state_dict().items()}

    def swap(self, weights: Any, _: Any) -> Any:
        current = self.snapshot()
        self.restore(weights)
        return current

    def restore(self, weights: Any) -> None:
        self.model.load_state_dict(weights)


def parts(target: str) -> tuple[EmbeddedGeneration, Scoring]:
    engine: Any = ShardedEngine()
    residency = Residency(engine)
    generation = EmbeddedGeneration(engine, residency, TrainingProgress(), GenerationConfig(), f"{__name__}:{target}")
    return generation, Scoring(engine, None, residency, 1.0, SnapshotReference(engine))  # type: ignore[arg-type]


def test_nothing_is_generated_inside_use_reference_model():
    generation, scoring = parts("Served")
    with (
        pytest.raises(UserError, match=r"generate needs the weights of the policy.*leave the block first"),
        scoring.use_reference_model(),
    ):
        generation.exchange([REQUEST], (), None)
    (result,) = generation.exchange([REQUEST], (), None).results
    assert result.request_id == "one"


def test_an_engine_that_finishes_with_another_version_serves_nothing():
    generation, _ = parts("OneBehind")
    with pytest.raises(RefitError, match=r"the embedded OneBehind finished its update with version -1; .* sent 0"):
        generation.exchange([REQUEST], (), None)
