"""The `step` functions that `forward_backward` calls: head values become log-probabilities in rows, or a loss."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import Microbatch
from rlframework.interfaces.loss import LossFunction
from rlframework.policy.engine import Step, StepResult
from rlframework.policy.head.request import HeadOutput
from rlframework.policy.profiling import LOSS, trace_span


def _dense(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Scatter head values `[N, ...]` to their targets in `[b, S', ...]`, 0 elsewhere; differentiable."""
    if len(values) != len(microbatch.scatter):
        raise RuntimeError(
            f"the head returned {len(values)} rows of values for a microbatch with {len(microbatch.scatter)} positions"
            "; it must run at exactly Microbatch.head_positions, as inside HeadPatch.computing"
        )
    rows, width = microbatch.data_dict["input_ids"].shape
    flat = values.new_zeros((rows * width, *values.shape[1:])).index_put((microbatch.scatter,), values)
    return flat.view(rows, width, *values.shape[1:])


def _require_output(output: HeadOutput) -> None:
    if not isinstance(output, HeadOutput):
        raise TypeError(
            f"`step` takes a HeadOutput, but got a {type(output).__name__}; convert the patched model's output with "
            "read_head_output(values, head)"
        )


def require_results(results: Sequence[StepResult], microbatches: Sequence[Microbatch]) -> None:
    """Raise a RuntimeError unless `forward_backward` returned one result per microbatch."""
    if isinstance(results, Sequence) and len(results) == len(microbatches):
        return
    given = f"{len(results)} results" if isinstance(results, Sequence) else type(results).__name__
    raise RuntimeError(
        f"the engine's forward_backward returned {given} for {len(microbatches)} microbatches; it must return a list "
        "with the StepResult of each, in order, on every rank"
    )


def values_step(output: HeadOutput, microbatch: Microbatch) -> StepResult:
    """Scatter all of the head's results to `[b, S', ...]` each, by the names of `HeadRequest.results`."""
    _require_output(output)
    return StepResult(outputs={name: _dense(values, microbatch) for name, values in output.results().items()})


def loss_step(loss_fn: LossFunction, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Step:
    """Return the step that computes the loss of a microbatch. A dummy has a loss of 0 and no metrics."""

    def step(output: HeadOutput, microbatch: Microbatch) -> StepResult:
        _require_output(output)
        values = output.logits if output.logprobs is None else output.logprobs
        if values is None:
            raise RuntimeError("the HeadOutput has neither logprobs nor logits; compute what HeadRequest.wants names")
        if microbatch.is_dummy:
            return StepResult(loss=values.sum() * 0.0)
        data = microbatch.data_dict
        if output.entropy is not None:
            data = BatchedDataDict({**data, "entropy": _dense(output.entropy, microbatch)[:, 1:]})
        with trace_span(LOSS):
            loss, metrics = loss_fn(_dense(values, microbatch)[:, 1:], data, global_valid_seqs, global_valid_toks)
        return StepResult(loss=loss, outputs={**metrics, "loss": loss.detach()})

    return step
