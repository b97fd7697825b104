"""The driver's handle on generation: prompts out to the workers' engines, completions back in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.errors import BatchError, WorkerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig
    from rlframework.interfaces.worker_group import WorkerGroup

_SHARDED = "data_parallel"


class Generation:
    """Generates on all workers of a policy: `prepare_for_generation`, any number of `generate`, `finish_generation`."""

    def __init__(self, worker_group: WorkerGroup, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """`config` and `tokenizer` are those that the workers have; nothing is started."""
        self._group, self.config = worker_group, config
        self._pad_id = int(tokenizer.pad_token_id)

    def prepare_for_generation(self) -> bool:
        """True when ready: engines inside the trainer's processes always are."""
        return True

    def pop_metrics(self) -> dict[str, float]:
        """What there is to tell of generation since this was last called, by metric name; here nothing."""
        return {}

    def shutdown(self) -> bool:
        """End the workers that were started for generation alone; here there are none."""
        return True

    def finish_generation(self) -> bool:
        """Engines free what they hold between rollouts."""
        future = self._group.run_all_workers_single_data("finish_generation")
        return all(self._group.get_all_worker_results(future))

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete each row: in and out as `GenerationEngine.generate`.

        Rows go in contiguous shards of nearly equal size to the data-parallel ranks, so that equal prompts side by side
        are mostly prefilled once. There may be fewer rows than ranks: a rank without rows does one that is thrown away.
        """
        if data.size == 0:
            raise BatchError("generate was given no rows; give at least one prompt")
        axes = self._group.sharding.names
        replicated = [axis for axis in axes if axis != _SHARDED]
        counts = _shares(data.size, self._group.sharding.get_axis_size(_SHARDED))
        future = self._group.run_all_workers_sharded_data(
            "generate",
            data=_shards(data, counts),
            in_sharded_axes=[_SHARDED],
            replicate_on_axes=replicated,
            output_is_replicated=replicated,
            common_kwargs={"greedy": greedy},
        )
        results = self._group.get_all_worker_results(future)
        if len(results) != len(counts):
            raise WorkerError(f"generate came back from {len(results)} data-parallel ranks of {len(counts)}")
        kept = [result for result, count in zip(results, counts, strict=True) if count]
        return BatchedDataDict.from_batches(kept, pad_value_dict={"output_ids": self._pad_id})


def _shares(rows: int, ranks: int) -> list[int]:
    """Rows of each rank: all within one of each other, the larger ones first."""
    each, more = divmod(rows, ranks)
    return [each + (rank < more) for rank in range(ranks)]


def _shards(data: BatchedDataDict[Any], counts: list[int]) -> list[BatchedDataDict[Any]]:
    shards, start = [], 0
    for count in counts:
        rows = range(start, start + count) if count else range(1)  # without rows: the first, to be thrown away
        shards.append(data.select_indices(list(rows)))
        start += count
    return shards
