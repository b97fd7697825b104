"""The driver's handle: shards, order, padding, ranks without rows. The worker group is a recording stand-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.errors import BatchError
from rlframework.generation.driver import Generation
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.named_sharding import NamedSharding

PAD = 0


class Group:
    """Workers on a grid; each completes a row of length n by n tokens, `100 + first token`: shards differ in width."""

    def __init__(self, data_parallel: int, tensor_parallel: int = 1) -> None:
        layout = torch.arange(data_parallel * tensor_parallel).reshape(1, data_parallel, 1, tensor_parallel).numpy()
        names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
        self.sharding = NamedSharding(layout, names)
        self.greedy: list[bool] = []
        self.sizes: list[int] = []
        self.finished = 0

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> Any:
        assert method_name == "finish_generation"
        self.finished += 1
        return [True] * self.sharding.size

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *,
        data: list[BatchedDataDict[Any]],
        in_sharded_axes: list[str],
        replicate_on_axes: list[str],
        output_is_replicated: list[str],
        common_kwargs: Mapping[str, Any],
    ) -> Any:
        others = ["pipeline_parallel", "context_parallel", "tensor_parallel"]
        assert method_name == "generate"
        assert in_sharded_axes == ["data_parallel"]
        assert replicate_on_axes == others == output_is_replicated
        self.greedy.append(common_kwargs["greedy"])
        self.sizes = [shard.size for shard in data]
        return [answer(shard) for shard in data]

    def get_all_worker_results(self, future: Any) -> Any:
        return future


def answer(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    assert data.size > 0
    lengths = data["input_lengths"]
    ids = torch.full((data.size, int(2 * lengths.max())), PAD)
    logprobs = torch.zeros(ids.shape)
    for row, length in enumerate(lengths.tolist()):
        ids[row, :length] = data["input_ids"][row, :length]
        ids[row, length : 2 * length] = 100 + data["input_ids"][row, 0]
        logprobs[row, length : 2 * length] = -1.0
    return BatchedDataDict(
        {
            "output_ids": ids,
            "logprobs": logprobs,
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": 2 * lengths,
            "truncated": lengths > 2,
        }
    )


def make(group: Group) -> Generation:
    return Generation(group, GenerationConfig(), character_tokenizer("01"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [5]), (2, [3, 2]), (4, [2, 1, 1, 1]), (7, [1, 1, 1, 1, 1, 1, 1])])
def test_rows_come_back_in_order(batch: Any, ranks: int, sizes: list[int]) -> None:
    """Seven ranks and five rows: two of them get a row whose result is discarded."""
    group = Group(ranks)
    output = make(group).generate(batch([[3], [4, 4], [5, 5, 5], [6], [7]]), greedy=True)
    expected = [[3, 103], [4, 4, 104, 104], [5, 5, 5, 105, 105, 105], [6, 106], [7, 107]]
    assert group.sizes == sizes
    assert output["output_ids"].tolist() == [row + [PAD] * (6 - len(row)) for row in expected]
    assert output["unpadded_sequence_lengths"].tolist() == [2, 4, 6, 2, 2]
    assert output["truncated"].tolist() == [False, False, True, False, False]
    assert output["logprobs"][1].tolist() == [0, 0, -1, -1, 0, 0]
    assert group.greedy == [True]


def test_other_axes_share_a_shard(batch: Any) -> None:
    group = Group(2, tensor_parallel=2)
    assert make(group).generate(batch([[3], [4], [5]])).size == 3
    assert group.sizes == [2, 1]
    assert group.greedy == [False]


def test_the_calls_around_a_rollout_and_no_rows() -> None:
    group = Group(2)
    generation = make(group)
    assert generation.prepare_for_generation()
    with pytest.raises(BatchError, match="generate got no rows"):
        generation.generate(BatchedDataDict({"input_ids": torch.zeros(0, 3), "input_lengths": torch.zeros(0)}))
    assert generation.finish_generation()
    assert group.finished == 1
