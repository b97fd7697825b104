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
    num_workers: PositiveInt = Field(1, description="processes of the policy; `inline` has one")
    deadlines: DeadlinesConfig = DeadlinesConfig()


class HostedGroupConfig(WorkerGroupConfig):
    """Workers in processes of their own: of the driver's environment variables they get what is named, and no more."""

    environment: dict[str, str] = Field({}, description="environment variables of the workers, by name")
    pass_environment: tuple[str, ...] = Field(
        (), description="names of environment variables that the workers get from this process, where it has them"
    )


class RayGroupConfig(HostedGroupConfig):
    """Workers that are Ray actors, on this machine or on several."""

    address: str | None = Field(
        None,
        description="of a Ray cluster to run on, `host:port` or `auto`; by default RAY_ADDRESS where that is set, and "
        "otherwise this run starts a Ray of its own on this machine and ends it",
    )
    workers_per_node: PositiveInt | None = Field(
        None, description="of a cluster: this many on each node; by default as `placement` says"
    )
    placement: Literal["pack", "spread"] = Field(
        "pack", description="of a cluster, without workers_per_node: on as few nodes as they fit, or on as many"
    )
    listen: str = Field(
        "127.0.0.1",
        description="address of this machine at which the Ray that this run starts listens: loopback, so that no other "
        "machine reaches it. On several nodes of a cluster the workers listen at the addresses that their nodes have",
    )
    python: str | None = Field(
        None,
        description="Python executable of the workers, on each node, with the same versions of Python and Ray; by "
        "default the backend's own where it names one, and otherwise that of the cluster or of this process",
    )


class GenerationWorkersConfig(Section):
    """Generation engines in processes of their own, which get the trainer's weights by refits."""

    group: Literal["processes", "ray", "inline"] = Field(
        "processes", description="where they run, as worker_group.name; `inline`: one, in the driver's process"
    )
    num_workers: PositiveInt = Field(1, description="engines; each holds the whole model and gets its share of prompts")
    python: str | None = Field(
        None, description="Python executable of another environment for them, where `group` is ray"
    )
    deadlines: DeadlinesConfig = DeadlinesConfig()


class RefitConfig(Section):
    """How weights go from the trainer to generation engines in other processes."""

    transport: Literal["auto", "ipc", "collective"] = Field(
        "auto",
        description="ipc: memory that both sides share, on one machine or GPU; collective: broadcasts in a process "
        "group of their own; auto: ipc where all engines can reach the trainer's memory",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of floating-point weights on their way and in the engines; auto: policy.precision"
    )
    buffer_mb: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="MiB of weights that go together, of which there are three at a time; none: what suits the device. "
        "A weight that is larger goes alone",
    )
    deadline: Seconds = Field(
        120.0, description="seconds that meeting, and each group of weights, may take before it is an error"
    )


class GenerationConfig(Section):
    """What all generation engines understand."""

    name: str = Field("transformers", description="the engine: see `rlframework plugins`")
    max_new_tokens: PositiveInt = Field(64, description="an answer is cut after so many tokens")
    temperature: Annotated[float, Field(ge=0.0)] = Field(1.0, description="0 is greedy")
    top_k: PositiveInt | None = Field(None, description="sample from the so many likeliest tokens; none: from all")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="sample from the likeliest tokens that have this probability together; 1: from all"
    )
    stop_token_ids: tuple[int, ...] = Field((), description="besides the model's own end tokens")
    stop_strings: tuple[str, ...] = Field((), description="each must be one token of the tokenizer")
    batch_size: PositiveInt = Field(256, description="rows that are decoded together on one worker")
    workers: GenerationWorkersConfig | None = Field(
        None, description="engines in processes of their own; none: in the workers of the policy"
    )
    refit: RefitConfig = RefitConfig()


class EnvironmentConfig(Section):
    """What all environments share."""

    name: str = Field(description="an environment of `rlframework plugins`, or `module:Class` of your own")
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
    samples: PositiveInt = Field(256, description="the first so many held-out prompts")
    at_start: bool = Field(True, description="before the first step")
    at_end: bool = Field(True, description="after the last one")


class AlgorithmConfig(Section):
    """What all algorithms share."""

    name: str = Field(description="`grpo`, `sft`, or a plugin's")
    num_steps: PositiveInt = Field(100, description="training steps of the run")
    validation: ValidationConfig = ValidationConfig()


class ObserversConfig(Section):
    """Who listens to the run besides plugins."""

    console: bool = Field(True, description="a progress display; plain lines where the output is no terminal")
    jsonl: bool = Field(True, description="metrics.jsonl and samples.jsonl in output_dir")
    tensorboard: bool = Field(True, description="scalars in output_dir/tensorboard")
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


class ProfilerConfig(Section):
    """Steps of which the torch profiler writes a trace to `output_dir/traces`, for https://ui.perfetto.dev.

    A step that is profiled is slower, and its trace may be large: some megabytes for each second of small operations.
    """

    steps: tuple[PositiveInt, ...] = Field((), description="these steps, counted from 1")
    start: PositiveInt | None = Field(None, description="and each step from this one, up to `stop`")
    stop: PositiveInt | None = Field(None, description="last step of those from `start`; none: `start` alone")
    ranks: tuple[NonNegativeInt, ...] = Field((0,), description="workers that are profiled, each with a trace")
    with_stack: bool = Field(False, description="the line of Python that each operation came from; slow")
    record_shapes: bool = Field(False, description="shapes of the arguments of each operation")
    memory: bool = Field(False, description="memory that each operation took and freed")

    @property
    def wanted(self) -> frozenset[int]:
        """The steps."""
        span = () if self.start is None else range(self.start, (self.stop or self.start) + 1)
        return frozenset({*self.steps, *span})


class CheckpointsConfig(Section):
    """What `rlframework train --resume` goes on from, in `output_dir/checkpoints`."""

    every: NonNegativeInt = Field(0, description="steps between checkpoints; 0: none but when the run is told to stop")
    keep_last: PositiveInt = Field(2, description="of the newest")
    keep_best: NonNegativeInt = Field(0, description="besides, of those with the best `metric` at their step")
    metric: str = Field("validation/accuracy", description="what `keep_best` goes by; a name of metrics.jsonl")
    best: Literal["highest", "lowest"] = Field("highest", description="which value of `metric` is the best")
    on_interrupt: bool = Field(
        True, description="Ctrl-C and SIGTERM end the step and write a checkpoint first, where the backend can"
    )
    format: Literal["portable", "sharded", "native"] = Field(
        "portable",
        description="portable: whole tensors, written by one worker as a Hugging Face directory; sharded: each worker "
        "writes its own pieces, on a file system that all share, which `rlframework convert` makes portable. Any "
        "number of workers goes on from either, under any backend. native: files of the engine's own, for programs "
        "that read these; the run goes on from them under the same backend",
    )
    asynchronous: bool = Field(
        False, description="of sharded ones: the next steps go on while pieces are written, from copies of them in RAM"
    )


class FaultToleranceConfig(Section):
    """What happens when a worker is lost while the run trains: its process died, its machine left, or it hangs.

    Not for errors that would come again: a user's mistake, an error that a worker raised, gradients that are not
    finite. An interrupt ends the run.
    """

    max_restarts: NonNegativeInt = Field(
        0, description="from the last checkpoint, with new workers, in a row; a new checkpoint starts the count anew"
    )
    backoff: Seconds = Field(5.0, description="seconds before the first restart; doubled for each further one in a row")
    max_backoff: Seconds = Field(300.0, description="the most seconds before a restart")


class RunConfig(Section):
    """A whole run, resolved. `load_config` narrows the open sections to the models of the chosen plugins."""

    seed: NonNegativeInt = Field(0, description="of the order of data, of samples, and of what environments draw")
    output_dir: Path = Field(Path("runs/run"), description="where metrics, samples, checkpoints and the model go")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs where there are any")
    plugins: tuple[str, ...] = Field((), description="modules with plugins that are not installed")
    algorithm: SerializeAsAny[AlgorithmConfig]
    policy: SerializeAsAny[PolicyConfig]
    environment: SerializeAsAny[EnvironmentConfig]
    generation: SerializeAsAny[GenerationConfig] = GenerationConfig()
    worker_group: SerializeAsAny[WorkerGroupConfig] = WorkerGroupConfig()
    observers: ObserversConfig = ObserversConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    recording: RecordingConfig = RecordingConfig()
    profiler: ProfilerConfig = ProfilerConfig()
