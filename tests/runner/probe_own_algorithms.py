"""Algorithms and advantages that tests give by import path."""

from __future__ import annotations

from pydantic import Field

from rlframework.algorithms.algorithm import Algorithm, RunResult
from rlframework.algorithms.grpo import GRPO
from rlframework.config.algorithms import GRPOConfig
from rlframework.config.sections import AlgorithmConfig


class CountingConfig(AlgorithmConfig):
    upto: int = Field(3, gt=0)


class Counting(Algorithm):
    config_model = CountingConfig

    def __init__(self, parts):
        self.upto = parts.config.algorithm.upto

    def run(self):
        return RunResult({"step": 0.0, "counted": float(self.upto)})


class Half(Counting):
    run = Algorithm.run


not_a_class = Counting.__init__


class CappedConfig(GRPOConfig):
    cap: float = 1.0


class Bare(GRPO):
    pass


class Capped(GRPO):
    config_model = CappedConfig

    def add_advantages(self, result, timer):
        metrics = super().add_advantages(result, timer)
        result.data["advantages"] = result.data["advantages"].clamp(max=self.config.cap)
        return metrics | {"train/largest_advantage": float(result.data["advantages"].max())}


def from_the_mean(rewards, rollout):
    return rewards - rewards.mean(1, keepdim=True)


def of_one(rewards):
    return rewards
