"""Contracts 2, 3 and 5 for mixtures of experts: on one worker, and distributed over the data-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path

from rlframework.plugins.types import Capability
from rlframework_conformance.contracts import FP32
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import read_weights
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.checkpoints import moments_of, saved
from rlframework_conformance.suites.policy_worker.worker_harness import PROBE, PolicyHarness, loss_function

EXPERTS = Capability.EXPERT_PARALLEL
COEFFICIENT = 0.7
"""Weight of the router loss, large enough to show in the gradient of each tensor."""


class Experts(Suite):
    """A mixture that sends each token to two of four experts per block. Not combined with other parallelism."""

    @holds(3, EXPERTS)
    def test_experts_learn_as_the_oracles(self, harness: PolicyHarness) -> None:
        """Log-probabilities, loss, gradient norm and each expert's gradient must match the oracle, whichever rank has
        the tokens.
        """
        harness.first_step(harness.batch(), "experts", model="experts", batching={"mode": "auto", "tokens": 40})

    @holds(2, EXPERTS)
    def test_the_router_loss_is_of_the_whole_batch(self, harness: PolicyHarness) -> None:
        """The router loss must be computed over the global batch, not per microbatch.

        Padding and rows excluded from the loss do not count. Its value is a metric of the step, and its gradient is
        part of the step's gradient.
        """
        data, oracle = harness.batch(), harness.oracle("experts", router_loss=COEFFICIENT, max_grad_norm=None)
        policy = harness.policy("experts", **PROBE, router_aux_loss_coef=COEFFICIENT)
        before, gradients, loss = oracle.weights(), oracle.gradients(data, "pg"), oracle.router_loss(data).item()
        result, right = policy.train(data, loss_function("pg")), oracle.step(data, "pg")
        harness.scalar("loss without that of the routers", result["loss"], right.loss)
        harness.scalar("loss of the routers", result["metrics"].get("router_aux_loss", 0.0), loss)
        harness.scalar("gradient norm", result["grad_norm"][0], right.grad_norm)
        harness.tensors("gradient", harness.gradient(policy, before), gradients, FP32, FP32)

    @holds(5, EXPERTS)
    def test_experts_are_saved_by_the_names_of_files(self, harness: PolicyHarness) -> None:
        """Each expert must be saved separately under the names transformers uses, and transformers must be able to load
        the model.
        """
        right = read_weights(harness.model("experts"))
        policy = harness.policy("experts", optimizer={"lr": 1e-2})
        untrained = harness.weights(policy)
        harness.equal("names", sorted(untrained), sorted(right))
        harness.same("as it was loaded", untrained, right)
        policy.train(harness.batch(), loss_function("nll"))
        folder, data = harness.folder / "experts", harness.batch()
        policy.save_pretrained(str(folder))
        got = policy.get_logprobs(data)["logprobs"]
        harness.values("log-probabilities of the saved model", Oracle(folder).logprobs(data), got)

    @holds(5, EXPERTS, Capability.PORTABLE_OPTIMIZER_STATE)
    def test_experts_go_on_from_a_checkpoint(self, harness: PolicyHarness) -> None:
        """Moments must be saved under the same names, and another policy must resume from them."""
        first, oracle = harness.policy("experts"), harness.oracle("experts")
        for seed in range(2):
            harness.step(first, oracle, harness.batch(seed=seed), "nll", f"step {seed + 1}")
        weights, optimizer = saved(harness, first)
        steps = json.loads((Path(optimizer) / "training.json").read_text())["steps"]
        harness.equal("steps of each weight", steps, dict.fromkeys(oracle.weights(), 2))
        found = {name: one for name, one in read_weights(Path(optimizer)).items() if name.startswith("exp_avg")}
        harness.tensors("moments", found, moments_of(oracle), 1e-5, 1e-4)
        second = harness.policy("experts")
        second.load_checkpoint(weights, optimizer)
        harness.step(second, oracle, harness.batch(seed=2), "nll", "step 3, of the resumed policy")
        harness.tensors("weights after resuming", harness.weights(second), oracle.weights(), 1e-5, 2e-4)
