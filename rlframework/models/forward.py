"""Run a microbatch through a transformers model: padded rows, a packed row, or this rank's shard of either."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from rlframework.interfaces.data_processor import Microbatch
from rlframework.models import attention
from rlframework.models.context_parallel import ContextParallel
from rlframework.policy.head.patch import HeadPatch
from rlframework.policy.head.request import HeadRequest


def attending(config: Any, microbatch: Microbatch, context: ContextParallel | None) -> AbstractContextManager[None]:
    """Switch a model of `config` to the attention that `microbatch` needs.

    Must also enclose the backward, where activation checkpointing runs the attention again.
    """
    if context is not None:
        return attention.attention(config, context.attention)
    return nullcontext() if microbatch.cu_seqlens is None else attention.attention(config, attention.SEGMENTS)


def forward(
    model: Any, patch: HeadPatch, microbatch: Microbatch, head: HeadRequest, context: ContextParallel | None
) -> Tensor:
    """Return the values of `patch` at all head positions of `microbatch`, `[N, ...]`. Call within `attending`.

    `context`: shards each sequence over ranks; None without context parallelism.
    """
    if context is not None:
        return context.forward(model, patch, microbatch, head)
    processed = microbatch.processed_inputs
    inputs: dict[str, Any] = {"input_ids": processed.input_ids, "use_cache": False, **processed.vlm_kwargs}
    if microbatch.cu_seqlens is not None:
        segments = attention.Segments(microbatch.cu_seqlens.tolist())
        inputs |= {"position_ids": processed.position_ids, "segments": segments}
    with patch.computing(head, microbatch.head_positions, microbatch.targets):
        values: Tensor = model(**inputs).logits
    return values
