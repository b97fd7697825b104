"""The reference training engine: any Hugging Face causal language model, on CPU (gloo) and GPU (NCCL).

Split by FSDP2 or HSDP, tensor and sequence parallelism, context and expert parallelism, over one mesh (`mesh`).
Vision-language models too, in padded and dynamic microbatches; LoRA by layers of peft; reward models (`reward`).

Supplies the primitives of `rlframework.policy.engine.Engine`: here the step, in `held` the weights and moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from rlframework.interfaces.data_processor import Microbatch, MicrobatchRule
from rlframework.models.context_parallel import ContextParallel
from rlframework.models.forward import attending, forward
from rlframework.models.load_balancing import RouterLoss
from rlframework.models.loading import is_multimodal
from rlframework.policy.engine import Step, StepResult
from rlframework.policy.head.request import HeadOutput, HeadRequest, read_head_output
from rlframework.policy.optimization import parameter_groups
from rlframework.policy.trace_spans import BACKWARD, FORWARD, span
from rlframework.policy.worker import PolicyWorkerBase
from rlframework.workers import process_groups
from rlframework_dtensor import gradients, media, offload
from rlframework_dtensor.build import build_model
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.mesh import Sizes
from rlframework_dtensor.state import Held
from rlframework_dtensor.torch_context_parallel import TorchContextParallel


class DTensorPolicyWorker(Held, TorchContextParallel, offload.ModelMoves, PolicyWorkerBase):
    """One rank of a model under FSDP2 and the other axes of its mesh. Constructor arguments: see `PolicyWorkerBase`."""

    backend_config: DTensorConfig
    backend_config_model = DTensorConfig

    def build(self, *, init_optimizer: bool) -> None:
        """See `Engine.build`."""
        self._sizes = Sizes.of(self.context.world_size, self.config.parallelism, self.backend_config.replicate)
        built = build_model(self.config, self.backend_config, self.context, self._sizes, self.tokenizer, self.device)
        self.model, self._head, self._mesh, self._packs = built.model, built.head, built.mesh, built.packs
        self._multimodal = is_multimodal(self.model)
        group = self._mesh.context_group() if self._mesh is not None else None
        self._context = ContextParallel(group) if group is not None else None
        wanted = self.config.router_aux_loss_coef > 0
        self._router_loss = RouterLoss(self.model, self.data_parallel_group()) if wanted else None
        self._optimizer = self._make_optimizer() if init_optimizer else None

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self.config.optimizer
        groups = parameter_groups(self.model.named_parameters(), config)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """See `Engine.forward_backward`."""
        self.model.train(not forward_only)
        if not forward_only:
            self.model.zero_grad(set_to_none=True)
            if self._multimodal:
                microbatches = media.evened(microbatches, self.data_parallel_group())
            if self._router_loss is not None:
                step = self._with_router_loss(step, microbatches, head)
        return [self._run_microbatch(microbatch, head, step, forward_only) for microbatch in microbatches]

    def _with_router_loss(self, step: Step, microbatches: Sequence[Microbatch], head: HeadRequest) -> Step:
        """`step`, and the part of the routers' loss that the microbatch has."""
        routers = self._router_loss
        assert routers is not None

        def forward(microbatch: Microbatch) -> None:
            self._run_microbatch(microbatch, head, lambda output, _: StepResult(), forward_only=True)

        balance = routers.balance(microbatches, forward)

        def with_part(output: HeadOutput, microbatch: Microbatch) -> StepResult:
            result, part = step(output, microbatch), routers.part(microbatch, balance)
            assert result.loss is not None
            result.loss = result.loss + self.config.router_aux_loss_coef * part
            if not microbatch.is_dummy:
                result.outputs["router_aux_loss"] = part.detach()
            return result

        return with_part

    def _run_microbatch(self, microbatch: Microbatch, head: HeadRequest, step: Step, forward_only: bool) -> StepResult:
        with attending(self.model.config, microbatch, self._context):
            with torch.no_grad() if forward_only else nullcontext():
                with span(FORWARD):
                    values = forward(self.model, self._head, microbatch, head, self._context)
                result = step(read_head_output(values, head), microbatch)
            if not forward_only:
                assert result.loss is not None
                # FSDP2 takes the mean over ranks, the contract is the sum
                with span(BACKWARD):
                    (result.loss * self._sizes.gradient_ranks).backward()
                result.loss = None
        return result

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`."""
        assert self._optimizer is not None
        found = gradients.gradients_of(self.model.parameters())
        norm = float(gradients.total_norm(found, self._mesh))
        skipped = not math.isfinite(norm)
        if not skipped:
            if max_grad_norm is not None and norm > max_grad_norm:
                gradients.clip(found, max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return norm, skipped

    def microbatch_rule(self) -> MicrobatchRule:
        """See `Engine.microbatch_rule`."""
        multiple = 1 if self._context is None else self._context.pad_multiple
        # with sequence parallelism each rank has as many tokens
        return MicrobatchRule(pad_multiple=multiple * (self._sizes.tensor if self.config.parallelism.sequence else 1))

    def preferred_batching(self) -> str:
        """See `Engine.preferred_batching`: on a CPU as measured; on a GPU nothing has been measured yet."""
        return "packed" if self._packs else "dynamic"

    def preferred_tokens(self) -> int:
        """See `Engine.preferred_tokens`: on a CPU what stays in its caches is faster than what is large."""
        return 1024 if self.device.type == "cpu" else super().preferred_tokens()

    # -- generation and the rest --------------------------------------------------------------------------------------

    def move(self, device: torch.device, *, model: bool = False, optimizer: bool = False) -> int:
        """See `Engine.move`."""
        moved, on_cpu = 0, self.config.offload.parameters
        if model:
            moved += offload.move_model(self.model, device, buffers_only=on_cpu)
        if optimizer and self._optimizer is not None and not on_cpu:
            moved += offload.move_optimizer(self._optimizer, device)
        return moved

    def whole_model(self) -> nn.Module | None:
        """See `Engine.whole_model`."""
        return None if self._mesh is not None else self.model

    @contextmanager
    def generating(self) -> Iterator[None]:
        """See `Engine.generating`: activation checkpointing would switch the cache off."""
        self.model.eval()
        yield

    def data_parallel_group(self) -> Any:
        """See `Engine.data_parallel_group`."""
        return self._mesh.data_group() if self._mesh is not None else None

    def data_parallel_size(self) -> int:
        """See `Engine.data_parallel_size`."""
        return self._sizes.data

    def close(self) -> None:
        """See `Engine.close`."""
        self._optimizer = None
        del self.model
        if self._mesh is not None:
            self._mesh = None
            process_groups.leave()
