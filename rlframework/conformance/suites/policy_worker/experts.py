"""Contracts 2, 3 and 5 for mixtures of experts: on one worker, and spread over those that share the rows."""

from __future__ import annotations

import json
from pathlib import Path

from rlframework.conformance.contracts import FP32
from rlframework.conformance.oracle import Oracle
from rlframework.conformance.policies import read_weights
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.checkpoints import moments_of, saved
from rlframework.conformance.suites.policy_worker.workbench import PROBE, PolicyBench, loss_function
from rlframework.plugins.types import Capability

EXPERTS = Capability.EXPERT_PARALLEL
COEFFICIENT = 0.7
"""Of the routers' loss: large, so that it shows in the gradient of each tensor."""


class Experts(Suite):
    """A mixture, whose tokens go to two of four experts in each block. Not beside other ways to split a model."""

    @holds(3, EXPERTS)
    def test_experts_learn_as_the_oracles(self, bench: PolicyBench) -> None:
        """Log-probabilities, loss, gradient norm and the gradient of each expert, of tokens on whichever worker."""
        bench.first_step(bench.batch(), "experts", model="experts", batching={"mode": "auto", "tokens": 40})

    @holds(2, EXPERTS)
    def test_the_router_loss_is_of_the_whole_batch(self, bench: PolicyBench) -> None:
        """Not of each microbatch, three rows or fewer; padding and rows that the loss leaves out do not count.

        Its value is a metric of the step, and its gradient is part of the gradient.
        """
        data, oracle = bench.batch(), bench.oracle("experts", router_loss=COEFFICIENT, max_grad_norm=None)
        policy = bench.policy("experts", **PROBE, router_aux_loss_coef=COEFFICIENT)
        before, gradients, loss = oracle.weights(), oracle.gradients(data, "pg"), oracle.router_loss(data).item()
        result, right = policy.train(data, loss_function("pg")), oracle.step(data, "pg")
        bench.scalar("loss without that of the routers", result["loss"], right.loss)
        bench.scalar("loss of the routers", result["metrics"].get("router_aux_loss", 0.0), loss)
        bench.scalar("gradient norm", result["grad_norm"][0], right.grad_norm)
        bench.tensors("gradient", bench.gradient(policy, before), gradients, FP32, FP32)

    @holds(5, EXPERTS)
    def test_experts_are_saved_by_the_names_of_files(self, bench: PolicyBench) -> None:
        """Each expert by itself, as transformers writes them, which reads the model that was trained."""
        right = read_weights(bench.model("experts"))
        policy = bench.policy("experts", optimizer={"lr": 1e-2})
        untrained = bench.weights(policy)
        bench.equal("names", sorted(untrained), sorted(right))
        for name, weight in right.items():
            bench.exact(f"{name} as it was loaded", untrained[name], weight)
        policy.train(bench.batch(), loss_function("nll"))
        folder, data = bench.folder / "experts", bench.batch()
        policy.save_pretrained(str(folder))
        got = policy.get_logprobs(data)["logprobs"]
        bench.values("log-probabilities of the saved model", Oracle(folder).logprobs(data), got)

    @holds(5, EXPERTS, Capability.PORTABLE_OPTIMIZER_STATE)
    def test_experts_go_on_from_a_checkpoint(self, bench: PolicyBench) -> None:
        """Moments are under the names of files too, and another policy goes on with them."""
        first, oracle = bench.policy("experts"), bench.oracle("experts")
        for seed in range(2):
            bench.step(first, oracle, bench.batch(seed=seed), "nll", f"step {seed + 1}")
        weights, optimizer = saved(bench, first)
        steps = json.loads((Path(optimizer) / "training.json").read_text())["steps"]
        bench.equal("steps of each weight", steps, dict.fromkeys(oracle.weights(), 2))
        found = {name: one for name, one in read_weights(Path(optimizer)).items() if name.startswith("exp_avg")}
        bench.tensors("moments", found, moments_of(oracle), 1e-5, 1e-4)
        second = bench.policy("experts")
        second.load_checkpoint(weights, optimizer)
        bench.step(second, oracle, bench.batch(seed=2), "nll", "step 3, of the policy that goes on")
        bench.tensors("weights after going on", bench.weights(second), oracle.weights(), 1e-5, 2e-4)
