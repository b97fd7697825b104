"""Contract 2: losses divide by global counts, so how rows are grouped, ordered, padded or shared changes no number."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.policy_worker.losses import TellingLoss
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench, loss_function
from rlframework.plugins.types import Capability


class Grouping(Suite):
    """Loss, gradient norm and the first step's gradient of each tensor, against the oracle's one padded batch."""

    @holds(2)
    def test_first_step_is_that_of_the_oracle(self, bench: PolicyBench) -> None:
        """Padded microbatches of three rows, the last of them partial."""
        bench.first_step(bench.batch(), "padded")

    @holds(2)
    def test_supervised_step_is_that_of_the_oracle(self, bench: PolicyBench) -> None:
        """The mean over valid tokens: neither over padding nor over rows."""
        bench.first_step(bench.batch(seed=1), "nll, padded", kind="nll")

    @holds(2)
    def test_sequence_level_loss_averages_over_sequences(self, bench: PolicyBench) -> None:
        """The mean over sequences of each one's mean: rows of different lengths weigh the same."""
        bench.first_step(bench.batch(), "sequence level", kind="sequence_pg")

    @holds(2)
    def test_microbatch_size_changes_nothing(self, bench: PolicyBench) -> None:
        """One row at a time, all at once."""
        for rows in (1, 8):
            bench.first_step(bench.batch(), f"microbatches of {rows}", train_micro_batch_size=rows)

    @holds(2)
    def test_order_of_rows_changes_nothing(self, bench: PolicyBench) -> None:
        """The rows sorted by length, longest first: with several workers one of them gets most of the tokens."""
        data = bench.batch()
        order = torch.argsort(data["input_lengths"], descending=True, stable=True)
        bench.first_step(data.select_indices(order), "sorted rows")
        right = bench.oracle().step(data, "pg")
        result = bench.policy().train(data.select_indices(order), loss_function("pg"))
        bench.scalar("loss, sorted rows and not", result["loss"], right.loss)

    @holds(2)
    def test_padding_changes_nothing(self, bench: PolicyBench) -> None:
        """Wider rows, with tokens and numbers in the padding that would be noticed."""
        data = bench.batch()
        wide: BatchedDataDict[Any] = BatchedDataDict(
            {
                name: torch.nn.functional.pad(value, (0, 9), value=7) if value.dim() == 2 else value
                for name, value in data.items()
            }
        )
        wide["token_mask"][:, data["input_ids"].shape[1] :] = 0.0
        bench.first_step(wide, "wider")
        oracle, policy = bench.oracle(), bench.policy()
        logprobs = policy.get_logprobs(wide)["logprobs"]
        bench.values("log-probabilities, wider", logprobs[:, :-9], oracle.logprobs(data))
        bench.exact("log-probabilities of the padding", logprobs[:, -9:], torch.zeros(data.size, 9))
        result, right = policy.train(wide, loss_function("pg")), oracle.step(data, "pg")
        bench.scalar("loss, wider and not", result["loss"], right.loss)

    @holds(2, Capability.PACKING)
    def test_packed_equals_padded(self, bench: PolicyBench) -> None:
        """Several sequences in one row: none sees another."""
        bench.first_step(bench.batch(), "packed", batching={"mode": "packed", "tokens": 30})

    @holds(2, Capability.PACKING, Capability.LEARNED_POSITIONS)
    def test_positions_start_again_in_packed_rows(self, bench: PolicyBench) -> None:
        """With learned positions, because rotary ones are relative and hide positions that run through."""
        bench.first_step(bench.batch(), "packed", model="learned_positions", batching={"mode": "packed", "tokens": 30})

    @holds(2, Capability.DYNAMIC_BATCHING)
    def test_dynamic_equals_padded(self, bench: PolicyBench) -> None:
        """Microbatches of so many tokens, padding counted."""
        bench.first_step(bench.batch(), "dynamic", batching={"mode": "dynamic", "tokens": 30})

    @holds(2)
    def test_masked_rows_count_for_nothing(self, bench: PolicyBench) -> None:
        """One row of eight is work, so a microbatch, and all but one of the workers, has nothing to learn from."""
        data = bench.batch()
        data["sample_mask"] = torch.zeros(data.size)
        data["sample_mask"][3] = 1.0
        bench.first_step(data, "one row of eight", batching={"mode": "auto", "tokens": 20})

    @holds(2)
    def test_targets_may_lie_at_one_end_of_their_rows(self, bench: PolicyBench) -> None:
        """Only the third token of each row is learnt from, then only the last: a part of a row may have none."""
        data = bench.batch()
        third, last = (torch.zeros_like(data["token_mask"]) for _ in range(2))
        third[:, 2] = 1.0
        last[torch.arange(data.size), data["input_lengths"] - 1] = 1.0
        for what, mask in (("third token", third), ("last token", last)):
            for mode in ("padded", "auto"):
                given: BatchedDataDict[Any] = BatchedDataDict({**data, "token_mask": mask})
                bench.first_step(given, f"{what} of each row, {mode}", batching={"mode": mode, "tokens": 30})

    @holds(2)
    def test_counts_are_of_the_whole_global_batch(self, bench: PolicyBench) -> None:
        """`global_valid_seqs` and `global_valid_toks`, counted by hand from the masks, over all workers."""
        data = bench.batch()
        result = bench.policy().train(data, loss_function("nll"))
        rows = [row for row in range(data.size) if data["sample_mask"][row]]
        tokens = sum(int(value) for row in rows for value in data["token_mask"][row][1:])
        bench.equal("global_valid_seqs", result["global_valid_seqs"], len(rows))
        bench.equal("global_valid_toks", result["global_valid_toks"], tokens)

    @holds(2, data_parallel=2)
    def test_workers_with_unequal_work_agree(self, bench: PolicyBench) -> None:
        """One worker has one short row to learn from and the others the rest: as many forwards, the same sums."""
        data = bench.batch()
        data["token_mask"][:4] = 0.0
        data["token_mask"][0, 1] = 1.0
        data["sample_mask"][:] = 1.0
        for mode in ("padded", "auto"):
            batching = {"mode": mode, "tokens": 16}
            bench.first_step(data, f"unequal work, {mode}", batching=batching, train_micro_batch_size=1)

    @holds(2)
    def test_several_global_batches_are_several_steps(self, bench: PolicyBench) -> None:
        """24 rows with global batches of 8: three optimizer steps in one call, in the order of the rows."""
        batches = [bench.batch(seed=seed) for seed in range(3)]
        policy, oracle = bench.policy(), bench.oracle()
        result = policy.train(BatchedDataDict.from_batches(batches), loss_function("pg"))
        steps = [oracle.step(data, "pg") for data in batches]
        bench.values("losses", result["global_loss"], torch.tensor([step.loss for step in steps]))
        bench.values("gradient norms", result["grad_norm"], torch.tensor([step.grad_norm for step in steps]))
        bench.tensors("weights after three steps", bench.weights(policy), oracle.weights(), 1e-5, 2e-4)

    @holds(2)
    def test_metrics_are_of_the_whole_global_batch(self, bench: PolicyBench) -> None:
        """Sums over microbatches and workers; `_min` and `_max` are extremes; the mean over several global batches."""
        policy, batches = bench.policy(), [bench.batch(seed=seed) for seed in range(2)]
        rows = [valid_advantages(data) for data in batches]
        for evaluate in (True, False):
            for count in (1, 2):
                given: BatchedDataDict[Any] = BatchedDataDict.from_batches(batches[:count])
                result = policy.train(given, TellingLoss(), eval_mode=evaluate)
                metrics, what = result["metrics"], f"{count} global batches, eval_mode={evaluate}"
                right = sum(float(row.mean()) for row in rows[:count]) / count
                bench.scalar(f"metric, {what}", metrics["advantage"], right)
                bench.scalar(f"metric_min, {what}", metrics["advantage_min"], min(float(r.min()) for r in rows[:count]))
                bench.scalar(f"metric_max, {what}", metrics["advantage_max"], max(float(r.max()) for r in rows[:count]))
                bench.equal(f"valid tokens, {what}", result["global_valid_toks"], sum(len(r) for r in rows[:count]))

    @holds(2)
    def test_sizes_may_be_given_with_the_call(self, bench: PolicyBench) -> None:
        """`gbs`, `mbs` and `micro_batch_size` stand for what the configuration says."""
        policy, oracle, data = bench.policy(), bench.oracle(), bench.batch()
        right = oracle.logprobs(data)
        for size in (1, 5):
            got = policy.get_logprobs(data, micro_batch_size=size)["logprobs"]
            bench.values(f"log-probabilities in microbatches of {size}", got, right)
        result = policy.train(data, loss_function("pg"), gbs=4, mbs=1)
        steps = [oracle.step(data.slice(start, start + 4), "pg") for start in (0, 4)]
        bench.values("losses of two global batches of 4", result["global_loss"], torch.tensor([s.loss for s in steps]))

    @holds(2)
    def test_several_global_batches_are_evaluated_one_by_one(self, bench: PolicyBench) -> None:
        """A loss for each, as in training."""
        batches = [bench.batch(seed=seed) for seed in range(2)]
        result = bench.policy().train(BatchedDataDict.from_batches(batches), loss_function("nll"), eval_mode=True)
        right = torch.tensor([float(bench.oracle().loss(data, "nll").detach()) for data in batches])
        bench.values("losses of two global batches, evaluated", result["global_loss"], right)


def valid_advantages(data: BatchedDataDict[Any]) -> torch.Tensor:
    """The advantages of the tokens that count."""
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:] > 0
    found: torch.Tensor = data["advantages"][:, 1:][mask]
    return found
