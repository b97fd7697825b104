"""Sets of tokens, and tokens that the engine did not sample from the policy: violations of contracts 1 to 3 and 11."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.policy_worker import SAMPLED_NOW, PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.head.patch import HeadPatch
from rlframework.policy.training_step import Training
from rlframework_conformance.mutants.mutant import around, mutant, together
from rlframework_conformance.mutants.policy_worker.engine_access import changed_output
from rlframework_conformance.mutants.policy_worker.tensor import TENSOR


@mutant("bound_after_the_step", "The bound on sampled tokens is looked at after the optimizer step.")
@around(Training.global_batch)
def _bound_after_the_step(call: Any, training: Any, *args: Any) -> Any:
    *others, bound = args
    if bound is not None:
        call(*others, None)
    return call(*args)


@around(Engine.forward_backward)
def _train_pending_again(call: Any, engine: Any, microbatches: Any, *args: Any, forward_only: bool) -> Any:
    batches = list(microbatches)
    again = getattr(engine, "pending", False) and not forward_only
    results = call(batches * 2 if again else batches, *args, forward_only=forward_only)
    engine.pending = not forward_only
    return results[: len(batches)]


@around(Engine.clip_and_step)
def _forget_pending(call: Any, engine: Any, *args: Any) -> Any:
    engine.pending = False
    return call(*args)


withheld_gradient_is_kept = mutant(
    "withheld_gradient_is_kept", "The gradient of a step that was withheld is part of the next."
)(together(_train_pending_again, _forget_pending))


@mutant("all_tokens_are_compared", "Tokens of earlier weights are compared with those that are trained now.")
@around(Training.train)
def _all_tokens_are_compared(call: Any, training: Any, data: Any, *args: Any, **options: Any) -> Any:
    if SAMPLED_NOW in data:
        data[SAMPLED_NOW] = torch.ones_like(data[SAMPLED_NOW])
    return call(data, *args, **options)


sets_without_gradient = mutant(
    "sets_without_gradient", "Only the token of the row has a gradient; those of its set are constants."
)(changed_output("set_logprobs", lambda logprobs: logprobs.detach()))

sets_of_the_position_before = mutant(
    "sets_of_the_position_before", "Log-probabilities of a set are those of the position before it."
)(changed_output("set_logprobs", lambda logprobs: logprobs.roll(-1, 0)))

sets_renormalized = mutant("sets_renormalized", "The tokens of a set are normalized among themselves.")(
    changed_output("set_logprobs", lambda logprobs: logprobs.log_softmax(-1))
)


@mutant("set_weights_twice", "The loss gets the weights of sets squared, as where they are applied twice.")
@around(PolicyWorker.train)
def _set_weights_twice(call: Any, worker: Any, data: Any, *args: Any, **options: Any) -> Any:
    if "set_weights" in data:
        data = BatchedDataDict({**data, "set_weights": data["set_weights"].square()})
    return call(data, *args, **options)


@mutant("sets_of_own_rows", "Tokens of a set are looked up in this rank's rows of the head only.", layout=TENSOR)
@around(HeadPatch.values)
def _sets_of_own_rows(call: Any, head: Any, request: Any, rows: Any, weight: Any, bias: Any, targets: Any) -> Any:
    if request.token_sets is not None:
        own = (targets >= head.shard.start) & (targets < head.shard.start + head.shard.rows)
        own[:, 0] = True
        targets = torch.where(own, targets, head.shard.start)
    return call(request, rows, weight, bias, targets)


@mutant("normalizers_of_the_top", "Normalizers of the most likely tokens are sums over these alone.")
@around(PolicyWorker.get_topk_logits)
def _normalizers_of_the_top(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    scored = call(*args, **options)
    return BatchedDataDict({**scored, "topk_normalizers": scored["topk_logits"].logsumexp(-1)})
