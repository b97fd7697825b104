"""The sections of the built-in algorithms: `algorithm: {name: sft | grpo | dapo | ppo | ..., ...}`."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from rlframework.config.algorithm_presets import PRESETS, AlgorithmName, PresetName, with_preset
from rlframework.config.asynchrony import WithAsync, with_importance_correction
from rlframework.config.base import NeedsTrust, OwnPath, Section
from rlframework.config.numbers import (
    Coefficient,
    Count,
    CountOrZero,
    Fraction,
    Limit,
    StepsOrZero,
    Tokens,
    TokensOrZero,
)
from rlframework.config.sections import AlgorithmConfig

Share = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share that is not 0."""


class ReferenceSyncConfig(Section):
    """Updates of the reference policy during a run (TR-DPO, arXiv:2404.09656); the defaults are TRL's."""

    steps: Count = Field(512, description="training steps from one update to the next")
    alpha: Share = Field(
        0.6, description="the reference becomes alpha x policy + (1 - alpha) x reference; 1: a copy of the policy"
    )


class WithReferenceSync(Section):
    """The key of an algorithm that may have a reference policy."""

    reference_sync: ReferenceSyncConfig | None = Field(
        None,
        description="move the reference policy toward the trained one every so many steps; null: it keeps the weights "
        "that the run starts from",
    )


class CurriculumConfig(Section):
    """Skip prompts that the policy solves nearly always or nearly never, for some passes over the data.

    The success of a prompt is the mean `accuracy` of its last group of completions in this run. Prompts without a
    measurement are drawn.
    """

    min_success: Fraction = Field(0.1, description="a prompt with a lower success is too hard")
    max_success: Fraction = Field(0.9, description="a prompt with a higher success is too easy")
    skip_epochs: Count = Field(
        3, description="passes over the data in which such a prompt is skipped, before it is drawn and measured again"
    )
    measured: Path | None = Field(
        None,
        description="completions.jsonl of `rlframework evaluate --split train`, with measurements to start from; null: "
        "all prompts are drawn at first",
    )

    @model_validator(mode="after")
    def _is_band(self) -> Self:
        if self.min_success > self.max_success:
            raise ValueError(f"min_success is {self.min_success}, but must be at most max_success = {self.max_success}")
        return self


TrainOn = Literal["last", "assistant", "all"]
"""Tokens of a conversation to train on: the last assistant turn, every assistant turn, or all tokens."""


class OwnLossConfig(Section):
    """Your own loss, named by its import path. All other keys are passed to it as keyword arguments."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, NeedsTrust("calls this function with the arguments in its file")] = Field(
        description="import path `module:name`, such as my_losses:MyLoss"
    )

    @field_validator("name")
    @classmethod
    def _is_path(cls, name: str) -> str:
        if ":" not in name:
            raise ValueError("must be a mapping of the loss's settings, or an import path such as my_losses:MyLoss")
        return name

    @property
    def keys(self) -> dict[str, Any]:
        """The keyword arguments for the loss's constructor."""
        return dict(self.model_extra or {})


class OwnPolicyLossConfig(OwnLossConfig):
    """Your own loss for training on rollouts, named by its import path. Other keys are keyword arguments."""

    kl_coef: Coefficient = Field(0.0, description="above 0: keep a reference policy that scores every batch")

    @property
    def keys(self) -> dict[str, Any]:
        """The keyword arguments for the loss's constructor, including `kl_coef` if it is not 0."""
        return super().keys | ({"kl_coef": self.kl_coef} if self.kl_coef else {})


def _path_as_section(value: Any) -> Any:
    """Expand the shorthand `module:name` to `{name: module:name}`."""
    return {"name": value} if isinstance(value, str) else value


def _which_loss(value: Any) -> str:
    named = "name" in value if isinstance(value, dict) else isinstance(value, OwnLossConfig)
    return "own" if named else "clipped"


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning on the environment's completions, one global batch per step."""

    name: Literal["sft"] | OwnPath = Field("sft", description="supervised fine-tuning")
    train_on: TrainOn = Field("last", description="tokens to train on: the last or every assistant turn, or all")
    max_tokens: Tokens | None = Field(
        None, description="truncate longer rows at the end; null: a row longer than the model's limit is an error"
    )
    token_data: Path | None = Field(None, description="folder of rows from `rlframework tokenize` to train on")
    loss: Annotated[
        OwnLossConfig | None, BeforeValidator(_path_as_section, json_schema_input_type=OwnLossConfig | OwnPath | None)
    ] = Field(None, description="import path of your own loss; null: negative log-likelihood")
    stop_at_accuracy: float | None = Field(None, gt=0.0, le=1.0, description="stop the run at this validation accuracy")


class ClippedPGLossConfig(Section):
    """The policy-gradient loss (PPO, arXiv:1707.06347; GRPO, arXiv:2402.03300; and the algorithms derived from it)."""

    ratio: Literal["token", "sequence", "sequence_token", "product"] = Field(
        "token",
        description="probability ratio: of each token; sequence: geometric mean over the tokens of a row (GSPO, "
        "arXiv:2507.18071); sequence_token: its value with the gradient of each token (GSPO-token); product: over the "
        "tokens of a row",
    )
    surrogate: Literal["clipped", "cispo", "reinforce"] = Field(
        "clipped",
        description="clipped: minimum of the ratio and the clipped ratio, times the advantage; cispo: clipped ratio as "
        "a constant weight of the log-probability (arXiv:2506.13585); reinforce: log-probability times the advantage, "
        "without a ratio",
    )
    ratio_clip_min: Coefficient = Field(0.2, description="lower clipping bound of the probability ratio: 1 - this")
    ratio_clip_max: Coefficient = Field(0.2, description="upper clipping bound of the probability ratio: 1 + this")
    ratio_clip_c: float | None = Field(
        None, gt=1.0, le=1e9, description="dual-clip PPO (arXiv:1912.09729): bound on the loss at negative advantages"
    )
    level: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="average the loss over all tokens, or per sequence and then over sequences; constant: sum each "
        "sequence, divide by `constant_length`, average over sequences (Dr. GRPO, arXiv:2503.20783)",
    )
    constant_length: Tokens | None = Field(
        None, description="number of tokens that level=constant divides by; null: `generation.max_new_tokens`"
    )
    kl_coef: Coefficient = Field(
        0.0, description="weight of the KL divergence from the reference policy; 0: no reference policy"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="see http://joschu.net/blog/kl-approx.html")
    kl_max: Limit | None = Field(
        None,
        description="bound on the absolute KL estimate of a token, times the factor of kl_correction; no gradient "
        "beyond it; null: none",
    )
    kl_correction: Literal["none", "ratio", "score", "generator"] = Field(
        "none",
        description="factor of the KL estimate, with its gradient. ratio: the probability ratio (DeepSeek-V3.2, "
        "arXiv:2512.02556); score: 1, with the gradient of the log-probability (arXiv:2506.09477); generator: the "
        "probability over the generator's",
    )
    entropy_coef: float = Field(
        0.0,
        ge=-1e3,
        le=1e3,
        description="weight of the entropy, which is subtracted from the loss, with the same mean; negative: lowers it",
    )
    importance_correction: Literal["none", "truncated"] = Field(
        "none", description="truncated: weight tokens by trainer/generator probability, at most `importance_cap`"
    )
    importance_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="that weight is of each token, or of all tokens of a row: their product or geometric mean"
    )
    importance_cap: Limit = Field(2.0, description="upper bound of an importance weight")
    importance_floor: Coefficient = Field(0.0, description="lower bound of an importance weight")
    importance_mask: Literal["none", "token", "sequence", "geometric"] = Field(
        "none",
        description="give tokens a loss of 0 where trainer/generator probability, at this level, is beyond "
        "`importance_mask_min` to `importance_mask_max`",
    )
    importance_mask_min: Coefficient = Field(0.5, description="smallest ratio that `importance_mask` keeps")
    importance_mask_max: Limit = Field(2.0, description="largest ratio that `importance_mask` keeps")
    mismatch_bound: Limit = Field(
        0.1,
        description="difference between the log-probabilities of trainer and engine beyond which a token counts in the "
        "metric `train/generation_logprob_beyond_fraction`",
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.level != "constant" and self.constant_length is not None:
            raise ValueError(f"constant_length is for level=constant, but level is {self.level}; remove one of them")
        if self.surrogate != "clipped" and self.ratio_clip_c is not None:
            raise ValueError(
                f"ratio_clip_c is for surrogate=clipped, but surrogate is {self.surrogate}; set it to null"
            )
        for low, high in (("importance_floor", "importance_cap"), ("importance_mask_min", "importance_mask_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} is {getattr(self, low)}, but must be at most {high} = {getattr(self, high)}")
        return self


class OverlongConfig(Section):
    """Soft overlong penalty on the reward (DAPO, arXiv:2503.14476, eq. 13)."""

    buffer: TokensOrZero = Field(0, description="tokens before `max_new_tokens` over which the penalty grows; 0: off")
    penalty: Coefficient = Field(1.0, description="penalty at `max_new_tokens`, subtracted from the reward")
    drop_truncated: bool = Field(False, description="exclude completions truncated at `max_new_tokens` from the loss")


class RewardKLConfig(Section):
    """The KL divergence from the reference policy as a penalty in the reward, without a gradient of its own."""

    coef: Coefficient = Field(0.05, description="weight of the penalty; 0: none, and no reference policy")
    estimator: Literal["k1", "k2", "k3"] = Field("k1", description="see http://joschu.net/blog/kl-approx.html")
    max: Limit | None = Field(None, description="bound on the absolute estimate of a token; null: none")
    spread: Literal["sequence", "to_go", "token"] = Field(
        "sequence",
        description="sequence: the sum over its tokens is subtracted from the reward of a completion, before the "
        "baseline (RLOO, arXiv:2402.14740); to_go: the sum from a token to the end from its advantage (REINFORCE++, "
        "arXiv:2501.03262); token: the estimate of a token from its advantage",
    )


def _preset_of(section: type[BaseModel], name: Any) -> str:
    """Return the algorithm whose presets those of `section` are: `name`, or the one that it is derived from."""
    if name in PRESETS:
        return str(name)
    sections = [base for base in section.__mro__ if issubclass(base, BaseModel) and "name" in base.model_fields]
    return next(str(name) for base in sections if (name := base.model_fields["name"].default) in PRESETS)


class GRPOConfig(WithAsync, WithReferenceSync, AlgorithmConfig):
    """Group-relative policy optimization (arXiv:2402.03300) and the algorithms that are other settings of it."""

    name: AlgorithmName | OwnPath = Field("grpo", description="the algorithm, whose page lists its defaults")
    preset: PresetName | None = Field(
        None,
        description="whose definition of the algorithm the defaults are: of its paper, TRL, verl or NeMo-RL; null: of "
        "the paper, except for grpo. Keys that are set take precedence. It changes nothing in `policy`: TRL's are "
        "`policy.scheduler.name` linear and `policy.optimizer.weight_decay` 0",
    )
    prompts_per_step: Count = Field(32, description="distinct prompts in each rollout batch")
    samples_per_prompt: Count = Field(8, description="completions per prompt, which form a group")
    epochs_per_batch: Count = Field(1, description="training passes over each rollout batch")
    dynamic_sampling: CountOrZero = Field(
        0,
        description="repeat rollouts, up to this many a step, until there are prompts_per_step groups whose rewards "
        "differ (DAPO, arXiv:2503.14476); 0: off",
    )
    curriculum: CurriculumConfig | None = Field(
        None, description="skip prompts that are too easy or too hard by their measured success; null: draw all"
    )
    group_baseline: bool = Field(True, description="subtract the mean reward of the group; false: no baseline")
    leave_one_out: bool = Field(False, description="baseline: mean of the other rewards (RLOO, arXiv:2402.14740)")
    normalize_std: bool | Literal["batch", "others"] = Field(
        True,
        description="divide advantages by the standard deviation of the group's rewards; batch: of all rewards; "
        "others: of the group's other rewards, if it is not 0",
    )
    advantage: Annotated[OwnPath | None, NeedsTrust("calls this function")] = Field(
        None,
        description="import path of a function of your own that compares the rewards of a group, instead of "
        "group_baseline, leave_one_out and normalize_std; null: these",
    )
    std_epsilon: Coefficient = Field(1e-6, description="added to that standard deviation")
    batch_normalization: Literal["none", "population", "sample"] = Field(
        "none",
        description="subtract the mean of the advantages of all tokens of the rollout, and divide by their standard "
        "deviation (REINFORCE++, arXiv:2501.03262): with n (variance at least 1e-8), or with n - 1 (plus 1e-8)",
    )
    reward_kl: RewardKLConfig | None = Field(None, description="KL penalty in the reward; null: none")
    skip_zero_variance: bool = Field(
        True,
        description="skip groups whose rewards are all equal, if nothing else gives them a gradient; a metric counts "
        "them",
    )
    overlong: OverlongConfig = OverlongConfig()
    loss: Annotated[
        Annotated[ClippedPGLossConfig, Tag("clipped")] | Annotated[OwnPolicyLossConfig, Tag("own")],
        Discriminator(_which_loss),
        BeforeValidator(_path_as_section, json_schema_input_type=ClippedPGLossConfig | OwnPolicyLossConfig | OwnPath),
    ] = Field(ClippedPGLossConfig(), description="settings of the loss, or the import path of your own loss")

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return with_importance_correction(with_preset(values, _preset_of(cls, values.get("name"))))

    @property
    def reward_kl_coef(self) -> float:
        """The weight of the KL penalty in the reward, 0 without one."""
        return self.reward_kl.coef if self.reward_kl is not None else 0.0

    @property
    def skips_constant_groups(self) -> bool:
        """Whether groups whose rewards are all equal are skipped: all else that gives them a gradient is off."""
        penalized = self.reward_kl is not None and self.reward_kl.coef > 0 and self.reward_kl.spread != "sequence"
        others = self.loss.kl_coef > 0 or penalized or self.batch_normalization != "none"
        return self.skip_zero_variance and (self.group_baseline or self.advantage is not None) and not others

    @model_validator(mode="after")
    def _rows(self) -> Self:
        if (rows := self.prompts_per_step * self.samples_per_prompt) > 1_000_000:
            raise ValueError(f"prompts_per_step x samples_per_prompt must be at most 1000000 rows, but is {rows}")
        return self

    @model_validator(mode="after")
    def _groups(self) -> Self:
        in_group = self.group_baseline or self.leave_one_out or self.normalize_std in (True, "others")
        if self.samples_per_prompt < 2 and in_group and self.advantage is None:
            raise ValueError(
                "samples_per_prompt must be at least 2, because advantages compare the samples of a prompt; one sample "
                "needs group_baseline=false and normalize_std=false"
            )
        if self.leave_one_out and not self.group_baseline:
            raise ValueError("leave_one_out is a baseline, so group_baseline=false excludes it; set one of them only")
        if self.normalize_std == "others" and not self.leave_one_out:
            raise ValueError("normalize_std=others is the deviation of the rewards of leave_one_out; set that to true")
        if self.dynamic_sampling and not self.group_baseline:
            raise ValueError("dynamic_sampling drops groups of equal rewards, which group_baseline=false trains on")
        return self

    @model_validator(mode="after")
    def _band(self) -> Self:
        band, each = self.curriculum, self.samples_per_prompt
        if band and not any(band.min_success <= right / each <= band.max_success for right in range(each + 1)):
            raise ValueError(
                f"with samples_per_prompt={each} no prompt can have a success from curriculum.min_success="
                f"{band.min_success:g} to curriculum.max_success={band.max_success:g}; use more samples or a wider band"
            )
        return self

    @model_validator(mode="after")
    def _clip_range(self) -> Self:
        if isinstance(self.loss, ClippedPGLossConfig):
            bound, above = self.loss.ratio_clip_c, 1.0 + self.loss.ratio_clip_max
            if self.loss.ratio_clip_min >= 1.0 and self.loss.surrogate == "clipped":
                raise ValueError("loss.ratio_clip_min must be less than 1: the ratio is clipped at 1 - ratio_clip_min")
            if bound is not None and bound <= above:
                needed = f"greater than 1 + ratio_clip_max = {above}, the clipped ratio that it bounds"
                raise ValueError(f"loss.ratio_clip_c is {bound}, but must be {needed}")
        return self


class TokenRewardKLConfig(RewardKLConfig):
    """The KL divergence from the reference policy as a penalty in the rewards that advantages are estimated from."""

    spread: Literal["token", "sequence"] = Field(
        "token",
        description="token: each token has its own estimate as a reward; sequence: the sum over the tokens is "
        "subtracted from the reward of the completion",
    )


class ValueLossConfig(Section):
    """The loss of the critic: half the squared difference of a token's value and return, averaged over tokens."""

    clip: Limit | None = Field(
        0.2,
        description="largest change of a token's value from before the step: beyond it, the loss is the larger one of "
        "those with and without the bound; null: none",
    )
    coef: Limit = Field(1.0, description="weight of the loss; with AdamW it only moves where gradients are clipped")


class PPOConfig(GRPOConfig):
    """Proximal policy optimization (arXiv:1707.06347) with a critic, and advantages of arXiv:1506.02438."""

    name: Literal["ppo"] | OwnPath = Field("ppo", description="proximal policy optimization")
    samples_per_prompt: Count = Field(1, description="completions per prompt")
    gamma: Fraction = Field(1.0, description="discount of the rewards of later tokens")
    gae_lambda: Fraction = Field(
        0.95,
        description="0: advantages from the critic's next value alone; 1: from the rewards of the whole completion",
    )
    value_loss: ValueLossConfig = ValueLossConfig()
    critic_warmup: StepsOrZero = Field(0, description="first steps, in which only the critic is trained")
    advantage: None = Field(None, description="must be null: the critic gives the advantages")
    group_baseline: Literal[False] = Field(False, description="must be false: the critic is the baseline")
    normalize_std: Literal[False] = Field(False, description="must be false; see batch_normalization")
    batch_normalization: Literal["none", "population", "sample"] = Field(
        "population",
        description="subtract the mean of the advantages of all tokens of the rollout, and divide by their standard "
        "deviation: with n (variance at least 1e-8), or with n - 1 (plus 1e-8)",
    )
    reward_kl: TokenRewardKLConfig | None = Field(None, description="KL penalty in the reward; null: none")
