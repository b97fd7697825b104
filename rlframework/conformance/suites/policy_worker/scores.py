"""Contracts 2, 3 and 8 for reward models: one number a sequence, read at its last token."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance import oracle
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench
from rlframework.plugins.types import Capability

CALL = "rlframework.conformance.suites.policy_worker.inspection:call"


class Scores(Suite):
    """`score`, with `policy.head=score`."""

    @holds(3, Capability.SCORING)
    def test_scores_are_those_of_the_last_tokens(self, bench: PolicyBench) -> None:
        """Each row alone gives the same: what stands in the padding, a token like others, is not taken for the end."""
        self._scored(bench, "padded")

    @holds(2, Capability.SCORING)
    def test_scores_do_not_hang_on_the_grouping(self, bench: PolicyBench) -> None:
        """One row at a time, and microbatches as the backend likes them best."""
        self._scored(bench, "one at a time", micro_batch_size=1)
        self._scored(bench, "as preferred", batching={"mode": "auto", "tokens": 30})

    @holds(2, Capability.SCORING, Capability.PACKING)
    def test_scores_of_packed_rows_are_the_same(self, bench: PolicyBench) -> None:
        """Several ends in one row."""
        self._scored(bench, "packed", batching={"mode": "packed", "tokens": 30})

    @holds(8, Capability.SCORING)
    def test_a_head_does_what_it_is_for_only(self, bench: PolicyBench) -> None:
        """A reward model has no log-probabilities, a language model no scores, and neither makes any up."""
        data = bench.batch()
        for model, head, method in (("reward", "score", "get_logprobs"), ("untied", "language", "score")):
            policy = bench.policy(model, head=head)
            for told in policy.inspect(CALL, method=method, arguments={"data": data}):
                bench.require("NotSupported" in told, f"{method} is refused with policy.head={head}", got=told)

    def _scored(self, bench: PolicyBench, what: str, micro_batch_size: int | None = None, **keys: Any) -> None:
        data, model = bench.batch(), bench.model("reward")
        right = oracle.scores(model, data)
        got = bench.policy("reward", head="score", **keys).score(data, micro_batch_size)["scores"]
        bench.equal("shape and dtype of scores", (tuple(got.shape), got.dtype), ((data.size,), torch.float32))
        bench.values(f"scores, {what}", got, right)
