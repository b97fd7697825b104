"""Ulysses context parallelism: exchange heads between the ranks of a sequence with DeepSpeed's `DistributedAttention`.

`HeadShard` implements the attention. DeepSpeed's support for uneven heads is not used: it relies on
DeepSpeed's own groups, which differ from the policy's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.engine import Attend, ContextParallel
from rlframework_deepspeed.config import DeepSpeedConfig
from rlframework_deepspeed.config_checks import unexchangeable

BATCH, SEQUENCE, HEADS = 0, 1, 2
"""Dimensions of the exchanged tensors."""


def context_of(section: DeepSpeedConfig, group: dist.ProcessGroup) -> ContextParallel:
    """The configured context parallelism over `group`."""
    if section.sequence_exchange == "gather":
        return ContextParallel(group)

    def exchange(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention: Any = import_module("deepspeed.sequence.layer").DistributedAttention
        output: Tensor = attention(attend, group, scatter_idx=HEADS, gather_idx=SEQUENCE)(query, key, value, BATCH)
        return output

    return ContextParallel(group, exchange)


def require_exchange(config: PolicyConfig, section: DeepSpeedConfig, model_config: Any) -> None:
    """Raise `NotSupported` if the heads of `model_config` cannot be exchanged as configured."""
    if section.sequence_exchange == "gather":
        return
    text = model_config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads")
    found = unexchangeable({name: getattr(text, name, None) for name in names}, config.parallelism)
    if found:
        raise NotSupported(f"{found}; set policy.deepspeed.sequence_exchange to gather")
