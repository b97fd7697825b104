"""The key-value cache of the decoding loop: preallocated layers, the bytes that a row needs, and the rows that a GPU's
free memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlframework.generation.sdk import SAMPLED_ELEMENTS, first_size

_MIN_GROWTH = 64
"""Positions that a layer without a known capacity grows by at least. A long one grows by a quarter."""


class PreallocatedLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` `[B, heads, S, D]` are views of larger tensors.

    transformers' own layer reallocates all keys and values for each token; on a CPU that took three quarters of a
    decoding step with 64 rows at 230 positions. `capacity`: positions to allocate at the first token after the prompt;
    None: grow as needed. Removing rows keeps the memory. If `keys` and `values` are replaced from outside, the next
    `update` copies them once. Does not support gradients.
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._capacity = capacity or 0
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._keys_view: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append `key_states` and `value_states` `[B, heads, new, D]`; return all keys and values."""
        length = self.get_seq_length()
        if length == 0:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        assert self.keys is not None
        assert self.values is not None
        total = length + key_states.shape[-2]
        buffers = self._own_buffers()
        if buffers is None or buffers[0].shape[-2] < total:
            positions = max(self._capacity, total) if self._capacity else total + max(_MIN_GROWTH, total // 4)
            buffers = _enlarged(self.keys, positions), _enlarged(self.values, positions)
        buffers[0][..., length:total, :] = key_states
        buffers[1][..., length:total, :] = value_states
        return self._show(buffers, total)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with the rows `beam_idx [m]`; fewer rows stay in the memory that the layer has."""
        buffers, rows, length = self._own_buffers(), len(beam_idx), self.get_seq_length()
        if buffers is None or rows > len(buffers[0]):
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            return
        for buffer in buffers:  # `index_select` makes a copy first: rows may move in any order
            buffer[:rows, :, :length] = buffer[..., :length, :].index_select(0, beam_idx)
        self._show((buffers[0][:rows], buffers[1][:rows]), length)

    def append_rows(self, others: Sequence[PreallocatedLayer], length: int, longest: int) -> None:
        """Add the rows of `others`; all then end at `length`, with zeros before those that are shorter.

        Allocates `longest` further positions, if the capacity is known.
        """
        self._capacity = max(self._capacity, length + longest) if self._capacity else 0
        self.keys = torch.cat([_lengthened(layer.keys, length) for layer in (self, *others)])
        self.values = torch.cat([_lengthened(layer.values, length) for layer in (self, *others)])

    def _own_buffers(self) -> tuple[Tensor, Tensor] | None:
        """The tensors that `keys` and `values` are views of; None if there are none, or these were replaced."""
        return self._buffers if self._keys_view is self.keys else None

    def _show(self, buffers: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
        self._buffers = buffers
        self.keys, self.values = (buffer[..., :length, :] for buffer in buffers)
        self._keys_view = self.keys
        return self.keys, self.values


def _lengthened(states: Tensor | None, length: int) -> Tensor:
    """Return `states [n, heads, S, D]` with zeros before them, so that S is `length`."""
    assert states is not None
    return nn.functional.pad(states, (0, 0, length - states.shape[-2], 0))


def _enlarged(states: Tensor, positions: int) -> Tensor:
    """A copy of `states [B, heads, S, D]` at the beginning of `[B, heads, positions, D]`; the rest is not written."""
    batch, heads, length, size = states.shape
    larger = states.new_empty(batch, heads, positions, size)
    larger[..., :length, :] = states
    return larger


def decoding_cache(config: Any, capacity: int | None = None) -> DynamicCache:
    """Return an empty cache for a model of `config`, with a `PreallocatedLayer` for each `DynamicLayer`.

    Other kinds of layers (sliding windows, state spaces) are left to transformers. `capacity`: see `PreallocatedLayer`.
    """
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def whole_cache(config: Any, capacity: int | None = None) -> DynamicCache | None:
    """Return an empty cache of `PreallocatedLayer`s, which keep all positions, also those outside sliding windows.

    None if the model has layers with another state than keys and values.
    """
    cache = DynamicCache(config=config)
    if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return None
    cache.layers = [PreallocatedLayer(capacity) for _ in cache.layers]
    return cache


def stack_rows(caches: Sequence[DynamicCache], length: int, longest: int) -> None:
    """Add the rows of all other `caches` to the first, see `PreallocatedLayer.append_rows`."""
    for layer, *others in zip(*(cache.layers for cache in caches), strict=True):
        layer.append_rows(others, length, longest)


def cache_bytes(config: Any, positions: int, width: int) -> int:
    """Return the bytes of one row's cache at `positions`, with `width` bytes per number, for a model of `config`.

    2 x key-value heads x head size x width for each layer and position, where layers with a sliding window keep no
    more positions than that. Layers with a state of fixed size (state spaces, linear attention) count as attention.
    """
    text = config.get_text_config(decoder=True)
    heads = first_size(text, "num_key_value_heads", "num_attention_heads") or 1
    size = first_size(text, "head_dim") or text.hidden_size // text.num_attention_heads
    # latent attention (DeepSeek) is cached as whole keys and values, of two sizes
    sizes = (first_size(text, "qk_head_dim") or size) + (first_size(text, "v_head_dim") or size)
    limits = [layer.get_max_length() for layer in DynamicCache(config=config).layers]
    kept = sum(min(positions, limit) if limit > 0 else positions for limit in limits)
    return int(kept * heads * sizes * width)


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
