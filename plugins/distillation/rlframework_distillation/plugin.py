"""The entry point: the record of the algorithm. Imports no torch."""

from __future__ import annotations

from rlframework.config.sections import RunConfig
from rlframework.plugins.builtin import check_sampling
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import AlgorithmRecord, Problem
from rlframework_distillation.config import DistillationConfig


@hookimpl
def rlframework_algorithms() -> list[AlgorithmRecord]:
    """Return the algorithm, selected by `algorithm.name`."""
    return [
        AlgorithmRecord(
            "distillation",
            "rlframework_distillation.training:Distillation",
            api_version=1,
            summary="distillation of a teacher, on-policy or from data (Agarwal et al. 2023, arXiv:2306.13649)",
            config_model=DistillationConfig,
            check=check_distillation,
        )
    ]


def check_distillation(config: RunConfig, device: str) -> list[Problem]:
    """Reject truncated and greedy sampling for the policy gradient of sampled tokens."""
    if not isinstance(config.algorithm, DistillationConfig) or config.algorithm.tokens != "sampled":
        return []
    problems = check_sampling(config, device)
    if config.generation.temperature == 0:
        message = "greedy completions are not samples, from which algorithm.tokens=sampled estimates the divergence."
        problems.append(Problem("generation.temperature", message, "Set it to a positive value, such as 1.0."))
    return problems
