"""Contracts 2, 3 and 5 for kinds of models: windows, noise, sinks, soft caps and frequencies, mixtures and images.

A backend may reject a kind that `Kinds` tests, before any work and by name; the verdict says which. A backend that
accepts one must compute it like the oracle, which sees one row at a time, in each batching mode. Mixtures are tested on
one worker, and distributed over the data-parallel ranks. Each row with images is computed with its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.contracts import FP32
from rlframework_conformance.further_oracles import VisionOracle
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import read_weights
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.checkpoints import require_moments, saved
from rlframework_conformance.suites.policy_worker.worker_harness import PROBE, PolicyHarness, loss_function

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
        require_moments(harness, optimizer, oracle, 2, "experts")
        second = harness.resumed((weights, optimizer), "experts")
        harness.step(second, oracle, harness.batch(seed=2), "nll", "step 3, of the resumed policy")
        harness.tensors("weights after resuming", harness.weights(second), oracle.weights(), 1e-5, 2e-4)


TOKENS = 80
DECAYING: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.1}
"""Settings of AdamW under which gradients, moments, counts of steps and weight decay each change weights visibly."""
OTHER_NAMES = {"model.visual.": "visual.", "model.language_model.": "model."}
"""Starts of the names of weights in memory and in files, where they differ."""


class Images(Suite):
    """Rows with none, one and two images, compared with each row by itself."""

    @holds(2, Capability.MULTIMODAL)
    def test_rows_see_their_own_images(self, harness: PolicyHarness) -> None:
        """Log-probabilities, loss and gradients of padded rows must be the oracle's, in the image encoder too."""
        first_image_step(harness, "images", {"mode": "padded"})

    @holds(2, Capability.MULTIMODAL)
    def test_images_of_different_sizes_keep_to_their_rows(self, harness: PolicyHarness) -> None:
        """The same for images of different sizes, in microbatches of the backend's choice, packed if it packs them."""
        first_image_step(harness, "patches", {"mode": "auto", "tokens": TOKENS})

    @holds(3, Capability.MULTIMODAL)
    def test_one_part_is_trained(self, harness: PolicyHarness) -> None:
        """A step with `policy.freeze` must change the weights of the other part only, unless it is rejected by name."""
        data = cases.image_batch("images")
        for part, frozen in (("vision", "vision_model"), ("language", "text_model")):
            keys: dict[str, Any] = {"freeze": part, "optimizer": {"lr": 1e-2}}
            policy = harness.policy_unless_rejected("images", f"a frozen {part} part", "frozen", **keys)
            if policy is None:
                continue
            before = harness.weights(policy)
            policy.prepare_for_training()
            policy.train(data, loss_function("nll"))
            after = harness.weights(policy)
            changed = {name for name in before if not before[name].equal(after[name])}
            kept = {name for name in before if f".{frozen}." in name or (part == "language" and "lm_head" in name)}
            harness.equal(f"weights changed with policy.freeze={part}", changed, before.keys() - kept)

    @holds(3, Capability.MULTIMODAL)
    def test_parameters_without_a_gradient_are_left_alone(self, harness: PolicyHarness) -> None:
        """A step without images must leave the image encoder, its moments and its count of steps as they were.

        Weight decay does not apply either. The steps after it reveal moments and counts: a single row has an image, so
        that one microbatch on one rank has it, the last or the first of the step.
        """
        policy = harness.policy("patches", optimizer=DECAYING, max_grad_norm=None)
        oracle = VisionOracle(harness.model("patches"), **DECAYING, max_grad_norm=None)
        for number, images in enumerate((cases.IMAGES, (0,) * 8, (*(0,) * 7, 1), (1, *(0,) * 7))):
            data, what = cases.image_batch("patches", images=images), f"step {number} with images {images}"
            before, right = harness.weights(policy), oracle.step(data, "nll")
            harness.compare_step(policy, right, data, "nll", what)
            after = harness.weights(policy)
            unmoved = before.keys() - {_in_files(name, before) for name in right.gradients}
            harness.equal(f"the model has parameters without a gradient, {what}", bool(unmoved), not any(images))
            for name in sorted(unmoved):
                harness.exact(f"{name}, which had no gradient in {what}", after[name], before[name])
        expected = {_in_files(name, after): weight for name, weight in oracle.weights().items()}
        harness.tensors("weights after all steps", after, expected, FP32, 10 * FP32)


def first_image_step(harness: PolicyHarness, model: str, batching: dict[str, Any]) -> None:
    """Compare log-probabilities, loss, gradient norm and gradients of the first step on images with the oracle."""
    data: BatchedDataDict[Any] = cases.image_batch(model)
    policy, oracle = harness.policy(model, batching=batching, **PROBE), VisionOracle(harness.model(model))
    oracle.max_grad_norm = None
    what = f"{model}, {batching['mode']}"
    harness.values(f"log-probabilities, {what}", policy.get_logprobs(data)["logprobs"], oracle.logprobs(data))
    before: dict[str, Tensor] = harness.weights(policy)
    right = oracle.step(data, "nll")
    harness.compare_step(policy, right, data, "nll", what)
    found = harness.gradient(policy, before)
    # the gradient of a key's bias is rounding only
    expected = {name: one for name, one in right.gradients.items() if one.norm() > 1e-6 * right.grad_norm}
    expected = {_in_files(name, found): one for name, one in expected.items()}
    found = {name: found[name] for name in expected}
    harness.tensors(f"gradient, {what}", found, expected, FP32, 10 * FP32)


def _in_files(name: str, names: Collection[str]) -> str:
    """Return the name in files, which are `names`, of the weight `name` in memory."""
    for start, other in OTHER_NAMES.items():
        if name.startswith(start) and name not in names:
            return other + name.removeprefix(start)
    return name
