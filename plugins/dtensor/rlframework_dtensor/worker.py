"""The reference training engine: FSDP2 over any Hugging Face causal language model, on CPU (gloo) and GPU (NCCL).

Vision-language models too, in padded and dynamic microbatches.

Supplies the primitives of `rlframework.policy.engine.Engine`. Left out so far: tensor, context and sequence
parallelism, refit to other processes, LoRA, offload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from rlframework.errors import NotSupported
from rlframework.interfaces.data_processor import Microbatch
from rlframework.policy.checkpoint import Moments
from rlframework.policy.engine import Step, StepResult, WeightSpec
from rlframework.policy.head import HeadPatch, HeadRequest, read_head_output, require_plain_head
from rlframework.policy.optimizer import parameter_groups
from rlframework.policy.worker_base import PolicyWorkerBase
from rlframework_dtensor import attention, groups, media
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.parallelize import (
    checkpoint_activations,
    is_multimodal,
    load_model,
    packs,
    require_vocabulary,
    shard,
)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """A copy of the whole `value` that lies and is sharded as `tensor` is; no collective."""
    value = value.to(device=tensor.device, dtype=tensor.dtype, copy=True)
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


class DTensorPolicyWorker(PolicyWorkerBase):
    """One rank of a model under FSDP2. Constructor arguments: see `PolicyWorkerBase`."""

    backend_config: DTensorConfig
    backend_config_model = DTensorConfig

    def build(self, *, init_optimizer: bool) -> None:
        """See `Engine.build`."""
        choice = self.backend_config.attention
        attention.register()
        model = load_model(self.config, None if choice == "auto" else choice)
        require_vocabulary(model, self.tokenizer)
        require_plain_head(model)
        mode = self.config.batching.mode
        may_pack = mode == "packed" or (mode == "auto" and self.device.type == "cpu")  # else there is nothing to try
        self._packs = may_pack and choice in ("auto", "sdpa") and packs(model)
        if mode == "packed" and not self._packs:
            raise NotSupported(
                f"{type(model).__name__} with policy.dtensor.attention={choice} does not keep packed sequences apart; "
                "set policy.batching.mode to dynamic or auto"
            )
        self._multimodal = is_multimodal(model)
        model = model.to(self.device)
        if self.config.activation_checkpointing:
            checkpoint_activations(model)
        self._head = HeadPatch(model)
        self._sharded = self.context.world_size > 1 or self.config.precision != "float32"
        self._mesh = self._make_mesh() if self._sharded else None
        if self._sharded:
            shard(model, self._mesh, self.config.precision, self.backend_config.reshard_after_forward)
        self.model = model
        self._optimizer = self._make_optimizer() if init_optimizer else None

    def _make_mesh(self) -> Any:
        groups.join(self.context, self.device)
        return init_device_mesh(self.device.type, (self.context.world_size,), mesh_dim_names=("data_parallel",))

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
        return [self._run_microbatch(microbatch, head, step, forward_only) for microbatch in microbatches]

    def _run_microbatch(self, microbatch: Microbatch, head: HeadRequest, step: Step, forward_only: bool) -> StepResult:
        packed = microbatch.cu_seqlens is not None
        # around the backward too: activation checkpointing runs the attention again there
        with attention.attention(self.model.config, attention.SEGMENTS) if packed else nullcontext():
            with torch.no_grad() if forward_only else nullcontext():
                result = step(read_head_output(self._forward(microbatch, head), head), microbatch)
            if not forward_only:
                assert result.loss is not None
                # FSDP2 takes the mean over ranks, the contract is the sum
                (result.loss * self.data_parallel_size()).backward()
                result.loss = None
        return result

    def _forward(self, microbatch: Microbatch, head: HeadRequest) -> Tensor:
        processed = microbatch.processed_inputs
        inputs: dict[str, Any] = {"input_ids": processed.input_ids, "use_cache": False, **processed.vlm_kwargs}
        if microbatch.cu_seqlens is not None:
            inputs |= {"position_ids": processed.position_ids, "cu_seqlens": microbatch.cu_seqlens.tolist()}
        with self._head.computing(head, microbatch.head_positions, microbatch.targets):
            values: Tensor = self.model(**inputs).logits
        return values

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`."""
        assert self._optimizer is not None
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        total = nn.utils.get_total_norm([gradient for p in parameters if (gradient := p.grad) is not None])
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        skipped = not torch.isfinite(torch.tensor(norm)).item()
        if not skipped:
            if max_grad_norm is not None and norm > max_grad_norm:
                nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, total)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return norm, skipped

    def preferred_batching(self) -> str:
        """See `Engine.preferred_batching`: segments on a CPU; a GPU would start a kernel for each segment."""
        return "packed" if self._packs else "dynamic"

    def preferred_tokens(self) -> int:
        """See `Engine.preferred_tokens`: on a CPU what stays in its caches is faster than what is large."""
        return 1024 if self.device.type == "cpu" else super().preferred_tokens()

    # -- weights ------------------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, Tensor]:
        """The tensors that `save_pretrained` writes, by name; a tied head stands once, under the embedding's name.

        Mixtures of experts keep the names that they have in memory, which transformers reads as well as its own.

        Gathered parameters are let go first: what FSDP leaves whole after a forward without gradients is a copy, and
        writing to the shards behind it would leave it stale without an error.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        saved = self.model.state_dict().keys()
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named if name in saved}

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        return {name: WeightSpec(tuple(weight.shape), weight.dtype) for name, weight in self._weights().items()}

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        weights = self._weights()
        for name in names:
            weight = weights[name]
            yield name, whole(weight)

    def snapshot(self) -> dict[str, Tensor]:
        """See `Engine.snapshot`."""
        return {name: _local(weight).to("cpu", copy=True) for name, weight in self._weights().items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """See `Engine.restore`."""
        for name, weight in self._weights().items():
            _local(weight).copy_(snapshot[name])

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`."""
        for name, weight in self._weights().items():
            _local(weight).copy_(_local(like(weight, weights[name])))

    def _trained(self) -> dict[str, Tensor]:
        """The parameters that the optimizer has, by the names of `weight_specs`."""
        assert self._optimizer is not None
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        assert self._optimizer is not None
        for name, parameter in self._trained().items():
            state = self._optimizer.state.get(parameter)
            if state:
                yield name, Moments(int(state["step"]), whole(state["exp_avg"]), whole(state["exp_avg_sq"]))
            else:
                yield name, Moments(0, torch.zeros(parameter.shape), torch.zeros(parameter.shape))

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        assert self._optimizer is not None
        for name, parameter in self._trained().items():
            saved = moments[name]
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(saved.steps), device=self.device),
                "exp_avg": like(parameter, saved.exp_avg),
                "exp_avg_sq": like(parameter, saved.exp_avg_sq),
            }

    # -- generation and the rest --------------------------------------------------------------------------------------

    def whole_model(self) -> nn.Module | None:
        """See `Engine.whole_model`."""
        return None if self._sharded else self.model

    @contextmanager
    def generating(self) -> Iterator[None]:
        """See `Engine.generating`: activation checkpointing would switch the cache off."""
        self.model.eval()
        yield

    def data_parallel_group(self) -> Any:
        """See `Engine.data_parallel_group`."""
        return self._mesh.get_group() if self._mesh is not None and self.context.world_size > 1 else None

    def data_parallel_size(self) -> int:
        """See `Engine.data_parallel_size`."""
        return self.context.world_size

    def close(self) -> None:
        """See `Engine.close`."""
        self._optimizer = None
        del self.model
        if self._sharded:
            self._sharded = False
            groups.leave()
