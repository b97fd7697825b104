"""`torch.compile` of the blocks of a model, each by itself, for any number of rows and tokens.

Our attentions stay outside: they loop over sequences, whose number and lengths differ from row to row, and what is
before and after them in a block is compiled. Left out: the embedding and the head, and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rlframework.models import attention, context_parallel
from rlframework.models.abilities import decoder_layers


def compile_blocks(model: nn.Module, compiler: str = "inductor") -> None:
    """Compile each block of `model` when it first runs, with this backend of torch.compile; before `fully_shard`."""
    from transformers import AttentionInterface

    own: dict[str, Callable[..., Any]] = {
        attention.SEGMENTS: attention.segment_attention,
        context_parallel.CONTEXT: context_parallel.context_attention,
    }
    for name, function in own.items():
        AttentionInterface.register(name, torch.compiler.disable(function))
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend=compiler)
