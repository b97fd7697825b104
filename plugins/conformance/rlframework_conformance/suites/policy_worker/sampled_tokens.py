"""Contract 11 in the trainer: tokens whose log-probabilities are not the policy's are not learned from."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.policy_worker import SAMPLED_NOW, SamplingBound
from rlframework_conformance.contracts import FP32
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function

_OFF = 0.5
"""Nats by which the engine's log-probabilities of the batches below are off."""


def _batch(harness: PolicyHarness) -> BatchedDataDict[Any]:
    data = harness.batch()
    data["generation_logprobs"] = data["prev_logprobs"] + _OFF * data["token_mask"]
    return data


class SampledTokens(Suite):
    """The argument `sampling_bound` of `train`."""

    @holds(11)
    def test_a_step_on_other_tokens_than_sampled_is_withheld(self, harness: PolicyHarness) -> None:
        """Beyond the bound no weight may change, and nothing of the batch may be left for the step that follows."""
        policy, oracle, data = harness.policy(), harness.oracle(), _batch(harness)
        before = harness.weights(policy)
        policy.prepare_for_training()
        sampled = policy.train(data, loss_function("pg"), sampling_bound=SamplingBound(0.9 * _OFF, math.inf))["sampled"]
        harness.equal("whether the step was withheld", sampled.withheld, True)
        harness.scalar("mean difference", sampled.mean, _OFF, FP32)
        harness.scalar("largest difference", sampled.largest, _OFF, FP32)
        after = harness.weights(policy)
        harness.require(all(torch.equal(before[name], after[name]) for name in before), "no weight has changed")
        harness.step(policy, oracle, data, "pg", "the step after one that was withheld")

    @holds(11)
    def test_tokens_of_other_versions_are_not_compared(self, harness: PolicyHarness) -> None:
        """The difference must be the mean over the tokens that the weights of this step have sampled, on all ranks."""
        policy, data = harness.policy(), _batch(harness)
        counted = (data["token_mask"] != 0) & (data["sample_mask"][:, None] != 0)
        counted[:, 0] = False  # it has no log-probability
        now = counted & (torch.arange(counted.shape[1]) % 2 == 0)
        data[SAMPLED_NOW] = now
        data["generation_logprobs"] = data["prev_logprobs"] + torch.where(now, 0.01, 3.0)
        policy.prepare_for_training()
        sampled = policy.train(data, loss_function("pg"), sampling_bound=SamplingBound(0.02, 0.02))["sampled"]
        harness.equal("whether the step was withheld", sampled.withheld, False)
        harness.equal("tokens compared", sampled.tokens, float(now.sum()))
        harness.scalar("mean difference", sampled.mean, 0.01, 1e-3)
