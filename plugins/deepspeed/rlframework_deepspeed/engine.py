"""The training engine on DeepSpeed: any Hugging Face causal language model, on CPU (gloo) and GPU (NCCL).

Supports ZeRO (stages 0 to 3), AutoTP, context parallelism, LoRA with peft layers, and reward models.

Implements the primitives of `rlframework.policy.engine.Engine`: the step in this module, weights and moments in
`named_state`. Accumulation, clipping and the schedule are the framework's, not DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from rlframework.engine import (
    BACKWARD,
    FORWARD,
    HeadRequest,
    HostBuffers,
    Microbatch,
    MicrobatchRule,
    Step,
    StepResult,
    align_media,
    attending,
    forward,
    is_multimodal,
    kernel_for_packed_rows,
    on_device,
    on_host,
    packs_images,
    read_head_output,
    trace_span,
)
from rlframework_deepspeed import gradient_norm, process_state, zero_offload
from rlframework_deepspeed.build import build
from rlframework_deepspeed.config import DeepSpeedConfig
from rlframework_deepspeed.named_state import ZeroState
from rlframework_deepspeed.ulysses import context_of
from rlframework_deepspeed.zero import shards_of


class DeepSpeedEngine(ZeroState):
    """One rank of a model under DeepSpeed."""

    backend_config: DeepSpeedConfig
    backend_config_model = DeepSpeedConfig
    _failed: bool = False
    """Whether the previous forward or backward failed."""

    def build(self, *, init_optimizer: bool) -> None:
        """See `Engine.build`."""
        built = build(
            self.config, self.backend_config, self.context, self.tokenizer, self.device, init_optimizer=init_optimizer
        )
        self._engine, self.model, self._head, self._packs = built.engine, built.model, built.head, built.packs
        self._tensor, self._groups, self._saved_buffers = built.tensor, built.groups, built.saved_buffers
        self._layout = built.layout
        # the mask that transformers makes for padded rows reads the device in each forward
        self._multimodal = is_multimodal(self.model)
        self._replace_padded = built.packs and not self._multimodal and self.device.type != "cpu"
        self._shards = shards_of(self._engine)
        self._host = HostBuffers()
        group = self._groups.context
        self._context = context_of(self.backend_config, group) if group is not None else None
        with process_state.leaving_on_failure(self.context):
            self.fill()

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """See `Engine.forward_backward`."""
        if self._failed:
            self._shards.recover()
        self._failed = True
        if self._multimodal:  # ranks run the same modules: ZeRO-3 gathers their weights, and all stages sum gradients
            aligned = align_media(on_host(microbatches), self.data_parallel_group())
            microbatches = on_device(aligned, self.device)
        self.model.train(not forward_only)
        if not forward_only:
            self._shards.discard()
        last = len(microbatches) - 1
        results = [
            self._evaluate(one, head, step) if forward_only else self._learn(one, head, step, last=number == last)
            for number, one in enumerate(microbatches)
        ]
        self._failed = False
        return results

    def _evaluate(self, microbatch: Microbatch, head: HeadRequest, step: Step) -> StepResult:
        with self._attending(microbatch):
            with torch.no_grad(), trace_span(FORWARD):
                values = self._forward(microbatch, head)
            return step(read_head_output(values, head), microbatch)

    def _learn(self, microbatch: Microbatch, head: HeadRequest, step: Step, *, last: bool) -> StepResult:
        self._engine.set_gradient_accumulation_boundary(last)
        with self._attending(microbatch):
            with trace_span(FORWARD):
                values = self._forward(microbatch, head)
            result = step(read_head_output(values, head), microbatch)
            assert result.loss is not None
            # DeepSpeed averages over its data-parallel ranks; the contract is the sum
            factor = self._shards.ranks * self._shards.own_scale()
            with trace_span(BACKWARD):
                self._engine.backward(result.loss * factor)
            result.loss = None
        return result

    def _attending(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        return attending(self.model.config, microbatch, self._context, replace_padded=self._replace_padded)

    def _forward(self, microbatch: Microbatch, head: HeadRequest) -> torch.Tensor:
        replace = self._replace_padded
        return forward(self._engine, self._head, microbatch, head, self._context, replace_padded=replace)

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`."""
        with self.waits.measured():
            self._shards.share_reached()
            norm = gradient_norm.total_norm(
                self._shards, lambda parameter: self._tensor.partition(parameter) is not None, self._tensor.group
            )
        return norm, gradient_norm.step(self._shards, norm, max_grad_norm, lr)

    def microbatch_rule(self) -> MicrobatchRule:
        """See `Engine.microbatch_rule`."""
        multiple = 1 if self._context is None else self._context.pad_multiple
        packs_media = self._packs and packs_images(self.model.config)
        return MicrobatchRule(pad_multiple=multiple, few_shapes=self.device.type != "cpu", packs_media=packs_media)

    def preferred_batching(self) -> str:
        """See `Engine.preferred_batching`: on a GPU packed where one kernel computes a packed row."""
        half = self.config.precision != "float32"
        suits = self.device.type == "cpu" or kernel_for_packed_rows(self.device, half_precision=half)
        return "packed" if self._packs and suits else "dynamic"

    # -- generation and the rest --------------------------------------------------------------------------------------

    def move(self, device: torch.device, *, model: bool = False, optimizer: bool = False) -> int:
        """See `Engine.move`."""
        return zero_offload.move(self._shards, device, self._host, model=model, optimizer=optimizer)

    def whole_model(self) -> nn.Module | None:
        """See `Engine.whole_model`."""
        whole = self._engine.zero_optimization_stage() < 3 and self._tensor.group is None
        return self.model if whole else None

    def data_parallel_group(self) -> Any:
        """See `Engine.data_parallel_group`."""
        return self._groups.data

    def data_parallel_size(self) -> int:
        """See `Engine.data_parallel_size`."""
        return self._groups.sizes.data

    def close(self) -> None:
        """See `Engine.close`."""
        if getattr(self, "_engine", None) is None:
            return
        engine, self._engine = self._engine, None
        engine.destroy()
        del self.model, self._shards
        process_state.leave()
