"""Contract 1: what goes in and what comes out."""

from __future__ import annotations

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.contracts import BF16
from rlframework.conformance.policies import read_weights
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.workbench import PROBE, PolicyBench, loss_function
from rlframework.plugins.types import Capability


class Conventions(Suite):
    """Right padding, one log-probability for each token, rows in the order in which they went in."""

    @holds(1)
    def test_logprobs_are_those_of_the_oracle(self, bench: PolicyBench) -> None:
        """Entry i is log p(token i | tokens before i), for a head of its own and for one tied to the embedding."""
        data = bench.batch()
        for model in ("untied", "tied"):
            got = bench.policy(model).get_logprobs(data)["logprobs"]
            bench.values(f"log-probabilities, {model} head", got, bench.oracle(model).logprobs(data))

    @holds(1)
    def test_first_position_and_padding_are_zero(self, bench: PolicyBench) -> None:
        """Nothing predicts the first token, and padding is no token, whatever id stands there."""
        data = bench.batch()
        got = bench.policy().get_logprobs(data)["logprobs"]
        bench.exact("log-probability of the first token", got[:, 0], torch.zeros(data.size))
        padding = torch.arange(got.shape[1]) >= data["input_lengths"][:, None]
        bench.exact("log-probability at padding", got[padding], torch.zeros(int(padding.sum())))

    @holds(1)
    def test_results_are_fp32_on_the_cpu(self, bench: PolicyBench) -> None:
        """Callers combine them with what they have, on the driver."""
        data = bench.batch()
        policy = bench.policy()
        got = policy.get_logprobs(data)["logprobs"]
        bench.equal("log-probabilities are fp32 on the CPU", (got.dtype, str(got.device)), (torch.float32, "cpu"))
        bench.equal("log-probabilities have the shape of input_ids", got.shape, data["input_ids"].shape)
        result = policy.train(data, loss_function("nll"))
        for name in ("global_loss", "grad_norm"):
            bench.equal(f"{name} is one fp32 number a global batch, on the CPU", result[name].shape, torch.Size([1]))
            bench.equal(f"dtype of {name}", (result[name].dtype, str(result[name].device)), (torch.float32, "cpu"))

    @holds(1)
    def test_results_come_in_the_order_of_the_rows(self, bench: PolicyBench) -> None:
        """Rows of mixed lengths, in several microbatches of the backend's own choice, and their permutation."""
        data = bench.batch(11)
        policy = bench.policy(batching={"mode": "auto", "tokens": 32})
        order = torch.tensor([7, 2, 9, 0, 10, 4, 1, 8, 3, 6, 5])
        right = bench.oracle().logprobs(data)
        bench.values("log-probabilities", policy.get_logprobs(data)["logprobs"], right)
        permuted = policy.get_logprobs(data.select_indices(order))["logprobs"]
        bench.values("log-probabilities of permuted rows", permuted, right[order])

    @holds(1, Capability.PACKING)
    def test_packed_results_come_in_the_order_of_the_rows(self, bench: PolicyBench) -> None:
        """Packing puts rows into bins; results leave them in the order of the rows."""
        data = bench.batch(11)
        got = bench.policy(batching={"mode": "packed", "tokens": 28}).get_logprobs(data)["logprobs"]
        bench.values("log-probabilities, packed", got, bench.oracle().logprobs(data))

    @holds(1)
    def test_a_batch_may_have_any_number_of_rows_when_scored(self, bench: PolicyBench) -> None:
        """One row, and numbers that divide neither by the workers nor by the microbatch."""
        data, policy = bench.batch(7), bench.policy()
        right = bench.oracle().logprobs(data)
        for rows in (1, 5, 7):
            got = policy.get_logprobs(data.slice(0, rows))["logprobs"]
            bench.values(f"log-probabilities of {rows} rows", got, right[:rows])
        data["input_lengths"][2] = 0
        data["token_mask"][2] = 0.0
        got, right = policy.get_logprobs(data)["logprobs"], bench.oracle().logprobs(data)
        bench.values("log-probabilities beside a row without a token", got, right)

    @holds(1)
    def test_only_asked_positions_are_scored(self, bench: PolicyBench) -> None:
        """`token_mask` and `loss` are there so that the head runs at fewer positions; the rest is 0."""
        data = bench.batch()
        right = bench.oracle().logprobs(data)
        masks = {
            "token_mask": data["token_mask"],
            "loss": data["token_mask"] * data["sample_mask"][:, None],
        }
        for mode in ("padded", "auto"):
            policy = bench.policy(batching={"mode": mode, "tokens": 28})
            for positions, mask in masks.items():
                got = policy.get_logprobs(data, positions=positions)["logprobs"]
                bench.values(f"log-probabilities at positions={positions}, {mode}", got, right * mask)

    @holds(1)
    def test_entropies_come_with_log_probabilities(self, bench: PolicyBench) -> None:
        """In nats, of the distribution that each token was drawn from, at the temperature of sampling; 0 elsewhere."""
        data, oracle = bench.batch(), bench.oracle(temperature=0.7)
        for mode in ("padded", "auto"):
            policy = bench.policy(generation={"temperature": 0.7}, batching={"mode": mode, "tokens": 28})
            got = policy.get_logprobs(data, entropy=True)
            bench.values(f"entropies, {mode}", got["entropy"], oracle.entropy(data))
            bench.values(f"log-probabilities beside entropies, {mode}", got["logprobs"], oracle.logprobs(data))
        asked = policy.get_logprobs(data, positions="token_mask", entropy=True)["entropy"]
        bench.values("entropies where token_mask asks", asked, oracle.entropy(data) * data["token_mask"])

    @holds(1)
    def test_the_likeliest_tokens_are_those_of_the_oracle(self, bench: PolicyBench) -> None:
        """The `k` largest logits, largest first, with their tokens: of the distribution that token i was drawn from."""
        data, oracle = bench.batch(), bench.oracle(temperature=0.7)
        logits, tokens = oracle.top_logits(data, 5)
        for mode in ("padded", "auto"):
            policy = bench.policy(generation={"temperature": 0.7}, batching={"mode": mode, "tokens": 28})
            got = policy.get_topk_logits(data, 5)
            bench.values(f"largest logits, {mode}", got["topk_logits"], logits)
            bench.exact(f"likeliest tokens, {mode}", got["topk_indices"], tokens)

    @holds(1)
    def test_scoring_and_training_are_at_the_temperature_of_sampling(self, bench: PolicyBench) -> None:
        """Samples are drawn from softmax(logits / T): their log-probabilities are of that, on both sides."""
        data = bench.batch()
        policy = bench.policy(generation={"temperature": 0.7}, **PROBE)
        oracle = bench.oracle(temperature=0.7, max_grad_norm=None)
        got = policy.get_logprobs(data)["logprobs"]
        bench.values("log-probabilities at temperature 0.7", got, oracle.logprobs(data))
        data = BatchedDataDict({**data, "prev_logprobs": got})  # so that all ratios are 1
        bench.step(policy, oracle, data, "pg", "temperature 0.7")

    @holds(1)
    def test_supervised_loss_is_at_temperature_one(self, bench: PolicyBench) -> None:
        """Likelihood is of the model, not of how it is sampled."""
        policy = bench.policy(generation={"temperature": 0.7})
        bench.step(policy, bench.oracle(), bench.batch(), "nll", "nll beside temperature 0.7")

    @holds(1)
    def test_dropout_is_off(self, bench: PolicyBench) -> None:
        """A model whose configuration has dropout scores and trains without: ratios compare one function."""
        data, policy = bench.batch(), bench.policy("dropout")
        oracle = bench.oracle("dropout")
        bench.values("log-probabilities, dropout", policy.get_logprobs(data)["logprobs"], oracle.logprobs(data))
        bench.step(policy, oracle, data, "pg", "dropout")

    @holds(1, Capability.BFLOAT16)
    def test_bfloat16_is_near_fp32(self, bench: PolicyBench) -> None:
        """Forward and backward in bfloat16: results are fp32 and near."""
        data, policy, oracle = bench.batch(), bench.policy(precision="bfloat16"), bench.oracle()
        got, right = policy.get_logprobs(data)["logprobs"], oracle.logprobs(data)
        bench.equal("dtype of log-probabilities", got.dtype, torch.float32)
        bench.norm("log-probabilities in bfloat16", got, right, BF16)
        result, step = policy.train(data, loss_function("nll")), oracle.step(data, "nll")
        bench.scalar("loss in bfloat16", result["loss"], step.loss, BF16)
        bench.scalar("gradient norm in bfloat16", result["grad_norm"][0], step.grad_norm, BF16)

    @holds(1, gpu=True)
    def test_the_model_lies_on_the_gpu(self, bench: PolicyBench) -> None:
        """Each worker holds at least its share of the fp32 weights there."""
        weights = sum(weight.nbytes for weight in read_weights(bench.model()).values())
        for info in bench.policy().get_info():
            share = weights / bench.layout.workers
            bench.require(
                info["memory_bytes"] >= share,
                "the share of the weights is there",
                got=info["memory_bytes"],
                expected=share,
            )

    @holds(1)
    def test_workers_tell_who_they_are(self, bench: PolicyBench) -> None:
        """The driver reads there how batches are made; people read the rest."""
        infos = bench.policy().get_info()
        bench.equal("ranks", [info["rank"] for info in infos], list(range(bench.layout.workers)))
        for info in infos:
            missing = {"pid", "device", "memory_bytes", "threads", "versions"} - info.keys()
            bench.equal("what get_info lacks", missing, set())
            bench.require(info["memory_bytes"] > 0, "memory_bytes is above 0", got=info["memory_bytes"])
            bench.equal("device", info["device"].partition(":")[0], bench.device)
