"""Contract 1: the conventions of inputs and outputs."""

from __future__ import annotations

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance.contracts import BF16
from rlframework_conformance.policies import read_weights
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PROBE, PolicyHarness, loss_function


class Conventions(Suite):
    """Right padding, one log-probability per token, and results in the order of the input rows."""

    @holds(1)
    def test_logprobs_are_those_of_the_oracle(self, harness: PolicyHarness) -> None:
        """`get_logprobs` must return log p(token i | tokens before i) in entry i, for an untied and a tied head."""
        data = harness.batch()
        for model in ("untied", "tied"):
            got = harness.policy(model).get_logprobs(data)["logprobs"]
            harness.values(f"log-probabilities, {model} head", got, harness.oracle(model).logprobs(data))

    @holds(1)
    def test_results_are_fp32_on_the_cpu(self, harness: PolicyHarness) -> None:
        """Results must be fp32 tensors on the CPU, where callers combine them with their own."""
        data = harness.batch()
        policy = harness.policy()
        got = policy.get_logprobs(data)["logprobs"]
        harness.equal("log-probabilities are fp32 on the CPU", (got.dtype, str(got.device)), (torch.float32, "cpu"))
        harness.equal("log-probabilities have the shape of input_ids", got.shape, data["input_ids"].shape)
        result = policy.train(data, loss_function("nll"))
        for name in ("global_loss", "grad_norm"):
            harness.equal(f"{name} is one fp32 number a global batch, on the CPU", result[name].shape, torch.Size([1]))
            harness.equal(f"dtype of {name}", (result[name].dtype, str(result[name].device)), (torch.float32, "cpu"))

    @holds(1)
    def test_results_come_in_the_order_of_the_rows(self, harness: PolicyHarness) -> None:
        """Results must be in the order of the rows, for rows of mixed lengths in several microbatches and for a
        permutation, in every batching mode.
        """
        data, right = harness.batch(11), harness.oracle().logprobs(harness.batch(11))
        order = torch.tensor([7, 2, 9, 0, 10, 4, 1, 8, 3, 6, 5])
        for batching in harness.batchings(32):
            policy, mode = harness.policy(batching=batching), batching["mode"]
            harness.values(f"log-probabilities, {mode}", policy.get_logprobs(data)["logprobs"], right)
            permuted = policy.get_logprobs(data.select_indices(order))["logprobs"]
            harness.values(f"log-probabilities of permuted rows, {mode}", permuted, right[order])

    @holds(1)
    def test_a_batch_may_have_any_number_of_rows_when_scored(self, harness: PolicyHarness) -> None:
        """Scoring must accept any number of rows, including one and numbers not divisible by workers or microbatch."""
        data, policy = harness.batch(7), harness.policy()
        right = harness.oracle().logprobs(data)
        for rows in (1, 5, 7):
            got = policy.get_logprobs(data.slice(0, rows))["logprobs"]
            harness.values(f"log-probabilities of {rows} rows", got, right[:rows])
        data["input_lengths"][2] = 0
        data["token_mask"][2] = 0.0
        got, right = policy.get_logprobs(data)["logprobs"], harness.oracle().logprobs(data)
        harness.values("log-probabilities beside a row without a token", got, right)

    @holds(1)
    def test_only_asked_positions_are_scored(self, harness: PolicyHarness) -> None:
        """With `positions`, log-probabilities must be correct at the requested positions and 0 elsewhere.

        `token_mask` and `loss` exist so that the head runs at fewer positions.
        """
        data = harness.batch()
        right = harness.oracle().logprobs(data)
        masks = {
            "token_mask": data["token_mask"],
            "loss": data["token_mask"] * data["sample_mask"][:, None],
        }
        for mode in ("padded", "auto"):
            policy = harness.policy(batching={"mode": mode, "tokens": 28})
            for positions, mask in masks.items():
                got = policy.get_logprobs(data, positions=positions)["logprobs"]
                harness.values(f"log-probabilities at positions={positions}, {mode}", got, right * mask)

    @holds(1)
    def test_entropies_come_with_log_probabilities(self, harness: PolicyHarness) -> None:
        """Entropies must be in nats, of the distribution each token was drawn from at the sampling temperature, and 0
        elsewhere.
        """
        data, oracle = harness.batch(), harness.oracle(temperature=0.7)
        for mode in ("padded", "auto"):
            policy = harness.policy(generation={"temperature": 0.7}, batching={"mode": mode, "tokens": 28})
            got = policy.get_logprobs(data, entropy=True)
            harness.values(f"entropies, {mode}", got["entropy"], oracle.entropy(data))
            harness.values(f"log-probabilities beside entropies, {mode}", got["logprobs"], oracle.logprobs(data))
        asked = policy.get_logprobs(data, positions="token_mask", entropy=True)["entropy"]
        harness.values("entropies where token_mask asks", asked, oracle.entropy(data) * data["token_mask"])

    @holds(1)
    def test_the_likeliest_tokens_are_those_of_the_oracle(self, harness: PolicyHarness) -> None:
        """`get_topk_logits` must return the `k` largest logits in descending order and their tokens.

        Entry i describes the distribution that token i was drawn from.
        """
        data, oracle = harness.batch(), harness.oracle(temperature=0.7)
        logits, tokens = oracle.top_logits(data, 5)
        for mode in ("padded", "auto"):
            policy = harness.policy(generation={"temperature": 0.7}, batching={"mode": mode, "tokens": 28})
            got = policy.get_topk_logits(data, 5)
            harness.values(f"largest logits, {mode}", got["topk_logits"], logits)
            harness.exact(f"most likely tokens, {mode}", got["topk_indices"], tokens)

    @holds(1)
    def test_scoring_and_training_are_at_the_temperature_of_sampling(self, harness: PolicyHarness) -> None:
        """Scoring and policy-gradient training must use softmax(logits / T), from which the samples were drawn."""
        data = harness.batch()
        policy = harness.policy(generation={"temperature": 0.7}, **PROBE)
        oracle = harness.oracle(temperature=0.7, max_grad_norm=None)
        got = policy.get_logprobs(data)["logprobs"]
        harness.values("log-probabilities at temperature 0.7", got, oracle.logprobs(data))
        data = BatchedDataDict({**data, "prev_logprobs": got})  # so that all ratios are 1
        harness.step(policy, oracle, data, "pg", "temperature 0.7")

    @holds(1)
    def test_supervised_loss_is_at_temperature_one(self, harness: PolicyHarness) -> None:
        """The supervised loss must ignore the sampling temperature: likelihood is a property of the model."""
        policy = harness.policy(generation={"temperature": 0.7})
        harness.step(policy, harness.oracle(), harness.batch(), "nll", "nll beside temperature 0.7")

    @holds(1, Capability.BFLOAT16)
    def test_bfloat16_is_near_fp32(self, harness: PolicyHarness) -> None:
        """With forward and backward in bfloat16, results must be fp32 and close to the oracle's."""
        data, policy, oracle = harness.batch(), harness.policy(precision="bfloat16"), harness.oracle()
        got, right = policy.get_logprobs(data)["logprobs"], oracle.logprobs(data)
        harness.equal("dtype of log-probabilities", got.dtype, torch.float32)
        harness.norm("log-probabilities in bfloat16", got, right, BF16)
        result, step = policy.train(data, loss_function("nll")), oracle.step(data, "nll")
        harness.scalar("loss in bfloat16", result["loss"], step.loss, BF16)
        harness.scalar("gradient norm in bfloat16", result["grad_norm"][0], step.grad_norm, BF16)

    @holds(1, gpu=True)
    def test_the_model_lies_on_the_gpu(self, harness: PolicyHarness) -> None:
        """Each worker must hold at least its share of the fp32 weights on the GPU."""
        weights = sum(weight.nbytes for weight in read_weights(harness.model()).values())
        for info in harness.policy().get_info():
            share = weights / harness.layout.workers
            harness.require(
                info["memory_bytes"] >= share,
                "the GPU holds the worker's share of the weights",
                got=info["memory_bytes"],
                expected=share,
            )

    @holds(1)
    def test_workers_report_their_rank(self, harness: PolicyHarness) -> None:
        """`get_info` must describe each worker: the driver plans batches with it, and people read the rest."""
        infos = harness.policy().get_info()
        harness.equal("ranks", [info["rank"] for info in infos], list(range(harness.layout.workers)))
        for info in infos:
            missing = {"pid", "device", "memory_bytes", "threads", "versions"} - info.keys()
            harness.equal("keys missing from get_info", missing, set())
            harness.require(info["memory_bytes"] > 0, "memory_bytes is above 0", got=info["memory_bytes"])
            harness.equal("device", info["device"].partition(":")[0], harness.device)
