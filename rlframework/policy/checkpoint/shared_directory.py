"""Directories that all ranks write together, on a file system that they share; the native form is written so."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from rlframework.base.errors import UserError
from rlframework.base.files import Replacement, writing
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.all_ranks import run_on_all_ranks
from rlframework.policy.checkpoint.manifest import FileFacts, describe_file, write_manifest
from rlframework.policy.checkpoint.saved import ENGINE, NATIVE


class SharedDirectory:
    """Ranks write into the temporary `folder`, and `commit` moves it to `path`: it appears complete or not at all.

    Constructor and `commit` are collective. As a context manager, it abandons the directory if the block fails.
    """

    def __init__(self, path: str | Path, context: WorkerContext, form: str, begin: Callable[[Path], None]) -> None:
        """Create `folder`, in which rank 0 calls `begin`; `form` is the checkpoint's form, for errors."""
        self.path, self._context = Path(path), context
        self._replacement: Replacement | None = None
        with self:
            self.folder = Path(run_on_all_ranks(context, lambda: self._create(begin))[0])
            run_on_all_ranks(context, lambda: self._require_visible(form))

    def _create(self, begin: Callable[[Path], None]) -> str:
        if self._context.rank:
            return ""
        with writing(self.path):
            self._replacement = Replacement(self.path)
            begin(self._replacement.folder)
        return str(self._replacement.folder)

    def _require_visible(self, form: str) -> None:
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} was created by rank 0, but rank {self._context.rank} does not see it: {form} "
                "checkpoints need a file system that all workers share; set checkpoints.format=portable, or another "
                "output_dir"
            )

    def commit(self, describe: Callable[[], Mapping[str, FileFacts]], end: Callable[[], None] = lambda: None) -> None:
        """Call `end` on rank 0, add the manifest, and move the directory into place.

        `describe` returns entries of the manifest that this rank has computed; rank 0 computes the others.
        """
        parts = run_on_all_ranks(self._context, describe)

        def commit() -> None:
            if self._replacement is not None:
                with writing(self.path):
                    end()
                    write_manifest(self.folder, {name: facts for part in parts for name, facts in part.items()})
                self._replacement.commit()

        run_on_all_ranks(self._context, commit)

    def abandon(self) -> None:
        """Remove what was written, on rank 0. No collective."""
        if self._replacement is not None:
            self._replacement.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()


def save_native(
    path: str, context: WorkerContext, *, beside: Callable[[Path], None], write: Callable[[Path], None], facts: object
) -> None:
    """Write the directory `path` atomically: `beside` on rank 0, `write` on all ranks. Collective.

    `write` gets the new, empty folder `engine`; `facts` become `native.json`.
    """

    def begin(folder: Path) -> None:
        beside(folder)
        (folder / ENGINE).mkdir()
        (folder / NATIVE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def share_of_files() -> dict[str, FileFacts]:  # the ranks compute checksums in parallel
        files = sorted(path for path in (directory.folder / ENGINE).rglob("*") if path.is_file())
        own = files[context.rank :: context.world_size]
        return {path.relative_to(directory.folder).as_posix(): describe_file(path) for path in own}

    with SharedDirectory(path, context, "native", begin) as directory:
        with writing(path):
            write(directory.folder / ENGINE)
        directory.commit(share_of_files)
