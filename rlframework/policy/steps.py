"""What is done with the head's values of one microbatch: they become log-probabilities in rows, or a loss.

These are the `step` functions that an engine's `forward_backward` calls.
"""

from __future__ import annotations

from torch import Tensor

from rlframework.interfaces.data_processor import Microbatch
from rlframework.interfaces.loss import LossFunction
from rlframework.policy.engine import Step, StepResult
from rlframework.policy.head import HeadOutput
from rlframework.policy.spans import LOSS, span


def _dense(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Head values `[N, ...]` at the positions of their targets in `[b, S', ...]`, 0 elsewhere; differentiable."""
    rows, width = microbatch.data_dict["input_ids"].shape
    flat = values.new_zeros((rows * width, *values.shape[1:])).index_put((microbatch.scatter,), values)
    return flat.view(rows, width, *values.shape[1:])


def values_step(output: HeadOutput, microbatch: Microbatch) -> StepResult:
    """All that the head computed, `[b, S', ...]` each, by the names of `HeadRequest.results`."""
    return StepResult(outputs={name: _dense(values, microbatch) for name, values in output.results().items()})


def loss_step(loss_fn: LossFunction, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Step:
    """The step that turns head values into the loss of a microbatch. A dummy gives a loss of 0 and empty metrics."""

    def step(output: HeadOutput, microbatch: Microbatch) -> StepResult:
        values = output.logits if output.logprobs is None else output.logprobs
        assert values is not None
        if microbatch.is_dummy:
            return StepResult(loss=values.sum() * 0.0)
        data = microbatch.data_dict
        if output.entropy is not None:
            data["entropy"] = _dense(output.entropy, microbatch)[:, 1:]
        with span(LOSS):
            loss, metrics = loss_fn(_dense(values, microbatch)[:, 1:], data, global_valid_seqs, global_valid_toks)
        return StepResult(loss=loss, outputs={**metrics, "loss": loss.detach()})

    return step
