"""Violations of contracts 5 and 6: the saved, generating or sent weights are not the trained ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import RefitError, WriteError
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.trained_weights import TrainedWeights
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import after, around, before, in_silence, mutant, result, together
from rlframework_conformance.mutants.policy_worker.engine_access import change_weights, to_bfloat16

DATA = Layout(data=2)


@around(PolicyWorker.save_pretrained)
def _save_the_start(call: Any, worker: Any, path: str) -> None:
    current = worker.engine.snapshot()
    worker.engine.restore(worker.engine.start)
    call(path)
    worker.engine.restore(current)


_COPIED = around(Engine.whole_model)(lambda call, engine: None)
"""Generation gets a copy of the weights in any layout, also where the engine could give it the live module."""


def _stale(gather: Callable[..., Any], fragment: str) -> Callable[[Any], Any]:
    """Break weights on their way: those whose names contain `fragment` stay as when `gather` first returned them."""

    @around(gather)
    def stale(call: Any, part: Any, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        first: dict[str, Tensor] = vars(part).setdefault("first", {})
        for name, weight in call(names):
            yield name, first.setdefault(name, weight.clone()) if fragment in name else weight

    return stale


@around(PolicyWorker.use_reference_model)
@contextmanager
def _leave_the_reference(call: Any, worker: Any) -> Any:
    vars(worker).pop("policy_weights", None)
    current = worker.engine.snapshot()
    worker.engine.restore(worker.scoring.reference.weights)
    yield
    worker.policy_weights = current


@around(PolicyWorker.train, PolicyWorker.get_logprobs)
def _restore_the_policy(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    if (weights := vars(worker).pop("policy_weights", None)) is not None:
        worker.engine.restore(weights)
    return call(*args, **options)


@mutant("seeds_by_place", "Samples are drawn by row index instead of by seed.")
@around(PolicyWorker.exchange)
def _seeds_by_place(call: Any, worker: Any, requests: Any, *args: Any, **options: Any) -> Any:
    return call([replace(request, seed=row) for row, request in enumerate(requests)], *args, **options)


@mutant("greedy_samples", "Greedy generation samples.")
@around(PolicyWorker.exchange)
def _greedy_samples(call: Any, worker: Any, requests: Any, *args: Any, **options: Any) -> Any:
    sampled = [replace(each, sampling=replace(each.sampling, temperature=1.0)) for each in requests]
    return call(sampled, *args, **options)


SQUARE = "model.layers.0.self_attn.q_proj.weight"
OTHER = "model.layers.1.self_attn.q_proj.weight"
EXCHANGED = {SQUARE: OTHER, OTHER: SQUARE}


def _changed_when_sent(change: Callable[[Tensor], Tensor], names: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Break sending only: each sent weight, or each of those with these `names`, becomes `change(weight)`."""

    @around(TrainedWeights.gather)
    def gather(call: Any, weights: Any, sent: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in call(sent):
            yield name, change(weight) if not names or name in names else weight

    return gather


@mutant("names_swapped", "Two weights of the same shape are sent under each other's names.")
@around(TrainedWeights.gather)
def _names_swapped(call: Any, weights: Any, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in call([EXCHANGED.get(name, name) for name in names]):
        yield EXCHANGED.get(name, name), weight


@mutant("last_weight_not_sent", "The last weight of each group is not sent.")
@around(PolicyWorker.get_weights_ipc_handles)
def _last_weight_not_sent(call: Any, worker: Any, keys: Iterable[str]) -> Any:
    return call(list(keys)[:-1])


@mutant("one_buffer", "A group of weights overwrites the previous one before it has been read.")
@around(PolicyWorker.get_weights_ipc_handles)
def _one_buffer(call: Any, worker: Any, keys: Iterable[str]) -> Any:
    handles = call(keys)
    for group in handles.values():  # overwritten before any receiver can read it
        group.slots[-1].of(worker.sender.ipc.written()).zero_()
    return handles


@mutant("room_not_written", "Weights are reported as written into the engine's memory, but one of them is missing.")
@around(PolicyWorker.get_weights_ipc_handles)
def _room_not_written(call: Any, worker: Any, keys: Iterable[str]) -> Any:
    handles = call(keys)
    for group in handles.values() if worker.sender.ipc.receive_buffer is not None else ():
        group.slots[-1].of(worker.sender.ipc.written()).zero_()
    return handles


@mutant("trainer_rounded", "A refit rounds the trainer's own weights to the transfer dtype.")
@around(PolicyWorker.prepare_info_for_collective)
def _trainer_rounded(call: Any, worker: Any) -> Any:
    info = call()
    if torch.bfloat16 in {dtype for _, dtype in info.values()}:
        change_weights(worker.engine, to_bfloat16)
    return info


MUTANTS = (
    mutant("one_tensor_not_saved", "The final norm is missing from the saved model.")(
        result(
            Engine.gather_weights,
            lambda weights: ((name, weight) for name, weight in weights if name != "model.norm.weight"),
        )
    ),
    mutant("saved_in_bfloat16", "Weights are saved in bfloat16.")(
        result(Engine.gather_weights, lambda weights: ((name, weight.to(torch.bfloat16)) for name, weight in weights))
    ),
    mutant("saving_rounds_weights", "Saving rounds the live weights to bfloat16.")(
        after(PolicyWorker.save_pretrained, lambda worker: change_weights(worker.engine, to_bfloat16))
    ),
    mutant("generating_rounds_weights", "Generation rounds the live weights to bfloat16.")(
        after(PolicyWorker.exchange, lambda worker: change_weights(worker.engine, to_bfloat16))
    ),
    mutant("saving_fails_in_silence", "A failed save raises no error.")(
        in_silence(PolicyWorker.save_pretrained, WriteError)
    ),
    mutant("nothing_to_prepare", "Handles are returned without a refit having been prepared.")(
        before(PolicyWorker.get_weights_ipc_handles, lambda worker: worker.prepare_weights_for_ipc())
    ),
    mutant("lost_engines_borne", "Weights that no engine received are reported as sent.")(
        in_silence(PolicyWorker.broadcast_weights_for_collective, RefitError)
    ),
    mutant("saves_the_weights_of_the_start", "Saving writes the initial weights instead of the trained ones.")(
        together(after(Engine.build, lambda engine: setattr(engine, "start", engine.snapshot())), _save_the_start)
    ),
    mutant("stale_weights_after_refit", "The engine keeps the weights of the first refit.", layout=DATA)(
        together(_COPIED, _stale(Engine.gather_weights, ""))
    ),
    mutant("one_tensor_skipped_in_refit", "A refit does not update one of the norms.", layout=DATA)(
        together(_COPIED, _stale(Engine.gather_weights, "layers.0.input_layernorm"))
    ),
    mutant(
        "reference_left_for_generation", "The policy's weights are restored only at the next training or scoring call."
    )(together(_leave_the_reference, _restore_the_policy)),
    mutant("weights_of_the_first_refit", "Every refit sends the weights of the first one.")(
        _stale(TrainedWeights.gather, "")
    ),
    mutant("one_weight_stale", "The norms are always sent as they were at the first refit.")(
        _stale(TrainedWeights.gather, "layernorm")
    ),
    mutant("sent_transposed", "A square matrix is sent transposed.")(
        _changed_when_sent(lambda weight: weight.t().contiguous(), (SQUARE,))
    ),
    mutant("rounded_on_the_way", "Weights are rounded to float16 in transit.")(
        _changed_when_sent(lambda weight: weight.to(torch.float16).to(weight.dtype))
    ),
    mutant(
        "part_sent_as_whole", "One shard of a matrix sharded over two ranks is sent twice.", layout=Layout(tensor=2)
    )(_changed_when_sent(lambda weight: torch.cat([weight.chunk(2)[0]] * 2), (SQUARE,))),
    mutant("announced_in_fp32", "Weights are announced in fp32 instead of the transfer dtype.")(
        around(TrainedWeights.transfer_dtype)(lambda call, weights: torch.float32)
    ),
)
