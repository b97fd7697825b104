"""Bases of the sections whose own keys come from a plugin: each has a `name` and the keys that all plugins share.

The record of a plugin names a model derived from one of these; `load.py` puts the chosen ones into the run's model.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, SerializeAsAny

from rlframework.config.base import Section
from rlframework.config.observers import MlflowConfig, WandbConfig
from rlframework.config.policy import PolicyConfig

Seconds = Annotated[float, Field(gt=0.0)]


class DeadlinesConfig(Section):
    """How long the driver waits, in seconds, before it gives up and says what it waited for."""

    start: Seconds = Field(180.0, description="workers to come up, and the collective group to form")
    call: Seconds = Field(1800.0, description="one call to all workers, such as a training step")
    shutdown: Seconds = Field(30.0, description="workers to leave before they are killed")


class WorkerGroupConfig(Section):
    """Where the workers run."""

    name: str = Field("inline", description="`inline` (this process), `processes`, `ray`, or a plugin's")
    num_workers: PositiveInt = 1
    deadlines: DeadlinesConfig = DeadlinesConfig()


class GenerationConfig(Section):
    """What all generation engines understand."""

    name: str = "transformers"
    max_new_tokens: PositiveInt = 64
    temperature: Annotated[float, Field(ge=0.0)] = Field(1.0, description="0 is greedy")
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    stop_token_ids: tuple[int, ...] = Field((), description="besides the model's own end tokens")
    stop_strings: tuple[str, ...] = Field((), description="each must be one token of the tokenizer")
    batch_size: PositiveInt = Field(256, description="rows that are decoded together on one worker")


class EnvironmentConfig(Section):
    """What all environments share."""

    name: str
    system_prompt: str | None = Field(
        None, description="first message of every conversation, where the model has roles"
    )

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """What the training rows do not depend on: `environment.key`, or `seed`. By default they do on everything.

        Token data is taken for a run where these differ. A key that decides which rows are held out is none of them.
        """
        return frozenset()


class ValidationConfig(Section):
    """Greedy answers to held-out samples."""

    every: NonNegativeInt = Field(0, description="steps between validations; 0: only before and after")
    samples: PositiveInt = 256
    at_start: bool = True
    at_end: bool = True


class AlgorithmConfig(Section):
    """What all algorithms share."""

    name: str
    num_steps: PositiveInt = 100
    validation: ValidationConfig = ValidationConfig()


class ObserversConfig(Section):
    """Who listens to the run besides plugins."""

    console: bool = True
    jsonl: bool = True
    tensorboard: bool = True
    curve: bool = Field(True, description="a picture of reward and accuracy at the end")
    samples: NonNegativeInt = Field(4, description="completions with rewards kept at each step")
    wandb: WandbConfig | Literal[False] = Field(False, description="a section switches it on; `{}` for its defaults")
    mlflow: MlflowConfig | Literal[False] = Field(False, description="a section switches it on; `{}` for its defaults")


class RecordingConfig(Section):
    """Training steps that are written to `output_dir/recorded`, for `rlframework parity --replay`; none by default.

    A recorded step takes the room of the model in fp32 and of its batch, and the time to write them.
    """

    steps: tuple[PositiveInt, ...] = Field((), description="these steps, counted from 1")
    every: NonNegativeInt = Field(0, description="and each step that is a multiple of this; 0: no others")


class CheckpointsConfig(Section):
    """What `rlframework train --resume` goes on from, in `output_dir/checkpoints`."""

    every: NonNegativeInt = Field(0, description="steps between checkpoints; 0: none but when the run is told to stop")
    keep_last: PositiveInt = Field(2, description="of the newest")
    keep_best: NonNegativeInt = Field(0, description="besides, of those with the best `metric` at their step")
    metric: str = "validation/accuracy"
    best: Literal["highest", "lowest"] = "highest"
    on_interrupt: bool = Field(
        True, description="Ctrl-C and SIGTERM end the step and write a checkpoint first, where the backend can"
    )


class RunConfig(Section):
    """A whole run, resolved. `load_config` narrows the open sections to the models of the chosen plugins."""

    seed: NonNegativeInt = 0
    output_dir: Path = Path("runs/run")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    plugins: tuple[str, ...] = Field((), description="modules with plugins that are not installed")
    algorithm: SerializeAsAny[AlgorithmConfig]
    policy: SerializeAsAny[PolicyConfig]
    environment: SerializeAsAny[EnvironmentConfig]
    generation: SerializeAsAny[GenerationConfig] = GenerationConfig()
    worker_group: SerializeAsAny[WorkerGroupConfig] = WorkerGroupConfig()
    observers: ObserversConfig = ObserversConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    recording: RecordingConfig = RecordingConfig()
