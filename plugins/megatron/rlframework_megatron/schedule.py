"""The loop over microbatches: megatron-core's schedules, with and without a pipeline, and results on every stage.

The head runs inside the last stage's forward, and `step` on what it gives; the other stages hear of the results after.
Left out: averaging of any kind, which `calculate_per_token_loss` switches off; see `settings.transformer_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.interfaces.data_processor import Microbatch, MicrobatchRule
from rlframework.models.context_parallel import ContextParallel, Share
from rlframework.policy.engine import Step, StepResult
from rlframework.policy.head.request import HeadRequest, read_head_output
from rlframework.policy.trace_spans import FORWARD, span
from rlframework_megatron.model import Chunk, model_inputs
from rlframework_megatron.parallel import Groups
from rlframework_megatron.upstream import get_forward_backward_func


class Schedule:
    """Runs `models`, the `chunks` of this rank inside what reduces their gradients, or the chunks themselves."""

    def __init__(self, chunks: Sequence[Chunk], models: Sequence[nn.Module], groups: Groups) -> None:
        self._models, self._groups = list(models), groups
        self._config = chunks[0].config
        self._head = chunks[-1].head
        self._context = ContextParallel(groups.context) if groups.context is not None else None

    def rule(self) -> MicrobatchRule:
        """How many microbatches there must be, and what their lengths divide by."""
        sizes = self._groups.sizes
        stages = sizes.pipeline if sizes.virtual > 1 else 1  # interleaving takes whole rounds of the stages
        pad = (sizes.tensor if sizes.sequence else 1) * (1 if self._context is None else self._context.pad_multiple)
        return MicrobatchRule(count_multiple=stages, count_minimum=stages, pad_multiple=pad)

    def run(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """See `Engine.forward_backward`; the gradients are left in megatron-core's buffers."""
        if not microbatches:
            return []
        results: list[StepResult] = []
        shapes = {tuple(microbatch.processed_inputs.input_ids.shape) for microbatch in microbatches}
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
        return self._told(results)

    def _forward_step(
        self, head: HeadRequest, step: Step, results: list[StepResult], forward_only: bool
    ) -> Callable[[Iterator[Microbatch], nn.Module], tuple[Tensor, Callable[..., Any]]]:
        """What the schedule calls for each microbatch on each chunk."""

        def loss(microbatch: Microbatch, values: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            result = step(read_head_output(values, head), microbatch)
            found = values.new_zeros(()) if forward_only else result.loss
            assert found is not None
            result.loss = None
            results.append(result)
            return found, torch.zeros((), dtype=torch.int, device=values.device), {}

        def forward(microbatches: Iterator[Microbatch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            microbatch = next(microbatches)
            with span(FORWARD):
                output = self._forward(model, microbatch, head)
            return output, partial(loss, microbatch)

        return forward

    def _forward(self, model: nn.Module, microbatch: Microbatch, head: HeadRequest) -> Tensor:
        """Of one chunk: what the next stage gets, or on the last one the head's values at all head positions."""
        if self._context is not None:
            return self._forward_part(model, microbatch, head, self._context)
        output: Tensor
        if self._head is None:
            output = model(**model_inputs(microbatch))
            return output
        with self._head.computing(head, microbatch.head_positions, microbatch.targets):
            output = model(**model_inputs(microbatch))
        return output

    def _forward_part(
        self, model: nn.Module, microbatch: Microbatch, head: HeadRequest, context: ContextParallel
    ) -> Tensor:
        """The same of this rank's part of each sequence; the values are those of all ranks that share them."""

        def part(input_ids: Tensor, position_ids: Tensor, context_share: Share, **_: Any) -> Any:
            return SimpleNamespace(logits=model(input_ids, position_ids, context_share))

        if self._head is not None and model is self._models[-1]:
            return context.forward(part, self._head, microbatch, head)
        inputs, share = microbatch.processed_inputs, context.share(microbatch)
        assert inputs.position_ids is not None
        output: Tensor = model(inputs.input_ids[:, share.columns], inputs.position_ids[:, share.columns], share)
        return output

    def _told(self, results: list[StepResult]) -> list[StepResult]:
        """`results` of the last stage, on every stage."""
        group = self._groups.pipeline
        if group is None:
            return results
        told: list[Any] = [[_on_cpu(result.outputs) for result in results]]
        dist.broadcast_object_list(told, src=self._groups.last_stage, group=group)
        if self._groups.pipeline_rank == self._groups.sizes.pipeline - 1:
            return results
        return [StepResult(outputs=outputs) for outputs in told[0]]


def _on_cpu(outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in outputs.items()}
