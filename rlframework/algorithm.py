"""The algorithm interface: what a run does with its parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.generation.client import Generation
    from rlframework.interfaces.environment import Environment
    from rlframework.observers.dispatch import Observers
    from rlframework.policy.client import Policy


@dataclass
class Parts:
    """What an algorithm works with. `checkpoint`: where a run that was stopped goes on from; None: it starts."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    generation: Generation
    environment: Environment
    observers: Observers
    checkpoint: Path | None = None


@dataclass(frozen=True)
class RunResult:
    """What a run came to: the last metrics by name, and the metrics of each step."""

    metrics: Mapping[str, float]
    history: list[dict[str, float]] = field(default_factory=list)


class Algorithm(ABC):
    """Trains `parts.policy`. `needs_reference_model` tells before the policy is built whether one is kept."""

    @classmethod
    def needs_reference_model(cls, config: Any) -> bool:
        """Whether `config` (the algorithm's own section) uses the reference policy."""
        return False

    @classmethod
    def training_calls(cls, config: Any) -> int:
        """How often a run calls `policy.train`: what the learning-rate schedule spans unless it says otherwise."""
        return int(config.num_steps)

    @abstractmethod
    def __init__(self, parts: Parts) -> None:
        """Check that the parts fit together (`ConfigError`, `DataError`) before any work."""

    @abstractmethod
    def run(self) -> RunResult:
        """Train to the end."""
