"""Pickling of the tensors of a batch for another process, as numpy arrays of bytes.

Protocol 5 with out-of-band buffers, as in Ray, copies nothing while sending, and while receiving only what is
read-only; in-band, each byte is copied once on each side. torch alone copies more, and sends the whole storage of a
view. The received tensor belongs to the receiver: it is writable and contiguous, and has no gradient. Does not cover
tensors on devices, tensor subclasses and sparse tensors, which torch pickles in its own way.
"""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class PickledTensor:
    """A CPU tensor in the state of a pickle or of a deep copy, where it becomes a new tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        flat = self.tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a tensor of one element may have any stride
        data: Any = None
        if len(raw):  # protocols 0 to 2 have no type for bytes; `torch.save` uses 2, and stores tensors separately
            data = raw.numpy() if protocol > 2 else _own_elements(raw)
        return _unpickled, (data, self.tensor.dtype, tuple(self.tensor.shape))


def picklable(value: Tensor) -> PickledTensor | Tensor:
    """Return an object to put into a pickle's state instead of `value`; it is unpickled as a tensor."""
    supported = (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not value.is_nested
    )
    return PickledTensor(value) if supported else _own_elements(value)


def _own_elements(value: Tensor) -> Tensor:
    """Detach `value`, and copy it if it is a view of a larger storage, as torch pickles whole storages."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.device.type == "meta" or value.is_nested:
        return value
    used = value.numel() * value.element_size()
    return value.detach().clone() if value.untyped_storage().nbytes() > used else value.detach()


def _unpickled(data: npt.NDArray[Any] | Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if data is None or not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    raw = data if isinstance(data, Tensor) else torch.from_numpy(data if data.flags.writeable else data.copy())
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype).reshape(shape)
