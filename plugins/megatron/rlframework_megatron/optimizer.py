"""Megatron-core's reduction of gradients and its AdamW, plain or distributed, under core's rules.

Core's are the groups of weight decay, the learning rate of each step, and what happens on a gradient that is not
finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlframework.config.policy import PolicyConfig
from rlframework_megatron.config import MegatronConfig
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


def reduced(chunks: Sequence[Chunk], section: MegatronConfig) -> list[Any]:
    """`chunks`, each inside megatron-core's `DistributedDataParallel`. Collective."""
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
    """The optimizer over `models` of `reduced`; it takes over what their configuration says of gradients."""

    def __init__(self, models: Sequence[Any], config: PolicyConfig, section: MegatronConfig) -> None:
        self.models = list(models)
        self._decay = config.optimizer.weight_decay
        few = ParamPredicate(name="fewer_than_two_dimensions", fn=lambda parameter: parameter.ndim < 2)
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
            config_overrides={ParamKey(predicate=few): {"wd_mult": 0.0}},
            use_gloo_process_groups=False,
        )
        for group in self.inner.param_groups:
            group["weight_decay"] = self._decay * group["wd_mult"]
            if any(isinstance(part.optimizer, torch.optim.AdamW) for part in self.parts):
                group["fused"] = True  # without Transformer Engine and Apex it is torch's
        self._hand_over(section)
        self._gathers_late, self._unsettled = section.overlap_param_gather, False

    def _hand_over(self, section: MegatronConfig) -> None:
        """What the schedule asks the model's configuration for."""
        made = self.models[0].config
        made.finalize_model_grads_func = _finalize
        if section.overlap_grad_reduce:
            made.no_sync_func = _one_or_all([model.no_sync for model in self.models])
            made.grad_sync_func = _one_or_all([model.start_grad_sync for model in self.models])
        if section.overlap_param_gather:
            made.param_sync_func = _one_or_all([model.start_param_sync for model in self.models])

    @property
    def parts(self) -> list[Any]:
        """Megatron-core's optimizers, one of dense weights and, where there are experts, one of those."""
        return list(getattr(self.inner, "chained_optimizers", [self.inner]))

    def forget(self) -> None:
        """No gradients, whatever was there before."""
        for model in self.models:
            model.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`. Collective."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        skipped = not math.isfinite(norm)
        if not skipped:
            if max_grad_norm is not None and norm > max_grad_norm:
                self._scale(max_grad_norm / (norm + 1e-6))
            for group in self.inner.param_groups:
                group["lr"] = lr
            self.inner.step_with_ready_grads()
            self._unsettled = self._gathers_late
        self.forget()
        return norm, skipped

    def settle(self) -> None:
        """Gather the weights that the last step updated, where the next forward is to do it. Collective then."""
        if self._unsettled:
            for model in self.models:
                model.start_param_sync(force_sync=True)
            self._unsettled = False

    def _scale(self, factor: float) -> None:
        for part in self.parts:
            for parameter in part.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


def _finalize(models: list[nn.Module], tokens: Any = None, **arguments: Any) -> None:
    """Gradients of data-parallel ranks, of norms and of tied heads added up; no division by `tokens`."""
    finalize_model_grads(models, None, **arguments)


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
