"""Read the sharded form, with any number of workers or in a single process; see `sharded.py`.

`SavedShards` is a mapping like `SavedTensors`, so engines load either form with the same code. DCP stores its index as
a pickle; only the classes that an index consists of are allowed, so that no checkpoint file can run code.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlframework.errors import DataError
from rlframework.policy.checkpoint.manifest import reading
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
        with reading(folder / INDEX):
            with (folder / INDEX).open("rb") as file:
                index: Metadata = _IndexUnpickler(file).load()
            entries = index.state_dict_metadata
            self.tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
            for entry in self.tensors.values():  # a pickle can be intact and contain something else
                _ = tuple(entry.size), entry.chunks
            self.set_up_storage_reader(index, is_coordinator=True)


class _Planner(DefaultLoadPlanner):
    """Reads one slice of one tensor into `target`."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """See `DefaultLoadPlanner`."""
        return self._target


class SavedShards(Saved):
    """The tensors of a directory in the sharded form."""

    def __enter__(self) -> Self:
        self._reader = _Reader(self.folder)
        self._entries = self._reader.tensors
        return self

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
