"""Contract 4: looking changes nothing."""

from __future__ import annotations

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench, loss_function
from rlframework.plugins.types import Capability

HERE = "rlframework.conformance.suites.policy_worker.inspection"
CALL = f"{HERE}:call"


class State(Suite):
    """Evaluating, scoring, generating, saving and swapping the reference in leave no trace."""

    @holds(4)
    def test_evaluating_gives_the_loss_and_changes_nothing(self, bench: PolicyBench) -> None:
        """Weights stay to the bit; optimizer and schedule too: the next steps are those of a run without it."""
        schedule = {"name": "linear", "warmup_steps": 1, "total_steps": 3}
        policy, oracle = bench.policy(scheduler=schedule), bench.oracle()
        first, second, other = (bench.batch(seed=seed) for seed in range(3))
        policy.train(first, loss_function("nll"))
        oracle.step(first, "nll")
        before = bench.weights(policy)
        result = policy.train(other, loss_function("nll"), eval_mode=True)
        bench.scalar("loss of the evaluation", result["loss"], float(oracle.loss(other, "nll").detach()))
        bench.equal("gradient norm of an evaluation", result["grad_norm"], None)
        for name, weight in bench.weights(policy).items():
            bench.exact(f"{name} after an evaluation", weight, before[name])
        result = policy.train(second, loss_function("nll"))
        bench.scalar("learning rate after an evaluation", result["lr"], 1e-4)
        oracle.step(second, "nll")
        bench.tensors("weights after the next step", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(4)
    def test_scoring_changes_nothing(self, bench: PolicyBench) -> None:
        """Between two steps and twice: the same numbers, the same weights, nothing added to the next gradient."""
        policy, oracle = bench.policy(), bench.oracle()
        bench.step(policy, oracle, bench.batch(), "nll", "before scoring")
        before, data = bench.weights(policy), bench.batch(seed=1)
        first, second = (policy.get_logprobs(data)["logprobs"] for _ in range(2))
        bench.exact("log-probabilities, the second time", second, first)
        for name, weight in bench.weights(policy).items():
            bench.exact(f"{name} after scoring", weight, before[name])
        bench.step(policy, oracle, bench.batch(seed=2), "nll", "after scoring")

    @holds(4)
    def test_scoring_is_with_the_weights_of_now(self, bench: PolicyBench) -> None:
        """After each step, and not with a copy that was made before it."""
        policy, oracle, data = bench.policy(optimizer={"lr": 1e-2}), bench.oracle(lr=1e-2), bench.batch()
        policy.get_logprobs(data)
        bench.step(policy, oracle, data, "nll", "a large step")
        got = policy.get_logprobs(data)["logprobs"]
        bench.values("log-probabilities after a step", got, oracle.logprobs(data), 2e-4)

    @holds(4)
    def test_data_is_not_changed(self, bench: PolicyBench) -> None:
        """What the caller passes stays the caller's."""
        policy, data = bench.policy(), bench.batch()
        copies = {name: value.clone() for name, value in data.items()}
        policy.get_logprobs(data)
        policy.train(data, loss_function("pg"))
        bench.equal("keys of the batch", sorted(data), sorted(copies))
        for name, value in copies.items():
            bench.exact(f"{name} of the caller's batch", data[name], value)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_the_reference_is_the_model_of_the_start(self, bench: PolicyBench) -> None:
        """To the bit, however many steps were taken; and scoring with it does not change the policy."""
        data, policy = bench.batch(), bench.policy(reference=True, optimizer={"lr": 1e-2})
        first = policy.get_logprobs(data)["logprobs"]
        for seed in range(3):
            policy.train(bench.batch(seed=seed), loss_function("nll"))
        before, moved = bench.weights(policy), policy.get_logprobs(data)["logprobs"]
        got = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        bench.exact("reference log-probabilities after three steps", got, first)
        bench.exact("the policy's own afterwards", policy.get_logprobs(data)["logprobs"], moved)
        bench.require(bool((moved != first).any()), "three large steps change the policy's log-probabilities")
        for name, weight in bench.weights(policy).items():
            bench.exact(f"{name} after scoring with the reference", weight, before[name])

    @holds(4)
    def test_preparing_changes_nothing(self, bench: PolicyBench) -> None:
        """`prepare_for_lp_inference` and `prepare_for_training` move what must be moved, and no number."""
        policy, oracle = bench.policy(), bench.oracle()
        for number in range(2):
            data = bench.batch(seed=number)
            policy.prepare_for_lp_inference()
            got = policy.get_logprobs(data)["logprobs"]
            bench.values(f"log-probabilities of step {number + 1}, prepared", got, oracle.logprobs(data))
            bench.step(policy, oracle, data, "nll", f"prepared, step {number + 1}")
        bench.equal("is_alive of all workers", policy.everywhere("is_alive"), [True] * bench.layout.workers)

    @holds(4)
    def test_evaluating_needs_no_optimizer(self, bench: PolicyBench) -> None:
        """A worker that was built without one evaluates, and says that it does not train."""
        policy, oracle, data = bench.policy(trains=False), bench.oracle(), bench.batch()
        evaluation = {"data": data, "loss_fn": loss_function("nll"), "eval_mode": True, "gbs": data.size}
        for told in policy.inspect(CALL, method="train", arguments=evaluation) if bench.layout.data == 1 else ():
            bench.equal("what an evaluation without an optimizer raises", told, "nothing")
        result = policy.train(data, loss_function("nll"), eval_mode=True)
        bench.scalar("loss without an optimizer", result["loss"], float(oracle.loss(data, "nll").detach()))
        for told in policy.inspect(CALL, method="train", arguments={**evaluation, "eval_mode": False}):
            bench.require("NotSupported" in told, "training without an optimizer is refused", got=told)

    @holds(4, Capability.CPU_OFFLOAD)
    def test_moving_away_and_back_changes_nothing(self, bench: PolicyBench) -> None:
        """Each transition tells the bytes that it moved; what is away comes back by itself when a call needs it."""
        policy, oracle = bench.policy(), bench.oracle()
        names = ("offload_before_refit", "offload_after_refit", "prepare_for_lp_inference", "prepare_for_training")
        for number, transitions in enumerate((names, names[:2], names[::-1], ("offload_after_refit",))):
            data = bench.batch(seed=number)
            for name in transitions:
                told = getattr(policy, name)()
                bench.require(
                    set(told) == {"model", "optimizer"} and all(size >= 0 for size in told.values()),
                    f"{name} tells the bytes of the model and of the optimizer that it moved",
                    got=told,
                )
            got = policy.get_logprobs(data)["logprobs"]
            bench.values(f"log-probabilities after {', '.join(transitions)}", got, oracle.logprobs(data))
            policy.offload_before_refit()
            result, right = policy.train(data, loss_function("nll")), oracle.step(data, "nll")
            bench.scalar(f"loss after {', '.join(transitions)}", result["loss"], right.loss)
        bench.tensors("weights after four steps", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(2, Capability.CPU_OFFLOAD)
    def test_what_lies_in_cpu_memory_learns_alike(self, bench: PolicyBench) -> None:
        """`policy.offload` changes where numbers are, and none of them."""
        bench.first_step(bench.batch(), "all offloaded", offload={"parameters": True, "optimizer": True})
        policy, oracle = bench.policy(offload={"parameters": True, "optimizer": True}), bench.oracle()
        for seed in range(3):
            bench.step(policy, oracle, bench.batch(seed=seed), "nll", f"all offloaded, step {seed + 1}")
        bench.tensors("weights after three steps", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_the_reference_is_scored_like_the_policy(self, bench: PolicyBench) -> None:
        """At the temperature of sampling and at the positions that are asked for: the KL term compares the two."""
        data, policy = bench.batch(), bench.policy(reference=True, generation={"temperature": 0.7})
        right = bench.oracle(temperature=0.7).logprobs(data)
        for positions, mask in {"all": torch.ones_like(right), "token_mask": data["token_mask"]}.items():
            got = policy.get_reference_policy_logprobs(data, positions=positions)["reference_logprobs"]
            bench.values(f"reference log-probabilities at positions={positions}", got, right * mask)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_the_reference_gives_way_after_an_exception(self, bench: PolicyBench) -> None:
        """Whatever happens inside `use_reference_model`: the weights of the policy come back, bit for bit."""
        data, policy = bench.batch(), bench.policy(reference=True, optimizer={"lr": 1e-2})
        policy.train(data, loss_function("nll"))
        before, scored = bench.weights(policy), policy.get_logprobs(data)["logprobs"]
        bench.equal(
            "exceptions seen", policy.inspect(f"{HERE}:raise_inside_reference"), ["seen"] * bench.layout.workers
        )
        for name, weight in bench.weights(policy).items():
            bench.exact(f"{name} after an exception", weight, before[name])
        bench.exact("log-probabilities after an exception", policy.get_logprobs(data)["logprobs"], scored)

    @holds(4, Capability.REFERENCE_MODEL)
    def test_training_goes_on_after_the_reference(self, bench: PolicyBench) -> None:
        """The swap does not touch the optimizer, and the next step is from the policy's own weights."""
        policy, oracle = bench.policy(reference=True), bench.oracle()
        for number in range(3):
            data = bench.batch(seed=number)
            policy.get_reference_policy_logprobs(data)
            bench.step(policy, oracle, data, "nll", f"after the reference, step {number + 1}")
        bench.tensors("weights", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(4)
    def test_random_state_of_the_caller_is_left_alone(self, bench: PolicyBench) -> None:
        """With a worker in the driver's process too: a user's own sampling must not depend on the backend."""
        torch.manual_seed(5)
        state = torch.get_rng_state()
        policy = bench.policy()
        data = bench.batch()
        policy.get_logprobs(data)
        policy.train(data, loss_function("nll"))
        bench.exact("torch's random state in the driver", torch.get_rng_state(), state)
