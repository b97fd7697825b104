"""The sections of reward-model training: `algorithm: {name: reward_model | process_reward_model, ...}`."""

from typing import ClassVar, Literal

from pydantic import Field

from rlframework.config.base import OwnPath
from rlframework.config.numbers import Coefficient
from rlframework.config.preference_algorithms import PairLossConfig, PreferenceConfig, Smoothing


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

    uses_reference: ClassVar[bool] = False

    name: Literal["process_reward_model"] | OwnPath = Field(
        "process_reward_model", description="a value per step of an answer"
    )
    separator: str = Field("\n", description="text after each step, which belongs to it")
