"""The neutral keys under `policy`: what means the same for every training backend.

`policy.<backend>` is not here: it is the pydantic model of the backend's own record.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator

from rlframework.config.base import Section

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class ParallelismConfig(Section):
    """How one model is split over workers. Data parallelism takes the workers that the other axes leave."""

    tensor: PositiveInt = Field(1, description="workers that share each layer")
    context: PositiveInt = Field(1, description="workers that share each sequence")
    pipeline: PositiveInt = Field(1, description="stages of layers, one after the other")
    expert: PositiveInt = Field(1, description="workers that share the experts of a mixture, of those that share rows")
    sequence: bool = Field(False, description="shard activations along the sequence between tensor-parallel regions")

    @property
    def model_size(self) -> int:
        """Workers that hold one replica of the model together."""
        return self.tensor * self.context * self.pipeline


class BatchingConfig(Section):
    """How rows become microbatches. `auto` takes what the backend says is fastest on the device."""

    mode: Literal["auto", "padded", "dynamic", "packed"] = Field(
        "auto",
        description="padded: so many rows; dynamic: rows of like length, up to `tokens` with their padding; packed: "
        "rows side by side, up to `tokens`, without padding; auto: the fastest on this device",
    )
    tokens: PositiveInt | None = Field(
        None, description="most tokens in one dynamic or packed microbatch; none: what suits the device, and any row"
    )
    logprob_tokens: PositiveInt | None = Field(None, description="the same for scoring; none: as `tokens`")


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); no weight decay on parameters of one dimension."""

    name: Literal["adamw"] = Field("adamw", description="the optimizer")
    lr: Annotated[float, Field(ge=0.0)] = Field(1e-6, description="the learning rate that `scheduler` scales")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of the first and of the second moment")
    eps: float = Field(1e-8, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.01, description="decoupled; of matrices only")


class SchedulerConfig(Section):
    """Learning rate as a factor of `optimizer.lr`: linear warm-up, then constant, linear or cosine decay.

    It moves on once for each call of `train`, however many optimizer steps the call takes.
    """

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="what comes after the warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="training calls in which it grows from 0")
    total_steps: PositiveInt | None = Field(None, description="training calls until the decay ends")
    min_ratio: Fraction = Field(0.0, description="factor that the decay ends at")


class NonFiniteGradientsConfig(Section):
    """What happens when a gradient is not finite: the step is skipped and counted."""

    stop_after: PositiveInt = Field(5, description="consecutive skipped steps that end the run")


class OffloadConfig(Section):
    """What lies in CPU memory between uses. On a CPU it makes no difference."""

    parameters: bool = Field(
        False, description="weights, gradients and optimizer; blocks are taken to the device as they are computed"
    )
    optimizer: bool = Field(False, description="the optimizer's state, but during the step")


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W + alpha / rank * B A, of which B and A are trained."""

    rank: PositiveInt = Field(16, description="columns of B and rows of A")
    alpha: Annotated[float, Field(gt=0.0)] = Field(32.0, description="the product of B and A counts alpha / rank times")
    dropout: Fraction = Field(0.0, description="0: training and scoring are of one function, so there is no dropout")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        description="linear layers that get an adapter, by the ends of their paths",
    )
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of the values that A starts with; B starts at 0")
    refit: Literal["merged", "adapters"] = Field(
        "merged",
        description="what goes to generation engines in other processes: whole weights; or adapters alone, to engines "
        "that read the base themselves",
    )

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                "must be 0: log-probabilities of training and of scoring are of one function here, and the model's own "
                "dropout is switched off too"
            )
        return dropout

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return self.alpha / self.rank


class PolicyConfig(Section):
    """The model that is trained, and how. The same for every backend."""

    model_name: str = Field(description="a Hugging Face model directory, or a name on the hub")
    tokenizer_name: str | None = Field(None, description="none: as `model_name`")
    chat_template: str | None = Field(
        None, description="a file with a Jinja template, or its text; none: the tokenizer's own"
    )
    head: Literal["language", "score"] = Field(
        "language", description="score: a reward model, with one number a sequence, which is only asked for scores"
    )
    backend: str = Field("dtensor", description="name of the training backend: see `rlframework plugins`")
    data_processor: str = Field("microbatches", description="what makes microbatches of rows: a plugin's name")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of the forward and backward; weights and optimizer states stay fp32"
    )
    parallelism: ParallelismConfig = ParallelismConfig()
    batching: BatchingConfig = BatchingConfig()
    train_global_batch_size: PositiveInt = Field(64, description="rows of one optimizer step, over all workers")
    train_micro_batch_size: PositiveInt = Field(8, description="rows of one padded microbatch on one worker")
    logprob_batch_size: PositiveInt = Field(16, description="rows of one padded microbatch when scoring")
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = Field(
        1.0, description="L2 norm of the whole gradient that it is clipped to; none: no clipping"
    )
    non_finite_gradients: NonFiniteGradientsConfig = NonFiniteGradientsConfig()
    router_aux_loss_coef: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="weight of a loss that evens out the work of the experts of a mixture (Switch Transformers, "
        "arXiv:2101.03961); 0: none. Over the tokens of the whole global batch, for which each step runs the model "
        "forward once more",
    )
    activation_checkpointing: bool = Field(
        False, description="blocks keep their inputs only, and are computed again in the backward"
    )
    offload: OffloadConfig = OffloadConfig()
    lora: LoraConfig | None = None
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
