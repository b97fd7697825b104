"""Read the sharded form, with any number of workers or in a single process; see `sharded.py`.

`SavedShards` is a mapping like `SavedTensors`, so engines load either form with the same code. DCP stores its index as
a pickle; only the classes that an index consists of are allowed, so that no checkpoint file can run code.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlframework.errors import DataError
from rlframework.policy.checkpoint.saved import INDEX, Saved

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}
"""The only names that an index may contain, by module, besides torch's dtypes."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return names in `_ALLOWED`; raise `UnpicklingError` for any other."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which no checkpoint index needs")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """DCP's reader with an index that cannot run code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / INDEX
        try:
            with path.open("rb") as file:
                self.index: Metadata = _IndexUnpickler(file).load()
            # a pickle can be intact and contain something else
            entries = {name: (tuple(entry.size), entry.chunks) for name, entry in self._tensors()}
            self.set_up_storage_reader(self.index, is_coordinator=True)
            assert len(entries) == len(self.index.state_dict_metadata)
        except Exception as error:
            raise DataError(f"{path} is damaged or cannot be read: {type(error).__name__}: {error}") from error

    def _tensors(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        for name, entry in self.index.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                yield name, entry


class _Planner(DefaultLoadPlanner):
    """Reads one slice of one tensor into `target`."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """See `DefaultLoadPlanner`."""
        return self._target


class SavedShards(Saved):
    """The tensors of a directory in the sharded form, by name; each slice is read on access.

    Raises a `DataError` if files are missing or damaged. Use as a context manager.
    """

    def __enter__(self) -> SavedShards:
        self._reader = _Reader(self.folder)
        self._entries = dict(self._reader._tensors())
        return self

    def __exit__(self, *exception: object) -> None:
        self._entries = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.read_slice(name, tuple(slice(0, size) for size in self.shape(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return tuple(self._entries[name].size)

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.read_slice`."""
        entry = self._entries[name]
        offsets, sizes = [one.start for one in where], [one.stop - one.start for one in where]
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        if where and not target.numel():
            return target
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, entry, [chunk])
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise DataError(f"{self.folder / INDEX} is damaged: its shards of {name} do not cover the whole")
        try:
            self._reader.read_data(LoadPlan(items), _Planner(target)).wait()
        except Exception as error:
            names = sorted({self._reader.storage_data[item.storage_index].relative_path for item in items})
            raise DataError(
                f"{name} cannot be read from {', '.join(str(self.folder / each) for each in names)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
