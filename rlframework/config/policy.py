"""The backend-neutral keys of `policy`, which mean the same for every training backend, and its worker group.

`policy.<backend>` is not defined in this module: it is the `config_model` of the backend's record.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlframework.config.base import NeedsTrust, Section
from rlframework.config.numbers import (
    Coefficient,
    Count,
    Fraction,
    LearningRate,
    Limit,
    Seconds,
    Seed,
    Steps,
    StepsOrZero,
    Tokens,
    Workers,
)

Head = Literal["language", "score", "value"]
"""The output of a model: `policy.head`."""
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Checkpointing = Annotated[
    Literal[False, "selective", "full"],
    BeforeValidator(
        lambda given: "full" if given is True else given, json_schema_input_type=bool | Literal["selective", "full"]
    ),
]

ALL_LINEAR = "all-linear"
"""The value of `policy.lora.target_modules`, as in peft, for every linear layer but the head."""


def _listed_modules(value: Any) -> Any:
    """Turn the one word that is allowed in place of a list into a list."""
    if isinstance(value, str) and value != ALL_LINEAR:
        raise ValueError(f"must be {ALL_LINEAR}, or a list such as [q_proj, v_proj]")
    return (value,) if isinstance(value, str) else value


TargetModules = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed_modules, json_schema_input_type=list[str] | Literal["all-linear"]),
]


class ParallelismConfig(Section):
    """How one model is distributed over workers. Data parallelism uses the workers that remain."""

    tensor: Workers = Field(1, description="tensor-parallel degree: workers that share the weights of each layer")
    context: Workers = Field(1, description="context-parallel degree: workers that share each sequence")
    pipeline: Workers = Field(1, description="pipeline-parallel degree: stages that the layers are divided into")
    expert: Workers = Field(1, description="expert-parallel degree: data-parallel workers that share the experts")
    sequence: bool = Field(False, description="shard activations along the sequence between tensor-parallel regions")

    @property
    def model_size(self) -> int:
        """The number of workers that together hold one model replica."""
        return self.tensor * self.context * self.pipeline


class BatchingConfig(Section):
    """How rows are grouped into microbatches."""

    mode: Literal["auto", "padded", "dynamic", "packed"] = Field(
        "auto",
        description="padded: a fixed number of rows; dynamic: rows of similar length, up to `tokens` including "
        "padding; packed: rows concatenated without padding, up to `tokens`; auto: the mode that the backend reports "
        "as fastest on the device",
    )
    tokens: Tokens | None = Field(
        None, description="maximum tokens in a dynamic or packed microbatch; null: chosen for the device"
    )
    logprob_tokens: Tokens | None = Field(None, description="`tokens` for log-probabilities; null: the same")

    @property
    def chosen(self) -> str | None:
        """The mode; None if the backend chooses it."""
        return None if self.mode == "auto" else self.mode

    @property
    def limited(self) -> Literal["rows", "tokens"] | None:
        """The unit of the maximum of a microbatch; None if the backend chooses the mode."""
        return {"auto": None, "padded": "rows"}.get(self.mode, "tokens")

    @property
    def packs(self) -> bool:
        """Whether the mode needs a model that keeps sequences in one row apart."""
        return self.mode == "packed"


class OptimizerConfig(Section):
    """The optimizer, without weight decay on one-dimensional parameters.

    adamw: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101). muon: Muon (Jordan et al. 2024; Liu et al. 2025,
    arXiv:2502.16982) for the matrices of the layers, and AdamW for embedding, head and other parameters.
    """

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw; or muon for the matrices of the layers, with updates scaled to the size of AdamW's, so "
        "that `lr` and `weight_decay` serve both",
    )
    lr: LearningRate = Field(1e-6, description="peak learning rate, scaled by `scheduler`")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay rates of the first and second moments")
    eps: float = Field(
        1e-8, ge=1e-30, le=1e6, description="added to the root of the second moment, for numerical stability"
    )
    weight_decay: LearningRate = Field(0.01, description="decoupled weight decay, applied to matrices only")
    momentum: Decay = Field(0.95, description="decay rate of muon's average of gradients (Nesterov momentum)")


class SchedulerConfig(Section):
    """Learning-rate schedule as a factor of `optimizer.lr`: linear warmup, then constant, linear or cosine decay.

    The schedule advances once per call of `train`, regardless of the number of optimizer steps in the call.
    """

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="shape of the schedule after warmup")
    warmup_steps: StepsOrZero = Field(
        0, description="training calls over which the learning rate rises; at the first it is 0"
    )
    total_steps: Steps | None = Field(None, description="training calls until the decay ends, warmup included")
    min_ratio: Fraction = Field(0.0, description="factor of `optimizer.lr` at the end of the decay")


class NonFiniteGradientsConfig(Section):
    """Handling of NaN or infinite gradients: the step is skipped and counted."""

    stop_after: Steps = Field(5, description="fail the run after this many consecutive skipped steps")


class OffloadConfig(Section):
    """State to keep in CPU memory between uses. No effect when training on CPUs."""

    parameters: bool = Field(
        False, description="weights, gradients and optimizer state; a block is moved to the device when it is computed"
    )
    optimizer: bool = Field(False, description="optimizer state, except during the optimizer step")


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W + alpha / rank * B A, where B and A are trained."""

    rank: Annotated[int, Field(gt=0, le=100_000)] = Field(16, description="number of columns of B and rows of A")
    alpha: Limit = Field(32.0, description="the product B A is scaled by alpha / rank")
    dropout: Fraction = Field(0.0, description="must be 0, because training and scoring must compute the same function")
    target_modules: TargetModules = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        description="linear layers to adapt, given by the last components of their names; all-linear: every linear "
        "layer but the head",
    )
    part: Literal["all", "vision", "language"] = Field(
        "all",
        description="the part of a vision-language model in which layers are adapted. vision: its image encoder; "
        "language: its language model",
    )
    seed: Seed = Field(0, description="seed for the initialization of A; B is initialized to 0")
    refit: Literal["merged", "adapters"] = Field(
        "merged",
        description="weights sent to generation engines in other processes. merged: the full weights; adapters: only "
        "the adapters, for engines that load the base model themselves",
    )

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                "must be 0: training and scoring must compute the same function, so the model's own dropout is "
                "disabled too"
            )
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _all_or_some(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in names and len(names) > 1:
            raise ValueError(f"{ALL_LINEAR} selects every linear layer: leave out the other names, or leave it out")
        return names

    @property
    def adapts_all_linear(self) -> bool:
        """Whether every linear layer but the head is adapted, instead of those that are named."""
        return ALL_LINEAR in self.target_modules

    @property
    def selects_by_name(self) -> bool:
        """Whether PEFT selects the layers by `target_modules`, instead of by the path of each layer."""
        return self.part == "all" and not self.adapts_all_linear

    @property
    def scale(self) -> float:
        """The factor of the product B A: alpha / rank."""
        return self.alpha / self.rank


class PolicyConfig(Section):
    """The model to train and how to train it, independent of the backend."""

    model_name: str = Field(description="Hugging Face model directory, or name of a model on the Hub")
    tokenizer_name: str | None = Field(None, description="tokenizer directory or name; null: same as `model_name`")
    chat_template: str | None = Field(None, description="Jinja template, or a file with one; null: the tokenizer's own")
    head: Head = Field(
        "language",
        description="output of the model. language: log-probabilities of tokens; score: a scalar per row, read at its "
        "last token (a reward model); value: a scalar per token (a critic, or a model of process rewards)",
    )
    head_init: Literal["checkpoint", "zeros"] = Field(
        "checkpoint",
        description="start of the head `score` or `value`. checkpoint: the weights in `model_name`; zeros: a new head "
        "on a causal language model, whose own head is ignored",
    )
    backend: str = Field("dtensor", description="name of the training backend; `rlframework plugins` lists them")
    data_processor: str = Field("microbatches", description="name of the plugin that turns rows into microbatches")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="precision of the forward and backward pass; weights and optimizer state stay in fp32. On a GPU, "
        "bfloat16 is the default",
    )
    tf32: bool = Field(
        False, description="on a GPU, compute fp32 matrix products with 10 bits of mantissa; true is the default there"
    )
    cudnn_attention: bool = Field(
        False, description="let torch use cuDNN's attention on a GPU, which plans 0.5 to 1 s for each new shape"
    )
    expandable_segments: bool = Field(
        False,
        description="on a GPU, let torch's allocator extend its memory in place; true is the default there with the "
        "generation engine `transformers`. PYTORCH_ALLOC_CONF takes precedence",
    )
    parallelism: ParallelismConfig = ParallelismConfig()
    batching: BatchingConfig = BatchingConfig()
    train_global_batch_size: Count = Field(64, description="rows per optimizer step, over all workers")
    train_micro_batch_size: Count = Field(8, description="rows per padded microbatch on each worker")
    logprob_batch_size: Count = Field(16, description="`train_micro_batch_size` when computing log-probabilities")
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    max_grad_norm: Limit | None = Field(1.0, description="clip gradients to this global L2 norm; null: never")
    non_finite_gradients: NonFiniteGradientsConfig = NonFiniteGradientsConfig()
    router_aux_loss_coef: Coefficient = Field(
        0.0,
        description="weight of the load-balancing loss of mixture-of-experts models (Switch Transformers, "
        "arXiv:2101.03961); 0: off. It is computed over the whole global batch, which takes one extra forward pass per "
        "step",
    )
    activation_checkpointing: Checkpointing = Field(
        False,
        description="full: keep only the inputs of each block, and recompute its activations in the backward pass; "
        "selective: keep the results of matrix products and attention too; false: keep everything. true means full",
    )
    offload: OffloadConfig = OffloadConfig()
    lora: LoraConfig | None = None
    freeze: Literal["vision", "language"] | None = Field(
        None,
        description="the part of a vision-language model that is not trained. vision: its image encoder; language: its "
        "language model, with embedding and head; null: all weights are trained",
    )
    trust_remote_code: Annotated[bool, NeedsTrust("runs Python code from the model's files")] = Field(
        False, description="allow running Python code that is part of the model's files"
    )

    @model_validator(mode="after")
    def _trains_adapters_or_a_part(self) -> "PolicyConfig":
        if self.freeze is not None and self.lora is not None:
            raise ValueError(
                f"freeze is {self.freeze}, but with lora only adapters are trained; remove freeze and set "
                "lora.part to adapt one part"
            )
        return self

    @model_validator(mode="after")
    def _has_a_new_head(self) -> "PolicyConfig":
        if self.head_init != "checkpoint" and self.head == "language":
            raise ValueError(
                f"head_init is {self.head_init}, but head=language always has the weights of the checkpoint; set head "
                "to score or value, or remove head_init"
            )
        return self


class DeadlinesConfig(Section):
    """Timeouts of the driver in seconds. A timeout is an error that names what the driver was waiting for."""

    start: Seconds = Field(180.0, description="for workers to start and form their process group")
    call: Seconds = Field(1800.0, description="for one call to all workers, such as a training step")
    shutdown: Seconds = Field(30.0, description="for workers to exit before they are killed")


class WorkerGroupConfig(Section):
    """Where the workers of a policy run."""

    name: str = Field("inline", description="`inline` (the driver's process), `processes`, `ray`, or a plugin's name")
    num_workers: Workers = Field(1, description="number of workers; `inline` supports one")
    deadlines: DeadlinesConfig = DeadlinesConfig()


class RemoteGroupConfig(WorkerGroupConfig):
    """Workers in separate processes. They inherit only the listed environment variables of the driver."""

    environment: Annotated[
        dict[str, str],
        NeedsTrust("sets environment variables of the workers, with which Python loads code (LD_PRELOAD, PYTHONPATH)"),
    ] = Field({}, description="environment variables to set for the workers, by name")
    pass_environment: tuple[str, ...] = Field((), description="environment variables of the driver to pass on, by name")
