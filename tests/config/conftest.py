"""Parts that exist only in these tests, and a manager that has them: no plugin needs to be installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, PositiveInt, model_validator

from rlframework.base.errors import PluginError
from rlframework.config.base import Section
from rlframework.config.sections import (
    AlgorithmConfig,
    EnvironmentConfig,
    GenerationConfig,
    RunConfig,
    WorkerGroupConfig,
)
from rlframework.plugins.listing import PluginListing
from rlframework.plugins.manager import Registered, create_manager
from rlframework.plugins.types import (
    AlgorithmRecord,
    Capability,
    EnvironmentRecord,
    GenerationEngineRecord,
    PolicyWorkerRecord,
    Problem,
    Record,
    WorkerGroupRecord,
)


class ClimbLossConfig(Section):
    clip: float = Field(0.2, description="how far a step goes")


class ClimbConfig(AlgorithmConfig):
    name: Literal["climb"] = "climb"
    group_size: PositiveInt = 4
    loss: ClimbLossConfig = ClimbLossConfig()

    @model_validator(mode="after")
    def _enough_steps(self) -> ClimbConfig:
        if self.num_steps < self.group_size:
            raise ValueError("num_steps must not be less than group_size")
        return self


class CopyConfig(AlgorithmConfig):
    name: str = "copy"
    temperature_of_copies: float = 1.0


class DiceConfig(EnvironmentConfig):
    name: str = "dice"
    sides: PositiveInt = 6
    path: Path | None = None


class CardsConfig(EnvironmentConfig):
    name: str = "cards"
    suits: PositiveInt = Field(description="how many suits the pack has")
    mix: dict[str, float] = Field(default_factory=dict)
    limit: int | Literal["all"] = "all"


class EngineConfig(Section):
    lr_scale: float = 1.0
    shards: tuple[int, ...] = (1,)


class NeedyConfig(Section):
    license: str = Field(description="the key that you bought")


def dislikes_seven(config: RunConfig, device: str) -> list[Problem]:
    if config.seed == 7:
        return [Problem("seed", f"7 brings bad luck on {device}.", "Take another one.")]
    return []


def gpu_only(config: RunConfig, device: str) -> list[Problem]:
    return [] if device == "cuda" else [Problem("device", f"is {device}.", "Use a GPU.")]


@dataclass
class FakeManager:
    """The part of a plugin manager that the configuration uses."""

    records: list[Record]
    rows: list[PluginListing] = field(default_factory=list)

    def registered(self, kind: str) -> dict[str, Registered]:
        return {
            record.name: Registered(record, "fake", "1.0", "fake") for record in self.records if record.kind == kind
        }

    def select(self, kind: str, name: str) -> Registered:
        found = self.registered(kind)
        if name not in found:
            raise PluginError(f"there is no {kind} {name!r}. Installed: {', '.join(found)}.")
        return found[name]

    hints = create_manager().hints

    def listing(self) -> list[PluginListing]:
        return self.rows


@pytest.fixture
def manager() -> FakeManager:
    """Two algorithms, two environments, three backends; `off` is a plugin that is disabled."""
    capabilities = frozenset({Capability.DATA_PARALLEL, Capability.LORA})
    records: list[Record] = [
        AlgorithmRecord("climb", "x:Y", 1, config_model=ClimbConfig),
        AlgorithmRecord("copy", "x:Y", 1, config_model=CopyConfig),
        EnvironmentRecord("dice", "x:Y", 1, config_model=DiceConfig, check=dislikes_seven),
        EnvironmentRecord("cards", "x:Y", 1, config_model=CardsConfig),
        GenerationEngineRecord("transformers", "x:Y", 2, config_model=GenerationConfig),
        WorkerGroupRecord("inline", "x:Y", 1, config_model=WorkerGroupConfig),
        PolicyWorkerRecord("dtensor", "x:Y", 1, config_model=EngineConfig, capabilities=capabilities),
        PolicyWorkerRecord("needy", "x:Y", 1, config_model=NeedyConfig),
        PolicyWorkerRecord("plain", "x:Y", 1, check=gpu_only),
    ]
    return FakeManager(records, [PluginListing("off", None, "off-dist", "2", None, (), "disabled", "by hand")])


@pytest.fixture
def minimal() -> dict[str, dict[str, object]]:
    """The least that a configuration must say."""
    return {"policy": {"model_name": "m"}, "algorithm": {"name": "climb"}, "environment": {"name": "dice"}}
