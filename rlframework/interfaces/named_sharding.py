"""`NamedSharding`: which rank stands where on the named axes of a group of workers. No torch, no processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlframework.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlframework.config.policy import ParallelismConfig

POLICY_AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
"""The axes of a policy's workers, in the order of its layout."""

REPLICATED_AXES = ("pipeline_parallel", "context_parallel", "tensor_parallel")
"""The axes of a policy over which all workers get the same rows and return the same results."""


class NamedSharding:
    """Unique integer ranks in an N-D array with one name for each dimension.

    A layout that is ragged, holds other things than whole numbers or a rank twice, or has not one name for each
    dimension is a `ValueError`.
    """

    def __init__(self, layout: Sequence[Any] | NDArray[Any], names: Sequence[str]) -> None:
        self._layout = _as_ranks(layout)
        self._names = list(names)
        if self._layout.ndim != len(self._names) or len(set(self._names)) != len(self._names):
            raise ValueError(
                f"a layout of {self._layout.ndim} dimensions needs as many different names, got {self._names}"
            )
        ranks, counts = np.unique(self._layout, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"Duplicate ranks found in the layout: {ranks[counts > 1].tolist()}; each may occur once")
        self._coords = {int(rank): index for index, rank in np.ndenumerate(self._layout)}

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis by name, in the order of the dimensions."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def names(self) -> list[str]:
        """The names of the axes (a copy)."""
        return list(self._names)

    @property
    def layout(self) -> NDArray[np.int64]:
        """The ranks (a copy)."""
        return self._layout.copy()

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._layout.size

    def get_axis_index(self, name: str) -> int:
        """Which dimension `name` is; a `ValueError` for an unknown name."""
        if name not in self._names:
            raise ValueError(f"Axis '{name}' not found; the axes are {self._names}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Number of ranks along `name`."""
        return int(self._layout.shape[self.get_axis_index(name)])

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Where `rank` stands, by axis name; a `ValueError` for an unknown rank."""
        if rank not in self._coords:
            raise ValueError(f"rank {rank} is not in the layout; its ranks are {sorted(self._coords)}")
        return {name: int(index) for name, index in zip(self._names, self._coords[rank], strict=True)}

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """The ranks at these coordinates (any number of axes), sorted; none where a coordinate is out of range."""
        index: list[Any] = [slice(None)] * self.ndim
        for name, coordinate in coords.items():
            axis = self.get_axis_index(name)
            if not 0 <= coordinate < self._layout.shape[axis]:
                return []
            index[axis] = coordinate
        return sorted(int(rank) for rank in np.ravel(self._layout[tuple(index)]))

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """The part at these coordinates with the axes that are left, or the rank when all axes are given.

        A coordinate out of range is an `IndexError`.
        """
        index: list[Any] = [slice(None)] * self.ndim
        for name, coordinate in coords.items():
            axis = self.get_axis_index(name)
            if not 0 <= coordinate < self._layout.shape[axis]:
                raise IndexError(f"coordinate {coordinate} on axis '{name}' of size {self._layout.shape[axis]}")
            index[axis] = coordinate
        part = self._layout[tuple(index)]
        left = [name for name in self._names if name not in coords]
        return NamedSharding(part, left) if left else int(part)

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Iterable[str]) -> bool:
        """True when `coords` is 0 on all of `axes`."""
        return all(coords[axis] == 0 for axis in axes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._layout, other._layout)

    def __hash__(self) -> int:
        return hash((tuple(self._names), self._layout.shape, self._layout.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding({self._layout.tolist()}, names={self._names})"


def policy_sharding(world_size: int, parallelism: ParallelismConfig) -> NamedSharding:
    """The layout of a policy's workers: pipeline, data, context, tensor parallel; data parallel takes what is left.

    A `ConfigError` when the workers cannot be divided into whole replicas of the model.
    """
    shape = (parallelism.pipeline, data_parallel_size(world_size, parallelism), parallelism.context, parallelism.tensor)
    return NamedSharding(np.arange(world_size).reshape(shape), POLICY_AXES)


def data_parallel_size(world_size: int, parallelism: ParallelismConfig) -> int:
    """How many replicas of the model `world_size` workers hold, each with rows of its own.

    A `ConfigError` when the workers cannot be divided into whole replicas.
    """
    size, left = divmod(world_size, parallelism.model_size)
    if left or size < 1:
        raise ConfigError(
            f"{world_size} workers cannot hold whole replicas of the model: pipeline {parallelism.pipeline} x context "
            f"{parallelism.context} x tensor {parallelism.tensor} takes {parallelism.model_size} workers each; "
            "make worker_group.num_workers a multiple of it, or change policy.parallelism"
        )
    return size


def _as_ranks(layout: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    try:
        given = np.asarray(layout)
    except ValueError as error:
        raise ValueError(f"the layout is ragged: {layout}") from error
    whole = given.dtype.kind in "iu" or (given.dtype.kind == "f" and bool((given == np.floor(given)).all()))
    if not whole or (given.dtype.kind == "f" and not np.isfinite(given).all()):
        raise ValueError(f"Layout must contain only integer rank IDs. Got {given.tolist()}")
    return given.astype(np.int64)
