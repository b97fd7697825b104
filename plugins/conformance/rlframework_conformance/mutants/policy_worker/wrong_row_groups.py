"""Violations of contract 13: a loss of groups sees parts of them, or their rows in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.policy.microbatches.on_demand import on_host
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_service

_MODES = tuple(f"test_groups_share_a_{mode}_microbatch" for mode in ("padded", "dynamic", "packed"))


def _broken_split(change: Callable[..., Any]) -> Any:
    """Break the microbatches of a loss of groups: they become `change(sound, data, positions, rows, tokens)`."""

    @in_service("microbatching_class")
    def break_it(microbatching_class: Any) -> Any:
        class Broken(microbatching_class):  # type: ignore[misc]
            def split(self, data: Any, positions: str, rows: int, tokens: Any, groups: bool = False) -> Any:
                if groups:
                    return change(super().split, data, positions, rows, tokens)
                return super().split(data, positions, rows, tokens)

        return Broken

    return break_it


groups_divided_by_the_packer = mutant(
    "groups_divided_by_the_packer",
    "Rows are assigned to microbatches one by one, whatever their group.",
    *_MODES,
)(_broken_split(lambda sound, data, *how: sound(data, *how, False)))

order_within_groups_lost = mutant(
    "order_within_groups_lost",
    "The rows of a group are in another order than in the batch.",
    *_MODES,
)(_broken_split(lambda sound, data, *how: sound(data.select_indices(range(data.size - 1, -1, -1)), *how, True)))


def _ids_of_the_first_rows(sound: Any, data: Any, *how: Any) -> Any:
    made = sound(data, *how, True)
    for microbatch in on_host(made):
        microbatch.data_dict["group_ids"] = data["group_ids"][: len(microbatch.rows)]
    return made


group_ids_of_other_rows = mutant(
    "group_ids_of_other_rows",
    "`group_ids` are not sliced with the rows: each microbatch has those of the first rows.",
    *_MODES,
)(_broken_split(_ids_of_the_first_rows))


@mutant(
    "groups_divided_over_ranks",
    "Rows are assigned to data-parallel ranks in turn, whatever their group.",
    *_MODES,
    layout=Layout(data=2),
)
def groups_divided_over_ranks(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, *args: Any, **options: Any) -> Any:
            if "group_ids" in data:
                group = self.engine.data_parallel_group()
                whole: BatchedDataDict[Any] = BatchedDataDict(dict(data)).all_gather(group)
                data = whole.select_indices(range(group.rank(), whole.size, group.size()))
            return super().train(data, *args, **options)

    return Broken


@mutant(
    "groups_counted_by_each_rank",
    "A loss of groups is divided by the rows of its own rank, not by those of the global batch.",
    *_MODES,
    layout=Layout(data=2),
)
@in_service("microbatching_class")
def groups_counted_by_each_rank(microbatching_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(microbatching_class):  # type: ignore[misc]
        def global_batch(self, *args: Any, **options: Any) -> Any:
            found = super().global_batch(*args, **options)
            batch = found["batch"]
            if "group_ids" not in batch:
                return found
            return {**found, "global_valid_seqs": batch["sample_mask"].sum().clamp(min=1.0)}

    return Broken
