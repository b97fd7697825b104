"""The megatron-core training engine, on GPU, and on CPU over gloo for development and tests.

Implements the primitives of `rlframework.policy.engine.Engine`: the training step in this module, weights and moments
in `state`. Megatron-core provides tensor, sequence, pipeline and data parallelism and the loop over microbatches.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError, DataError, NotSupported
from rlframework.engine import (
    HeadRequest,
    Microbatch,
    MicrobatchRule,
    Step,
    StepResult,
    kernel_for_packed_rows,
    load_config,
    new_weights,
    require_vocabulary,
    trace_span,
    weights_folder,
)
from rlframework.plugins.model_checks import indivisible
from rlframework_megatron import cpu
from rlframework_megatron.adapter_weights import adapted_weights, adapter_weights
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.fused_lora import add_adapters
from rlframework_megatron.gathering import Groups as GatheringGroups
from rlframework_megatron.gathering import local_coordinates
from rlframework_megatron.layers import uses_transformer_engine
from rlframework_megatron.load_balancing import MegatronLoadBalancingLoss
from rlframework_megatron.model import build_chunks
from rlframework_megatron.offload import Offloader
from rlframework_megatron.optimizer import Optimizer, wrap_ddp
from rlframework_megatron.parallel import Groups, Sizes
from rlframework_megatron.schedule import Schedule
from rlframework_megatron.settings import as_reward_model, require_axes, require_experts, require_same_function
from rlframework_megatron.state import ModelState, load_from_folder
from rlframework_megatron.upstream import quiet
from rlframework_megatron.weights import LocalModel

if TYPE_CHECKING:
    import torch

STEP = "forward_backward"
"""Profiler span of the schedule, which interleaves forward and backward passes."""


class MegatronEngine(ModelState):
    """One rank of a model under megatron-core."""

    backend_config: MegatronConfig
    backend_config_model = MegatronConfig

    def build(self, *, init_optimizer: bool) -> None:
        """See `Engine.build`."""
        self._groups: Groups | None = None
        self._optimizer: Optimizer | None = None
        self.router_loss: MegatronLoadBalancingLoss | None = None
        if self.config.offload.parameters and self.device.type == "cuda":
            raise NotSupported(
                "policy.offload.parameters: megatron-core requires its weights on the GPU; set it to false"
            )
        self._model_config = load_config(self.config)
        require_same_function(self._model_config)
        if self.config.head != "language":
            as_reward_model(self._model_config, self.config.head)
        require_vocabulary(self._model_config.vocab_size, self.tokenizer)
        folder = weights_folder(self.config.model_name)
        if folder is None:
            raise DataError(
                f"policy.model_name={self.config.model_name!r} has no model*.safetensors files, which the megatron "
                "backend requires; save the model with save_pretrained of transformers"
            )
        sizes = Sizes.of(self.context.world_size, self.config.parallelism, self.backend_config.virtual_pipeline)
        if (problem := indivisible(self._model_config.to_dict(), sizes.tensor)) is not None:
            raise ConfigError(f"{problem}; choose a divisor")
        require_axes(self._model_config, sizes)
        require_experts(self._model_config, sizes, router_loss=self.config.router_aux_loss_coef > 0)
        self._require_adaptable(sizes)
        self._groups = Groups(self.context, self.device, sizes)
        try:
            self._fill(folder, self._groups, init_optimizer=init_optimizer)
        except BaseException:
            self.close()
            raise

    def _require_adaptable(self, sizes: Sizes) -> None:
        """Raise `NotSupported` or `ConfigError` if the model cannot have the adapters of `policy.lora`."""
        if self.config.lora is None:
            return
        if sizes.expert > 1:
            raise NotSupported("LoRA with expert parallelism is not supported; set policy.parallelism.expert to 1")
        adapted_weights(self._model_config, self.config.lora)

    def _fill(self, folder: Path, groups: Groups, *, init_optimizer: bool) -> None:
        """Build this rank's chunks and optimizer, and load their weights."""
        lora = self.config.lora
        fused = lora is None and uses_transformer_engine(self.backend_config, self.device, self._model_config)
        coordinates = local_coordinates(fused=fused)
        with self._megatron():
            self.chunks = build_chunks(self._model_config, self.config, self.backend_config, groups, coordinates)
            if lora is not None:
                add_adapters(self.chunks, self._model_config, lora, coordinates, self.chunks[0].config)
            self._models = wrap_ddp(self.chunks, self.backend_config) if init_optimizer else list(self.chunks)
            if init_optimizer:
                self._optimizer = Optimizer(self._models, self.config, self.backend_config, self.waits)
        inner = None if self._optimizer is None else self._optimizer.inner
        optimizers = [] if self._optimizer is None else self._optimizer.optimizers
        self._offloader = Offloader(self.chunks, self._models, optimizers, self.device)
        self._local_model = LocalModel(
            self._model_config, coordinates, self.chunks, GatheringGroups.current(self.device), inner
        )
        adapters = None if lora is None else adapter_weights(self._model_config, lora)
        self._local_adapters = None if adapters is None else replace(self._local_model, only=adapters)
        load_from_folder(self._local_model, folder, new_weights(self.config))
        self._initialize_adapters()
        if self.config.router_aux_loss_coef > 0:
            self.router_loss = MegatronLoadBalancingLoss(self.chunks[0], groups.data)
        self._schedule = Schedule(self.chunks, self._models, groups)

    @contextmanager
    def _megatron(self) -> Iterator[None]:
        """The context for every use of megatron-core."""
        with quiet(), cpu.on(self.device):
            yield

    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """See `Engine.forward_backward`."""
        with self._megatron(), trace_span(STEP):
            for model in self._models:
                model.train(not forward_only)
            if self._optimizer is not None and not forward_only:
                self._optimizer.zero_grad()
                if self.router_loss is not None:

                    def run(microbatch: Microbatch, step: Step) -> Any:
                        return self._schedule.run([microbatch], head, step, forward_only=True)

                    step = self.router_loss.add_to(step, microbatches, run, self.config.router_aux_loss_coef)
            return self._schedule.run(microbatches, head, step, forward_only=forward_only)

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`."""
        assert self._optimizer is not None
        with self._megatron():
            return self._optimizer.clip_and_step(max_grad_norm, lr)

    def _finish_param_gather(self) -> None:
        if self._optimizer is not None:
            with self._megatron():
                self._optimizer.finish_param_gather()

    def move(self, device: torch.device, *, model: bool = False, optimizer: bool = False) -> int:
        """See `Engine.move`."""
        return self._offloader.move(device, model=model, optimizer=optimizer)

    def microbatch_rule(self) -> MicrobatchRule:
        """See `Engine.microbatch_rule`."""
        return self._schedule.rule()

    def preferred_batching(self) -> str:
        """See `Engine.preferred_batching`: on a GPU packed where one kernel computes a packed row; not benchmarked."""
        half = self.config.precision != "float32"
        return "packed" if kernel_for_packed_rows(self.device, half_precision=half) else "dynamic"

    def data_parallel_group(self) -> Any:
        """See `Engine.data_parallel_group`."""
        return self._groups.data if self._groups is not None else None

    def data_parallel_size(self) -> int:
        """See `Engine.data_parallel_size`."""
        return self._groups.sizes.data if self._groups is not None else 1

    def close(self) -> None:
        """See `Engine.close`."""
        self._optimizer = self.router_loss = None
        for name in (
            "chunks",
            "_models",
            "_local_model",
            "_local_adapters",
            "_schedule",
            "_offloader",
        ):  # they all reference the model
            self.__dict__.pop(name, None)
        if self._groups is not None:
            self._groups = None
            gc.collect()  # megatron-core's modules form reference cycles that keep groups and weights alive
            Groups.leave()
