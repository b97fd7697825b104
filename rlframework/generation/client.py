"""The driver's handle on generation: sends prompts to the workers' engines and returns completions in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import GenerationConfig
    from rlframework.interfaces.worker_group import WorkerGroup

_SHARDED = "data_parallel"


class Generation:
    """Generates on all workers of a policy: `prepare_for_generation`, any number of `generate`, `finish_generation`."""

    def __init__(self, worker_group: WorkerGroup, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """`config` and `tokenizer` must be those of the workers. Starts nothing."""
        self._group, self.config = worker_group, config
        self._pad_id = int(tokenizer.pad_token_id)

    def prepare_for_generation(self) -> bool:
        """Return True when ready; engines inside the trainer's processes always are."""
        return True

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of generation since the last call, by name; embedded engines have none."""
        return {}

    def shutdown(self) -> bool:
        """Shut down workers started only for generation; embedded engines have none."""
        return True

    def finish_generation(self) -> bool:
        """Have the engines free their caches between rollouts."""
        future = self._group.run_all_workers_single_data("finish_generation")
        return all(self._group.get_all_worker_results(future))

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Complete each row; input and output as in `GenerationEngine.generate`.

        The data-parallel ranks get contiguous shards of nearly equal size, so that adjacent equal prompts are mostly
        prefilled once. With fewer rows than ranks, a rank without rows completes one whose result is discarded.
        """
        if data.size == 0:
            raise BatchError("generate was given no rows; give at least one prompt")
        replicated = [axis for axis in self._group.sharding.names if axis != _SHARDED]
        parts = np.array_split(np.arange(data.size), self._group.sharding.get_axis_size(_SHARDED))
        future = self._group.run_all_workers_sharded_data(
            "generate",
            data=[data.select_indices(rows.tolist() or [0]) for rows in parts],
            in_sharded_axes=[_SHARDED],
            replicate_on_axes=replicated,
            output_is_replicated=replicated,
            common_kwargs={"greedy": greedy},
        )
        results = self._group.get_all_worker_results(future)
        kept = [result for result, rows in zip(results, parts, strict=True) if len(rows)]
        return BatchedDataDict.from_batches(kept, pad_value_dict={"output_ids": self._pad_id})
