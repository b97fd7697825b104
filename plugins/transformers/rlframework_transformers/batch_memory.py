"""The number of rows that a GPU's free memory allows to decode together."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.generation.sdk import SAMPLED_ELEMENTS
from rlframework_transformers.cache import cache_bytes

_USABLE = 0.9
"""Share of the free memory that is planned with; the rest is left to fragmentation and to what is not counted."""

_SAMPLING_BYTES = {False: 40, True: 72}
"""Bytes of each logit that is sampled from: fp32 and fp64 copies; with top-k or top-p also their order."""


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on `device`; None if it is not a CUDA device."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def rows_that_fit(free: int, config: Any, *, prompt: int, total: int, width: int, truncated: bool) -> int:
    """Return how many rows of a model of `config` can be decoded at once in `free` bytes, at least 1.

    `prompt`, `total`: the most tokens of a prompt, and of a prompt with its completion. `width`: bytes per number of
    weights and cache. `truncated`: with top-k or top-p. All rows are assumed to be as long as the longest.
    """
    sampling = SAMPLED_ELEMENTS * _SAMPLING_BYTES[truncated]
    return max(1, int(free * _USABLE - sampling) // row_bytes(config, prompt=prompt, total=total, width=width))


def row_bytes(config: Any, *, prompt: int, total: int, width: int) -> int:
    """Return the bytes of a row while it is decoded, with the arguments of `rows_that_fit`.

    The cache of all layers and once more that of one, which is copied when it grows or rows leave; the logits of two
    steps in fp32 and of one as the model computes them; and the prompt's activations in one layer: four hidden and
    three MLP widths, two norms in fp32, and the mask as bool and as numbers. Every prompt counts as different from the
    others.
    """
    text = config.get_text_config(decoder=True)
    cache = cache_bytes(config, total, width)
    mlp = (getattr(text, "num_experts_per_tok", None) or 0) * (getattr(text, "moe_intermediate_size", None) or 0)
    mlp = max(mlp, getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    token = (4 * text.hidden_size + 3 * mlp) * width + 8 * text.hidden_size + (1 + width) * prompt
    per_row: int = cache + cache // text.num_hidden_layers + (8 + width) * text.vocab_size + prompt * token
    return per_row
