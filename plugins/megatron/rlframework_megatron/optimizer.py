"""Megatron-core's gradient reduction and AdamW, plain or distributed.

The framework decides the weight-decay groups, the learning rate of each step and the handling of non-finite gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlframework.config.policy import PolicyConfig
from rlframework.engine import DeviceWait
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.gradients import single_optimizers, total_norm
from rlframework_megatron.model import Chunk
from rlframework_megatron.upstream import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    finalize_model_grads,
    get_megatron_optimizer,
)


def wrap_ddp(chunks: Sequence[Chunk], section: MegatronConfig) -> list[Any]:
    """Wrap each chunk in megatron-core's `DistributedDataParallel`. Collective."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=section.distributed_optimizer,
        overlap_grad_reduce=section.overlap_grad_reduce,
        overlap_param_gather=section.overlap_param_gather,
    )
    return [
        DistributedDataParallel(config=chunk.config, ddp_config=settings, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


class Optimizer:
    """The optimizer of the models from `wrap_ddp`; sets the gradient hooks in their configuration."""

    def __init__(self, models: Sequence[Any], config: PolicyConfig, section: MegatronConfig, waits: DeviceWait) -> None:
        self.models, self._waits = list(models), waits
        self._device = next(self.models[0].parameters()).device
        self._decay = config.optimizer.weight_decay
        no_decay = ParamPredicate(name="fewer_than_two_dimensions", fn=lambda parameter: parameter.ndim < 2)
        self.inner: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.optimizer.lr,
                weight_decay=self._decay,
                adam_beta1=config.optimizer.betas[0],
                adam_beta2=config.optimizer.betas[1],
                adam_eps=config.optimizer.eps,
                clip_grad=0.0,
                bf16=self.models[0].config.bf16,
                params_dtype=self.models[0].config.params_dtype,
                use_distributed_optimizer=section.distributed_optimizer,
                overlap_param_gather=section.overlap_param_gather,
            ),
            self.models,
            config_overrides={ParamKey(predicate=no_decay): {"wd_mult": 0.0}},
            use_gloo_process_groups=False,
        )
        for group in self.inner.param_groups:
            group["weight_decay"] = self._decay * group["wd_mult"]
            if any(isinstance(optimizer.optimizer, torch.optim.AdamW) for optimizer in self.optimizers):
                group["fused"] = True  # torch's AdamW: Transformer Engine and Apex are not installed
        self._configure_schedule(section)
        self._overlaps_param_gather, self._gather_pending = section.overlap_param_gather, False

    def _configure_schedule(self, section: MegatronConfig) -> None:
        """Set the functions that the schedule reads from the model's configuration."""
        core_config = self.models[0].config
        core_config.finalize_model_grads_func = _finalize
        if section.overlap_grad_reduce:
            core_config.no_sync_func = _one_or_all([model.no_sync for model in self.models])
            core_config.grad_sync_func = _one_or_all([model.start_grad_sync for model in self.models])
        if section.overlap_param_gather:
            core_config.param_sync_func = _one_or_all([model.start_param_sync for model in self.models])

    @property
    def optimizers(self) -> list[Any]:
        """See `single_optimizers`."""
        return single_optimizers(self.inner)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for model in self.models:
            model.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`. Collective."""
        self.inner.prepare_grads()
        with self._waits.measured():
            norm = total_norm(self.inner, self._device)
        skipped = not math.isfinite(norm)
        if not skipped:
            if max_grad_norm is not None and norm > max_grad_norm:
                self._scale(max_grad_norm / (norm + 1e-6))
            for group in self.inner.param_groups:
                group["lr"] = lr
            self.inner.step_with_ready_grads()
            self._gather_pending = self._overlaps_param_gather
        self.zero_grad()
        return norm, skipped

    def finish_param_gather(self) -> None:
        """Gather the updated weights now if that was deferred to the next forward pass. Collective in that case."""
        if self._gather_pending:
            for model in self.models:
                model.start_param_sync(force_sync=True)
            self._gather_pending = False

    def _scale(self, factor: float) -> None:
        for optimizer in self.optimizers:
            for parameter in optimizer.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


def _finalize(models: list[nn.Module], tokens: Any = None, **arguments: Any) -> None:
    """Reduce gradients across data-parallel ranks, of norms and of tied heads, without dividing by `tokens`."""
    finalize_model_grads(models, None, **arguments)


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
