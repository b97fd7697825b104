"""Contract 3: training is what a plain AdamW program does, over many steps, with the same schedule and clipping."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance import cases
from rlframework.conformance.contracts import FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.losses import LogitsLoss, NotFiniteLoss
from rlframework.conformance.suites.policy_worker.workbench import PROBE, PolicyBench, loss_function
from rlframework.errors import NonFiniteGradients
from rlframework.plugins.types import Capability


class Training(Suite):
    """One step may agree by luck; twenty do not. An update that is a little too small shows only then."""

    @holds(3)
    def test_twenty_steps_end_at_the_oracles_weights(self, bench: PolicyBench) -> None:
        """Loss and gradient norm at each step on the way, other rows in each, learning rate 1e-4."""
        policy, oracle = bench.policy(batching={"mode": "auto", "tokens": 40}), bench.oracle()
        for number in range(20):
            bench.step(policy, oracle, bench.batch(seed=number), "pg", f"step {number + 1} of 20")
        bench.tensors(
            "weights after 20 steps",
            bench.weights(policy),
            oracle.weights(),
            WEIGHTS_AFTER_20_STEPS,
            TENSOR_AFTER_20_STEPS,
        )

    @holds(3)
    def test_a_tied_head_stays_tied(self, bench: PolicyBench) -> None:
        """The embedding gets the gradient of both uses, and there is no second copy that goes another way."""
        bench.first_step(bench.batch(), "tied head", model="tied")
        policy, oracle = bench.policy("tied"), bench.oracle("tied")
        for number in range(3):
            bench.step(policy, oracle, bench.batch(seed=number), "nll", f"tied head, step {number + 1}")
        bench.tensors("weights of the tied model", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_a_padding_token_inside_a_row_is_learnt_as_in_the_model(self, bench: PolicyBench) -> None:
        """A row may hold it, as where padding is the end of text; transformers gives the embedding a `padding_idx`.

        As an input it is not learnt; as a target it is, and through a tied head so is the embedding.
        """
        data = bench.batch()
        data["input_ids"][:, 1] = data["input_ids"][4, 6:8] = cases.tokenizer().pad_token_id
        data["token_mask"][:, 1] = 1.0
        for model in ("untied", "tied"):
            bench.first_step(data, f"padding token inside, {model} head", kind="nll", model=model)

    @holds(3)
    def test_norms_that_heads_share_are_learnt_from_all(self, bench: PolicyBench) -> None:
        """A norm of each head (Qwen3) has one weight, of which a rank with some of the heads sees a part's gradient."""
        bench.first_step(bench.batch(), "norms of heads", kind="nll", model="norms_of_heads")

    @holds(3)
    def test_updates_go_against_the_gradient_at_the_learning_rate(self, bench: PolicyBench) -> None:
        """AdamW's first update of an element is the learning rate, against the gradient's sign, whatever its size."""
        lr = 1e-3
        policy, oracle = bench.policy(optimizer={"lr": lr, "weight_decay": 0.0}), bench.oracle()
        before, data = oracle.weights(), bench.batch()
        gradients = oracle.gradients(data, "nll")
        policy.train(data, loss_function("nll"))
        after = bench.weights(policy)
        clear = {name: gradient.abs() > 1e-4 for name, gradient in gradients.items()}
        for name, places in clear.items():
            update, sign = (before[name] - after[name])[places], gradients[name][places].sign()
            bench.scalar(
                f"mean update of {name}, over the learning rate", float((update * sign).mean()) / lr, 1.0, 2e-3
            )

    @holds(3)
    def test_clipping_is_of_the_whole_gradient(self, bench: PolicyBench) -> None:
        """To `max_grad_norm`, over all tensors and workers; the norm that is told is the one before clipping."""
        data, limit = bench.batch(), 0.5
        policy, oracle = bench.policy(**{**PROBE, "max_grad_norm": limit}), bench.oracle(max_grad_norm=limit)
        before, gradients = oracle.weights(), oracle.gradients(data, "pg")
        bench.step(policy, oracle, data, "pg", "clipped")
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        bench.require(norm > 2 * limit, "the gradient of the case is beyond the limit", got=norm)
        clipped = {name: gradient * (limit / norm) for name, gradient in gradients.items()}
        bench.tensors("clipped gradient", bench.gradient(policy, before), clipped, FP32, FP32)

    @holds(3)
    def test_a_gradient_within_the_limit_is_left_alone(self, bench: PolicyBench) -> None:
        """Clipping never makes a gradient larger, and a limit that is not reached changes nothing."""
        data = bench.batch()
        policy, oracle = bench.policy(**{**PROBE, "max_grad_norm": 1e4}), bench.oracle()
        before, gradients = oracle.weights(), oracle.gradients(data, "pg")
        policy.train(data, loss_function("pg"))
        bench.tensors("gradient within the limit", bench.gradient(policy, before), gradients, FP32, FP32)

    @holds(3)
    def test_weight_decay_spares_parameters_of_one_dimension(self, bench: PolicyBench) -> None:
        """Matrices shrink by lr * decay, norms and biases do not."""
        data, lr, decay = bench.batch(), 1e-2, 0.5
        policy = bench.policy(optimizer={"lr": lr, "weight_decay": decay, "eps": 1e6})
        before = bench.oracle().weights()
        policy.train(data, loss_function("pg"))
        after = bench.weights(policy)  # with that epsilon nothing but the decay moves a weight
        right = {name: weight * (1 - lr * decay if weight.dim() > 1 else 1.0) for name, weight in before.items()}
        bench.tensors("weights after one decay", after, right, 1e-6, 1e-6)

    @holds(3)
    def test_betas_and_epsilon_are_the_configured_ones(self, bench: PolicyBench) -> None:
        """Five steps with betas and an epsilon that are nobody's default."""
        settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.2}
        policy, oracle = bench.policy(optimizer=settings), bench.oracle(**settings)
        for number in range(5):
            bench.step(policy, oracle, bench.batch(seed=number), "nll", f"own betas, step {number + 1}")
        bench.tensors("weights with own betas", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_the_schedule_moves_once_a_call(self, bench: PolicyBench) -> None:
        """Warm-up over two calls, then linear to 0.2 after six: factors 0.5, 1, 1, 0.8, worked out by hand.

        Each call takes two optimizer steps at one learning rate.
        """
        schedule = {"name": "linear", "warmup_steps": 2, "total_steps": 6, "min_ratio": 0.2}
        policy, oracle = bench.policy(scheduler=schedule, optimizer={"lr": 1e-3}), bench.oracle(lr=1e-3)
        for number, factor in enumerate((0.5, 1.0, 1.0, 0.8)):
            batches = [bench.batch(seed=10 * number + part) for part in range(2)]
            result = policy.train(BatchedDataDict.from_batches(batches), loss_function("nll"))
            bench.scalar(f"learning rate of call {number + 1}", result["lr"], 1e-3 * factor)
            for data in batches:
                oracle.step(data, "nll", lr=1e-3 * factor)
        bench.tensors("weights after the schedule", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_a_gradient_that_is_not_finite_is_skipped(self, bench: PolicyBench) -> None:
        """Nothing moves, weights or moments; it is counted, and the next step is as if it had not been."""
        policy, oracle = bench.policy(), bench.oracle()
        bench.step(policy, oracle, bench.batch(), "nll", "before")
        before = bench.weights(policy)
        result = policy.train(bench.batch(seed=1), NotFiniteLoss())
        bench.equal("skipped steps", result["skipped"], 1)
        for name, weight in bench.weights(policy).items():
            bench.exact(f"{name} after a skipped step", weight, before[name])
        bench.step(policy, oracle, bench.batch(seed=2), "nll", "after")
        bench.tensors("weights after a skipped step", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_too_many_gradients_that_are_not_finite_end_the_run(self, bench: PolicyBench) -> None:
        """`non_finite_gradients.stop_after` in a row: the model is broken, and nobody wants to find out tomorrow."""
        policy = bench.policy(non_finite_gradients={"stop_after": 2})
        policy.train(bench.batch(), NotFiniteLoss())
        bench.refuses(
            NonFiniteGradients,
            lambda: policy.train(bench.batch(), NotFiniteLoss()),
            "the second gradient in a row that is not finite",
            "not finite",
        )

    @holds(3)
    def test_a_batch_without_a_valid_token_takes_no_step(self, bench: PolicyBench) -> None:
        """There is nothing to learn: no update by old momentum or decay either."""
        policy, oracle = bench.policy(), bench.oracle()
        bench.step(policy, oracle, bench.batch(), "nll", "before")
        before, empty = bench.weights(policy), bench.batch(seed=1)
        empty["token_mask"][:] = 0.0
        policy.train(empty, loss_function("nll"))
        for name, weight in bench.weights(policy).items():
            bench.exact(f"{name} after a batch without a valid token", weight, before[name])

    @holds(3)
    def test_losses_may_ask_for_logits(self, bench: PolicyBench) -> None:
        """`[B, S-1, V]` where the loss says so, for what log-probabilities of the targets do not tell."""
        data = bench.batch()
        oracle = bench.oracle()
        right = oracle.step(data, "nll")
        result = bench.policy().train(data, LogitsLoss())
        bench.scalar("loss from logits", result["loss"], right.loss)
        bench.scalar("gradient norm from logits", result["grad_norm"][0], right.grad_norm)

    @holds(3)
    def test_losses_may_ask_for_entropy(self, bench: PolicyBench) -> None:
        """In nats, at the temperature of sampling, where the loss counts."""
        data = bench.batch()
        metrics = bench.policy(generation={"temperature": 0.7}).train(data, loss_function("pg"))["metrics"]
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        right = bench.oracle(temperature=0.7).entropy(data)[:, 1:]
        bench.scalar("mean entropy", metrics["entropy"], float((right * mask).sum() / mask.sum()))

    @holds(3, Capability.ACTIVATION_CHECKPOINTING)
    def test_activation_checkpointing_changes_nothing(self, bench: PolicyBench) -> None:
        """Computing activations again in the backward is a matter of memory."""
        batching = {"mode": "auto", "tokens": 30}
        bench.first_step(bench.batch(), "activation checkpointing", activation_checkpointing=True, batching=batching)

    @holds(3, Capability.BFLOAT16)
    def test_small_updates_are_not_lost_in_bfloat16(self, bench: PolicyBench) -> None:
        """Weights and moments stay fp32: at 1e-5 no step moves a weight of 0.2 by a bfloat16 digit, and ten do not."""
        lr = 1e-5
        policy = bench.policy(precision="bfloat16", optimizer={"lr": lr, "weight_decay": 0.0})
        before = bench.oracle().weights()
        for number in range(10):
            policy.train(bench.batch(seed=number), loss_function("nll"))
        after = bench.weights(policy)
        name = "lm_head.weight"
        bench.equal("dtype of the saved head", after[name].dtype, torch.float32)
        moved = (after[name] - before[name]).abs()
        share = float((moved > 0.5 * lr).float().mean())
        bench.require(share > 0.9, "nine of ten weights of the head moved in ten steps", got=share, expected="> 0.9")
        bench.require(float(moved.max()) < 11 * lr, "none moved by more than ten steps", got=float(moved.max()))
