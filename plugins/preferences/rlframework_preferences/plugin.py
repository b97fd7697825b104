"""The entry point: the records of the algorithms and of the environment. Imports neither torch nor tensordict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlframework.config.algorithms import GRPOConfig
from rlframework.config.sections import RunConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import AlgorithmRecord, Check, EnvironmentRecord, Problem
from rlframework_preferences.config import (
    DPOConfig,
    IPOConfig,
    KTOConfig,
    ORPOConfig,
    PreferenceConfig,
    PreferencesConfig,
    ProcessRewardModelTrainingConfig,
    RewardModelTrainingConfig,
    SimPOConfig,
)


@hookimpl
def rlframework_environments() -> list[EnvironmentRecord]:
    """Return the environment with pairs, selected by `environment.name`."""
    return [
        EnvironmentRecord(
            "preferences",
            "rlframework_preferences.preference_samples:PreferencesEnvironment",
            api_version=1,
            summary="chosen and rejected answers to prompts, for training on preferences",
            config_model=PreferencesConfig,
            check=check_pairs,
        )
    ]


@hookimpl
def rlframework_algorithms() -> list[AlgorithmRecord]:
    """Return the algorithms, selected by `algorithm.name`."""
    return [
        *(
            _record(name, "preference_training:PreferenceTraining", *described, check_preferences)
            for name, described in _PREFERENCES.items()
        ),
        _record(
            "reward_model",
            "reward_model_training:RewardModelTraining",
            "a reward model from preference pairs (Bradley and Terry; Ouyang et al. 2022, arXiv:2203.02155)",
            RewardModelTrainingConfig,
            check_reward_model,
        ),
        _record(
            "process_reward_model",
            "reward_model_training:ProcessRewardModelTraining",
            "a reward model of the steps of an answer (Lightman et al. 2023, arXiv:2305.20050)",
            ProcessRewardModelTrainingConfig,
        ),
    ]


_PREFERENCES: Mapping[str, tuple[str, type[PreferenceConfig]]] = {
    "dpo": ("direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290)", DPOConfig),
    "ipo": ("identity preference optimization (Azar et al. 2023, arXiv:2310.12036)", IPOConfig),
    "simpo": ("simple preference optimization (Meng et al. 2024, arXiv:2405.14734)", SimPOConfig),
    "orpo": ("odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691)", ORPOConfig),
    "kto": ("Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306)", KTOConfig),
}
"""The algorithms that differ in their losses alone: summary and section of each."""


def _record(
    name: str, target: str, summary: str, model: type[PreferenceConfig], check: Check | None = None
) -> AlgorithmRecord:
    return AlgorithmRecord(
        name, f"rlframework_preferences.{target}", api_version=1, summary=summary, config_model=model, check=check
    )


def check_pairs(config: RunConfig, device: str) -> list[Problem]:
    """Reject algorithms that need rewards."""
    if not isinstance(config.algorithm, GRPOConfig):
        return []
    message = "preferences has no rewards, which GRPO needs."
    return [Problem("environment.name", message, "Choose an environment that scores, or algorithm.name=dpo.")]


def check_preferences(config: RunConfig, device: str) -> list[Problem]:
    """Check that batches have whole pairs, global ones of KTO at least two, and that scoring is at temperature 1."""
    if not isinstance(config.algorithm, PreferenceConfig):
        return []
    is_kto = isinstance(config.algorithm, KTOConfig)
    problems = list(_pair_problems(config, least=4 if is_kto else 2, pairwise=not is_kto))
    temperature = config.generation.temperature
    if temperature not in (0.0, 1.0):
        message = f"log-probabilities would be those at temperature {temperature}; preferences are trained at 1."
        problems.append(Problem("generation.temperature", message, "Set it to 1.0; nothing is sampled."))
    return problems


def check_reward_model(config: RunConfig, device: str) -> list[Problem]:
    """Check that batches have whole pairs."""
    return list(_pair_problems(config, least=2, pairwise=True))


def _pair_problems(config: RunConfig, *, least: int, pairwise: bool) -> Iterator[Problem]:
    """Yield conflicts of batch sizes: `least` rows in a global batch; `pairwise`: microbatches have whole pairs."""
    policy, rows = config.policy, config.policy.train_global_batch_size
    if rows % 2 or rows < least:
        message = f"{rows} rows are not whole pairs of two rows, at least {least // 2}."
        yield Problem("policy.train_global_batch_size", message, f"Set it to an even number from {least} on.")
    if pairwise and policy.batching.limited == "rows" and policy.train_micro_batch_size < 2:
        message = f"a padded microbatch of {policy.train_micro_batch_size} row has no room for a pair."
        yield Problem("policy.train_micro_batch_size", message, "Set it to at least 2.")
