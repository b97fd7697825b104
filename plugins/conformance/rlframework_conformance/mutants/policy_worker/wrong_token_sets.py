"""Sets of tokens: violations of contracts 1 to 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine
from rlframework_conformance.mutants.policy_worker.tensor import TENSOR, with_head

_STEP = "test_losses_may_ask_for_sets_of_tokens"
_TRAINED = (_STEP, "test_sets_do_not_depend_on_the_grouping", "test_sets_of_packed_rows_are_the_same")
_SCORED = "test_sets_are_scored_at_the_temperature_of_sampling"


def _broken_output(change: Any) -> Any:
    """Break the head's output in training and scoring: it becomes `change(output)` where sets are computed."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def forward_backward(self, microbatches: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
                def broken(output: Any, microbatch: Any) -> Any:
                    return step(change(output) if output.set_logprobs is not None else output, microbatch)

                return super().forward_backward(microbatches, head, broken, forward_only=forward_only)

        return Broken

    return break_it


sets_without_gradient = mutant(
    "sets_without_gradient", "Only the token of the row has a gradient; those of its set are constants.", *_TRAINED
)(_broken_output(lambda output: replace(output, set_logprobs=output.set_logprobs.detach())))

sets_of_the_position_before = mutant(
    "sets_of_the_position_before",
    "Log-probabilities of a set are those of the position before it.",
    *_TRAINED,
    _SCORED,
)(_broken_output(lambda output: replace(output, set_logprobs=output.set_logprobs.roll(-1, 0))))

sets_renormalized = mutant(
    "sets_renormalized", "The tokens of a set are normalized among themselves.", *_TRAINED, _SCORED
)(_broken_output(lambda output: replace(output, set_logprobs=output.set_logprobs.log_softmax(-1))))


@mutant("set_weights_twice", "The loss gets the weights of sets squared, as where they are applied twice.", *_TRAINED)
def set_weights_twice(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, *args: Any, **options: Any) -> Any:
            if "set_weights" in data:
                data = BatchedDataDict({**data, "set_weights": data["set_weights"].square()})
            return super().train(data, *args, **options)

    return Broken


def _own_rows_only(head: Any) -> None:
    shard, sound_values = head.shard, head.values

    def values(request: Any, rows: Tensor, weight: Tensor, bias: Any, targets: Tensor) -> Any:
        if request.token_sets is not None:
            own = (targets >= shard.start) & (targets < shard.start + shard.rows)
            own[:, 0] = True
            targets = torch.where(own, targets, shard.start)
        return sound_values(request, rows, weight, bias, targets)

    head.values = values


sets_of_own_rows = mutant(
    "sets_of_own_rows", "Tokens of a set are looked up in this rank's rows of the head only.", _STEP, layout=TENSOR
)(with_head(_own_rows_only))


@mutant(
    "normalizers_of_the_top",
    "Normalizers of the most likely tokens are sums over these alone.",
    _SCORED,
)
def normalizers_of_the_top(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_topk_logits(self, *args: Any, **kwargs: Any) -> Any:
            found = super().get_topk_logits(*args, **kwargs)
            return BatchedDataDict({**found, "topk_normalizers": found["topk_logits"].logsumexp(-1)})

    return Broken
