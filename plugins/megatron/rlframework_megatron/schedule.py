"""The loop over microbatches: megatron-core's schedules, with or without a pipeline, returning results on every stage.

The last stage's forward runs the head and then `step` on its output; results are then broadcast to the other stages.
Nothing is averaged: `calculate_per_token_loss` disables it, see `settings.transformer_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.engine import (
    FORWARD,
    ContextParallel,
    HeadRequest,
    Microbatch,
    MicrobatchRule,
    RowLayout,
    Step,
    StepResult,
    on_host,
    read_head_output,
    trace_span,
)
from rlframework_megatron.model import Chunk, model_inputs
from rlframework_megatron.parallel import Groups
from rlframework_megatron.upstream import get_forward_backward_func


class Schedule:
    """Runs this rank's `chunks`; `models`: the chunks wrapped for gradient reduction, or the chunks themselves."""

    def __init__(self, chunks: Sequence[Chunk], models: Sequence[nn.Module], groups: Groups) -> None:
        self._models, self._groups = list(models), groups
        self._config = chunks[0].config
        self._head, self._by_length = chunks[-1].head, chunks[0].rotary.by_length
        self._context = ContextParallel(groups.context) if groups.context is not None else None

    def rule(self) -> MicrobatchRule:
        """The required number of microbatches and the multiple that their lengths are padded to."""
        sizes = self._groups.sizes
        few = self._groups.device.type != "cpu"
        stages = sizes.pipeline if sizes.virtual > 1 else 1  # interleaving needs a multiple of the stages
        pad = (sizes.tensor if sizes.sequence else 1) * (1 if self._context is None else self._context.pad_multiple)
        return MicrobatchRule(count_multiple=stages, count_minimum=stages, pad_multiple=pad, few_shapes=few)

    def run(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """See `Engine.forward_backward`; gradients stay in megatron-core's buffers."""
        if not microbatches:
            return []
        results: list[StepResult] = []
        shapes = {tuple(microbatch.processed_inputs.input_ids.shape) for microbatch in on_host(microbatches)}
        self._config.variable_seq_lengths = self._groups.sizes.pipeline > 1 and len(shapes) > 1
        rows, length = next(iter(shapes))
        iterators: list[Iterator[Microbatch]] = [iter(microbatches) for _ in self._models]
        single = len(self._models) == 1
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=self._forward_step(head, step, results, forward_only),
                data_iterator=iterators[0] if single else iterators,
                model=self._models[0] if single else self._models,
                num_microbatches=len(microbatches),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
        return self._broadcast_results(results)

    def _forward_step(
        self, head: HeadRequest, step: Step, results: list[StepResult], forward_only: bool
    ) -> Callable[[Iterator[Microbatch], nn.Module], tuple[Tensor, Callable[..., Any]]]:
        """The function that the schedule calls for each microbatch on each chunk."""

        def loss(microbatch: Microbatch, values: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            result = step(read_head_output(values, head), microbatch)
            found = values.new_zeros(()) if forward_only else result.loss
            assert found is not None
            result.loss = None
            results.append(result)
            return found, torch.zeros((), dtype=torch.int, device=values.device), {}

        def forward(microbatches: Iterator[Microbatch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            microbatch = next(microbatches)
            with trace_span(FORWARD):
                output = self._forward(model, microbatch, head)
            return output, partial(loss, microbatch)

        return forward

    def _forward(self, model: nn.Module, microbatch: Microbatch, head: HeadRequest) -> Tensor:
        """Run one chunk; return the next stage's input or, on the last, the head's values at all head positions."""
        if self._context is not None:
            return self._forward_shard(model, microbatch, head, self._context)
        positions, targets = microbatch.head_positions, microbatch.targets
        with nullcontext() if self._head is None else self._head.computing(head, positions, targets):
            output: Tensor = model(**model_inputs(microbatch, by_length=self._by_length))
        return output

    def _forward_shard(
        self, model: nn.Module, microbatch: Microbatch, head: HeadRequest, context: ContextParallel
    ) -> Tensor:
        """Like `_forward`, on this rank's shard of each sequence; returns the values of all context-parallel ranks."""

        def forward_shard(input_ids: Tensor, position_ids: Tensor, row_layout: RowLayout, **_: Any) -> Any:
            return SimpleNamespace(logits=model(input_ids, position_ids, row_layout))

        if self._head is not None and model is self._models[-1]:
            return context.forward(forward_shard, self._head, microbatch, head)
        inputs, share = microbatch.processed_inputs, context.shard(microbatch)
        assert inputs.position_ids is not None
        output: Tensor = model(inputs.input_ids[:, share.columns], inputs.position_ids[:, share.columns], share)
        return output

    def _broadcast_results(self, results: list[StepResult]) -> list[StepResult]:
        """Return the last stage's `results` on every stage. Collective over the pipeline."""
        group = self._groups.pipeline
        if group is None:
            return results
        received: list[Any] = [_on_cpu([result.outputs for result in results], self._groups.device)]
        dist.broadcast_object_list(received, src=self._groups.last_stage, group=group)
        if self._groups.pipeline_rank == self._groups.sizes.pipeline - 1:
            return results
        return [StepResult(outputs=outputs) for outputs in received[0]]


def _on_cpu(results: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Copy the tensors of `results` to CPU memory, waiting once for all."""
    found = [
        {
            name: value.to("cpu", non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in one.items()
        }
        for one in results
    ]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return found
