"""Contract 3: training matches a plain AdamW program over many steps, with the same schedule and clipping.

With Muon, matrices are orthogonalized whole, in every layout, and its state is resumed from (contract 5).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import DataError, NonFiniteGradients
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.contracts import FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework_conformance.further_oracles import MuonOracle
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.checkpoints import require_same_continuation, saved, train
from rlframework_conformance.suites.policy_worker.losses import EntropyLoss, LogitsLoss, NotFiniteLoss
from rlframework_conformance.suites.policy_worker.worker_harness import PROBE, PolicyHarness, loss_function


class Training(Suite):
    """One step may agree by chance, twenty do not: only then does a slightly too small update show."""

    @holds(3)
    def test_twenty_steps_end_at_the_oracles_weights(self, harness: PolicyHarness) -> None:
        """After 20 steps on different rows at learning rate 1e-4, the weights must be the oracle's.

        Loss and gradient norm are compared at each step.
        """
        policy, oracle = harness.policy(batching={"mode": "auto", "tokens": 40}), harness.oracle()
        for number in range(20):
            harness.step(policy, oracle, harness.batch(seed=number), "pg", f"step {number + 1} of 20")
        harness.tensors(
            "weights after 20 steps",
            harness.weights(policy),
            oracle.weights(),
            WEIGHTS_AFTER_20_STEPS,
            TENSOR_AFTER_20_STEPS,
        )

    @holds(3)
    def test_a_tied_head_stays_tied(self, harness: PolicyHarness) -> None:
        """A tied embedding must receive the gradient of both uses, and no second copy may diverge from it."""
        harness.first_step(harness.batch(), "tied head", model="tied")
        policy, oracle = harness.policy("tied"), harness.oracle("tied")
        harness.steps(policy, oracle, range(3), "nll", "tied head")
        harness.tensors("weights of the tied model", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_a_padding_token_inside_a_row_is_learnt_as_in_the_model(self, harness: PolicyHarness) -> None:
        """A padding token inside a row must be trained as in the transformers model, which sets a `padding_idx`.

        Rows may contain it, for example where padding is the end-of-text token. As an input it receives no gradient; as
        a target it does, and through a tied head so does the embedding.
        """
        data = harness.batch()
        data["input_ids"][:, 1] = data["input_ids"][4, 6:8] = cases.tokenizer().pad_token_id
        data["token_mask"][:, 1] = 1.0
        for model in ("untied", "tied"):
            harness.first_step(data, f"padding token inside, {model} head", kind="nll", model=model)

    @holds(3)
    def test_norms_that_heads_share_are_learnt_from_all(self, harness: PolicyHarness) -> None:
        """A norm shared by all heads (Qwen3) must receive the gradient of all heads, also if a rank has only some of
        them.
        """
        harness.first_step(harness.batch(), "norms of heads", kind="nll", model="norms_of_heads")

    @holds(3)
    def test_clipping_is_of_the_whole_gradient(self, harness: PolicyHarness) -> None:
        """Clipping must scale the gradient over all tensors and workers to `max_grad_norm`, and never enlarge it.

        The reported norm is the one before clipping.
        """
        data = harness.batch()
        for limit, clips in ((0.5, True), (1e4, False)):
            policy, oracle = harness.policy(**{**PROBE, "max_grad_norm": limit}), harness.oracle(max_grad_norm=limit)
            before, gradients = oracle.weights(), oracle.gradients(data, "pg")
            harness.step(policy, oracle, data, "pg", f"limit {limit}")
            norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
            harness.equal(f"the gradient of this case exceeds the limit {limit}", norm > 2 * limit, clips)
            right = {name: gradient * min(1.0, limit / norm) for name, gradient in gradients.items()}
            harness.tensors(f"gradient, limit {limit}", harness.gradient(policy, before), right, FP32, FP32)

    @holds(3)
    def test_betas_and_epsilon_are_the_configured_ones(self, harness: PolicyHarness) -> None:
        """The optimizer must use the configured betas and epsilon, tested over five steps with unusual values."""
        settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.2}
        policy, oracle = harness.policy(optimizer=settings), harness.oracle(**settings)
        harness.steps(policy, oracle, range(5), "nll", "own betas")
        harness.tensors("weights with own betas", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_the_schedule_moves_once_a_call(self, harness: PolicyHarness) -> None:
        """The learning-rate schedule must advance once per call of `train`, not once per optimizer step.

        Warm-up over two calls, then linear to 0.2 after six, gives the factors 0, 0.5, 1, 0.8. Each call takes two
        optimizer steps.
        """
        schedule = {"name": "linear", "warmup_steps": 2, "total_steps": 6, "min_ratio": 0.2}
        policy, oracle = harness.policy(scheduler=schedule, optimizer={"lr": 1e-3}), harness.oracle(lr=1e-3)
        for number, factor in enumerate((0.0, 0.5, 1.0, 0.8)):
            batches = [harness.batch(seed=10 * number + part) for part in range(2)]
            result = policy.train(BatchedDataDict.from_batches(batches), loss_function("nll"))
            harness.scalar(f"learning rate of call {number + 1}", result["lr"], 1e-3 * factor)
            for data in batches:
                oracle.step(data, "nll", lr=1e-3 * factor)
        harness.tensors("weights after the schedule", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_a_gradient_that_is_not_finite_is_skipped(self, harness: PolicyHarness) -> None:
        """A step with a non-finite gradient must be skipped and counted, and leave weights and moments untouched."""
        policy, oracle = harness.policy(), harness.oracle()
        harness.step(policy, oracle, harness.batch(), "nll", "before")
        before = harness.weights(policy)
        result = policy.train(harness.batch(seed=1), NotFiniteLoss())
        harness.equal("skipped steps", result["skipped"], 1)
        harness.same("after a skipped step", harness.weights(policy), before)
        harness.step(policy, oracle, harness.batch(seed=2), "nll", "after")
        harness.tensors("weights after a skipped step", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_a_gradient_of_zero_is_an_ordinary_step(self, harness: PolicyHarness) -> None:
        """A gradient of exactly 0 with valid tokens, as advantages of 0 give, must be a step with the norm 0.

        Clipping must not divide by that norm. With fresh moments and without weight decay no weight changes; the
        optimizer counts the step, which shows in the size of the next one.
        """
        settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0}
        policy, oracle = harness.policy(optimizer=settings), harness.oracle(**settings)
        before, data = harness.weights(policy), harness.batch()
        data["advantages"] = torch.zeros_like(data["advantages"])
        oracle.step(data, "pg")
        result = policy.train(data, loss_function("pg"))
        harness.equal("gradient norm of a gradient of 0", float(result["grad_norm"][0]), 0.0)
        harness.equal("skipped steps", result["skipped"], 0)
        harness.same("after a gradient of 0", harness.weights(policy), before)
        harness.step(policy, oracle, harness.batch(seed=1), "nll", "after a gradient of 0")
        harness.tensors("weights after the next step", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(3)
    def test_too_many_gradients_that_are_not_finite_end_the_run(self, harness: PolicyHarness) -> None:
        """`non_finite_gradients.stop_after` non-finite gradients in a row must raise `NonFiniteGradients`."""
        policy = harness.policy(non_finite_gradients={"stop_after": 2})
        policy.train(harness.batch(), NotFiniteLoss())
        harness.raises(
            NonFiniteGradients,
            lambda: policy.train(harness.batch(), NotFiniteLoss()),
            "the second gradient in a row that is not finite",
            "not finite",
        )

    @holds(3)
    def test_a_batch_without_a_valid_token_takes_no_step(self, harness: PolicyHarness) -> None:
        """A batch without valid tokens must not change the weights, not even by old momentum or weight decay."""
        policy, oracle = harness.policy(), harness.oracle()
        harness.step(policy, oracle, harness.batch(), "nll", "before")
        before, empty = harness.weights(policy), harness.batch(seed=1)
        empty["token_mask"][:] = 0.0
        policy.train(empty, loss_function("nll"))
        harness.same("after a batch without a valid token", harness.weights(policy), before)

    @holds(3)
    def test_losses_may_ask_for_logits(self, harness: PolicyHarness) -> None:
        """A loss that requests logits must receive them with shape `[B, S-1, V]`."""
        data = harness.batch()
        oracle = harness.oracle()
        right = oracle.step(data, "nll")
        result = harness.policy().train(data, LogitsLoss())
        harness.scalar("loss from logits", result["loss"], right.loss)
        harness.scalar("gradient norm from logits", result["grad_norm"][0], right.grad_norm)

    @holds(3)
    def test_losses_may_ask_for_entropy(self, harness: PolicyHarness) -> None:
        """A loss that requests entropies must receive them in nats, at the sampling temperature, with gradient if
        `entropy_gradient` is true.
        """
        data = harness.batch()
        policy, oracle = harness.policy(generation={"temperature": 0.7}), harness.oracle(temperature=0.7)
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        right = (oracle.differentiable_entropy(data)[:, 1:] * mask).sum() / mask.sum()
        right.backward()
        step, result = oracle.descend(right.item()), policy.train(data, EntropyLoss())
        harness.scalar("mean entropy as the loss", result["loss"], step.loss)
        harness.scalar("gradient norm of the entropy", result["grad_norm"][0], step.grad_norm)
        harness.tensors("weights after a step on the entropy", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)
        metrics = policy.train(data, loss_function("pg"))["metrics"]
        now = (oracle.entropy(data)[:, 1:] * mask).sum() / mask.sum()
        harness.scalar("mean entropy as a metric", metrics["entropy"], float(now))

    @holds(3, Capability.ACTIVATION_CHECKPOINTING)
    def test_activation_checkpointing_changes_nothing(self, harness: PolicyHarness) -> None:
        """Activation checkpointing must not change any number; it only saves memory."""
        batching = {"mode": "auto", "tokens": 30}
        for kept in ("full", "selective"):
            what = f"activation checkpointing: {kept}"
            harness.first_step(harness.batch(), what, activation_checkpointing=kept, batching=batching)

    @holds(3, Capability.BFLOAT16)
    def test_small_updates_are_not_lost_in_bfloat16(self, harness: PolicyHarness) -> None:
        """With bfloat16 compute, weights and moments must stay fp32, so that small updates accumulate.

        At learning rate 1e-5 neither one step nor ten move a weight of 0.2 by one bfloat16 digit.
        """
        lr = 1e-5
        policy = harness.policy(precision="bfloat16", optimizer={"lr": lr, "weight_decay": 0.0})
        before = harness.oracle().weights()
        for number in range(10):
            policy.train(harness.batch(seed=number), loss_function("nll"))
        after = harness.weights(policy)
        name = "lm_head.weight"
        harness.equal("dtype of the saved head", after[name].dtype, torch.float32)
        moved = (after[name] - before[name]).abs()
        share = float((moved > 0.5 * lr).float().mean())
        harness.require(
            share > 0.9, "at least 90% of the head's weights must move in ten steps", got=share, expected="> 0.9"
        )
        harness.require(
            float(moved.max()) < 11 * lr, "no weight may move by more than ten steps", got=float(moved.max())
        )


MUON: dict[str, Any] = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
MUON_MOMENTUM = 0.8
WHOLE, EACH = 2e-2, 4e-2
"""Tolerances of updates. `torch.optim.Muon` orthogonalizes in bfloat16, which amplifies the rounding of gradients: the
oracle's own updates differ by 5e-3 as a whole, and 1e-2 for a tensor, if only the order of the rows changes.
"""


class MuonOptimizer(Suite):
    """Muon's update of a matrix depends on all of its elements, unlike AdamW's."""

    @holds(3, Capability.MUON)
    def test_updates_by_muon_are_those_of_whole_matrices(self, harness: PolicyHarness) -> None:
        """After five steps, updates must be those of Muon on whole matrices, and of AdamW for embedding and head."""
        for model in ("untied", "tied"):
            policy = harness.policy(model, optimizer={"name": "muon", "momentum": MUON_MOMENTUM, **MUON})
            oracle = MuonOracle(harness.model(model), momentum=MUON_MOMENTUM, **MUON)
            before = oracle.weights()
            for number in range(5):
                data = harness.batch(seed=number)
                policy.prepare_for_training()
                policy.train(data, loss_function("nll"))
                oracle.step(data, "nll")
            got, right = _change(before, harness.weights(policy)), _change(before, oracle.weights())
            harness.tensors(f"update by muon, {model} head", got, right, WHOLE, EACH)

    @holds(5, Capability.MUON, Capability.PORTABLE_OPTIMIZER_STATE)
    def test_training_with_muon_goes_on(self, harness: PolicyHarness) -> None:
        """Training with Muon must resume bit for bit, and AdamW must not start from its state."""
        settings: dict[str, Any] = {"optimizer": {"name": "muon", "lr": 1e-3}, "apart": True}
        forms = ["portable", "sharded"][: 1 + (Capability.SHARDED_CHECKPOINTS in harness.record.capabilities)]
        first = harness.policy(**settings)
        train(harness, first, range(3))
        checkpoints = {form: saved(harness, first, form=form) for form in forms}
        wanted, right = train(harness, first, range(3, 5)), harness.weights(first)
        for form, paths in checkpoints.items():
            second = harness.resumed(paths, **settings)
            require_same_continuation(harness, second, range(3, 5), wanted, right, f"resuming with muon, {form}")
        other = harness.policy()
        harness.raises(DataError, lambda: other.load_checkpoint(*paths), "the state of another optimizer", "muon")


def _change(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: after[name].double() - before[name].double() for name in before}
