"""The sections of core's own algorithms: `algorithm: {name: sft | grpo, ...}`."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from rlframework.config.base import Section
from rlframework.config.sections import AlgorithmConfig

TrainOn = Literal["last", "assistant", "all"]
"""What supervised training learns of a conversation: its last assistant turn, all of them, or every token."""

NonNegative = Annotated[float, Field(ge=0.0)]


OwnPath = Annotated[str, Field(pattern=":")]


class OwnLossConfig(Section):
    """A loss of your own by its import path. Further keys go to the class or function that makes it."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="module:name, such as my_losses:MyLoss")

    @field_validator("name")
    @classmethod
    def _is_path(cls, name: str) -> str:
        if ":" not in name:
            raise ValueError("must be a section with keys of its own, or an import path, such as my_losses:MyLoss")
        return name

    @property
    def keys(self) -> dict[str, Any]:
        """What the loss is made with."""
        return dict(self.model_extra or {})


class OwnPolicyLossConfig(OwnLossConfig):
    """A loss of your own for training on rollouts, by its import path. Further keys go to what makes it."""

    kl_coef: NonNegative = Field(0.0, description="above 0: a reference policy is kept and scores the data")

    @property
    def keys(self) -> dict[str, Any]:
        """See `OwnLossConfig`: `kl_coef` is one of them where it is not 0."""
        return super().keys | ({"kl_coef": self.kl_coef} if self.kl_coef else {})


def _path_as_section(value: Any) -> Any:
    """`module:name` for `{name: module:name}`."""
    return {"name": value} if isinstance(value, str) else value


def _which_loss(value: Any) -> str:
    named = "name" in value if isinstance(value, dict) else isinstance(value, OwnLossConfig)
    return "own" if named else "clipped"


class SFTConfig(AlgorithmConfig):
    """Supervised training on the environment's own completions, one global batch a step."""

    name: Literal["sft"] = Field("sft", description="supervised training")
    train_on: TrainOn = Field("last", description="the last assistant turn, every assistant turn, or all tokens")
    max_tokens: PositiveInt | None = Field(
        None, description="longer rows are cut at their end; none: a row that the model cannot take is an error"
    )
    token_data: Path | None = Field(
        None, description="a folder that `rlframework tokenize` wrote: its rows are trained on, and nothing is rendered"
    )
    loss: Annotated[
        OwnLossConfig | None, BeforeValidator(_path_as_section, json_schema_input_type=OwnLossConfig | OwnPath | None)
    ] = Field(None, description="a loss of your own, by its import path; none: -log p of what is learnt")
    stop_at_accuracy: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="end as soon as a validation reaches this accuracy"
    )


class ClippedPGLossConfig(Section):
    """The clipped policy-gradient loss (PPO, arXiv:1707.06347; GRPO, arXiv:2402.03300; DAPO, arXiv:2503.14476)."""

    ratio_clip_min: NonNegative = Field(0.2, description="the ratio is clipped below at 1 - this")
    ratio_clip_max: NonNegative = Field(0.2, description="and above at 1 + this")
    ratio_clip_c: Annotated[float, Field(gt=1.0)] | None = Field(
        None, description="dual clip: bound of the loss for negative advantages"
    )
    level: Literal["token", "sequence"] = Field("token", description="average over all tokens, or sequence by sequence")
    kl_coef: NonNegative = Field(0.0, description="weight of the KL divergence to the reference policy")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="http://joschu.net/blog/kl-approx.html")
    importance_correction: Literal["none", "truncated"] = Field(
        "none", description="weigh tokens by trainer/generator probability, truncated from above"
    )
    importance_cap: Annotated[float, Field(gt=0.0)] = Field(2.0, description="the most that a token weighs")


class OverlongConfig(Section):
    """Soft punishment of long answers (DAPO, arXiv:2503.14476, eq. 13)."""

    buffer: NonNegativeInt = Field(0, description="last tokens before `max_new_tokens` in which it grows; 0: off")
    penalty: NonNegative = Field(1.0, description="what is taken from the reward at `max_new_tokens`")
    drop_truncated: bool = Field(False, description="answers cut by `max_new_tokens` do not count in the loss")


class GRPOConfig(AlgorithmConfig):
    """Group-relative policy optimisation (arXiv:2402.03300)."""

    name: Literal["grpo"] = Field("grpo", description="group-relative policy optimisation")
    prompts_per_step: PositiveInt = Field(32, description="different prompts of a rollout")
    samples_per_prompt: Annotated[int, Field(ge=2)] = Field(8, description="answers to each: a group")
    epochs_per_batch: PositiveInt = Field(1, description="passes over a rollout batch")
    leave_one_out: bool = Field(
        False, description="baseline of the other samples of the group (RLOO, arXiv:2402.14740)"
    )
    normalize_std: bool = Field(True, description="divide advantages by the group's standard deviation")
    skip_zero_variance: bool = Field(True, description="groups of equal rewards do no work and are counted")
    overlong: OverlongConfig = OverlongConfig()
    loss: Annotated[
        Annotated[ClippedPGLossConfig, Tag("clipped")] | Annotated[OwnPolicyLossConfig, Tag("own")],
        Discriminator(_which_loss),
        BeforeValidator(_path_as_section, json_schema_input_type=ClippedPGLossConfig | OwnPolicyLossConfig | OwnPath),
    ] = Field(ClippedPGLossConfig(), description="or a loss of your own, by its import path")

    @model_validator(mode="after")
    def _clip_range(self) -> Self:
        if not isinstance(self.loss, ClippedPGLossConfig):
            return self
        if self.loss.ratio_clip_min >= 1.0:
            raise ValueError("loss.ratio_clip_min must be below 1: the ratio is clipped at 1 - ratio_clip_min")
        bound, above = self.loss.ratio_clip_c, 1.0 + self.loss.ratio_clip_max
        if bound is not None and bound <= above:
            raise ValueError(
                f"loss.ratio_clip_c is {bound}; it must be more than 1 + ratio_clip_max, which is {above}: it bounds "
                "what the clipping of the ratio leaves"
            )
        return self
