"""`PackedTensor`: a value of a batch whose rows are tensors of different lengths, such as the images of each prompt.

A model takes the tensors of all rows joined along one dimension (all patches of all images); a batch has to slice and
shuffle them by row. So rows are kept apart, and joined when a tensor is asked for. Not here: padding (that is for
`[B, ...]` tensors), and knowing which model input is which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from rlframework.batch.tensor_parcel import parcel_rows
from rlframework.errors import BatchError, BatchTypeError

_SHARED: ContextVar[bool] = ContextVar("media are shared by deep copies", default=False)


class PackedTensor:
    """One tensor a row, or None for a row without media; `as_tensor` joins them along `dim_to_pack`.

    `tensors`: a list, or one tensor, which is one row. The tensors may differ in size on `dim_to_pack` only. A
    `PackedTensor` is not changed by any method; what a method returns shares the tensors of its rows, and nothing
    writes to them. So do rows that were repeated, sliced or shuffled: media count as immutable.
    """

    __slots__ = ("dim_to_pack", "tensors")

    def __init__(self, tensors: Tensor | Sequence[Tensor | None], dim_to_pack: int) -> None:
        rows = [tensors] if isinstance(tensors, Tensor) else tensors
        if not isinstance(rows, (list, tuple)) or not all(row is None or isinstance(row, Tensor) for row in rows):
            given = {type(row).__name__ for row in rows} if isinstance(rows, (list, tuple)) else {type(rows).__name__}
            raise BatchTypeError(f"a PackedTensor takes a list of a tensor or None for each row; got {sorted(given)}")
        if isinstance(dim_to_pack, bool) or not isinstance(dim_to_pack, int):
            raise BatchTypeError(f"dim_to_pack must be an integer, got {dim_to_pack!r}")
        for index, row in enumerate(rows):
            if row is not None and not -row.ndim <= dim_to_pack < row.ndim:
                raise BatchError(
                    f"row {index} has shape {tuple(row.shape)} and so no dimension {dim_to_pack} to be packed along"
                )
        self.tensors: list[Tensor | None] = list(rows)
        self.dim_to_pack = dim_to_pack

    @classmethod
    def empty_like(cls, other: PackedTensor) -> PackedTensor:
        """As many rows as `other`, none of which has media."""
        return cls([None] * len(other), other.dim_to_pack)

    @classmethod
    def concat(cls, from_packed_tensors: Sequence[PackedTensor]) -> PackedTensor:
        """The rows of all of them, in order. They must agree on `dim_to_pack`."""
        dims = sorted({packed.dim_to_pack for packed in _all_packed(from_packed_tensors, "concat")})
        if len(dims) != 1:
            raise BatchError(f"PackedTensors that are joined must have one dim_to_pack, got {dims or 'none of them'}")
        return cls._of([row for packed in from_packed_tensors for row in packed.tensors], dims[0])

    @classmethod
    def flattened_concat(cls, from_packed_tensors: Sequence[PackedTensor], dim_to_pack: int) -> PackedTensor:
        """Each of them, joined along its own `dim_to_pack`, as one row: the messages of a prompt as one."""
        return cls([packed.as_tensor() for packed in _all_packed(from_packed_tensors, "flattened_concat")], dim_to_pack)

    @classmethod
    def _of(cls, rows: list[Tensor | None], dim_to_pack: int) -> PackedTensor:
        """Without the checks, for rows that passed them."""
        made = cls.__new__(cls)
        made.tensors, made.dim_to_pack = rows, dim_to_pack
        return made

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, rows: slice) -> PackedTensor:
        """`packed[start:end]`: these rows. For one row take `packed.tensors[index]`."""
        if not isinstance(rows, slice):
            raise BatchTypeError(f"packed[{rows!r}]: take packed[start:end], packed.slice(indices) or packed.tensors")
        return self._of(self.tensors[rows], self.dim_to_pack)

    def __repr__(self) -> str:
        present = sum(row is not None for row in self.tensors)
        return f"PackedTensor({len(self)} rows, {present} with media, dim_to_pack={self.dim_to_pack})"

    @property
    def has_media(self) -> bool:
        """Whether any row has a tensor."""
        return any(row is not None for row in self.tensors)

    def as_tensor(self, device: str | torch.device | None = None) -> Tensor | None:
        """The tensors of all rows joined along `dim_to_pack`, on `device` if one is given; None if no row has media.

        A single tensor is given back as it is, not copied. `BatchError` if they differ in another dimension, or lie on
        different devices and none is given.
        """
        present = [row for row in self.tensors if row is not None]
        if not present:
            return None
        if len(present) > 1:
            self._check_joinable(present)
            if len({row.device for row in present}) > 1:
                present = self._on(present, device)
        joined = present[0] if len(present) == 1 else torch.cat(present, dim=self.dim_to_pack)
        return joined if device is None else joined.to(device)

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> PackedTensor:
        """A PackedTensor with its rows on `device`, floating ones as `dtype`; what is right already is not copied."""
        return self._of(
            [
                row if row is None else row.to(device, dtype if row.is_floating_point() else None)
                for row in self.tensors
            ],
            self.dim_to_pack,
        )

    def slice(self, indices: Sequence[int] | Tensor) -> PackedTensor:
        """The rows at `indices`, in their order; negative ones count from the end."""
        wanted = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        size = len(self)
        wrong = [i for i in wanted if isinstance(i, bool) or not isinstance(i, int) or not -size <= i < size]
        if wrong:
            raise BatchError(f"there is no row {wrong[0]!r} in a PackedTensor of {size} rows")
        return self._of([self.tensors[index] for index in wanted], self.dim_to_pack)

    def __getstate__(self) -> dict[str, Any]:
        return {"tensors": parcel_rows(self.tensors), "dim_to_pack": self.dim_to_pack}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.tensors, self.dim_to_pack = state["tensors"], state["dim_to_pack"]

    def __copy__(self) -> PackedTensor:
        return self._of(list(self.tensors), self.dim_to_pack)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTensor:
        if _SHARED.get():
            return self
        return self._of([None if row is None else row.clone() for row in self.tensors], self.dim_to_pack)

    def _check_joinable(self, present: Sequence[Tensor]) -> None:
        def fixed(row: Tensor) -> tuple[int, ...]:
            dim = self.dim_to_pack % row.ndim
            return (*row.shape[:dim], -1, *row.shape[dim + 1 :])

        if len({fixed(row) for row in present}) > 1:
            shapes = sorted({tuple(row.shape) for row in present})
            raise BatchError(
                f"the rows of a PackedTensor may differ in dimension {self.dim_to_pack} only, got shapes {shapes}"
            )

    def _on(self, present: list[Tensor], device: str | torch.device | None) -> list[Tensor]:
        if device is None:
            devices = sorted({str(row.device) for row in present})
            raise BatchError(f"the rows of a PackedTensor lie on {devices}; name one: as_tensor(device=...)")
        return [row.to(device) for row in present]


@contextmanager
def sharing_media() -> Iterator[None]:
    """Within it, `copy.deepcopy` of anything shares the PackedTensors in it instead of copying them."""
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
    """Whether a batch is multimodal: by its keys, so that all ranks say the same, also those without media."""
    return any(isinstance(value, PackedTensor) for value in data.values())
