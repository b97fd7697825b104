"""Contracts 2, 3, 5, 8 and 13 for the heads `score`, a number per row, and `value`, a number per token."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.plugins.types import Capability
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.grouping import GROUPS
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function

HEADS = {"scores": "score", "score_pairs": "score", "values": "value"}
"""The head that each loss reads."""


class Scores(Suite):
    """`score`, `get_values` and training, with `policy.head` score and value."""

    @holds(3, Capability.SCORING)
    def test_scores_are_those_of_the_last_tokens(self, harness: PolicyHarness) -> None:
        """The score must be read at each row's last real token, in every batching mode and size of microbatches.

        Padding with a regular token must not be mistaken for it, and a packed row has several last tokens.
        """
        for batching in harness.batchings(30):
            self._scored(harness, batching["mode"], batching=batching)
        self._scored(harness, "one at a time", micro_batch_size=1)

    @holds(8, Capability.SCORING)
    def test_a_head_does_what_it_is_for_only(self, harness: PolicyHarness) -> None:
        """A score head must reject `get_logprobs`, and a language-model head `score`, with `NotSupported`."""
        data = harness.batch()
        for model, head in (("reward", "score"), ("reward", "value"), ("untied", "language")):
            policy = harness.policy(model, head=head)
            calls: dict[str, tuple[str, dict[str, Any]]] = {
                "language": ("get_logprobs", {}),
                "score": ("score", {}),
                "value": ("get_values", {}),
                "nll": ("train", {"loss_fn": loss_function("nll")}),
                "scores": ("train", {"loss_fn": loss_function("scores")}),
                "values": ("train", {"loss_fn": loss_function("values")}),
            }
            for reads, (method, arguments) in calls.items():
                if {"nll": "language", **HEADS}.get(reads, reads) == head:
                    continue
                what = f"{method} must be rejected with policy.head={head}, as it reads {reads}"
                harness.workers_raise(policy, "NotSupported", what, method, data=data, **arguments)

    @holds(3, Capability.SCORING)
    def test_values_are_those_before_each_token(self, harness: PolicyHarness) -> None:
        """Entry i must be the head's output at token i-1: the value of the state in which token i was drawn."""
        data = harness.batch()
        right = torch.nn.functional.pad(
            harness.oracle("reward", head="checkpoint").values(data)[:, :-1].detach(), (1, 0)
        )
        right = right * (torch.arange(right.shape[1]) < data["input_lengths"][:, None])
        got = harness.policy("reward", head="value").get_values(data)["values"]
        harness.equal("shape and dtype of values", (tuple(got.shape), got.dtype), (tuple(right.shape), torch.float32))
        harness.values("values", got, right)

    @holds(3, Capability.SCORING)
    def test_heads_are_trained(self, harness: PolicyHarness) -> None:
        """Loss and gradient of scores at last tokens, and of values at the tokens of a loss, must be the oracle's.

        This holds in every batching mode, for scores in groups. Masked rows do not count, nor token masks for scores.
        """
        data = harness.batch()
        data["group_ids"] = torch.tensor(GROUPS)
        for batching in harness.batchings(48):
            for kind in ("score_pairs", "values"):
                what = f"{kind}, {batching['mode']}"
                harness.first_step(data, what, kind=kind, model="reward", head=HEADS[kind], batching=batching)

    @holds(3, Capability.SCORING)
    def test_a_new_head_begins_at_zeros(self, harness: PolicyHarness) -> None:
        """On a language model without such a head, `policy.head_init=zeros` must start at zeros and then train it.

        The model that is saved must be one that transformers loads, with the same scores.
        """
        oracle = harness.oracle("tied", head="zeros", lr=1e-2)
        policy = harness.policy("tied", head="score", head_init="zeros", optimizer={"lr": 1e-2})
        data = harness.batch()
        harness.exact("scores of a new head", policy.score(data)["scores"], torch.zeros(data.size))
        harness.steps(policy, oracle, range(3), "scores", "a new head")
        harness.tensors("weights after three steps", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)
        folder = harness.folder / "saved"
        policy.save_pretrained(str(folder))
        harness.values(
            "scores of the saved model",
            policy.score(data)["scores"],
            Oracle(folder, head="checkpoint").last_values(data).detach(),
        )

    @holds(5, Capability.SCORING, Capability.PORTABLE_OPTIMIZER_STATE)
    def test_a_new_head_resumes(self, harness: PolicyHarness) -> None:
        """A checkpoint must have the head and its moments: the step after resuming is that without a stop."""
        keys: dict[str, Any] = {"head": "value", "head_init": "zeros", "optimizer": {"lr": 1e-2}}
        first, loss_fn = harness.policy("tied", **keys), loss_function("values")
        first.train(harness.batch(), loss_fn)
        paths = str(harness.folder / "weights"), str(harness.folder / "optimizer")
        first.save_checkpoint(*paths)
        wanted, right = first.train(harness.batch(seed=1), loss_fn)["loss"], harness.weights(first)
        second = harness.resumed(paths, "tied", **keys)
        harness.equal("loss after resuming", second.train(harness.batch(seed=1), loss_fn)["loss"], wanted)
        harness.same("after resuming", harness.weights(second), right)

    def _scored(self, harness: PolicyHarness, what: str, micro_batch_size: int | None = None, **keys: Any) -> None:
        data = harness.batch()
        right = harness.oracle("reward", head="checkpoint").last_values(data).detach()
        got = harness.policy("reward", head="score", **keys).score(data, micro_batch_size)["scores"]
        harness.equal("shape and dtype of scores", (tuple(got.shape), got.dtype), ((data.size,), torch.float32))
        harness.values(f"scores, {what}", got, right)
