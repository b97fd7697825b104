"""`PackedTensor`: a value of a batch whose rows are tensors of different lengths, such as the images of each prompt.

A model takes the tensors of all rows joined along one dimension (all patches of all images), but a batch must slice and
shuffle them by row. So rows are stored separately and joined on request. Rows may share a tensor, such as the image of
a prompt that is repeated for a group: it is stored, pickled and moved to a device once. Does not cover padding, which
is for `[B, ...]` tensors, or the meaning of each model input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from rlframework.base.errors import BatchError, BatchTypeError

_SHARED: ContextVar[bool] = ContextVar("media are shared by deep copies", default=False)


class PackedTensor:
    """One tensor per row, or None for a row without media; `as_tensor` joins them along `dim_to_pack`.

    `tensors` is a list, or a single tensor, which is one row. The tensors may differ in size on `dim_to_pack` only.
    Media are treated as immutable: no method modifies a `PackedTensor`, and results, also of repeating, slicing and
    shuffling, share the tensors of their rows. Rows with one tensor keep one in pickles, copies and on a device.
    """

    __slots__ = ("dim_to_pack", "tensors")

    def __init__(self, tensors: Tensor | Sequence[Tensor | None], dim_to_pack: int) -> None:
        rows = [tensors] if isinstance(tensors, Tensor) else tensors
        if not isinstance(rows, (list, tuple)) or not all(row is None or isinstance(row, Tensor) for row in rows):
            given = {type(row).__name__ for row in rows} if isinstance(rows, (list, tuple)) else {type(rows).__name__}
            raise BatchTypeError(f"a PackedTensor takes a list with a tensor or None for each row, got {sorted(given)}")
        if isinstance(dim_to_pack, bool) or not isinstance(dim_to_pack, int):
            raise BatchTypeError(f"dim_to_pack must be an integer, got {dim_to_pack!r}")
        for index, row in enumerate(rows):
            if row is not None and not -row.ndim <= dim_to_pack < row.ndim:
                raise BatchError(
                    f"row {index} has shape {tuple(row.shape)}, which has no dimension {dim_to_pack} to pack along"
                )
        self.tensors: list[Tensor | None] = list(rows)
        self.dim_to_pack = dim_to_pack

    @classmethod
    def empty_like(cls, other: PackedTensor) -> PackedTensor:
        """Return a PackedTensor with as many rows as `other` and without media."""
        return cls([None] * len(other), other.dim_to_pack)

    @classmethod
    def concat(cls, from_packed_tensors: Sequence[PackedTensor]) -> PackedTensor:
        """Concatenate the rows of PackedTensors, which must have the same `dim_to_pack`."""
        dims = sorted({packed.dim_to_pack for packed in _all_packed(from_packed_tensors, "concat")})
        if len(dims) != 1:
            raise BatchError(f"PackedTensors to be joined must have one dim_to_pack, got {dims or 'no PackedTensors'}")
        return cls._of([row for packed in from_packed_tensors for row in packed.tensors], dims[0])

    @classmethod
    def flattened_concat(cls, from_packed_tensors: Sequence[PackedTensor], dim_to_pack: int) -> PackedTensor:
        """Join the rows of each PackedTensor (the messages of a prompt) into one, along that one's `dim_to_pack`."""
        return cls([packed.as_tensor() for packed in _all_packed(from_packed_tensors, "flattened_concat")], dim_to_pack)

    @classmethod
    def _of(cls, rows: list[Tensor | None], dim_to_pack: int) -> PackedTensor:
        """Construct without the checks, from rows that passed them."""
        made = cls.__new__(cls)
        made.tensors, made.dim_to_pack = rows, dim_to_pack
        return made

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, rows: slice) -> PackedTensor:
        """Return `packed[start:end]` as a PackedTensor; for a single row use `packed.tensors[index]`."""
        if not isinstance(rows, slice):
            raise BatchTypeError(f"packed[{rows!r}]: use packed[start:end], packed.slice(indices) or packed.tensors")
        return self._of(self.tensors[rows], self.dim_to_pack)

    def __repr__(self) -> str:
        present = sum(row is not None for row in self.tensors)
        return f"PackedTensor({len(self)} rows, {present} with media, dim_to_pack={self.dim_to_pack})"

    @property
    def has_media(self) -> bool:
        """Whether any row has a tensor."""
        return any(row is not None for row in self.tensors)

    def as_tensor(self, device: str | torch.device | None = None) -> Tensor | None:
        """Join the tensors of all rows along `dim_to_pack`, on `device` if given; None if no row has media.

        A single tensor is returned without a copy. Raises `BatchError` if the tensors differ in another dimension, or
        are on different devices and `device` is None.
        """
        present = [row for row in self.tensors if row is not None]
        if not present:
            return None
        self.check_joinable()
        devices = {str(row.device) for row in present}
        if len(devices) > 1:
            if device is None:
                raise BatchError(
                    f"the rows of a PackedTensor are on {sorted(devices)}; choose one: as_tensor(device=...)"
                )
            present = [row.to(device) for row in present]
        joined = present[0] if len(present) == 1 else torch.cat(present, dim=self.dim_to_pack)
        return joined if device is None else joined.to(device)

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> PackedTensor:
        """Return a PackedTensor with rows on `device`, floating-point ones as `dtype`; copies only where needed."""
        return self._of(
            self._each(lambda row: row.to(device, dtype if row.is_floating_point() else None)), self.dim_to_pack
        )

    def _each(self, change: Callable[[Tensor], Any]) -> list[Any]:
        """Return `change` of the tensor of each row, or None; it is called once for rows with the same tensor."""
        changed = {id(row): change(row) for row in {id(row): row for row in self.tensors if row is not None}.values()}
        return [changed.get(id(row)) for row in self.tensors]

    def slice(self, indices: Sequence[int] | Tensor) -> PackedTensor:
        """Return the rows at `indices`, in that order; negative indices count from the end."""
        wanted = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        size = len(self)
        wrong = [i for i in wanted if isinstance(i, bool) or not isinstance(i, int) or not -size <= i < size]
        if wrong:
            raise BatchError(
                f"row {wrong[0]!r} is not in a PackedTensor of {size} rows; indices are {-size}..{size - 1}"
            )
        return self._of([self.tensors[index] for index in wanted], self.dim_to_pack)

    def __getstate__(self) -> dict[str, Any]:
        return {"tensors": self._each(picklable), "dim_to_pack": self.dim_to_pack}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.tensors, self.dim_to_pack = state["tensors"], state["dim_to_pack"]

    def __copy__(self) -> PackedTensor:
        return self._of(list(self.tensors), self.dim_to_pack)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTensor:
        if _SHARED.get():
            return self
        return self._of(self._each(Tensor.clone), self.dim_to_pack)

    def check_joinable(self, name: str = "a PackedTensor") -> None:
        """Raise `BatchError` unless the tensors of all rows differ in `dim_to_pack` only."""

        def fixed(row: Tensor) -> tuple[int, ...]:
            dim = self.dim_to_pack % row.ndim
            return (*row.shape[:dim], -1, *row.shape[dim + 1 :])

        present = [row for row in self.tensors if row is not None]
        if len({fixed(row) for row in present}) > 1:
            shapes = sorted({tuple(row.shape) for row in present})
            raise BatchError(f"the rows of {name} may differ in dimension {self.dim_to_pack} only, got shapes {shapes}")


@contextmanager
def sharing_media() -> Iterator[None]:
    """Context manager: make `copy.deepcopy` share PackedTensors instead of copying them."""
    token = _SHARED.set(True)
    try:
        yield
    finally:
        _SHARED.reset(token)


def _all_packed(values: Sequence[PackedTensor], what: str) -> Sequence[PackedTensor]:
    wrong = [type(value).__name__ for value in values if not isinstance(value, PackedTensor)]
    if wrong:
        raise BatchTypeError(f"{what} takes PackedTensors, got a {wrong[0]}")
    return values


def has_media(data: Mapping[str, Any]) -> bool:
    """Whether a batch is multimodal: decided by the types of its values, so that ranks without media agree."""
    return any(isinstance(value, PackedTensor) for value in data.values())


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
