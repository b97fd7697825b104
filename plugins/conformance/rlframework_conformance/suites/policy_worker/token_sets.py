"""Contracts 1 to 3 and 11 for tokens beside the targets: sets of tokens at each position, and the tokens as sampled.

Tokens whose log-probabilities are not the policy's are not learned from.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.policy_worker import SAMPLED_NOW, SamplingBound
from rlframework_conformance.contracts import FP32
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function


def _batch_with_sets(harness: PolicyHarness) -> BatchedDataDict[Any]:
    """A batch with four ids of tokens per position, from all parts of the vocabulary, and a weight for each."""
    data = harness.batch()
    shape, generator = data["input_ids"].shape, torch.Generator().manual_seed(5)
    size = int(harness.oracle().model.config.vocab_size)
    order = torch.rand(*shape, size, generator=generator).argsort(-1)
    data["token_sets"] = order[..., :4].to(torch.int32)
    data["set_weights"] = torch.rand(*shape, 4, generator=generator)
    return data


class TokenSets(Suite):
    """Losses with `input_type` TOKEN_SETS, and `get_token_set_logprobs`."""

    @holds(3)
    def test_losses_may_ask_for_sets_of_tokens(self, harness: PolicyHarness) -> None:
        """A loss that requests sets must receive `[B, S-1, 1 + K]` log-probabilities, with gradient, of one softmax.

        They belong to the tokens at the position of the target, wherever in the vocabulary these are, and to the same
        ones in every batching mode.
        """
        for batching in harness.batchings(30):
            what = f"sets of tokens, {batching['mode']}"
            harness.first_step(_batch_with_sets(harness), what, kind="sets", batching=batching)

    @holds(1)
    def test_sets_are_scored_at_the_temperature_of_sampling(self, harness: PolicyHarness) -> None:
        """`get_token_set_logprobs` must return the oracle's log-probabilities, 0 where `positions` asks for none.

        `topk_normalizers` of `get_topk_logits` must be the logsumexp of all logits, not of the largest ones.
        """
        data, oracle = _batch_with_sets(harness), harness.oracle(temperature=0.7)
        right = oracle.set_logprobs(data)
        for mode in ("padded", "auto"):
            policy = harness.policy(generation={"temperature": 0.7}, batching={"mode": mode, "tokens": 28})
            got = policy.get_token_set_logprobs(data)["set_logprobs"]
            harness.values(f"log-probabilities of sets, {mode}", got, right)
            got = policy.get_token_set_logprobs(data, positions="token_mask")["set_logprobs"]
            harness.values(f"log-probabilities of sets, masked, {mode}", got, right * data["token_mask"][..., None])
            found = policy.get_topk_logits(data, 3)
            logprobs = (found["topk_logits"] - found["topk_normalizers"][..., None])[..., 0]
            best = oracle.set_logprobs({**data, "token_sets": found["topk_indices"]})[..., 0]
            harness.values(f"log-probability of the most likely token, {mode}", logprobs, best)


_OFF = 0.5
"""Nats by which the engine's log-probabilities of the batches below are off."""


def _sampled_batch(harness: PolicyHarness) -> BatchedDataDict[Any]:
    data = harness.batch()
    data["generation_logprobs"] = data["prev_logprobs"] + _OFF * data["token_mask"]
    return data


class SampledTokens(Suite):
    """The argument `sampling_bound` of `train`."""

    @holds(11)
    def test_a_step_on_other_tokens_than_sampled_is_withheld(self, harness: PolicyHarness) -> None:
        """Beyond the bound no weight may change, and nothing of the batch may be left for the step that follows."""
        policy, oracle, data = harness.policy(), harness.oracle(), _sampled_batch(harness)
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
        policy, data = harness.policy(), _sampled_batch(harness)
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
