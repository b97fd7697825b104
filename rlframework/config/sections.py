"""The top-level sections of a configuration, including the base models of those that plugins extend.

A plugin's record names a `config_model` derived from one of these bases (`AlgorithmConfig`, `EnvironmentConfig`, ...);
`models.py` puts the models of the chosen plugins into the run's model.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from rlframework.base.secrets import hide_in_text
from rlframework.config.base import ImportsCode, NeedsTrust, Section
from rlframework.config.further_policies import (
    FURTHER_POLICIES,
    CriticConfig,
    FurtherPolicyConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rlframework.config.numbers import (
    Coefficient,
    Count,
    CountOrZero,
    Fraction,
    Limit,
    Seconds,
    Seed,
    Steps,
    StepsOrZero,
    Temperature,
    Tokens,
    TokensOrZero,
    Workers,
)
from rlframework.config.policy import DeadlinesConfig as DeadlinesConfig
from rlframework.config.policy import PolicyConfig
from rlframework.config.policy import RemoteGroupConfig as RemoteGroupConfig
from rlframework.config.policy import WorkerGroupConfig as WorkerGroupConfig


class ImagesConfig(Section):
    """Rows may have images, which the model's own processor turns into its inputs."""

    root: str | None = Field(
        None, description="folder that relative paths of images start from; null: the folder of the data"
    )
    invalid: Literal["error", "skip"] = Field(
        "error", description="what to do with a row whose image cannot be used: end before any work, or leave it out"
    )
    max_pixels: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        50_000_000, description="most pixels of an image, checked before it is decoded"
    )
    allow_addresses: Annotated[bool, NeedsTrust("makes this machine read the addresses that the data names")] = Field(
        False,
        description="read images of rows at http and https addresses, each once, and keep them in memory; false: the "
        "image of such a row cannot be used",
    )


class GenerationWorkersConfig(Section):
    """Generation engines in separate processes, which receive the trainer's weights through refits."""

    group: Literal["processes", "ray", "inline"] = Field(
        "processes", description="where the engines run; `inline`: a single engine in the driver process"
    )
    num_workers: Workers = Field(1, description="engines; each holds the whole model and takes a share of prompts")
    python: Annotated[str | None, NeedsTrust("starts this program")] = Field(
        None, description="Python of another environment for the engines; requires `group: ray`"
    )
    deadlines: DeadlinesConfig = DeadlinesConfig()


class RefitConfig(Section):
    """The transfer of weights from the trainer to generation engines in other processes, and its proof."""

    transport: Literal["auto", "ipc", "collective"] = Field(
        "auto",
        description="ipc: memory shared on one machine or GPU; collective: broadcasts in a dedicated process group; "
        "auto: ipc if every engine can access the trainer's memory, otherwise collective",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of floating-point weights in transfer and in the engines; auto: policy.precision"
    )
    buffer_mb: Limit | None = Field(
        None, description="MiB per transfer buffer, of three; a larger weight is sent alone; null: for the device"
    )
    deadline: Seconds = Field(120.0, description="seconds to wait for the rendezvous, and for each buffer")
    probes: CountOrZero = Field(
        6, description="prompts of which engines and trainer compare log-probabilities after each refit; 0: none"
    )
    probe_bound: Limit | None = Field(
        None,
        description="largest mean difference of the probes' log-probabilities; null: as the engine declares, and the "
        "noise of earlier refits allows",
    )


class LogprobCheckConfig(Section):
    """The check that engines return the policy's log-probabilities of the tokens that they sample, in each step."""

    action: Literal["stop", "warn", "off"] = Field(
        "stop", description="beyond the bound: stop the run before it learns from the tokens, warn, or do not compare"
    )
    mean: Limit | None = Field(
        None, description="largest mean difference, in nats; null: by the dtype, and by the first steps of the run"
    )
    largest: Limit | None = Field(
        None, description="largest difference of a token, in nats; null: 0.05 in float32 without experts, else none"
    )


class GenerationConfig(Section):
    """Settings that all generation engines share."""

    name: str = Field("transformers", description="name of the generation engine; `rlframework plugins` lists them")
    max_new_tokens: Tokens = Field(64, description="maximum number of tokens to generate per completion")
    temperature: Temperature = Field(1.0, description="sampling temperature; 0: greedy decoding")
    top_k: Tokens | None = Field(
        None, description="sample from the k most likely tokens; null: from all, as GRPO requires"
    )
    top_p: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="sample from the fewest tokens with this total probability; 1: from all, as GRPO requires",
    )
    stop_token_ids: tuple[TokensOrZero, ...] = Field(
        (), description="token ids that end a completion, besides the model's own"
    )
    stop_strings: tuple[str, ...] = Field((), description="strings that end a completion; each must be a single token")
    batch_size: Count = Field(
        256, description="maximum rows decoded together on each worker; a GPU takes as many as fit"
    )
    max_in_flight: Count | None = Field(
        None, description="maximum requests that an engine has at a time, others wait; null: twice batch_size"
    )
    workers: GenerationWorkersConfig | None = Field(None, description="engine processes; null: use the policy workers")
    refit: RefitConfig = RefitConfig()
    logprob_check: LogprobCheckConfig = LogprobCheckConfig()


class EnvironmentConfig(Section):
    """Settings that all environments share."""

    name: str = Field(
        description="an environment (`rlframework plugins` lists them), or the import path `module:Class` of yours"
    )
    system_prompt: str | None = Field(
        None, description="system message of conversations that have none, if there is a chat template"
    )
    images: ImagesConfig | None = Field(None, description="how to read images; null: messages have none")
    max_turns: Count = Field(
        16,
        description="most turns of the model in an episode, which then ends as truncated; a further request of an "
        "agent is refused with an error",
    )
    max_episode_tokens: Tokens | None = Field(
        None, description="most tokens of an episode's conversation, with all turns; null: the model's positions"
    )
    step_timeout: Seconds = Field(
        60.0, description="seconds for each reset and step of an episode; one that takes longer fails, alone"
    )
    max_failed_episodes: Fraction = Field(
        0.9, description="fraction of a step's episodes that may fail; the run ends if more of them or all have failed"
    )
    max_concurrent_episodes: Count | None = Field(
        None, description="episodes that run at the same time; null: as many as the engines decode at a time"
    )
    gather_timeout: Seconds = Field(
        0.02, description="seconds for which engines wait for episodes between two turns, to decode the next together"
    )

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """The keys that do not affect the training rows: `environment.key` or `seed`. By default those of episodes.

        Tokenized data may be reused by a run in which only these keys differ. A key that determines which rows are held
        out does affect the training rows.
        """
        limits = ("max_turns", "max_episode_tokens", "step_timeout", "max_failed_episodes")
        keys = (*limits, "max_concurrent_episodes", "gather_timeout")
        return frozenset(f"environment.{key}" for key in keys)


class ValidationConfig(Section):
    """Evaluation during the run: answers to held-out prompts, or losses on held-out rows or pairs."""

    every: StepsOrZero = Field(0, description="steps between validations; 0: only at the start and end of the run")
    samples: Steps = Field(256, description="number of held-out prompts, rows or pairs to use, from the first")
    attempts: Steps = Field(
        1, description="answers to each prompt; several are reported as avg@k and pass@k, with intervals over prompts"
    )
    temperature: Temperature | None = Field(
        None, description="sampling temperature; null: 0 (greedy) for one attempt, `generation.temperature` for several"
    )
    at_start: bool = Field(True, description="validate before the first step")
    at_end: bool = Field(True, description="validate after the last step")

    def temperature_of(self, generation: GenerationConfig) -> float:
        """Return the temperature of validation in a run with `generation`."""
        if self.temperature is not None:
            return self.temperature
        return generation.temperature if self.attempts > 1 else 0.0


class EarlyStoppingConfig(Section):
    """The end of a run before `num_steps`, because a metric does not improve any more."""

    metric: str = Field("validation/accuracy", description="metric to follow, as named in metrics.jsonl")
    best: Literal["highest", "lowest"] = Field("highest", description="which value of `metric` is best")
    patience: Count = Field(3, description="measurements without an improvement after which the run ends")
    min_change: Coefficient = Field(0.0, description="change of `metric` that counts as an improvement if exceeded")


class AlgorithmConfig(Section):
    """Settings that all algorithms share."""

    takes_images: ClassVar[bool] = False
    """Whether an algorithm of a plugin trains on rows with images; those of core are known."""

    on_preferences: ClassVar[bool] = False
    """Whether the training data are answers that are preferred or graded, as the environment `preferences` has them."""

    name: str = Field(
        description="an algorithm (`rlframework plugins` lists them), or the import path `module:Class` of yours"
    )
    num_steps: StepsOrZero = Field(100, description="number of training steps; 0: those of `num_epochs`")
    num_epochs: Steps | None = Field(
        None,
        description="passes over the training samples, instead of `num_steps`; a last batch that they do not fill is "
        "filled with samples of the next pass",
    )
    validation: ValidationConfig = ValidationConfig()
    early_stopping: EarlyStoppingConfig | None = Field(None, description="end the run early; null: never")

    @model_validator(mode="before")
    @classmethod
    def _no_steps_with_epochs(cls, values: Any) -> Any:
        """Leave out the default of `num_steps` where `num_epochs` is given."""
        if isinstance(values, dict) and values.get("num_epochs") is not None:
            return {"num_steps": 0} | values
        return values

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.num_epochs is not None and self.num_steps:
            raise ValueError(
                f"num_steps={self.num_steps} and num_epochs={self.num_epochs} both say how long to train; set only one"
            )
        if self.num_epochs is None and not self.num_steps:
            raise ValueError("num_steps is 0, so num_epochs must be set; set one of them")
        return self


class WandbConfig(Section):
    """Report to Weights & Biases. Requires the extra `wandb`."""

    project: str = Field("rlframework", description="project to log the run to")
    entity: str | None = Field(None, description="user or team that owns the project; null: W&B's default")
    run_name: str | None = Field(None, description="display name of the run; null: the last component of output_dir")
    tags: tuple[str, ...] = Field((), description="tags of the run")
    mode: Literal["online", "offline"] = Field("online", description="offline: write output_dir/wandb for `wandb sync`")


class MlflowConfig(Section):
    """Report to MLflow. Requires the extra `mlflow`."""

    tracking_uri: Annotated[str | None, NeedsTrust("sends metrics, settings and samples to this address")] = Field(
        None, description="http://... or sqlite:///file; null: MLFLOW_TRACKING_URI if set, else MLflow's default"
    )
    experiment: str = Field("rlframework", description="experiment to log the run to")
    run_name: str | None = Field(None, description="display name of the run; null: the last component of output_dir")
    tags: Mapping[str, str] = Field(default_factory=dict, description="tags of the run, by name")


class TrackioConfig(Section):
    """Report to Trackio. Requires the extra `trackio`."""

    project: str = Field("rlframework", description="project to log the run to")
    run_name: str | None = Field(
        None, description="display name of the run, before its id; null: the last component of output_dir"
    )
    space_id: Annotated[str | None, NeedsTrust("sends metrics, settings and samples to this Space")] = Field(
        None,
        description="Space of Hugging Face to log to, `user/name`; null: TRACKIO_SPACE_ID or TRACKIO_SERVER_URL if "
        "set, else files on this machine for `trackio show`",
    )
    private: bool = Field(True, description="a Space that the run creates is private")


class ObserversConfig(Section):
    """Outputs of the run, besides those of plugins."""

    # No keys for passwords or API keys, because the configuration is saved with the run: the services read their own.

    console: bool = Field(True, description="progress display; plain lines if the output is not a terminal")
    jsonl: bool = Field(True, description="write metrics.jsonl, samples.jsonl and timeline.jsonl to output_dir")
    tensorboard: bool = Field(True, description="write scalars to output_dir/tensorboard")
    curve: bool = Field(True, description="draw the reward and accuracy curves at the end of the run")
    samples: CountOrZero = Field(4, description="completions to log with their rewards at each step")
    peak_tflops: Limit | None = Field(
        None,
        description="TFLOP/s that a worker's device can reach, for the metric `throughput/mfu`; null: of dense bf16 "
        "products, if the GPU is known",
    )
    wandb: WandbConfig | Literal[False] = Field(False, description="report to Weights & Biases; `{}`: with defaults")
    mlflow: MlflowConfig | Literal[False] = Field(False, description="report to MLflow; `{}`: with defaults")
    trackio: TrackioConfig | Literal[False] = Field(False, description="report to Trackio; `{}`: with defaults")


class RecordingConfig(Section):
    """Training steps to record in `output_dir/recorded`, for `rlframework parity --replay`. None by default.

    Each recorded step takes as much disk space as the model in fp32 plus its batch.
    """

    steps: tuple[Steps, ...] = Field((), description="these steps, counted from 1")
    every: StepsOrZero = Field(0, description="also record every step that is a multiple of this; 0: no others")


class ProfilerConfig(Section):
    """Steps to trace with the torch profiler. Traces are written to `output_dir/traces`, for https://ui.perfetto.dev.

    A profiled step is slower, and its trace can be large: several megabytes per second of small operations.
    """

    steps: tuple[Steps, ...] = Field((), description="these steps, counted from 1")
    start: Steps | None = Field(None, description="also profile every step from this one through `stop`")
    stop: Steps | None = Field(None, description="last step of the range from `start`; null: only `start`")
    ranks: tuple[CountOrZero, ...] = Field((0,), description="ranks of the workers to profile; each writes a trace")
    with_stack: bool = Field(False, description="record the Python source line of each operation; slow")
    record_shapes: bool = Field(False, description="record the argument shapes of each operation")
    memory: bool = Field(False, description="record the memory that each operation allocates and frees")

    def profiles(self, step: int) -> bool:
        """Whether to profile `step`."""
        return step in self.steps or (self.start is not None and self.start <= step <= (self.stop or self.start))


_AZURE_CONTAINER = re.compile(r"^((?:abfss?|az)://[a-z0-9](?:[a-z0-9-]{1,61})[a-z0-9])@(?=[a-z0-9]+\.)")
"""The container in `abfs://container@account.dfs.core.windows.net/path`."""


class CheckpointsConfig(Section):
    """Checkpoints in `output_dir/checkpoints`, from which `rlframework train --resume` resumes."""

    every: StepsOrZero = Field(
        0,
        description="steps between checkpoints, with one more after the last step; 0: only when the run is interrupted",
    )
    keep_last: Count = Field(2, description="number of newest checkpoints to keep")
    keep_best: CountOrZero = Field(0, description="number of checkpoints with the best `metric` to keep in addition")
    metric: str = Field("validation/accuracy", description="metric for `keep_best`, as named in metrics.jsonl")
    best: Literal["highest", "lowest"] = Field("highest", description="which value of `metric` is best")
    on_interrupt: bool = Field(True, description="on Ctrl-C or SIGTERM, finish the step and save, if the backend can")
    format: Literal["portable", "sharded", "native"] = Field(
        "portable",
        description="portable: full tensors, written by one worker as a Hugging Face directory; sharded: each worker "
        "writes its own shards to a shared file system, and `rlframework convert` makes them portable. A run can "
        "resume from either with any number of workers and any backend. native: the engine's own files, for programs "
        "that read them; a run can resume from them only with the same backend",
    )
    asynchronous: bool = Field(
        False, description="write sharded checkpoints in the background, from copies in RAM, while training continues"
    )
    upload: Annotated[str | None, NeedsTrust("sends checkpoints to this address")] = Field(
        None,
        description="address to which each checkpoint is copied in the background, e.g. s3://bucket/run-7 or "
        "file:///mnt/share/run-7: a folder of this run alone. Credentials come from the environment",
    )
    resume_uploaded: bool = Field(
        False,
        description="resume from the newest checkpoint in `output_dir` or at `upload`, which is fetched; start the run "
        "if there is none",
    )

    @field_validator("upload")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        plain = None if url is None else _AZURE_CONTAINER.sub(r"\1/", url)  # which stands where others have a user
        if plain is not None and hide_in_text(plain) != plain:
            raise ValueError("the address contains a password or key; give credentials in the environment")
        if url is not None and not url.partition("://")[2]:
            raise ValueError("must be an address such as s3://bucket/run-7 or file:///mnt/share/run-7")
        return url

    @model_validator(mode="after")
    def _resumed_from_somewhere(self) -> Self:
        if self.resume_uploaded and self.upload is None:
            raise ValueError("resume_uploaded needs upload, the address to fetch checkpoints from")
        return self


class FaultToleranceConfig(Section):
    """Restarts after a worker is lost during training: its process died, its machine disappeared, or it hangs.

    Errors that would recur are not retried: user errors, exceptions raised by a worker, non-finite gradients. An
    interrupt ends the run.
    """

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="maximum restarts from the last checkpoint; a newer checkpoint resets the count"
    )
    backoff: Seconds = Field(5.0, description="seconds before the first restart; doubled for each further one")
    max_backoff: Seconds = Field(300.0, description="maximum seconds before a restart")


class RunConfig(Section):
    """The resolved configuration of a run. `load_config` types its open sections by the chosen plugins."""

    seed: Seed = Field(
        0, description="random seed for data order, sampling, environments, and global random number generators"
    )
    output_dir: Path = Field(Path("runs/run"), description="directory for metrics, samples, checkpoints and the model")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if available")
    plugins: Annotated[tuple[str, ...], ImportsCode()] = Field(
        (), description="Python modules to load as plugins, besides the installed ones"
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
    critic: SerializeAsAny[CriticConfig] | None = None
    teacher: SerializeAsAny[TeacherConfig] | None = None
    reward_model: SerializeAsAny[RewardModelConfig] | None = None

    @property
    def resume_command(self) -> str:
        """See `resume_with`, without overrides."""
        return self.resume_with()

    def resume_with(self, *overrides: str) -> str:
        """The command that resumes this run from its newest checkpoint, also if its own keys need trust.

        A call from Python if only the program that started the run has what it needs: parts of `__main__`, or rows.
        """
        from rlframework.config.trust import needs_trust

        rows = getattr(self.environment, "data_digest", None) is not None
        if rows or '"__main__:' in self.model_dump_json():
            given = f", {list(overrides)!r}" * bool(overrides) + ", data=rows" * rows
            given += ", trust_run=True" * needs_trust(self)
            return f"from rlframework import resume; resume({str(self.output_dir)!r}{given})"
        trust = " --trust-run" if needs_trust(self) else ""
        return " ".join(
            [f"rlframework train --resume {shlex.quote(str(self.output_dir))}{trust}", *map(shlex.quote, overrides)]
        )

    @property
    def further_policies(self) -> dict[str, FurtherPolicyConfig]:
        """The sections of further policies that are given, by name."""
        return {name: section for name in FURTHER_POLICIES if (section := getattr(self, name)) is not None}

    def of(self, name: str) -> Self:
        """Return this configuration with the further policy `name` in the place of the policy.

        What reads `policy` and `worker_group`, such as the checks of backends, then concerns that further policy. One
        that is not trained is in no checkpoint.
        """
        section = self.further_policies[name]
        changed: dict[str, Any] = {"policy": section, "worker_group": section.worker_group}
        return self.model_copy(update=changed if section.trained else changed | {"checkpoints": CheckpointsConfig()})
