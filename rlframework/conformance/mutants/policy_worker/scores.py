"""Reward models: violations of contracts 2, 3 and 8."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.mutants.mutant import mutant
from rlframework.errors import NotSupported
from rlframework.policy.head.patch import HeadRequest

_SCORES = "test_scores_are_those_of_the_last_tokens"
_GROUPED = "test_scores_do_not_hang_on_the_grouping"
_PACKED = "test_scores_of_packed_rows_are_the_same"


@mutant(
    "score_of_the_padding",
    "Scores are read at the width of the batch instead of the end of each row.",
    _SCORES,
    _GROUPED,
    _PACKED,
)
def score_of_the_padding(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def score(self, data: Any, micro_batch_size: int | None = None) -> Any:
            whole = torch.full_like(data["input_lengths"], data["input_ids"].shape[1])
            return super().score(BatchedDataDict({**data, "input_lengths": whole}), micro_batch_size)

    return Broken


@mutant("score_before_the_end", "Scores are read one token early, as log-probabilities are.", _SCORES, _GROUPED)
def score_before_the_end(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def score(self, data: Any, micro_batch_size: int | None = None) -> Any:
            earlier = (data["input_lengths"] - 1).clamp(min=1)
            return super().score(BatchedDataDict({**data, "input_lengths": earlier}), micro_batch_size)

    return Broken


@mutant("scores_in_bfloat16", "Scores are rounded to bfloat16.", _SCORES, _PACKED)
def scores_in_bfloat16(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def score(self, data: Any, micro_batch_size: int | None = None) -> Any:
            found = super().score(data, micro_batch_size)
            return BatchedDataDict({"scores": found["scores"].bfloat16().float()})

    return Broken


@mutant(
    "scores_made_up", "A language model returns its highest logit as a score.", "test_a_head_does_what_it_is_for_only"
)
def scores_made_up(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def score(self, data: Any, micro_batch_size: int | None = None) -> Any:
            try:
                return super().score(data, micro_batch_size)
            except NotSupported:
                request = HeadRequest(frozenset({"topk"}), 1.0, 1)
                found = self.scoring.score_rows(data, request, micro_batch_size, "last")
                return BatchedDataDict({"scores": found["topk_logits"].sum((1, 2))})

    return Broken
