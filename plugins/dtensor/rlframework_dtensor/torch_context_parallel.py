"""torch's own context parallelism, for those who know it; the worker has that of `rlframework.models`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor


class TorchContextParallel:
    """NeMo-RL's two names for torch's own context parallelism, which needs a GPU. The worker itself does not use it."""

    @staticmethod
    def create_context_parallel_ctx(
        cp_mesh: Any,
        cp_buffers: list[Tensor],
        cp_seq_dims: list[int],
        cp_no_restore_buffers: set[Tensor],
        cp_rotate_method: str | None = None,
    ) -> AbstractContextManager[None]:
        """torch's `context_parallel`: within it `cp_buffers` are split along `cp_seq_dims` over `cp_mesh`, in place.

        `cp_rotate_method`: "allgather" or "alltoall", how keys and values travel; None: as it is set.
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
        """Within it, `cp_context` and the attention kernels that torch can split; None: nothing is changed."""
        if cp_context is None:
            yield
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]), cp_context:
            yield
