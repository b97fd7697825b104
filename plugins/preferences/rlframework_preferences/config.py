"""The sections of the environment of preferences and of the algorithms on it: DPO, its variants, reward models."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlframework.config.algorithms import WithReferenceSync
from rlframework.config.base import OwnPath, Section
from rlframework.config.environments import SplitRowsConfig
from rlframework.config.numbers import Coefficient, Limit, Tokens
from rlframework.config.sections import AlgorithmConfig

Smoothing = Annotated[float, Field(ge=0.0, lt=0.5)]
"""The assumed fraction of pairs whose answers are in the wrong order."""

SFTMean = Literal["answer", "token", "sum"]
"""The mean that an SFT term takes of the negative log-likelihood of chosen answers."""

_SFT_MEAN = (
    "answer: mean over the tokens of each chosen answer, then over pairs; token: mean over the tokens of all chosen "
    "answers of the global batch; sum: sum over the tokens of each chosen answer, mean over pairs"
)
_PRESET = "whose definition and defaults to use; keys that are set take precedence"


class PairLossConfig(Section):
    """The loss of a pair: an objective of the difference of two scores, and an SFT term on the chosen answer.

    With the scores s of the chosen (w) and the rejected (l) answer, h = s_w - s_l and z = beta h - margin, the
    objective `logistic` is -log sigmoid(z), or with `label_smoothing` e that of `smoothing`; `squared` is
    (h - 1 / (2 beta))^2.
    """

    score: Literal["log_ratio", "logprob", "log_odds"] = Field(
        "log_ratio",
        description="of an answer: log-probability minus that of the reference; log-probability; or log(p / (1 - p)) "
        "of its mean log-probability log p",
    )
    length_mean: bool = Field(False, description="divide log-ratios and log-probabilities by the answer's tokens")
    objective: Literal["logistic", "squared"] = Field("logistic", description="of the difference of the scores")
    beta: Limit = Field(0.1, description="factor of the difference; squared: 1 / (2 beta) is its target")
    margin: Coefficient = Field(0.0, description="subtracted from beta times the difference")
    label_smoothing: Smoothing = Field(0.0, description="assumed fraction of pairs in the wrong order")
    smoothing: Literal["conservative", "robust"] = Field("conservative", description="loss with label_smoothing")
    weight: Coefficient = Field(1.0, description="weight of the objective")
    sft_weight: Coefficient = Field(0.0, description="weight of the SFT term")
    sft_mean: SFTMean = Field("answer", description=_SFT_MEAN)


class PreferenceConfig(AlgorithmConfig):
    """Settings that all algorithms on preference pairs share."""

    takes_images: ClassVar[bool] = True
    on_preferences: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The values of keys that each preset other than `paper` has in place of the defaults."""

    max_tokens: Tokens | None = Field(
        None, description="truncate longer rows at the end; null: a row longer than the model's limit is an error"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**cls.presets.get(str(values.get("preset")), {}), **values}


class PairwiseConfig(PreferenceConfig):
    """Settings of the algorithms whose loss compares the two answers of a pair."""

    sft_weight: Coefficient = Field(0.0, description="weight of the SFT term, the likelihood of chosen answers; 0: off")
    sft_mean: SFTMean = Field("answer", description=_SFT_MEAN)

    loss: ClassVar[Mapping[str, Any]] = {}
    """The settings of the loss that the algorithm fixes."""

    def pair_loss(self) -> PairLossConfig:
        """Return the settings of the loss: those that are keys here too, and `loss`."""
        shared = PairLossConfig.model_fields.keys() & type(self).model_fields.keys()
        return PairLossConfig(**{name: getattr(self, name) for name in shared} | dict(self.loss))


class DPOConfig(WithReferenceSync, PairwiseConfig):
    """Direct preference optimization (arXiv:2305.18290)."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "trl": {"smoothing": "robust", "sft_mean": "token"},
        "nemo_rl": {"beta": 0.05, "sft_mean": "sum"},
    }

    name: Literal["dpo"] | OwnPath = Field("dpo", description="direct preference optimization")
    preset: Literal["paper", "trl", "nemo_rl"] = Field("paper", description=_PRESET)
    beta: Limit = Field(0.1, description="weight of the KL divergence from the reference that the optimum has")
    length_mean: bool = Field(
        False, description="divide the log-ratio of an answer by its number of tokens (Tulu 3, arXiv:2411.15124)"
    )
    label_smoothing: Smoothing = Field(
        0.0, description="assumed fraction of pairs whose answers are in the wrong order"
    )
    smoothing: Literal["conservative", "robust"] = Field(
        "conservative",
        description="conservative: expected loss over wrong orders (cDPO); robust: the unbiased estimate of the loss "
        "without them (arXiv:2403.00409)",
    )
    weight: Coefficient = Field(1.0, description="weight of the preference term")


class IPOConfig(WithReferenceSync, PairwiseConfig):
    """Identity preference optimization (arXiv:2310.12036)."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"trl": {"length_mean": True, "sft_mean": "token"}}
    loss: ClassVar[Mapping[str, Any]] = {"objective": "squared"}

    name: Literal["ipo"] | OwnPath = Field("ipo", description="identity preference optimization")
    preset: Literal["paper", "trl"] = Field("paper", description=_PRESET)
    beta: Limit = Field(0.1, description="tau of the paper: the difference of log-ratios is drawn to 1 / (2 beta)")
    length_mean: bool = Field(False, description="divide the log-ratio of an answer by its number of tokens")


class SimPOConfig(PairwiseConfig):
    """Simple preference optimization (arXiv:2405.14734), without a reference policy."""

    uses_reference: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"trl": {"beta": 0.1, "gamma": 0.5, "sft_mean": "token"}}
    loss: ClassVar[Mapping[str, Any]] = {"score": "logprob", "length_mean": True}

    name: Literal["simpo"] | OwnPath = Field("simpo", description="simple preference optimization")
    preset: Literal["paper", "trl"] = Field("paper", description=_PRESET)
    beta: Limit = Field(2.0, description="factor of the difference of mean log-probabilities; the paper: 2.0 to 2.5")
    gamma: Coefficient = Field(1.0, description="target margin of the scaled difference; the paper: 0.3 to 1.6")
    label_smoothing: Smoothing = Field(
        0.0, description="assumed fraction of pairs whose answers are in the wrong order"
    )

    def pair_loss(self) -> PairLossConfig:
        """See `PairwiseConfig`."""
        return super().pair_loss().model_copy(update={"margin": self.gamma})


class ORPOConfig(PairwiseConfig):
    """Odds ratio preference optimization (arXiv:2403.07691), without a reference policy."""

    uses_reference: ClassVar[bool] = False
    loss: ClassVar[Mapping[str, Any]] = {"score": "log_odds", "length_mean": True, "beta": 1.0}

    name: Literal["orpo"] | OwnPath = Field("orpo", description="odds ratio preference optimization")
    weight: Coefficient = Field(0.1, description="weight of the odds ratio term, lambda of the paper")
    sft_weight: Coefficient = Field(1.0, description="weight of the SFT term, the likelihood of chosen answers; 0: off")


class KTOConfig(WithReferenceSync, PreferenceConfig):
    """Kahneman-Tversky optimization (arXiv:2402.01306), on each answer of a pair by itself."""

    name: Literal["kto"] | OwnPath = Field("kto", description="Kahneman-Tversky optimization")
    beta: Limit = Field(0.1, description="factor of the difference of log-ratio and KL divergence")
    desirable_weight: Coefficient = Field(1.0, description="weight of chosen answers, lambda_D of the paper")
    undesirable_weight: Coefficient = Field(1.0, description="weight of rejected answers, lambda_U of the paper")


class RewardModelTrainingConfig(PreferenceConfig):
    """A reward model from preference pairs, by the model of Bradley and Terry (arXiv:2203.02155, eq. 1)."""

    uses_reference: ClassVar[bool] = False

    name: Literal["reward_model"] | OwnPath = Field("reward_model", description="a score per row from preference pairs")
    label_smoothing: Smoothing = Field(
        0.0, description="assumed fraction of pairs whose answers are in the wrong order"
    )
    smoothing: Literal["conservative", "robust"] = Field(
        "conservative", description="loss with label_smoothing: expected over wrong orders, or unbiased; see `dpo`"
    )
    margin_coef: Coefficient = Field(
        0.0,
        description="times the margin of a pair in the data, subtracted from the difference of its scores (Llama 2, "
        "arXiv:2307.09288, eq. 2); 0: off",
    )
    centering_coef: Coefficient = Field(
        0.0,
        description="weight of the squared sum of the two scores of a pair, which keeps scores around 0 "
        "(arXiv:2312.09244); 0: off",
    )

    def pair_loss(self) -> PairLossConfig:
        """Return the settings of the loss that reward models and algorithms on policies share."""
        return PairLossConfig(beta=1.0, label_smoothing=self.label_smoothing, smoothing=self.smoothing)


class ProcessRewardModelTrainingConfig(PreferenceConfig):
    """A reward model of the steps of an answer, each with its label (arXiv:2305.20050)."""

    takes_images: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = False

    name: Literal["process_reward_model"] | OwnPath = Field(
        "process_reward_model", description="a value per step of an answer"
    )
    separator: str = Field("\n", description="text after each step, which belongs to it")


class PreferenceColumnsConfig(Section):
    """Names of the columns of preference pairs."""

    prompt: str = Field("prompt", description="column with the prompt: text, or a list of messages; may be absent")
    chosen: str = Field("chosen", description="column with the chosen answer: text, or a list of messages")
    rejected: str = Field("rejected", description="column with the rejected answer: text, or a list of messages")
    image: str = Field("image", description="column with an image of the prompt, as in `dataset`")
    images: str = Field("images", description="column with a list of images of the prompt, after that of `image`")


class PreferencesConfig(SplitRowsConfig):
    """Preference pairs from JSONL, Parquet, the output of `datasets.save_to_disk`, or the Hugging Face Hub.

    All rows are read into memory. No prompt of the validation data is trained on, ignoring case and spacing.
    """

    name: str = Field("preferences", description="chosen and rejected answers to prompts")
    columns: PreferenceColumnsConfig = PreferenceColumnsConfig()
    pairs: Literal["all", "one"] = Field(
        "all",
        description="of rows with several graded solutions to a question: train on each right with each wrong one, or "
        "on one pair per question. Validation has one pair per question, so that pairs are independent",
    )
