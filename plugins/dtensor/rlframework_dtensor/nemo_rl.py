"""Names of NeMo-RL's DTensor worker that the worker keeps for code written against them, but does not use itself.

Module-level functions, and `NeMoRLMethods`, which `DTensorPolicyWorker` derives from.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlframework.engine import HostBuffers, TrainingProgress
from rlframework_dtensor.offload import move_model
from rlframework_dtensor.shards import local_slices, local_tensor, reshard

NOISE_STD = 0.01


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """Inside the context, the parameters of each `FSDPModule` in `model` are unsharded; they are resharded on exit.

    They are resharded after an exception too. Collective. Writes to the unsharded parameters are lost on exit.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module in modules:
            module.unshard()
        yield
    finally:
        for module in modules:
            module.reshard()


@torch.no_grad()
def get_cpu_state_dict(state_generator: Iterable[tuple[str, Tensor]], pin_memory: bool = False) -> dict[str, Tensor]:
    """Copy named tensors to CPU memory; of a `DTensor`, only this rank's shard. No collective.

    Each copy has the dtype and shape of the (local) tensor and shares no memory with it. `pin_memory` asks for
    page-locked copies, which need a GPU and are ignored without one. Copies from GPUs are asynchronous; the function
    synchronizes once, after the last.
    """
    pin_memory = pin_memory and torch.cuda.is_available()
    copies: dict[str, Tensor] = {}
    on_gpu = False
    for name, tensor in state_generator:
        local = local_tensor(tensor).detach()
        if local.ndim == 0:
            copies[name] = local.to("cpu", copy=True)
            continue
        on_gpu |= local.is_cuda
        copies[name] = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pin_memory)
        copies[name].copy_(local, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return copies


class NeMoRLMethods:
    """Methods of NeMo-RL's DTensor worker that have no counterpart in `PolicyWorker`."""

    engine: Any
    progress: TrainingProgress

    # -- state --------------------------------------------------------------------------------------------------------

    def return_state_dict(self) -> dict[str, Any]:
        """Return the module's own state dict: live tensors, sharded (`DTensor`) unless a single process holds them."""
        reshard(self.engine.model)
        state: dict[str, Any] = self.engine.model.state_dict()
        return state

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add normal noise with standard deviation 0.01 to each trainable parameter in place. For tests.

        The noise depends on the parameter's name and the weight version only, so replicas stay equal and the process's
        random state is untouched. Gradients and the optimizer's state do not change. No collective.
        """
        model, progress = self.engine.model, self.progress
        reshard(model)
        progress.weights_version += 1
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                digest = hashlib.sha256(f"noise:{progress.weights_version}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                noise = torch.empty(parameter.shape).normal_(0.0, NOISE_STD, generator=generator)
                local = local_tensor(parameter)
                local.add_(noise[local_slices(parameter)].to(local.device, local.dtype))

    # -- device placement ---------------------------------------------------------------------------------------------

    @staticmethod
    def move_to_device(model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the parameters and buffers of `model` to `device` and return it."""
        move_model(model, torch.device(device), HostBuffers())
        return model

    @staticmethod
    def move_buffer_to_device(model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the buffers of `model` to `device` and return it."""
        move_model(model, torch.device(device), HostBuffers(), buffers_only=True)
        return model

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """Move `model` to the GPU, free unused memory, and return it."""
        return _free_unused_memory(self.move_to_device(model, "cuda"))

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """Move `model` to CPU memory, free unused memory, and return it."""
        return _free_unused_memory(self.move_to_device(model, "cpu"))

    # -- torch's context parallelism ----------------------------------------------------------------------------------

    @staticmethod
    def create_context_parallel_ctx(
        cp_mesh: Any,
        cp_buffers: list[Tensor],
        cp_seq_dims: list[int],
        cp_no_restore_buffers: set[Tensor],
        cp_rotate_method: str | None = None,
    ) -> AbstractContextManager[None]:
        """Return torch's `context_parallel`, which shards `cp_buffers` along `cp_seq_dims` over `cp_mesh` in place.

        `cp_rotate_method`: "allgather" or "alltoall", how keys and values are exchanged; None keeps torch's setting.
        Needs a GPU. The worker itself uses the context parallelism of `rlframework.models`.
        """
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        if cp_rotate_method is not None:
            set_rotate_method(cp_rotate_method)
        context: AbstractContextManager[None] = context_parallel(
            cp_mesh, buffers=cp_buffers, buffer_seq_dims=cp_seq_dims, no_restore_buffers=cp_no_restore_buffers
        )
        return context

    @staticmethod
    @contextmanager
    def train_context(cp_context: AbstractContextManager[None] | None = None) -> Iterator[None]:
        """Enter `cp_context` and restrict attention to the kernels that torch can shard; None changes nothing."""
        if cp_context is None:
            yield
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]), cp_context:
            yield


def _free_unused_memory(model: nn.Module) -> nn.Module:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return model
