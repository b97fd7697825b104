"""The heads `score` and `value`, sets of tokens, and tokens that the engine did not sample from the policy.

Violations of contracts 1 to 3, 5, 8, 11 and 13.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rlframework.base.errors import NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.policy_worker import SAMPLED_NOW, PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.head.patch import SCORE_WEIGHT, HeadPatch, HeadRequest
from rlframework.policy.training_step import Training
from rlframework_conformance.mutants.mutant import around, before, mutant, result, together
from rlframework_conformance.mutants.policy_worker.engine_access import around_microbatch, changed_output, whole_weights
from rlframework_conformance.mutants.policy_worker.parallelism import TENSOR
from rlframework_conformance.mutants.policy_worker.wrong_grouping import DATA


@mutant("score_of_the_padding", "Scores are read at the width of the batch instead of the end of each row.")
@around(PolicyWorker.score)
def _score_of_the_padding(call: Any, worker: Any, data: Any, *args: Any, **options: Any) -> Any:
    whole = torch.full_like(data["input_lengths"], data["input_ids"].shape[1])
    return call(BatchedDataDict({**data, "input_lengths": whole}), *args, **options)


@mutant("score_before_the_end", "Scores are read one token early, as log-probabilities are.")
@around(PolicyWorker.score)
def _score_before_the_end(call: Any, worker: Any, data: Any, *args: Any, **options: Any) -> Any:
    earlier = (data["input_lengths"] - 1).clamp(min=1)
    return call(BatchedDataDict({**data, "input_lengths": earlier}), *args, **options)


@mutant("scores_made_up", "A language model returns its highest logit as a score.")
@around(PolicyWorker.score)
def _scores_made_up(call: Any, worker: Any, data: Any, micro_batch_size: int | None = None) -> Any:
    try:
        return call(data, micro_batch_size)
    except NotSupported:
        scored = worker.scoring.score_rows(data, HeadRequest(frozenset({"topk"}), 1.0, 1), micro_batch_size, "last")
        return BatchedDataDict({"scores": scored["topk_logits"].sum((1, 2))})


@mutant("values_made_up", "A head of scores returns values, and is trained on losses of values.")
@around(PolicyWorker.get_values)
def _values_made_up(
    call: Any, worker: Any, data: Any, micro_batch_size: int | None = None, positions: str = "all"
) -> Any:
    scored = worker.scoring.score_rows(data, HeadRequest(frozenset({"scores"})), micro_batch_size, positions)
    return BatchedDataDict({"values": scored["scores"]})


@mutant("trained_values_after_the_token", "A loss gets the value of the state after each token.")
@around_microbatch
def _trained_values_after_the_token(microbatch: Any, positions: str) -> None:
    if positions == "loss":
        last = microbatch.processed_inputs.input_ids.numel() - 1
        microbatch.head_positions = (microbatch.head_positions + 1).clamp(max=last)


@mutant("trained_scores_of_other_rows", "A loss gets the score of each row in the place of another one's.")
@around_microbatch
def _trained_scores_of_other_rows(microbatch: Any, positions: str) -> None:
    if positions == "loss_last":
        microbatch.scatter = microbatch.scatter.roll(1)


@mutant(
    "trained_scores_of_the_padding",
    "A loss gets the scores at the last column of a microbatch, which is padding for most rows.",
)
@around_microbatch
def _trained_scores_of_the_padding(microbatch: Any, positions: str) -> None:
    if positions == "loss_last" and microbatch.cu_seqlens is None:
        length = microbatch.processed_inputs.seq_len
        microbatch.head_positions = microbatch.head_positions // length * length + length - 1


@mutant("head_not_trained", "The head of scores keeps its first weights.")
@around(Engine.clip_and_step)
def _head_not_trained(call: Any, engine: Any, *args: Any) -> Any:
    head = {name: weight for name, weight in whole_weights(engine).items() if name == SCORE_WEIGHT}
    done = call(*args)
    engine.load_weights(whole_weights(engine) | head)
    return done


@mutant(
    "head_gradient_of_one_rank",
    "The head's gradient is not summed over data-parallel ranks, that of the other weights is.",
    layout=DATA,
)
@around(HeadPatch.values)
def _head_gradient_of_one_rank(call: Any, head: Any, request: Any, rows: Any, weight: Any, *others: Any) -> Any:
    """Rank 0 has the double gradient, and rank 1 has none."""
    if "scores" in request.wants:
        weight = weight.detach() + (0.0 if dist.get_rank() else 2.0) * (weight - weight.detach())
    return call(request, rows, weight, *others)


@mutant("new_head_at_random", "A new head is drawn at random by each worker.")
@around(Engine.build)
def _new_head_at_random(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    if engine.config.head_init == "zeros":
        weights = whole_weights(engine)
        engine.load_weights({**weights, SCORE_WEIGHT: torch.randn_like(weights[SCORE_WEIGHT])})


@mutant("head_left_out_of_checkpoints", "A checkpoint restores all weights but the head.")
@around(Engine.load_weights)
def _head_left_out_of_checkpoints(call: Any, engine: Any, weights: Any) -> None:
    current = whole_weights(engine)
    call({name: current[name] if name == SCORE_WEIGHT else weights[name] for name in weights})


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


@mutant("all_tokens_are_compared", "Tokens of earlier weights are compared with those that are trained now.")
@around(Training.train)
def _all_tokens_are_compared(call: Any, training: Any, data: Any, *args: Any, **options: Any) -> Any:
    if SAMPLED_NOW in data:
        data[SAMPLED_NOW] = torch.ones_like(data[SAMPLED_NOW])
    return call(data, *args, **options)


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


MUTANTS = (
    mutant("scores_in_bfloat16", "Scores are rounded to bfloat16.")(
        result(PolicyWorker.score, lambda scored: BatchedDataDict({"scores": scored["scores"].bfloat16().float()}))
    ),
    mutant("values_after_the_token", "A value is that of the state after its token, not before it.")(
        result(PolicyWorker.get_values, lambda scored: BatchedDataDict({"values": scored["values"].roll(-1, 1)}))
    ),
    mutant("withheld_gradient_is_kept", "The gradient of a step that was withheld is part of the next.")(
        together(_train_pending_again, before(Engine.clip_and_step, lambda engine: setattr(engine, "pending", False)))
    ),
    mutant("sets_without_gradient", "Only the token of the row has a gradient; those of its set are constants.")(
        changed_output("set_logprobs", lambda logprobs: logprobs.detach())
    ),
    mutant("sets_of_the_position_before", "Log-probabilities of a set are those of the position before it.")(
        changed_output("set_logprobs", lambda logprobs: logprobs.roll(-1, 0))
    ),
    mutant("sets_renormalized", "The tokens of a set are normalized among themselves.")(
        changed_output("set_logprobs", lambda logprobs: logprobs.log_softmax(-1))
    ),
)
