"""Contracts 5 and 6: what is saved is what was trained, and generation uses it."""

from __future__ import annotations

import json
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.oracle import Oracle
from rlframework.conformance.policies import InspectedPolicy, read_weights
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench, loss_function
from rlframework.errors import UserError
from rlframework.generation.client import Generation
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.types import Capability

PROMPTS = torch.tensor([[5, 9, 12, 7], [11, 6, 0, 0], [20, 21, 22, 0], [9, 9, 9, 9]])
LENGTHS = torch.tensor([4, 2, 3, 4])
SAMPLING = {"max_new_tokens": 6, "temperature": 0.8}


def prompts() -> BatchedDataDict[Any]:
    """Four prompts of mixed lengths."""
    return BatchedDataDict({"input_ids": PROMPTS, "input_lengths": LENGTHS, "seeds": torch.arange(4)})


class Saving(Suite):
    """A Hugging Face directory is the form that everybody reads."""

    @holds(5)
    def test_a_saved_model_is_the_trained_one(self, bench: PolicyBench) -> None:
        """transformers reads it and computes what the policy computes."""
        data = bench.batch()
        for model in ("untied", "tied"):
            policy = bench.policy(model, optimizer={"lr": 1e-2})
            policy.train(data, loss_function("nll"))
            folder = bench.folder / f"saved-{model}"
            policy.save_pretrained(str(folder))
            bench.values(
                f"log-probabilities of the saved model, {model} head",
                Oracle(folder).logprobs(data),
                policy.get_logprobs(data)["logprobs"],
            )

    @holds(5)
    def test_saved_names_shapes_and_dtypes_are_those_of_the_model(self, bench: PolicyBench) -> None:
        """Every weight once, in fp32, under the name that `save_pretrained` of transformers writes."""
        for model in ("untied", "tied"):
            right = read_weights(bench.model(model))
            folder = bench.folder / f"names-{model}"
            bench.policy(model).save_pretrained(str(folder))
            got = read_weights(folder)
            bench.equal(f"names, {model} head", sorted(got), sorted(right))
            for name, weight in right.items():
                bench.exact(f"{name} as it was loaded, {model} head", got[name], weight)
            config = json.loads((folder / "config.json").read_text())
            bench.equal("tie_word_embeddings in config.json", config["tie_word_embeddings"], model == "tied")

    @holds(5)
    def test_a_saved_model_goes_on(self, bench: PolicyBench) -> None:
        """A new policy that is made from it scores what the old one scored, to the bit on the same layout."""
        data, policy = bench.batch(), bench.policy(optimizer={"lr": 1e-2})
        policy.train(data, loss_function("nll"))
        folder = bench.folder / "to-go-on"
        policy.save_pretrained(str(folder))
        wanted = policy.get_logprobs(data)["logprobs"]
        got = bench.policy(folder, apart=True).get_logprobs(data)["logprobs"]
        bench.exact("log-probabilities of the policy that goes on", got, wanted)

    @holds(5)
    def test_saving_changes_nothing(self, bench: PolicyBench) -> None:
        """Between two steps."""
        policy, oracle = bench.policy(), bench.oracle()
        for number in range(3):
            bench.step(policy, oracle, bench.batch(seed=number), "nll", f"beside saving, step {number + 1}")
            policy.save_pretrained(str(bench.folder / "again"))

    @holds(8)
    def test_saving_where_it_cannot_is_an_error(self, bench: PolicyBench) -> None:
        """A file stands in the way: the caller is told, and the file stays."""
        (bench.folder / "file").write_text("mine")
        policy = bench.policy()
        bench.refuses(UserError, lambda: policy.save_pretrained(str(bench.folder / "file" / "model")), "such a path")
        bench.equal("what stood in the way", (bench.folder / "file").read_text(), "mine")

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_greedy_generation_takes_the_likeliest_tokens(self, bench: PolicyBench) -> None:
        """Of the model as it is now, whatever the temperature of sampling."""
        policy, oracle = bench.policy(generation=SAMPLING), bench.oracle()
        bench.step(policy, oracle, bench.batch(), "nll", "before generating")
        output = generate(policy, greedy=True)
        lengths = output["unpadded_sequence_lengths"]
        right = oracle.likeliest({"input_ids": output["output_ids"], "input_lengths": lengths})
        for row, (end, count) in enumerate(zip(lengths.tolist(), output["generation_lengths"].tolist(), strict=True)):
            got = output["output_ids"][row, end - count : end].tolist()
            bench.equal(f"greedy tokens of row {row}", got, right[row, end - count : end].tolist())

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_generation_uses_the_weights_of_now(self, bench: PolicyBench) -> None:
        """Before steps and after each: what the engine says of its samples is what the policy says of them.

        The steps are large and move every tensor, so that one which was left behind shows.
        """
        policy = bench.policy(generation=SAMPLING, optimizer={"lr": 3e-2})
        for number in range(3):
            compare_with_generation(bench, policy, f"after {number} steps")
            policy.train(bench.batch(seed=number), loss_function("nll"))
        compare_with_generation(bench, policy, "after 3 steps")

    @holds(6, Capability.EMBEDDED_GENERATION, Capability.REFERENCE_MODEL)
    def test_generation_after_the_reference_uses_the_policys_weights(self, bench: PolicyBench) -> None:
        """Weights that come and go in between must not stay in the engine."""
        policy = bench.policy(reference=True, generation=SAMPLING, optimizer={"lr": 3e-2})
        compare_with_generation(bench, policy, "at the start")
        policy.train(bench.batch(), loss_function("nll"))
        policy.get_reference_policy_logprobs(bench.batch())
        compare_with_generation(bench, policy, "after the reference")

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_generating_changes_nothing(self, bench: PolicyBench) -> None:
        """Training goes on as if nothing had been generated: no cache left on, no mode left behind."""
        policy, oracle = bench.policy(generation=SAMPLING), bench.oracle(temperature=SAMPLING["temperature"])
        for number in range(3):
            generate(policy)
            bench.step(policy, oracle, bench.batch(seed=number), "pg", f"beside generation, step {number + 1}")
        bench.tensors("weights", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(6, Capability.EMBEDDED_GENERATION)
    def test_generation_is_the_same_however_rows_are_shared(self, bench: PolicyBench) -> None:
        """A row's sample depends on its prompt, its seed and the weights: alone, or beside others on any worker."""
        policy = bench.policy(generation=SAMPLING)
        together = generate(policy)["output_ids"]
        for row in range(len(LENGTHS)):
            alone = generate(policy, prompts().slice(row, row + 1))["output_ids"]
            bench.equal(f"tokens of row {row}", together[row].tolist()[: alone.shape[1]], alone[0].tolist())


def generate(
    policy: InspectedPolicy, data: BatchedDataDict[Any] | None = None, *, greedy: bool = False
) -> BatchedDataDict[Any]:
    """Completions of `prompts` from the engine that is embedded in the workers."""
    config = policy.config
    generation = Generation(policy.worker_group, config.generation, load_tokenizer(config.policy.model_name))
    generation.prepare_for_generation()
    output = generation.generate(prompts() if data is None else data, greedy=greedy)
    generation.finish_generation()
    return output


def compare_with_generation(bench: PolicyBench, policy: InspectedPolicy, when: str) -> None:
    """The engine's log-probabilities of its own samples against the policy's."""
    output = generate(policy)
    lengths = output["unpadded_sequence_lengths"]
    data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": output["output_ids"], "input_lengths": lengths})
    places = torch.arange(data["input_ids"].shape[1])
    completion = (places >= (lengths - output["generation_lengths"])[:, None]) & (places < lengths[:, None])
    own = policy.get_logprobs(data)["logprobs"] * completion
    bench.values(f"log-probabilities of samples, {when}", output["logprobs"], own)
