"""Contract 2: losses divide by global counts, so grouping, order, padding and sharding of rows change no number.

Contract 13: rows of a group share a microbatch, compared with the oracle's single batch.
"""

from __future__ import annotations

from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.losses import MetricsLoss
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness, loss_function

GROUPS = (5, 9, 2, 5, 9, 5, 2, 7)
"""Ids of eight rows: groups of three, two, two and one row, mixed. Row 1 of the batch is masked."""


class Grouping(Suite):
    """Loss, gradient norm and gradient of the first step, compared with the oracle's single padded batch."""

    @holds(2)
    def test_first_step_is_that_of_the_oracle(self, harness: PolicyHarness) -> None:
        """The first step must match the oracle with padded microbatches of three rows, the last one partial."""
        harness.first_step(harness.batch(), "padded")

    @holds(2)
    def test_supervised_step_is_that_of_the_oracle(self, harness: PolicyHarness) -> None:
        """The supervised loss must be the mean over valid tokens, not over padding and not over rows."""
        harness.first_step(harness.batch(seed=1), "nll, padded", kind="nll")

    @holds(2)
    def test_sequence_level_loss_averages_over_sequences(self, harness: PolicyHarness) -> None:
        """A sequence-level loss must be the mean of each sequence's mean, so that long sequences do not weigh more."""
        harness.first_step(harness.batch(), "sequence level", kind="sequence_pg")

    @holds(2)
    def test_microbatch_size_changes_nothing(self, harness: PolicyHarness) -> None:
        """The microbatch size must not change the step: one row at a time gives what all at once gives."""
        for rows in (1, 8):
            harness.first_step(harness.batch(), f"microbatches of {rows}", train_micro_batch_size=rows)

    @holds(2)
    def test_order_of_rows_changes_nothing(self, harness: PolicyHarness) -> None:
        """The order of rows must not change the step, even if sorting by length gives one worker most of the tokens."""
        data = harness.batch()
        order = torch.argsort(data["input_lengths"], descending=True, stable=True)
        harness.first_step(data.select_indices(order), "sorted rows")

    @holds(2)
    def test_padding_changes_nothing(self, harness: PolicyHarness) -> None:
        """Additional padding must not change any number, whatever values the padding contains."""
        data = harness.batch()
        wide: BatchedDataDict[Any] = BatchedDataDict(
            {
                name: torch.nn.functional.pad(value, (0, 9), value=7) if value.dim() == 2 else value
                for name, value in data.items()
            }
        )
        wide["token_mask"][:, data["input_ids"].shape[1] :] = 0.0
        harness.first_step(wide, "wider")
        oracle, policy = harness.oracle(), harness.policy()
        logprobs = policy.get_logprobs(wide)["logprobs"]
        harness.values("log-probabilities, wider", logprobs[:, :-9], oracle.logprobs(data))
        harness.exact("log-probabilities of the padding", logprobs[:, -9:], torch.zeros(data.size, 9))
        result, right = policy.train(wide, loss_function("pg")), oracle.step(data, "pg")
        harness.scalar("loss, wider and not", result["loss"], right.loss)

    @holds(2, Capability.PACKING)
    def test_packed_equals_padded(self, harness: PolicyHarness) -> None:
        """Packed sequences must give the numbers of padded rows; no sequence may attend to another."""
        harness.first_step(harness.batch(), "packed", batching={"mode": "packed", "tokens": 30})

    @holds(2, Capability.PACKING, Capability.LEARNED_POSITIONS)
    def test_positions_start_again_in_packed_rows(self, harness: PolicyHarness) -> None:
        """Positions must restart at each packed sequence.

        Tested with learned positions, because rotary positions are relative and hide the error.
        """
        harness.first_step(
            harness.batch(), "packed", model="learned_positions", batching={"mode": "packed", "tokens": 30}
        )

    @holds(2, Capability.DYNAMIC_BATCHING)
    def test_dynamic_equals_padded(self, harness: PolicyHarness) -> None:
        """Dynamic microbatches with a token limit, padding included, must give the numbers of padded ones."""
        harness.first_step(harness.batch(), "dynamic", batching={"mode": "dynamic", "tokens": 30})

    @holds(2)
    def test_masked_rows_count_for_nothing(self, harness: PolicyHarness) -> None:
        """Masked rows must not contribute.

        With one valid row of eight, some microbatches and all workers but one have nothing to train on.
        """
        data = harness.batch()
        data["sample_mask"] = torch.zeros(data.size)
        data["sample_mask"][3] = 1.0
        harness.first_step(data, "one row of eight", batching={"mode": "auto", "tokens": 20})

    @holds(2)
    def test_targets_may_lie_at_one_end_of_their_rows(self, harness: PolicyHarness) -> None:
        """Targets may be at one end of their rows only (the third token, or the last), so that a shard of a row may
        have none.
        """
        data = harness.batch()
        third, last = (torch.zeros_like(data["token_mask"]) for _ in range(2))
        third[:, 2] = 1.0
        last[torch.arange(data.size), data["input_lengths"] - 1] = 1.0
        for what, mask in (("third token", third), ("last token", last)):
            for mode in ("padded", "auto"):
                given: BatchedDataDict[Any] = BatchedDataDict({**data, "token_mask": mask})
                harness.first_step(given, f"{what} of each row, {mode}", batching={"mode": mode, "tokens": 30})

    @holds(2, data_parallel=2)
    def test_workers_with_unequal_work_agree(self, harness: PolicyHarness) -> None:
        """Workers with unequal work must run the same number of forwards and agree on the sums.

        One worker has a single short row, the others have the rest.
        """
        data = harness.batch()
        data["token_mask"][:4] = 0.0
        data["token_mask"][0, 1] = 1.0
        data["sample_mask"][:] = 1.0
        for mode in ("padded", "auto"):
            batching = {"mode": mode, "tokens": 16}
            harness.first_step(data, f"unequal work, {mode}", batching=batching, train_micro_batch_size=1)

    @holds(2)
    def test_metrics_are_of_the_whole_global_batch(self, harness: PolicyHarness) -> None:
        """Metrics must cover the global batch: sums over microbatches and workers, extremes for `_min` and `_max`.

        Several global batches give the mean of their metrics, and the sums of their valid rows and tokens.
        """
        policy, batches = harness.policy(), [harness.batch(seed=seed) for seed in range(2)]
        rows = [valid_advantages(data) for data in batches]
        for evaluate in (True, False):
            for count in (1, 2):
                given: BatchedDataDict[Any] = BatchedDataDict.from_batches(batches[:count])
                result = policy.train(given, MetricsLoss(), eval_mode=evaluate)
                metrics, what = result["metrics"], f"{count} global batches, eval_mode={evaluate}"
                right = sum(float(row.mean()) for row in rows[:count]) / count
                harness.scalar(f"metric, {what}", metrics["advantage"], right)
                harness.scalar(
                    f"metric_min, {what}", metrics["advantage_min"], min(float(r.min()) for r in rows[:count])
                )
                harness.scalar(
                    f"metric_max, {what}", metrics["advantage_max"], max(float(r.max()) for r in rows[:count])
                )
                harness.equal(f"valid tokens, {what}", result["global_valid_toks"], sum(len(r) for r in rows[:count]))
                valid = sum(int(data["sample_mask"].sum()) for data in batches[:count])
                harness.equal(f"valid rows, {what}", result["global_valid_seqs"], valid)

    @holds(2)
    def test_sizes_may_be_given_with_the_call(self, harness: PolicyHarness) -> None:
        """`gbs`, `mbs` and `micro_batch_size` given with a call must override the configuration.

        Several global batches are several optimizer steps, in the order of the rows.
        """
        policy, oracle, data = harness.policy(), harness.oracle(), harness.batch()
        right = oracle.logprobs(data)
        for size in (1, 5):
            got = policy.get_logprobs(data, micro_batch_size=size)["logprobs"]
            harness.values(f"log-probabilities in microbatches of {size}", got, right)
        result = policy.train(data, loss_function("pg"), gbs=4, mbs=1)
        steps = [oracle.step(data.slice(start, start + 4), "pg") for start in (0, 4)]
        harness.values("losses of two global batches", result["global_loss"], torch.tensor([s.loss for s in steps]))
        harness.values("gradient norms", result["grad_norm"], torch.tensor([s.grad_norm for s in steps]))

    @holds(2)
    def test_several_global_batches_are_evaluated_one_by_one(self, harness: PolicyHarness) -> None:
        """Evaluation must return one loss per global batch, as training does."""
        batches = [harness.batch(seed=seed) for seed in range(2)]
        result = harness.policy().train(BatchedDataDict.from_batches(batches), loss_function("nll"), eval_mode=True)
        right = torch.tensor([float(harness.oracle().loss(data, "nll").detach()) for data in batches])
        harness.values("losses of two global batches, evaluated", result["global_loss"], right)


def valid_advantages(data: BatchedDataDict[Any]) -> torch.Tensor:
    """Return the advantages of the valid tokens."""
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:] > 0
    found: torch.Tensor = data["advantages"][:, 1:][mask]
    return found


def _batch(harness: PolicyHarness) -> BatchedDataDict[Any]:
    data = harness.batch()
    data["group_ids"] = torch.tensor(GROUPS)
    return data


class GroupedRows(Suite):
    """A step of a loss with `needs_groups` on pairs of rows: its value depends on whole groups and on their order."""

    @holds(13)
    def test_groups_share_a_microbatch(self, harness: PolicyHarness) -> None:
        """Microbatches must have whole groups in every batching mode.

        Three padded rows, or 48 tokens with padding, have room for the largest group and nothing else.
        """
        for batching in harness.batchings(48):
            harness.first_step(_batch(harness), f"pairs, {batching['mode']}", kind="pairs", batching=batching)
        harness.first_step(_batch(harness), "pairs in 8 rows", kind="pairs", train_micro_batch_size=8)
