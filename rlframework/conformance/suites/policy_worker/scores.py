"""Contracts 2, 3 and 8 for reward models: one score per sequence, read at its last token."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance import oracle
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.harness import PolicyHarness
from rlframework.plugins.types import Capability

CALL = "rlframework.conformance.suites.policy_worker.inspection:call"


class Scores(Suite):
    """`score`, with `policy.head=score`."""

    @holds(3, Capability.SCORING)
    def test_scores_are_those_of_the_last_tokens(self, harness: PolicyHarness) -> None:
        """The score must be read at each row's last real token; padding with a regular token must not be mistaken for
        it.
        """
        self._scored(harness, "padded")

    @holds(2, Capability.SCORING)
    def test_scores_do_not_hang_on_the_grouping(self, harness: PolicyHarness) -> None:
        """Scores must not depend on how rows are grouped into microbatches."""
        self._scored(harness, "one at a time", micro_batch_size=1)
        self._scored(harness, "as preferred", batching={"mode": "auto", "tokens": 30})

    @holds(2, Capability.SCORING, Capability.PACKING)
    def test_scores_of_packed_rows_are_the_same(self, harness: PolicyHarness) -> None:
        """Packed rows must get the same scores as padded ones, with several last tokens in one row."""
        self._scored(harness, "packed", batching={"mode": "packed", "tokens": 30})

    @holds(8, Capability.SCORING)
    def test_a_head_does_what_it_is_for_only(self, harness: PolicyHarness) -> None:
        """A score head must reject `get_logprobs`, and a language-model head `score`, with `NotSupported`."""
        data = harness.batch()
        for model, head, method in (("reward", "score", "get_logprobs"), ("untied", "language", "score")):
            policy = harness.policy(model, head=head)
            for raised in policy.inspect(CALL, method=method, arguments={"data": data}):
                harness.require(
                    "NotSupported" in raised, f"{method} must be rejected with policy.head={head}", got=raised
                )

    def _scored(self, harness: PolicyHarness, what: str, micro_batch_size: int | None = None, **keys: Any) -> None:
        data, model = harness.batch(), harness.model("reward")
        right = oracle.scores(model, data)
        got = harness.policy("reward", head="score", **keys).score(data, micro_batch_size)["scores"]
        harness.equal("shape and dtype of scores", (tuple(got.shape), got.dtype), ((data.size,), torch.float32))
        harness.values(f"scores, {what}", got, right)
