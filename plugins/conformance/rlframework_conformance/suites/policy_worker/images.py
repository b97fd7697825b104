"""Contracts 2 and 3 with images: each row is computed with its own images, in every batching mode."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.contracts import FP32
from rlframework_conformance.further_oracles import VisionOracle
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PROBE, PolicyHarness, loss_function

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
