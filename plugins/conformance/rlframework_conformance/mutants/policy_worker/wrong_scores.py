"""The heads `score` and `value`: violations of contracts 2, 3, 5, 8 and 13."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.base.errors import NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.policy.head.patch import SCORE_WEIGHT, HeadRequest
from rlframework.policy.microbatches.on_demand import on_host
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, in_service
from rlframework_conformance.mutants.policy_worker.tensor import with_head
from rlframework_conformance.mutants.policy_worker.wrong_grouping import DATA

_SCORES = "test_scores_are_those_of_the_last_tokens"
_GROUPED = "test_scores_do_not_hang_on_the_grouping"
_PACKED = "test_scores_of_packed_rows_are_the_same"
_VALUES = "test_values_are_those_before_each_token"
_TRAINED_SCORES = "test_the_head_of_scores_is_trained"
_TRAINED_VALUES = "test_the_head_of_values_is_trained"
_DYNAMIC_ROWS = "test_heads_are_trained_on_dynamic_rows"
_PACKED_ROWS = "test_heads_are_trained_on_packed_rows"
_NEW, _RESUMES = "test_a_new_head_begins_at_zeros", "test_a_new_head_resumes"


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


@mutant(
    "values_made_up",
    "A head of scores returns values, and is trained on losses of values.",
    "test_a_head_does_what_it_is_for_only",
)
def values_made_up(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_values(self, data: Any, micro_batch_size: int | None = None, positions: str = "all") -> Any:
            found = self.scoring.score_rows(data, HeadRequest(frozenset({"scores"})), micro_batch_size, positions)
            return BatchedDataDict({"values": found["scores"]})

    return Broken


@mutant("values_after_the_token", "A value is that of the state after its token, not before it.", _VALUES)
def values_after_the_token(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_values(self, *args: Any, **options: Any) -> Any:
            return BatchedDataDict({"values": super().get_values(*args, **options)["values"].roll(-1, 1)})

    return Broken


def _broken_positions(change: Any) -> Any:
    """Break the microbatches of a loss: `change(microbatch, positions)` changes each of them in CPU memory."""

    @in_service("microbatching_class")
    def break_it(microbatching_class: Any) -> Any:
        class Broken(microbatching_class):  # type: ignore[misc]
            def split(self, data: Any, positions: str, *how: Any) -> Any:
                made = super().split(data, positions, *how)
                for microbatch in on_host(made) if positions.startswith("loss") else ():
                    change(microbatch, positions)
                return made

        return Broken

    return break_it


def _one_token_later(microbatch: Any, positions: str) -> None:
    if positions == "loss":
        last = microbatch.processed_inputs.input_ids.numel() - 1
        microbatch.head_positions = (microbatch.head_positions + 1).clamp(max=last)


trained_values_after_the_token = mutant(
    "trained_values_after_the_token",
    "A loss gets the value of the state after each token.",
    _TRAINED_VALUES,
    _DYNAMIC_ROWS,
    _PACKED_ROWS,
)(_broken_positions(_one_token_later))


def _to_other_rows(microbatch: Any, positions: str) -> None:
    if positions == "loss_last":
        microbatch.scatter = microbatch.scatter.roll(1)


trained_scores_of_other_rows = mutant(
    "trained_scores_of_other_rows",
    "A loss gets the score of each row in the place of another one's.",
    _TRAINED_SCORES,
    _DYNAMIC_ROWS,
    _PACKED_ROWS,
    _NEW,
)(_broken_positions(_to_other_rows))


def _at_the_padding(microbatch: Any, positions: str) -> None:
    if positions == "loss_last" and microbatch.cu_seqlens is None:
        length = microbatch.processed_inputs.seq_len
        microbatch.head_positions = microbatch.head_positions // length * length + length - 1


trained_scores_of_the_padding = mutant(
    "trained_scores_of_the_padding",
    "A loss gets the scores at the last column of a microbatch, which is padding for most rows.",
    _TRAINED_SCORES,
)(_broken_positions(_at_the_padding))


@mutant(
    "head_not_trained",
    "The head of scores keeps its first weights.",
    _TRAINED_SCORES,
    _TRAINED_VALUES,
    _NEW,
)
@in_engine
def head_not_trained(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, *how: Any) -> Any:
            specs = self.weight_specs()
            head = {name: weight.clone() for name, weight in self.gather_weights(specs) if name == SCORE_WEIGHT}
            done = super().clip_and_step(*how)
            self.load_weights({name: weight.clone() for name, weight in self.gather_weights(specs)} | head)
            return done

    return Broken


def _gradient_of_rank_zero(head: Any) -> None:
    """Double the gradient of the head's weight on rank 0 and drop it on rank 1, as where ranks are not summed."""
    factor = 0.0 if dist.get_rank() else 2.0
    sound_values = head.values

    def values(request: Any, rows: Tensor, weight: Tensor, *others: Any) -> Any:
        if "scores" in request.wants:
            weight = weight.detach() + factor * (weight - weight.detach())
        return sound_values(request, rows, weight, *others)

    head.values = values


head_gradient_of_one_rank = mutant(
    "head_gradient_of_one_rank",
    "The head's gradient is not summed over data-parallel ranks, that of the other weights is.",
    _TRAINED_SCORES,
    _TRAINED_VALUES,
    layout=DATA,
)(with_head(_gradient_of_rank_zero))


@mutant("new_head_at_random", "A new head is drawn at random by each worker.", _NEW)
@in_engine
def new_head_at_random(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            if self.config.head_init == "zeros":
                weights = dict(self.gather_weights(self.weight_specs()))
                self.load_weights({**weights, SCORE_WEIGHT: torch.randn_like(weights[SCORE_WEIGHT])})

    return Broken


@mutant("head_left_out_of_checkpoints", "A checkpoint restores all weights but the head.", _RESUMES)
@in_engine
def head_left_out_of_checkpoints(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def load_weights(self, weights: Any) -> None:
            kept = dict(self.gather_weights(self.weight_specs()))
            super().load_weights({name: kept[name] if name == SCORE_WEIGHT else weights[name] for name in weights})

    return Broken
