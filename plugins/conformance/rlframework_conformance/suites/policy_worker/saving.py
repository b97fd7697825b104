"""Contracts 5 and 6: the saved model is the trained one, and generation uses it."""

from __future__ import annotations

import json
from typing import Any

import torch

from rlframework.base.errors import WriteError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.generation.driver import Generation
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.types import Capability
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import InspectedPolicy, read_weights
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function

PROMPTS = torch.tensor([[5, 9, 12, 7], [11, 6, 0, 0], [20, 21, 22, 0], [9, 9, 9, 9]])
LENGTHS = torch.tensor([4, 2, 3, 4])
SAMPLING = {"max_new_tokens": 6, "temperature": 0.8}


def prompts() -> BatchedDataDict[Any]:
    """Return four prompts of mixed lengths."""
    return BatchedDataDict({"input_ids": PROMPTS, "input_lengths": LENGTHS, "seeds": torch.arange(4)})


class Saving(Suite):
    """Models saved as a Hugging Face directory, and generation from the current weights."""

    @holds(5)
    def test_a_saved_model_is_the_trained_one(self, harness: PolicyHarness) -> None:
        """transformers must load the saved model and compute the policy's log-probabilities."""
        data = harness.batch()
        for model in ("untied", "tied"):
            policy = harness.policy(model, optimizer={"lr": 1e-2})
            policy.train(data, loss_function("nll"))
            folder = harness.folder / f"saved-{model}"
            policy.save_pretrained(str(folder))
            harness.values(
                f"log-probabilities of the saved model, {model} head",
                Oracle(folder).logprobs(data),
                policy.get_logprobs(data)["logprobs"],
            )

    @holds(5)
    def test_saved_names_shapes_and_dtypes_are_those_of_the_model(self, harness: PolicyHarness) -> None:
        """Each weight must be saved once, in fp32, under the name that `save_pretrained` of transformers writes."""
        for model in ("untied", "tied"):
            right = read_weights(harness.model(model))
            folder = harness.folder / f"names-{model}"
            harness.policy(model).save_pretrained(str(folder))
            got = read_weights(folder)
            harness.equal(f"names, {model} head", sorted(got), sorted(right))
            harness.same(f"as it was loaded, {model} head", got, right)
            config = json.loads((folder / "config.json").read_text())
            harness.equal("tie_word_embeddings in config.json", config["tie_word_embeddings"], model == "tied")

    @holds(5)
    def test_saving_changes_nothing(self, harness: PolicyHarness) -> None:
        """Saving between two steps must not change training."""
        policy, oracle = harness.policy(), harness.oracle()
        for number in range(3):
            harness.step(policy, oracle, harness.batch(seed=number), "nll", f"beside saving, step {number + 1}")
            policy.save_pretrained(str(harness.folder / "again"))

    @holds(8)
    def test_saving_where_it_cannot_is_an_error(self, harness: PolicyHarness) -> None:
        """Saving below a path that is a file must raise a `WriteError` and leave the file alone."""
        (harness.folder / "file").write_text("mine")
        policy = harness.policy()
        harness.raises(
            WriteError, lambda: policy.save_pretrained(str(harness.folder / "file" / "model")), "a path below a file"
        )
        harness.equal("content of the existing file", (harness.folder / "file").read_text(), "mine")

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_greedy_generation_takes_the_likeliest_tokens(self, harness: PolicyHarness) -> None:
        """Greedy generation must take the current model's most likely tokens, whatever the sampling temperature."""
        policy, oracle = harness.policy(generation=SAMPLING), harness.oracle()
        harness.step(policy, oracle, harness.batch(), "nll", "before generating")
        output = generate(policy, greedy=True)
        lengths = output["unpadded_sequence_lengths"]
        right = oracle.most_likely({"input_ids": output["output_ids"], "input_lengths": lengths})
        for row, (end, count) in enumerate(zip(lengths.tolist(), output["generation_lengths"].tolist(), strict=True)):
            got = output["output_ids"][row, end - count : end].tolist()
            harness.equal(f"greedy tokens of row {row}", got, right[row, end - count : end].tolist())

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_generation_uses_the_weights_of_now(self, harness: PolicyHarness) -> None:
        """Generation must use the current weights before and after each step.

        The engine's log-probabilities must match the policy's. The steps are large and move every tensor, so that a
        tensor left behind shows.
        """
        policy = harness.policy(generation=SAMPLING, optimizer={"lr": 3e-2})
        for number in range(3):
            compare_with_generation(harness, policy, f"after {number} steps")
            policy.train(harness.batch(seed=number), loss_function("nll"))
        compare_with_generation(harness, policy, "after 3 steps")

    @holds(6, Capability.EMBEDDED_GENERATION, Capability.REFERENCE_MODEL)
    def test_generation_after_the_reference_uses_the_policys_weights(self, harness: PolicyHarness) -> None:
        """Generation after reference scoring must use the policy's weights, not the reference's."""
        policy = harness.policy(reference=True, generation=SAMPLING, optimizer={"lr": 3e-2})
        compare_with_generation(harness, policy, "at the start")
        policy.train(harness.batch(), loss_function("nll"))
        policy.get_reference_policy_logprobs(harness.batch())
        compare_with_generation(harness, policy, "after the reference")

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_generating_changes_nothing(self, harness: PolicyHarness) -> None:
        """Generation must not affect training: no cache stays enabled and no mode stays changed."""
        policy, oracle = harness.policy(generation=SAMPLING), harness.oracle(temperature=SAMPLING["temperature"])
        for number in range(3):
            generate(policy)
            harness.step(policy, oracle, harness.batch(seed=number), "pg", f"beside generation, step {number + 1}")
        harness.tensors("weights", harness.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_generation_is_the_same_however_rows_are_shared(self, harness: PolicyHarness) -> None:
        """A sample must depend only on its prompt, its seed and the weights, not on neighbouring rows or the worker."""
        policy = harness.policy(generation=SAMPLING)
        batched = generate(policy)["output_ids"]
        for row in range(len(LENGTHS)):
            alone = generate(policy, prompts().slice(row, row + 1))["output_ids"]
            harness.equal(f"tokens of row {row}", batched[row].tolist()[: alone.shape[1]], alone[0].tolist())


def generate(
    policy: InspectedPolicy, data: BatchedDataDict[Any] | None = None, *, greedy: bool = False
) -> BatchedDataDict[Any]:
    """Return completions of `prompts` from the engine embedded in the workers."""
    generation = Generation(policy, load_tokenizer(policy.config.policy.model_name))
    generation.prepare_for_generation()
    output = generation.generate(prompts() if data is None else data, greedy=greedy)
    generation.finish_generation()
    return output


def compare_with_generation(harness: PolicyHarness, policy: InspectedPolicy, when: str) -> None:
    """Compare the engine's log-probabilities of its own samples with the policy's."""
    output = generate(policy)
    lengths = output["unpadded_sequence_lengths"]
    data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": output["output_ids"], "input_lengths": lengths})
    places = torch.arange(data["input_ids"].shape[1])
    completion = (places >= (lengths - output["generation_lengths"])[:, None]) & (places < lengths[:, None])
    own = policy.get_logprobs(data)["logprobs"] * completion
    harness.values(f"log-probabilities of samples, {when}", output["logprobs"], own)
