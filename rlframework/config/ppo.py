"""The section of PPO: `algorithm: {name: ppo, ...}`."""

from typing import Literal

from pydantic import Field

from rlframework.config.algorithms import GRPOConfig, RewardKLConfig
from rlframework.config.base import OwnPath, Section
from rlframework.config.numbers import Count, Fraction, Limit, StepsOrZero


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
