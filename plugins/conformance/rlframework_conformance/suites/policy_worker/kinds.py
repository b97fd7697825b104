"""Contract 2 for kinds of models: windows, noise, sinks, soft caps and frequencies, in each batching mode.

A backend may reject a kind, before any work and by name; the verdict says which. A backend that accepts one must
compute it like the oracle, which sees one row at a time.
"""

from __future__ import annotations

from typing import Any

from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness

SMOOTH: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.0}
"""Settings of AdamW under which a step is nearly proportional to small gradients, without amplifying their rounding."""


class Kinds(Suite):
    """Log-probabilities before and after a step, its loss and its gradient norm, compared with the oracle's."""

    @holds(2)
    def test_windows_limit_what_a_token_sees(self, harness: PolicyHarness) -> None:
        """A layer with a window must attend to so many tokens of a token's own sequence, and a layer without to all."""
        _compare(harness, "windows", "sliding windows", "window|sliding")

    @holds(2, alone=True)
    def test_windows_of_the_mask_limit_what_a_token_sees(self, harness: PolicyHarness) -> None:
        """The same for a window that the model gives to its mask only, and not to the attention function."""
        _compare(harness, "windows_of_the_mask", "windows in masks", "window|sliding|qwen2_?moe")

    @holds(2, alone=True)
    def test_nothing_is_random_in_training(self, harness: PolicyHarness) -> None:
        """Training must compute the function that is scored: without the noise of routers, whatever its name.

        The models of most tests have dropout, which must be off too.
        """
        _compare(harness, "router_noise", "router noise", "noise|jitter|mixtral")

    @holds(2, alone=True)
    def test_rotary_frequencies_are_those_of_each_length(self, harness: PolicyHarness) -> None:
        """Rotary frequencies that depend on the length must be those of each sequence, not of the longest beside it."""
        _compare(harness, "lengths", "longrope", "rope|rotary")

    @holds(2, alone=True)
    def test_soft_caps_squash_scores_and_logits(self, harness: PolicyHarness) -> None:
        """Soft caps of attention scores and of logits must be applied, and be part of the gradient."""
        _compare(harness, "caps", "soft caps", "cap|gemma_?2")

    @holds(2, alone=True)
    def test_sinks_take_their_share_of_attention(self, harness: PolicyHarness) -> None:
        """Sinks, a trained score for each head beside those of the keys, must be applied and trained."""
        _compare(harness, "sinks", "attention sinks", "sink|gpt_?oss")


def _compare(harness: PolicyHarness, model: str, kind: str, words: str) -> None:
    """Compare a step of `model` with the oracle's on padded and on packed rows, unless the backend rejects `kind`.

    `words`: a pattern that the message of a rejection must match.
    """
    data, oracle = harness.batch(), harness.oracle(model, **SMOOTH, max_grad_norm=None)
    before, step = oracle.logprobs(data), oracle.step(data, "nll")
    after = oracle.logprobs(data)
    for mode in ("padded", *["packed"] * (Capability.PACKING in harness.record.capabilities)):
        keys: dict[str, Any] = {"optimizer": SMOOTH, "max_grad_norm": None, "batching": {"mode": mode, "tokens": 30}}
        policy = harness.policy_unless_rejected(model, kind if mode == "padded" else f"packed {kind}", words, **keys)
        if policy is None:
            return
        what = f"{model}, {mode}"
        harness.values(f"log-probabilities, {what}", policy.get_logprobs(data)["logprobs"], before)
        harness.compare_step(policy, step, data, "nll", what)
        harness.values(f"log-probabilities after a step, {what}", policy.get_logprobs(data)["logprobs"], after)
