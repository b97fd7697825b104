"""The parts of a run, which an algorithm trains with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.datasets.image_inputs import ImageInputs
    from rlframework.generation.driver import Generation
    from rlframework.interfaces.environment import Environment
    from rlframework.observers.dispatch import Observers
    from rlframework.observers.timeline import Timeline
    from rlframework.plugins.hookspec import Uploads
    from rlframework.policy.client import Policy


@dataclass(repr=False)
class Parts:
    """The components of a run that an algorithm uses.

    `checkpoint` is the one to resume from, or None for a new run. `models` has the further policies of the run by the
    names of their sections: `critic`, `teacher`, `reward_model`. `images` makes the model's inputs of images, or is
    None if rows have none (`environment.images`). `timeline` is what the training loop records, None outside of one.
    `uploads` sends checkpoints elsewhere, None if the run does not (`checkpoints.upload`).
    """

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    generation: Generation
    environment: Environment
    observers: Observers
    checkpoint: Path | None = None
    models: Mapping[str, Policy] = field(default_factory=dict)
    images: ImageInputs | None = None
    timeline: Timeline | None = None
    uploads: Uploads | None = None

    def __repr__(self) -> str:
        further = "".join(f", {name}" for name in self.models)
        return f"<Parts of {self.config.output_dir}: {self.config.policy.model_name}{further}>"

    @property
    def trained(self) -> dict[str, Policy]:
        """The further policies that are trained, and so saved, by name."""
        sections = self.config.further_policies
        return {name: model for name, model in self.models.items() if sections[name].trained}
