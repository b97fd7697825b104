"""The algorithm interface: the training procedure of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError
from rlframework.rollout.parts import Parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.datasets.chat.rendering import Rendered
    from rlframework.datasets.image_inputs import ImageInputs
    from rlframework.interfaces.environment import Environment, Sample

__all__ = ["Algorithm", "Parts", "RunResult"]


_SHOWN = ("step", "train/loss", "train/reward", "validation/accuracy")


@dataclass(frozen=True)
class RunResult:
    """The result of a run: its last metrics by name, and the metrics of each step."""

    metrics: Mapping[str, float]
    history: list[dict[str, float]] = field(default_factory=list)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {value:.4g}" for name, value in self.metrics.items() if name in _SHOWN)
        return f"<RunResult: {shown}; {len(self.metrics)} metrics, history of {len(self.history)} rows>"


class Algorithm(ABC):
    """Trains `parts.policy`. The class methods are called before the policy is built, to configure it."""

    @classmethod
    def needs_reference_model(cls, config: Any) -> bool:
        """Whether `config`, the algorithm's own section, needs the reference policy."""
        return False

    @classmethod
    def head(cls, config: Any) -> str:
        """Return the `policy.head` that `config`, the algorithm's own section, trains."""
        return "language"

    @classmethod
    def further_policies(cls, config: RunConfig) -> Mapping[str, int]:
        """Return the further policies that the run uses, by the names of their sections.

        Each with the number of its `train` calls, which its learning-rate schedule spans; 0 if it is not trained.
        """
        return {}

    @classmethod
    def training_calls(cls, config: Any) -> int:
        """Return the number of calls of `Policy.train` in a run, the default length of the learning-rate schedule."""
        return int(config.num_steps)

    @classmethod
    def samples_per_step(cls, config: RunConfig) -> int:
        """Return the number of training samples that a step takes, by which `num_epochs` becomes a number of steps."""
        return config.policy.train_global_batch_size

    @classmethod
    def training_samples(cls, config: RunConfig, environment: Environment) -> int:
        """Return the number of samples that a run trains on: an epoch."""
        return len(environment.samples("train"))

    @classmethod
    def shown_rows(
        cls,
        config: RunConfig,
        samples: Sequence[Sample],
        tokenizer: PreTrainedTokenizerBase,
        images: ImageInputs | None,
    ) -> list[tuple[str, Rendered]]:
        """Return the training rows of `samples` with a name each, for `rlframework tokenize --show`."""
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name!r}, whose rows cannot be shown; those of sft, of preference "
            "pairs such as dpo, and the prompts of algorithms with rollouts such as grpo can"
        )

    @abstractmethod
    def __init__(self, parts: Parts) -> None:
        """Check the parts against each other before any work; raise `ConfigError` or `DataError`."""

    def restore(self) -> None:
        """Load `parts.checkpoint`, if there is one, so that an error comes before the files of the run are changed.

        Called once before `run`. By default it does nothing, and `run` loads it.
        """

    @abstractmethod
    def run(self) -> RunResult:
        """Train to the end and return the result."""
