"""The sharded form of a checkpoint, written and read with torch's DCP.

An engine returns its shards with their offsets (`Engine.sharded_state`). DCP never sees a DTensor, because torch 2.13
computes wrong offsets for one that is sharded unevenly twice. Shards that several workers hold are written once.
Planning and finishing are collective; writing is not, so it may run in a thread while the workers train.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlframework.base.errors import DataError
from rlframework.base.files import writing
from rlframework.base.logs import debug_span
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.checkpoint.manifest import FileFacts, describe_file, reading, require_inside
from rlframework.policy.checkpoint.pretrained import SharedDirectory
from rlframework.policy.checkpoint.saved import INDEX, SHARD_SUFFIX, Saved
from rlframework.policy.engine import TensorShard
from rlframework.workers.process_groups import run_on_all_ranks

_LOG = logging.getLogger(__name__)


def _index(shard: TensorShard) -> MetadataIndex:
    return MetadataIndex(shard.name, torch.Size(shard.offset))


def _write_item(shard: TensorShard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offset), shard.local.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=shard.local.dtype), torch.Size(shard.shape))
    return WriteItem(index=_index(shard), type=WriteItemType.SHARD, tensor_data=data)


class _Planner(DefaultSavePlanner):
    """DCP's planner over shards: it drops replicas and requires that the shards of each tensor cover it."""

    def __init__(self, shards: Iterable[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = {_index(shard): shard for shard in shards if shard.local.numel() or not any(shard.offset)}

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`."""
        self.plan = SavePlan([_write_item(shard) for shard in self.shards.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """See `DefaultSavePlanner`."""
        return self.shards[index].value()

    def keep(self, items: Iterable[WriteItem], *, copied: bool) -> None:
        """Keep only the shards of `items`; `copied`: as copies on the CPU, which training does not change."""
        kept = [self.shards[item.index] for item in items]
        if copied:
            kept = [replace(shard, local=shard.local.to("cpu", copy=True)) for shard in kept]
        self.shards = {_index(shard): shard for shard in kept}


@dataclass(frozen=True)
class DirectoryPlan:
    """Contents of the directory `path`: this rank's shards, and a function with which rank 0 writes the other files."""

    path: str
    shards: Sequence[TensorShard]
    beside: Callable[[Path], None]
    one_file: bool = True
    """One file per rank, with all its shards in memory until it is written; otherwise one file per shard."""


class DirectorySave(SharedDirectory):
    """A directory being saved: `write` this rank's shards (no collective), then `finish` on all ranks.

    `copied`: copy the shards first, so that training may continue while `write` runs in a thread.
    """

    def __init__(self, plan: DirectoryPlan, context: WorkerContext, *, copied: bool) -> None:
        super().__init__(plan.path, context, "sharded", plan.beside)
        self._planner = _Planner(plan.shards)
        self._checksums: dict[str, FileFacts] = {}
        self._results: Any = []
        with self:
            self._writer = FileSystemWriter(self.folder, single_file_per_rank=plan.one_file, overwrite=False)
            plans = run_on_all_ranks(context, self._local_plan)
            try:  # each rank computes the same from the same local plans
                plans, self._metadata = self._planner.create_global_plan(plans)
            except ValueError as error:
                raise DataError(f"the workers' shards do not cover the tensors of {self.path}: {error}") from error
            self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[context.rank])
            run_on_all_ranks(context, lambda: self._planner.keep(self._plan.items, copied=copied))

    def _local_plan(self) -> SavePlan:
        coordinator = self._context.rank == 0
        self._planner.set_up_planner({}, self._writer.storage_meta(), coordinator)
        self._writer.set_up_storage_writer(coordinator)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self) -> None:
        """Write this rank's shards."""
        with writing(self.path):
            self._results = self._writer.write_data(self._plan, self._planner).wait()
            own = self.folder.glob(f"__{self._context.rank}_*{SHARD_SUFFIX}")
            self._checksums = {path.name: describe_file(path) for path in own}
        self._planner.shards = {}  # free the copies

    def finish(self, failure: Exception | None = None) -> None:
        """Move the directory into place, or raise on all ranks if one failed. `failure`: this rank's."""

        def results() -> Any:
            if failure is not None:
                raise failure
            return self._results

        of_ranks = run_on_all_ranks(self._context, results)
        self.commit(lambda: self._checksums, lambda: self._writer.finish(self._metadata, of_ranks))


class CheckpointSave:
    """Directories that are saved together: written by a thread on each rank (`asynchronous`), or by the constructor.

    Constructor and `finish` are collective.
    """

    def __init__(self, plans: Sequence[DirectoryPlan], context: WorkerContext, *, asynchronous: bool) -> None:
        self._saves: list[DirectorySave] = []
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        try:
            for plan in plans:
                self._saves.append(DirectorySave(plan, context, copied=asynchronous))
        except BaseException:
            self.abandon()
            raise
        if not asynchronous:
            self._write()
            return
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            with debug_span(_LOG, "checkpoint: writing %d directories", len(self._saves)):
                for save in self._saves:
                    save.write()
        except Exception as error:  # noqa: BLE001 - raised by `finish`, on all ranks
            self._failure = error

    @property
    def written(self) -> bool:
        """True if this rank has written its shards or failed, so that `finish` does not wait for it."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until all ranks have written, and move the directories into place. Collective."""
        self._join()
        try:
            for save in self._saves:
                save.finish(self._failure)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Wait for this rank's thread and remove unfinished directories. No collective."""
        self._join()
        for save in self._saves:
            save.abandon()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()


_METADATA = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata"
)
_PATHS = "Path PosixPath PurePosixPath"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": [*_METADATA.split(), "_MEM_FORMAT_ENCODING"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "torch": ["Size"],
    "pathlib": _PATHS.split(),
    "pathlib._local": _PATHS.split(),
}
"""The only names that an index may contain, by module, besides torch's dtypes."""


class _IndexUnpickler(pickle.Unpickler):
    """DCP stores its index as a pickle; others than `_ALLOWED` classes could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which no checkpoint index needs")
        return super().find_class(module, name)


def read_index(path: Path) -> Metadata:
    """Read the index `path` of a DCP checkpoint without running code. Raises `DataError` if that is not possible."""
    with reading(path), path.open("rb") as file:
        index: Metadata = _IndexUnpickler(file).load()
    return index


class _SlicePlanner(DefaultLoadPlanner):
    """Reads one slice of one tensor into `target`."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """See `DefaultLoadPlanner`."""
        return self._target


class SavedShards(Saved):
    """The tensors of a directory in the sharded form, read by DCP with an index that cannot run code."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / INDEX
        index = read_index(path)
        with reading(path):
            entries = index.state_dict_metadata
            tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
            for entry in tensors.values():  # a pickle can be intact and contain something else
                _ = tuple(entry.size), entry.chunks
            for stored in index.storage_data.values():
                require_inside(stored.relative_path)
            self._reader = FileSystemReader(folder)
            self._reader.set_up_storage_reader(index, is_coordinator=True)
        super().__init__(folder, tensors)

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
            self._reader.read_data(LoadPlan(items), _SlicePlanner(target)).wait()
        except Exception as error:
            names = sorted({self._reader.storage_data[item.storage_index].relative_path for item in items})
            raise DataError(
                f"{name} cannot be read from {', '.join(str(self.folder / each) for each in names)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return target
