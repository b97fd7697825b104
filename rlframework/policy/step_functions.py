"""What is done with the head's values of one microbatch: they become log-probabilities in rows, or a loss.

These are the `step` functions that an engine's `forward_backward` calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlframework.interfaces.data_processor import Microbatch
from rlframework.interfaces.loss import LossFunction
from rlframework.policy.engine import Step, StepResult
from rlframework.policy.head.request import HeadOutput
from rlframework.policy.trace_spans import LOSS, span


def _dense(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Head values `[N, ...]` at the positions of their targets in `[b, S', ...]`, 0 elsewhere; differentiable."""
    if len(values) != len(microbatch.scatter):
        raise RuntimeError(
            f"the head gave {len(values)} rows of values for a microbatch with {len(microbatch.scatter)} positions "
            "(Microbatch.head_positions): it must run at these and nowhere else, as it does in HeadPatch.computing"
        )
    rows, width = microbatch.data_dict["input_ids"].shape
    flat = values.new_zeros((rows * width, *values.shape[1:])).index_put((microbatch.scatter,), values)
    return flat.view(rows, width, *values.shape[1:])


def _require_output(output: HeadOutput) -> None:
    if not isinstance(output, HeadOutput):
        raise TypeError(
            f"`step` takes a HeadOutput, and got a {type(output).__name__}: what a model under HeadPatch returns is "
            "made one by read_head_output(values, head)"
        )


def require_results(results: Sequence[StepResult], microbatches: Sequence[Microbatch]) -> None:
    """A RuntimeError unless `forward_backward` gave a result for each of its microbatches."""
    if isinstance(results, Sequence) and len(results) == len(microbatches):
        return
    given = f"{len(results)} results" if isinstance(results, Sequence) else type(results).__name__
    raise RuntimeError(
        f"the engine's forward_backward gave {given} for {len(microbatches)} microbatches; it must return a list with "
        "the StepResult of each, in order, on every rank"
    )


def values_step(output: HeadOutput, microbatch: Microbatch) -> StepResult:
    """All that the head computed, `[b, S', ...]` each, by the names of `HeadRequest.results`."""
    _require_output(output)
    return StepResult(outputs={name: _dense(values, microbatch) for name, values in output.results().items()})


def loss_step(loss_fn: LossFunction, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Step:
    """The step that turns head values into the loss of a microbatch. A dummy gives a loss of 0 and empty metrics."""

    def step(output: HeadOutput, microbatch: Microbatch) -> StepResult:
        _require_output(output)
        values = output.logits if output.logprobs is None else output.logprobs
        if values is None:
            raise RuntimeError("the HeadOutput has neither logprobs nor logits; HeadRequest.wants names what it needs")
        if microbatch.is_dummy:
            return StepResult(loss=values.sum() * 0.0)
        data = microbatch.data_dict
        if output.entropy is not None:
            data["entropy"] = _dense(output.entropy, microbatch)[:, 1:]
        with span(LOSS):
            loss, metrics = loss_fn(_dense(values, microbatch)[:, 1:], data, global_valid_seqs, global_valid_toks)
        return StepResult(loss=loss, outputs={**metrics, "loss": loss.detach()})

    return step
