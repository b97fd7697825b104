"""`NamedSharding`: the layout of a worker group's ranks on named axes. Uses neither torch nor processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlframework.base.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlframework.config.policy import ParallelismConfig

POLICY_AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
"""The axes of a policy's workers, in the order of its layout."""

REPLICATED_AXES = ("pipeline_parallel", "context_parallel", "tensor_parallel")
"""The axes of a policy along which all workers get the same rows and return the same results."""


class NamedSharding:
    """Unique integer ranks in an N-D array with one name per dimension.

    Raises `ValueError` for a ragged layout, values that are not integers, duplicate ranks, and for a number of names
    other than the number of dimensions.
    """

    def __init__(self, layout: Sequence[Any] | NDArray[Any], names: Sequence[str]) -> None:
        try:
            given = np.asarray(layout)
        except ValueError as error:
            raise ValueError(f"the layout is ragged: {layout}") from error
        if given.dtype.kind not in "iuf" or not np.isfinite(given).all() or (given % 1).any():
            raise ValueError(f"Layout must contain only integer rank IDs. Got {given.tolist()}")
        self._layout = given.astype(np.int64)
        self._names = list(names)
        if self._layout.ndim != len(self._names) or len(set(self._names)) != len(self._names):
            raise ValueError(
                f"a layout of {self._layout.ndim} dimensions needs as many distinct names, got {self._names}"
            )
        ranks, counts = np.unique(self._layout, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"Duplicate ranks found in the layout: {ranks[counts > 1].tolist()}; each may occur once")
        self._coords = {int(rank): index for index, rank in np.ndenumerate(self._layout)}

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis by name, in the order of the dimensions."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def names(self) -> list[str]:
        """The names of the axes (a copy)."""
        return list(self._names)

    @property
    def layout(self) -> NDArray[np.int64]:
        """The array of ranks (a copy)."""
        return self._layout.copy()

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._layout.size

    def get_axis_index(self, name: str) -> int:
        """Return the dimension of axis `name`; raise `ValueError` for an unknown name."""
        if name not in self._names:
            raise ValueError(f"Axis '{name}' not found; the axes are {self._names}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return the number of ranks along axis `name`."""
        return int(self._layout.shape[self.get_axis_index(name)])

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` by axis name; raise `ValueError` for an unknown rank."""
        if rank not in self._coords:
            raise ValueError(f"rank {rank} is not in the layout; its ranks are {sorted(self._coords)}")
        return {name: int(index) for name, index in zip(self._names, self._coords[rank], strict=True)}

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the sorted ranks at these coordinates, on any number of axes; empty if one is out of range."""
        try:
            return sorted(int(rank) for rank in np.ravel(self._at(coords)))
        except IndexError:
            return []

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """Return the sub-layout at these coordinates, or the rank if all axes are given.

        The sub-layout keeps the axes that are not given. Raises `IndexError` for a coordinate that is out of range.
        """
        remaining = [name for name in self._names if name not in coords]
        ranks = self._at(coords)
        return NamedSharding(ranks, remaining) if remaining else int(ranks)

    def _at(self, coords: Mapping[str, int]) -> Any:
        index: list[Any] = [slice(None)] * self.ndim
        for name, coordinate in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= coordinate < size:
                raise IndexError(f"coordinate {coordinate} on axis '{name}' of size {size} is out of range")
            index[self.get_axis_index(name)] = coordinate
        return self._layout[tuple(index)]

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Iterable[str]) -> bool:
        """Return True if `coords` is 0 on all of `axes`."""
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
    """Lay out a policy's workers along `POLICY_AXES`; raises like `data_parallel_size`."""
    shape = (parallelism.pipeline, data_parallel_size(world_size, parallelism), parallelism.context, parallelism.tensor)
    return NamedSharding(np.arange(world_size).reshape(shape), POLICY_AXES)


def data_parallel_size(world_size: int, parallelism: ParallelismConfig) -> int:
    """Return how many replicas of the model `world_size` workers hold; each replica gets its own rows.

    Raises `ConfigError` if the workers do not divide into whole replicas.
    """
    size, remainder = divmod(world_size, parallelism.model_size)
    if remainder or size < 1:
        raise ConfigError(
            f"{world_size} workers cannot hold whole replicas of the model: pipeline {parallelism.pipeline} x context "
            f"{parallelism.context} x tensor {parallelism.tensor} takes {parallelism.model_size} workers each; "
            "make worker_group.num_workers a multiple of it, or change policy.parallelism"
        )
    return size
