"""The top-level sections of a configuration, including the base models of those that plugins extend.

A plugin's record names a `config_model` derived from one of these bases (`AlgorithmConfig`, `EnvironmentConfig`, ...);
`narrow.py` puts the models of the chosen plugins into the run's model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, SerializeAsAny

from rlframework.config.base import Section
from rlframework.config.policy import PolicyConfig


class DeadlinesConfig(Section):
    """Timeouts of the driver in seconds. A timeout is an error that names what the driver was waiting for."""

    start: PositiveFloat = Field(180.0, description="for workers to start and form their process group")
    call: PositiveFloat = Field(1800.0, description="for one call to all workers, such as a training step")
    shutdown: PositiveFloat = Field(30.0, description="for workers to exit before they are killed")


class WorkerGroupConfig(Section):
    """Where the workers of the policy run."""

    name: str = Field(
        "inline", description="`inline` (the driver process), `processes`, `ray`, or the name of a plugin"
    )
    num_workers: PositiveInt = Field(1, description="number of policy workers; `inline` supports one")
    deadlines: DeadlinesConfig = DeadlinesConfig()


class RemoteGroupConfig(WorkerGroupConfig):
    """Workers in separate processes. They inherit only the listed environment variables of the driver."""

    environment: dict[str, str] = Field({}, description="environment variables to set for the workers, by name")
    pass_environment: tuple[str, ...] = Field(
        (), description="names of environment variables to pass on from the driver, if they are set"
    )


class RayGroupConfig(RemoteGroupConfig):
    """Workers as Ray actors, on one machine or several."""

    address: str | None = Field(
        None,
        description="address of a running Ray cluster, `host:port` or `auto`; null: RAY_ADDRESS if set, otherwise the "
        "run starts a local Ray instance and stops it at the end",
    )
    workers_per_node: PositiveInt | None = Field(
        None, description="workers to place on each node of a cluster; null: decided by `placement`"
    )
    placement: Literal["pack", "spread"] = Field(
        "pack",
        description="without workers_per_node: pack onto as few nodes as possible, or spread over as many as possible",
    )
    listen: str = Field(
        "127.0.0.1",
        description="address on which the local Ray instance of this run listens; the loopback default makes it "
        "unreachable from other machines. On a multi-node cluster, workers listen on their nodes' addresses",
    )
    python: str | None = Field(
        None,
        description="Python executable for the workers, present on every node, with the same versions of Python and "
        "Ray; null: the one that the backend names, otherwise that of the cluster or of the driver",
    )


class GenerationWorkersConfig(Section):
    """Generation engines in separate processes, which receive the trainer's weights through refits."""

    group: Literal["processes", "ray", "inline"] = Field(
        "processes",
        description="where the engines run, as in worker_group.name; `inline`: a single engine in the driver process",
    )
    num_workers: PositiveInt = Field(
        1, description="number of engines; each holds the whole model and generates for its share of the prompts"
    )
    python: str | None = Field(
        None, description="Python executable of another environment for the engines; requires `group: ray`"
    )
    deadlines: DeadlinesConfig = DeadlinesConfig()


class RefitConfig(Section):
    """How weights are sent from the trainer to generation engines in other processes."""

    transport: Literal["auto", "ipc", "collective"] = Field(
        "auto",
        description="ipc: memory shared on one machine or GPU; collective: broadcasts in a dedicated process group; "
        "auto: ipc if every engine can access the trainer's memory, otherwise collective",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of floating-point weights in transfer and in the engines; auto: policy.precision"
    )
    buffer_mb: PositiveFloat | None = Field(
        None,
        description="MiB of weights per transfer buffer, of which there are three; null: chosen for the device. A "
        "larger weight is sent on its own",
    )
    deadline: PositiveFloat = Field(
        120.0, description="timeout in seconds for the rendezvous, and for each buffer of weights"
    )


class GenerationConfig(Section):
    """Settings that all generation engines share."""

    name: str = Field("transformers", description="name of the generation engine; `rlframework plugins` lists them")
    max_new_tokens: PositiveInt = Field(64, description="maximum number of tokens to generate per completion")
    temperature: NonNegativeFloat = Field(1.0, description="sampling temperature; 0: greedy decoding")
    top_k: PositiveInt | None = Field(
        None, description="sample from the k most likely tokens; null: from the full vocabulary"
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0,
        description="sample from the smallest set of most likely tokens with at least this total probability; 1: from "
        "all tokens",
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), description="token ids that end a completion, in addition to the model's end-of-sequence tokens"
    )
    stop_strings: tuple[str, ...] = Field(
        (), description="strings that end a completion; each must be a single token of the tokenizer"
    )
    batch_size: PositiveInt = Field(256, description="maximum rows decoded together on each worker")
    workers: GenerationWorkersConfig | None = Field(
        None, description="run engines in separate processes; null: generate in the policy workers"
    )
    refit: RefitConfig = RefitConfig()


class EnvironmentConfig(Section):
    """Settings that all environments share."""

    name: str = Field(
        description="name of an environment (`rlframework plugins` lists them), or the import path "
        "`module:Class` of yours"
    )
    system_prompt: str | None = Field(
        None, description="system message at the start of every conversation, for models with a chat template"
    )

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """The keys that do not affect the training rows: `environment.key` or `seed`. Empty by default.

        Tokenized data may be reused by a run in which only these keys differ. A key that determines which rows are held
        out does affect the training rows.
        """
        return frozenset()


class ValidationConfig(Section):
    """Greedy completions of held-out prompts, scored during the run."""

    every: NonNegativeInt = Field(0, description="steps between validations; 0: only at the start and end of the run")
    samples: PositiveInt = Field(256, description="number of held-out prompts to use, from the first")
    at_start: bool = Field(True, description="validate before the first step")
    at_end: bool = Field(True, description="validate after the last step")


class AlgorithmConfig(Section):
    """Settings that all algorithms share."""

    name: str = Field(description="`grpo`, `sft`, or the name of a plugin")
    num_steps: PositiveInt = Field(100, description="number of training steps")
    validation: ValidationConfig = ValidationConfig()


class WandbConfig(Section):
    """Report to Weights & Biases. Requires the extra `wandb`."""

    project: str = Field("rlframework", description="project to log the run to")
    entity: str | None = Field(None, description="user or team that owns the project; null: W&B's default")
    run_name: str | None = Field(None, description="display name of the run; null: the last component of output_dir")
    tags: tuple[str, ...] = Field((), description="tags of the run")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: write to output_dir/wandb, to upload later with `wandb sync`"
    )


class MlflowConfig(Section):
    """Report to MLflow. Requires the extra `mlflow`."""

    tracking_uri: str | None = Field(
        None,
        description="server (http://...) or sqlite:///file; null: MLFLOW_TRACKING_URI if set, else MLflow's default",
    )
    experiment: str = Field("rlframework", description="experiment to log the run to")
    run_name: str | None = Field(None, description="display name of the run; null: the last component of output_dir")
    tags: Mapping[str, str] = Field(default_factory=dict, description="tags of the run, by name")


class ObserversConfig(Section):
    """Outputs of the run, besides those of plugins."""

    # No keys for passwords or API keys, because the configuration is saved with the run: the services read their own.

    console: bool = Field(True, description="progress display; plain lines if the output is not a terminal")
    jsonl: bool = Field(True, description="write metrics.jsonl and samples.jsonl to output_dir")
    tensorboard: bool = Field(True, description="write scalars to output_dir/tensorboard")
    curve: bool = Field(True, description="draw the reward and accuracy curves at the end of the run")
    samples: NonNegativeInt = Field(4, description="completions to log with their rewards at each step")
    wandb: WandbConfig | Literal[False] = Field(
        False, description="report to Weights & Biases; `{}` enables it with its defaults"
    )
    mlflow: MlflowConfig | Literal[False] = Field(
        False, description="report to MLflow; `{}` enables it with its defaults"
    )


class RecordingConfig(Section):
    """Training steps to record in `output_dir/recorded`, for `rlframework parity --replay`. None by default.

    Each recorded step takes as much disk space as the model in fp32 plus its batch.
    """

    steps: tuple[PositiveInt, ...] = Field((), description="these steps, counted from 1")
    every: NonNegativeInt = Field(0, description="also record every step that is a multiple of this; 0: no others")


class ProfilerConfig(Section):
    """Steps to trace with the torch profiler. Traces are written to `output_dir/traces`, for https://ui.perfetto.dev.

    A profiled step is slower, and its trace can be large: several megabytes per second of small operations.
    """

    steps: tuple[PositiveInt, ...] = Field((), description="these steps, counted from 1")
    start: PositiveInt | None = Field(None, description="also profile every step from this one through `stop`")
    stop: PositiveInt | None = Field(
        None, description="last step of the range that begins at `start`; null: only `start`"
    )
    ranks: tuple[NonNegativeInt, ...] = Field((0,), description="ranks of the workers to profile; each writes a trace")
    with_stack: bool = Field(False, description="record the Python source line of each operation; slow")
    record_shapes: bool = Field(False, description="record the argument shapes of each operation")
    memory: bool = Field(False, description="record the memory that each operation allocates and frees")

    @property
    def wanted(self) -> frozenset[int]:
        """The steps to profile."""
        span = () if self.start is None else range(self.start, (self.stop or self.start) + 1)
        return frozenset({*self.steps, *span})


class CheckpointsConfig(Section):
    """Checkpoints in `output_dir/checkpoints`, from which `rlframework train --resume` resumes."""

    every: NonNegativeInt = Field(0, description="steps between checkpoints; 0: only when the run is interrupted")
    keep_last: PositiveInt = Field(2, description="number of newest checkpoints to keep")
    keep_best: NonNegativeInt = Field(0, description="number of checkpoints with the best `metric` to keep in addition")
    metric: str = Field(
        "validation/accuracy", description="metric that `keep_best` compares, as named in metrics.jsonl"
    )
    best: Literal["highest", "lowest"] = Field(
        "highest", description="whether the highest or the lowest value of `metric` is best"
    )
    on_interrupt: bool = Field(
        True, description="on Ctrl-C or SIGTERM, finish the step and write a checkpoint, if the backend supports it"
    )
    format: Literal["portable", "sharded", "native"] = Field(
        "portable",
        description="portable: full tensors, written by one worker as a Hugging Face directory; sharded: each worker "
        "writes its own shards to a shared file system, and `rlframework convert` makes them portable. A run can "
        "resume from either with any number of workers and any backend. native: the engine's own files, for programs "
        "that read them; a run can resume from them only with the same backend",
    )
    asynchronous: bool = Field(
        False,
        description="write sharded checkpoints in the background, from copies of the shards in RAM, while training "
        "continues",
    )


class FaultToleranceConfig(Section):
    """Restarts after a worker is lost during training: its process died, its machine disappeared, or it hangs.

    Errors that would recur are not retried: user errors, exceptions raised by a worker, non-finite gradients. An
    interrupt ends the run.
    """

    max_restarts: NonNegativeInt = Field(
        0,
        description="maximum consecutive restarts from the last checkpoint, with new workers; a new checkpoint resets "
        "the count",
    )
    backoff: PositiveFloat = Field(
        5.0, description="seconds before the first restart; doubled for each consecutive one"
    )
    max_backoff: PositiveFloat = Field(300.0, description="maximum seconds before a restart")


class RunConfig(Section):
    """The resolved configuration of a run. `load_config` types its open sections by the chosen plugins."""

    seed: NonNegativeInt = Field(0, description="random seed for data order, sampling, and environments")
    output_dir: Path = Field(
        Path("runs/run"), description="directory for metrics, samples, checkpoints and the trained model"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if available")
    plugins: tuple[str, ...] = Field(
        (), description="Python modules to load as plugins, in addition to the installed ones"
    )
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
