"""The reference training engine: any Hugging Face causal language model, on CPU (gloo) and GPU (NCCL).

Sharded by FSDP2 or HSDP, tensor and sequence parallelism, context and expert parallelism over one mesh (`mesh`). Also
supports vision-language models, LoRA with peft's layers, and reward models.

Implements the primitives of `rlframework.policy.engine.Engine`: the training step here, weights and moments in `state`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rlframework.engine import (
    BACKWARD,
    FORWARD,
    ContextParallel,
    HeadRequest,
    HostBuffers,
    LoadBalancingLoss,
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
    process_groups,
    read_head_output,
    trace_span,
    trains_images_only,
)
from rlframework_dtensor import gradients, offload
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.gradients import GradientReduction
from rlframework_dtensor.mesh import Sizes
from rlframework_dtensor.model_builder import build_model
from rlframework_dtensor.optimizer import make_optimizer
from rlframework_dtensor.state import MeshState


class DTensorEngine(MeshState):
    """One rank of a model sharded over a mesh."""

    backend_config: DTensorConfig
    backend_config_model = DTensorConfig

    def build(self, *, init_optimizer: bool) -> None:
        """See `Engine.build`."""
        self._sizes = Sizes.of(self.context.world_size, self.config.parallelism, self.backend_config.replicate)
        built = build_model(self.config, self.backend_config, self.context, self._sizes, self.tokenizer, self.device)
        self.model, self._head, self._mesh, self._packs = built.model, built.head, built.mesh, built.packs
        self._layout = built.layout
        self._multimodal = is_multimodal(self.model)
        self._replace_padded = built.packs and not self._multimodal and self.device.type != "cpu"
        group = self._mesh.context_group() if self._mesh is not None else None
        self._context = ContextParallel(group) if group is not None else None
        balances = self.config.router_aux_loss_coef > 0
        self.router_loss = LoadBalancingLoss(self.model, self.data_parallel_group()) if balances else None
        self._optimizer = make_optimizer(self.model, self.config.optimizer) if init_optimizer else None
        self._host_weights, self._host_moments = HostBuffers(), HostBuffers()
        # the last microbatch may have no backward if only images are trained on
        when = "microbatch" if trains_images_only(self.config) else self.backend_config.reduce_gradients
        self._reduction = self._mesh and GradientReduction(self.model, when, self.device, self._sizes.tensor)

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """See `Engine.forward_backward`."""
        self.model.train(not forward_only)
        if not forward_only:
            self.model.zero_grad(set_to_none=True)
            if self._multimodal:
                aligned = align_media(on_host(microbatches), self.data_parallel_group())
                microbatches = on_device(aligned, self.device)
            if self.router_loss is not None:

                def run(microbatch: Microbatch, step: Step) -> Any:
                    return self._run_microbatch(microbatch, head, step, forward_only=True)

                step = self.router_loss.add_to(step, microbatches, run, self.config.router_aux_loss_coef)
        results = []
        for left in range(len(microbatches) - 1, -1, -1):
            if self._reduction and not forward_only:
                self._reduction.before_backward(last=not left)
            results.append(self._run_microbatch(microbatches[-1 - left], head, step, forward_only))
        return results

    def _run_microbatch(self, microbatch: Microbatch, head: HeadRequest, step: Step, forward_only: bool) -> StepResult:
        replace = self._replace_padded
        with attending(self.model.config, microbatch, self._context, replace_padded=replace):
            with torch.no_grad() if forward_only else nullcontext():
                with trace_span(FORWARD):
                    values = forward(self.model, self._head, microbatch, head, self._context, replace_padded=replace)
                result = step(read_head_output(values, head), microbatch)
            if not forward_only:
                assert result.loss is not None
                # of text alone nothing is trained if the language model is frozen
                if result.loss.requires_grad or not self._multimodal:
                    # FSDP2 averages gradients over ranks; the contract is their sum
                    with trace_span(BACKWARD):
                        (result.loss * self._sizes.gradient_ranks).backward()
                result.loss = None
        return result

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`."""
        assert self._optimizer is not None
        grads = gradients.gradients_of(self.model.parameters())
        total = gradients.total_norm(grads, self._mesh)
        with self.waits.measured():
            norm = float(total)
        skipped = not math.isfinite(norm)
        if not skipped:
            if max_grad_norm is not None and norm > max_grad_norm:
                gradients.clip(grads, max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return norm, skipped

    def microbatch_rule(self) -> MicrobatchRule:
        """See `Engine.microbatch_rule`."""
        multiple = 1 if self._context is None else self._context.pad_multiple
        # sequence parallelism needs the same number of tokens on each rank
        multiple *= self._sizes.tensor if self.config.parallelism.sequence else 1
        packs_media = self._packs and packs_images(self.model.config)
        return MicrobatchRule(pad_multiple=multiple, few_shapes=self.device.type != "cpu", packs_media=packs_media)

    def preferred_batching(self) -> str:
        """See `Engine.preferred_batching`: on a GPU packed where one kernel computes a packed row."""
        half = self.config.precision != "float32"
        suits = self.device.type == "cpu" or kernel_for_packed_rows(self.device, half_precision=half)
        return "packed" if self._packs and suits else "dynamic"

    # -- device placement, generation, process groups ------------------------------------------------------------------

    def move(self, device: torch.device, *, model: bool = False, optimizer: bool = False) -> int:
        """See `Engine.move`."""
        moved, on_cpu = 0, self.config.offload.parameters
        if model:
            moved += offload.move_model(self.model, device, self._host_weights, buffers_only=on_cpu)
        if optimizer and self._optimizer is not None and not on_cpu:
            moved += offload.move_optimizer(self._optimizer, device, self._host_moments)
        return moved

    def whole_model(self) -> nn.Module | None:
        """See `Engine.whole_model`."""
        return None if self._mesh is not None else self.model

    def data_parallel_group(self) -> Any:
        """See `Engine.data_parallel_group`."""
        return self._mesh.data_group() if self._mesh is not None else None

    def data_parallel_size(self) -> int:
        """See `Engine.data_parallel_size`."""
        return self._sizes.data

    def close(self) -> None:
        """See `Engine.close`."""
        self._optimizer = None
        del self.model, self._host_weights, self._host_moments
        if self._mesh is not None:
            mesh, self._mesh = self._mesh, None
            process_groups.leave()
            mesh.close()
