"""Contract 4: reading state does not change it."""

from __future__ import annotations

import torch

from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import CALL, PolicyHarness, loss_function

HERE = "rlframework_conformance.inspected_worker"


class State(Suite):
    """Evaluating, scoring, generating, saving and loading the reference weights leave no trace."""

    @holds(4)
    def test_evaluating_gives_the_loss_and_changes_nothing(self, harness: PolicyHarness) -> None:
        """Evaluation must return the loss and change neither weights, optimizer nor schedule."""
        schedule = {"name": "linear", "total_steps": 2}
        policy, oracle = harness.policy(scheduler=schedule), harness.oracle()
        first, second, other = (harness.batch(seed=seed) for seed in range(3))
        policy.train(first, loss_function("nll"))
        oracle.step(first, "nll")
        before = harness.weights(policy)
        result = policy.train(other, loss_function("nll"), eval_mode=True)
        harness.scalar("loss of the evaluation", result["loss"], float(oracle.loss(other, "nll").detach()))
        harness.equal("gradient norm of an evaluation", result["grad_norm"], None)
        harness.same("after an evaluation", harness.weights(policy), before)
        result = policy.train(second, loss_function("nll"))
        harness.scalar("learning rate after an evaluation", result["lr"], 0.5e-4)
        oracle.step(second, "nll", lr=0.5e-4)
        harness.tensors("weights after the next step", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(4)
    def test_scoring_changes_nothing(self, harness: PolicyHarness) -> None:
        """Scoring must be repeatable and must not change the weights or the next gradient."""
        policy, oracle = harness.policy(), harness.oracle()
        harness.step(policy, oracle, harness.batch(), "nll", "before scoring")
        before, data = harness.weights(policy), harness.batch(seed=1)
        first, second = (policy.get_logprobs(data)["logprobs"] for _ in range(2))
        harness.exact("log-probabilities, the second time", second, first)
        harness.same("after scoring", harness.weights(policy), before)
        harness.step(policy, oracle, harness.batch(seed=2), "nll", "after scoring")

    @holds(4)
    def test_scoring_is_with_the_weights_of_now(self, harness: PolicyHarness) -> None:
        """Scoring must use the current weights after each step, not a copy from before."""
        policy, oracle, data = harness.policy(optimizer={"lr": 1e-2}), harness.oracle(lr=1e-2), harness.batch()
        policy.get_logprobs(data)
        harness.step(policy, oracle, data, "nll", "a large step")
        got = policy.get_logprobs(data)["logprobs"]
        harness.values("log-probabilities after a step", got, oracle.logprobs(data), 2e-4)

    @holds(4)
    def test_data_is_not_changed(self, harness: PolicyHarness) -> None:
        """A call must not modify the caller's batch."""
        policy, data = harness.policy(), harness.batch()
        copies = {name: value.clone() for name, value in data.items()}
        policy.get_logprobs(data)
        policy.train(data, loss_function("pg"))
        harness.equal("keys of the batch", sorted(data), sorted(copies))
        harness.same("of the caller's batch", data, copies)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_the_reference_is_the_model_of_the_start(self, harness: PolicyHarness) -> None:
        """Reference log-probabilities must equal the initial model's, bit for bit, after any number of steps.

        Scoring with the reference must not change the policy.
        """
        data, policy = harness.batch(), harness.policy(reference=True, optimizer={"lr": 1e-2})
        first = policy.get_logprobs(data)["logprobs"]
        for seed in range(3):
            policy.train(harness.batch(seed=seed), loss_function("nll"))
        before, moved = harness.weights(policy), policy.get_logprobs(data)["logprobs"]
        got = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        harness.exact("reference log-probabilities after three steps", got, first)
        harness.exact("the policy's own afterwards", policy.get_logprobs(data)["logprobs"], moved)
        harness.require(bool((moved != first).any()), "three large steps change the policy's log-probabilities")
        harness.same("after scoring with the reference", harness.weights(policy), before)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_the_reference_moves_toward_the_policy(self, harness: PolicyHarness) -> None:
        """`sync_reference` must give the reference weights alpha x policy + (1 - alpha) x reference.

        Repeatedly, from its weights of then, and without a change of the policy; with alpha 1 it becomes the policy.
        """
        data, policy = harness.batch(), harness.policy(reference=True, optimizer={"lr": 1e-2})
        right, oracle = harness.weights(policy), harness.oracle()
        for number, alpha in enumerate((0.25, 0.6)):
            policy.train(harness.batch(seed=number), loss_function("nll"))
            before = harness.weights(policy)
            policy.sync_reference(alpha)
            right = {name: alpha * before[name] + (1 - alpha) * weight for name, weight in right.items()}
            oracle.model.load_state_dict(right)
            got = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
            harness.values(f"reference log-probabilities after update {number + 1}", got, oracle.logprobs(data), 2e-4)
            harness.same(f"after update {number + 1} of the reference", harness.weights(policy), before)
        policy.sync_reference(1.0)
        got = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        harness.exact("reference log-probabilities with alpha 1", got, policy.get_logprobs(data)["logprobs"])

    @holds(4)
    def test_preparing_changes_nothing(self, harness: PolicyHarness) -> None:
        """`prepare_for_lp_inference` and `prepare_for_training` may move tensors but must not change any number."""
        policy, oracle = harness.policy(), harness.oracle()
        for number in range(2):
            data = harness.batch(seed=number)
            policy.prepare_for_lp_inference()
            got = policy.get_logprobs(data)["logprobs"]
            harness.values(f"log-probabilities of step {number + 1}, prepared", got, oracle.logprobs(data))
            harness.step(policy, oracle, data, "nll", f"prepared, step {number + 1}")
        harness.equal("is_alive of all workers", policy.everywhere("is_alive"), [True] * harness.layout.workers)

    @holds(4)
    def test_evaluating_needs_no_optimizer(self, harness: PolicyHarness) -> None:
        """A worker built without an optimizer must evaluate, and reject training with `NotSupported`."""
        policy, oracle, data = harness.policy(trains=False), harness.oracle(), harness.batch()
        evaluation = {"data": data, "loss_fn": loss_function("nll"), "eval_mode": True, "gbs": data.size}
        for raised in policy.inspect(CALL, method="train", arguments=evaluation) if harness.layout.data == 1 else ():
            harness.equal("error of an evaluation without an optimizer", raised, "nothing")
        result = policy.train(data, loss_function("nll"), eval_mode=True)
        harness.scalar("loss without an optimizer", result["loss"], float(oracle.loss(data, "nll").detach()))
        what = "training without an optimizer must raise NotSupported"
        harness.workers_raise(policy, "NotSupported", what, "train", **evaluation | {"eval_mode": False})

    @holds(4, Capability.CPU_OFFLOAD)
    def test_moving_away_and_back_changes_nothing(self, harness: PolicyHarness) -> None:
        """Offloading and onloading must not change any number, and must report the bytes moved.

        A call that needs offloaded state onloads it automatically.
        """
        policy, oracle = harness.policy(), harness.oracle()
        names = ("offload_before_refit", "offload_after_refit", "prepare_for_lp_inference", "prepare_for_training")
        for number, transitions in enumerate((names, names[:2], names[::-1], ("offload_after_refit",))):
            data = harness.batch(seed=number)
            for name in transitions:
                moved = getattr(policy, name)()
                harness.require(
                    set(moved) == {"model", "optimizer"} and all(size >= 0 for size in moved.values()),
                    f"{name} must report the bytes of the model and of the optimizer that it moved",
                    got=moved,
                )
            got = policy.get_logprobs(data)["logprobs"]
            harness.values(f"log-probabilities after {', '.join(transitions)}", got, oracle.logprobs(data))
            policy.offload_before_refit()
            result, right = policy.train(data, loss_function("nll")), oracle.step(data, "nll")
            harness.scalar(f"loss after {', '.join(transitions)}", result["loss"], right.loss)
        harness.tensors("weights after four steps", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(2, Capability.CPU_OFFLOAD)
    def test_what_lies_in_cpu_memory_learns_alike(self, harness: PolicyHarness) -> None:
        """`policy.offload` must not change any number of training; a GPU's engine may reject that of parameters."""
        offload = {"parameters": True, "optimizer": True}
        if (
            harness.policy_unless_rejected("untied", "parameters in CPU memory", "offload.parameters", offload=offload)
            is None
        ):
            offload["parameters"] = False
        harness.first_step(harness.batch(), "all offloaded", offload=offload)
        policy, oracle = harness.policy(offload=offload), harness.oracle()
        harness.steps(policy, oracle, range(3), "nll", "all offloaded")
        harness.tensors("weights after three steps", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_the_reference_is_scored_like_the_policy(self, harness: PolicyHarness) -> None:
        """Reference scoring must use the sampling temperature and the requested positions, as the KL term requires."""
        data, policy = harness.batch(), harness.policy(reference=True, generation={"temperature": 0.7})
        right = harness.oracle(temperature=0.7).logprobs(data)
        for positions, mask in {"all": torch.ones_like(right), "token_mask": data["token_mask"]}.items():
            got = policy.get_reference_policy_logprobs(data, positions=positions)["reference_logprobs"]
            harness.values(f"reference log-probabilities at positions={positions}", got, right * mask)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_the_reference_gives_way_after_an_exception(self, harness: PolicyHarness) -> None:
        """An exception inside `use_reference_model` must restore the policy's weights bit for bit."""
        data, policy = harness.batch(), harness.policy(reference=True, optimizer={"lr": 1e-2})
        policy.train(data, loss_function("nll"))
        before, scored = harness.weights(policy), policy.get_logprobs(data)["logprobs"]
        harness.equal(
            "exceptions seen", policy.inspect(f"{HERE}:raise_inside_reference"), ["seen"] * harness.layout.workers
        )
        harness.same("after an exception", harness.weights(policy), before)
        harness.exact("log-probabilities after an exception", policy.get_logprobs(data)["logprobs"], scored)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_training_goes_on_after_the_reference(self, harness: PolicyHarness) -> None:
        """Training must continue from the policy's own weights and optimizer state after reference scoring."""
        policy, oracle = harness.policy(reference=True), harness.oracle()
        for number in range(3):
            data = harness.batch(seed=number)
            policy.get_reference_policy_logprobs(data)
            harness.step(policy, oracle, data, "nll", f"after the reference, step {number + 1}")
        harness.tensors("weights", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(4)
    def test_random_state_of_the_caller_is_left_alone(self, harness: PolicyHarness) -> None:
        """The driver's random state must not change, even with a worker in the driver's process."""
        torch.manual_seed(5)
        state = torch.get_rng_state()
        policy = harness.policy()
        data = harness.batch()
        policy.get_logprobs(data)
        policy.train(data, loss_function("nll"))
        harness.exact("torch's random state in the driver", torch.get_rng_state(), state)
