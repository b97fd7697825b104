"""Contracts 1 to 3 for sets of tokens: log-probabilities of several tokens at each position, with gradient."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness


def _batch(harness: PolicyHarness) -> BatchedDataDict[Any]:
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

        They belong to the tokens at the position of the target, wherever in the vocabulary these are.
        """
        harness.first_step(_batch(harness), "sets of tokens", kind="sets")

    @holds(2, Capability.DYNAMIC_BATCHING)
    def test_sets_do_not_depend_on_the_grouping(self, harness: PolicyHarness) -> None:
        """Dynamic microbatches must give the same loss and gradient."""
        batching = {"mode": "dynamic", "tokens": 30}
        harness.first_step(_batch(harness), "sets of tokens, dynamic", kind="sets", batching=batching)

    @holds(2, Capability.PACKING)
    def test_sets_of_packed_rows_are_the_same(self, harness: PolicyHarness) -> None:
        """Packed rows must give the same loss and gradient."""
        batching = {"mode": "packed", "tokens": 30}
        harness.first_step(_batch(harness), "sets of tokens, packed", kind="sets", batching=batching)

    @holds(1)
    def test_sets_are_scored_at_the_temperature_of_sampling(self, harness: PolicyHarness) -> None:
        """`get_token_set_logprobs` must return the oracle's log-probabilities, 0 where `positions` asks for none.

        `topk_normalizers` of `get_topk_logits` must be the logsumexp of all logits, not of the largest ones.
        """
        data, oracle = _batch(harness), harness.oracle(temperature=0.7)
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
