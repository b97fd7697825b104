"""Keys and values of decoding in tensors that have room for more.

transformers' `DynamicLayer` makes all of its keys and values anew for each token; on a CPU that was three quarters of
the time of a step of 64 rows at 230 positions. Here a token is written into room that is there already. Layers of
other kinds (sliding windows, state spaces) stay as transformers makes them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM = 64
"""Positions that a tensor grows by at least; a long one grows by a quarter, so that growing stays cheap."""


class RoomyLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` `[B, heads, S, D]` are the front of larger tensors.

    What replaces `keys` and `values` from outside (`reorder_cache`) is taken as it is, and copied once at the next
    `update`. Gradients do not go through it.
    """

    _room: tuple[Tensor, Tensor] | None = None
    _front: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All keys and values after adding `key_states` and `value_states` `[B, heads, new, D]`."""
        length = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if length == 0:
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        total = length + key_states.shape[-2]
        keys, values = self._with_room(length, total)
        keys[..., length:total, :] = key_states
        values[..., length:total, :] = value_states
        self.keys, self.values = keys[..., :total, :], values[..., :total, :]
        self._front = self.keys
        return self.keys, self.values

    def _with_room(self, length: int, total: int) -> tuple[Tensor, Tensor]:
        if self._room is None or self._front is not self.keys or self._room[0].shape[-2] < total:
            assert self.keys is not None
            assert self.values is not None
            capacity = total + max(_LEAST_ROOM, total // 4)
            self._room = _larger(self.keys, length, capacity), _larger(self.values, length, capacity)
        return self._room


def _larger(tensor: Tensor, length: int, capacity: int) -> Tensor:
    shape = (*tensor.shape[:-2], capacity, tensor.shape[-1])
    larger = tensor.new_empty(shape)
    larger[..., :length, :] = tensor
    return larger


def decoding_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of `config`: `RoomyLayer` wherever transformers has a `DynamicLayer`."""
    cache = DynamicCache(config=config)
    # the constructor is transformers', which leaves it untyped
    cache.layers = [
        RoomyLayer() if type(layer) is DynamicLayer else layer  # type: ignore[no-untyped-call]
        for layer in cache.layers
    ]
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = RoomyLayer
    return cache
