"""The sharded form of a checkpoint: each worker writes its own pieces of weights and moments, with torch's DCP.

    weights_path/                    config.json and tokenizer, as of a Hugging Face directory
        __RANK_0.distcp              pieces of the weights, fp32, named as by `save_pretrained`
        .metadata                    where each piece lies in the whole
        checksums.json               sizes and checksums of all files
    optimizer_path/
        __RANK_0.distcp, .metadata   pieces of AdamW's moments, `exp_avg.NAME` and `exp_avg_sq.NAME`
        training.json, random.safetensors, checksums.json     as in the portable form

An engine tells its pieces (`Engine.sharded_state`), with the place of each in the whole: torch 2.13 gets the places of
a DTensor wrong that is cut unevenly twice, so DCP is never shown one. Pieces that several workers hold are written
once. Planning and finishing are collective; writing is not, so it may go on in a thread while the workers train. All
workers write into one folder: on several machines it must be on a file system that they share.

Reading is in `sharded_reading.py`: what it gives is cut anew to whatever layout asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from rlframework.errors import DataError
from rlframework.files import Replacement, telling_no_space
from rlframework.policy.all_ranks import require_shared, together
from rlframework.policy.checkpoint.manifest import FileFacts, describe_files, write_manifest
from rlframework.policy.model_state import Piece

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    from rlframework.interfaces.worker_group import WorkerContext


class _Planner(DefaultSavePlanner):
    """DCP's planner over pieces: it lets go of copies and requires that the pieces of each tensor fill it."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = {piece.index: piece for piece in pieces if piece.local.numel() or not any(piece.offset)}

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`."""
        self.plan = SavePlan([piece.write_item() for piece in self.pieces.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """See `DefaultSavePlanner`."""
        return self.pieces[index].value()

    def keep(self, items: Iterable[WriteItem], *, copied: bool) -> None:
        """Hold no other pieces than `items`; `copied`: as copies on the CPU, which training does not change."""
        kept = [self.pieces[item.index] for item in items]
        if copied:
            kept = [replace(piece, local=piece.local.to("cpu", copy=True)) for piece in kept]
        self.pieces = {piece.index: piece for piece in kept}


@dataclass(frozen=True)
class DirectoryPlan:
    """What goes into the directory `path`: this rank's pieces, and what rank 0 writes into the folder it is given."""

    path: str
    pieces: Sequence[Piece]
    beside: Callable[[Path], None]
    one_file: bool = True
    """A file a rank, of which all pieces are held until it is written; else a file a piece."""


class DirectorySave:
    """One directory on its way: `write` this rank's pieces into a folder beside its path, then `finish` together.

    Constructor and `finish` are collective, `write` is not. `copied`: pieces are copied first, so that training may go
    on while `write` runs in a thread.
    """

    def __init__(self, given: DirectoryPlan, context: WorkerContext, *, copied: bool) -> None:
        self.path, self._context = Path(given.path), context
        self._replacement: Replacement | None = None
        self._planner = _Planner(given.pieces)
        self._checksums: dict[str, FileFacts] = {}
        self._results: Any = []
        try:
            self._folder = Path(together(context, lambda: self._begin(given))[0])
            self._writer = FileSystemWriter(self._folder, single_file_per_rank=given.one_file, overwrite=False)
            self._plan, self._metadata = self._planned()
            together(context, lambda: self._planner.keep(self._plan.items, copied=copied))
        except BaseException:
            self.abandon()
            raise

    def _begin(self, given: DirectoryPlan) -> str:
        if self._context.rank:
            return ""
        with telling_no_space(self.path):
            self._replacement = Replacement(self.path)
            given.beside(self._replacement.folder)
        return str(self._replacement.folder)

    def _planned(self) -> tuple[SavePlan, Metadata]:
        """What this rank writes, and what all of them do. Each rank works it out, from the same pieces."""
        plans = together(self._context, self._local_plan)
        try:
            plans, metadata = self._planner.create_global_plan(plans)
        except ValueError as error:
            raise DataError(f"the workers' pieces do not make up the tensors of {self.path}: {error}") from error
        plan = self._writer.prepare_global_plan(plans)[self._context.rank]
        return self._planner.finish_plan(plan), metadata

    def _local_plan(self) -> SavePlan:
        require_shared(self._folder, self._context, "sharded")
        storage_meta: StorageMeta | None = self._writer.storage_meta()
        coordinator = self._context.rank == 0
        self._planner.set_up_planner({}, storage_meta, coordinator)
        self._writer.set_up_storage_writer(coordinator)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self) -> None:
        """Write this rank's pieces. No collective."""
        with telling_no_space(self.path):
            self._results = self._writer.write_data(self._plan, self._planner).wait()
            names = [path.name for path in self._folder.glob(f"__{self._context.rank}_*.distcp")]
            self._checksums = describe_files(self._folder, names)
        self._planner.keep([], copied=False)

    def finish(self, failure: Exception | None = None) -> None:
        """Put the directory where it belongs, or raise on all ranks what failed on one. `failure`: of this rank."""

        def told() -> tuple[Any, dict[str, FileFacts]]:
            if failure is not None:
                raise failure
            return self._results, self._checksums

        try:
            written = together(self._context, told)
            together(self._context, lambda: self._commit(written))
        except BaseException:
            self.abandon()
            raise

    def _commit(self, written: Sequence[tuple[Any, dict[str, FileFacts]]]) -> None:
        if self._replacement is None:
            return
        with telling_no_space(self.path):
            self._writer.finish(self._metadata, [results for results, _ in written])
            known = {name: facts for _, checksums in written for name, facts in checksums.items()}
            write_manifest(self._replacement.folder, known)
        self._replacement.commit()

    def abandon(self) -> None:
        """Remove what was written, where rank 0 is here."""
        if self._replacement is not None:
            self._replacement.abandon()


class CheckpointSave:
    """Directories that are saved together: written in a thread of each rank (`asynchronous`), or by `finish`.

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
        if asynchronous:
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        try:
            for save in self._saves:
                save.write()
        except Exception as error:  # noqa: BLE001 - raised by `finish`, on all ranks
            self._failure = error

    @property
    def written(self) -> bool:
        """Whether this rank has written its pieces, or failed to, so that `finish` does not wait for it."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until all ranks have written, and put the directories where they belong. Collective."""
        if self._thread is None:
            self._write()
        else:
            self._thread.join()
        try:
            for save in self._saves:
                save.finish(self._failure)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Wait for this rank's thread, and remove what is not finished. No collective."""
        if self._thread is not None:
            self._thread.join()
        for save in self._saves:
            save.abandon()
