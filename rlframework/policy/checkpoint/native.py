"""The native form of a checkpoint: files of the engine's own, for the programs that read these.

    weights_path/                    config.json and tokenizer, as of a Hugging Face directory
        native.json                  who wrote `engine/`, with how many workers, and whether the optimizer is in it
        engine/                      what `Engine.save_native` wrote
        checksums.json               sizes and checksums of all files
    optimizer_path/
        training.json, random.safetensors, checksums.json     as in the portable form, which moments are not beside

Only a backend that reads its engine's files goes on from it: the forms that every backend reads are `checkpoint.py`
and `sharded.py`. All workers write into one folder: on several machines it must be on a file system that they share.
Left out: what the files look like, and whether they are read under another layout, which is the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.errors import DataError
from rlframework.files import Replacement, telling_no_space
from rlframework.policy.all_ranks import require_shared, together
from rlframework.policy.checkpoint.manifest import FileFacts, describe_files, write_manifest
from rlframework.policy.checkpoint.saved import NATIVE

if TYPE_CHECKING:
    from rlframework.interfaces.worker_group import WorkerContext

ENGINE = "engine"


def save_native(
    path: str, context: WorkerContext, *, beside: Callable[[Path], None], write: Callable[[Path], None], facts: object
) -> None:
    """Write the directory `path`, whole or not: `beside` on rank 0, `write` on all ranks together. Collective.

    `write` gets the folder `engine`, made and empty; `facts` become `native.json`.
    """
    replacement: Replacement | None = None

    def begin() -> str:
        nonlocal replacement
        if context.rank:
            return ""
        with telling_no_space(path):
            replacement = Replacement(path)
            beside(replacement.folder)
            (replacement.folder / ENGINE).mkdir()
            (replacement.folder / NATIVE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return str(replacement.folder)

    def commit(known: Mapping[str, FileFacts]) -> None:
        if replacement is not None:
            with telling_no_space(path):
                write_manifest(replacement.folder, known)
            replacement.commit()

    try:
        folder = Path(together(context, begin)[0])
        together(context, lambda: require_shared(folder, context, "native"))
        with telling_no_space(path):
            write(folder / ENGINE)
        parts = together(context, lambda: _share_of_files(folder, context))
        together(context, lambda: commit({name: facts for part in parts for name, facts in part.items()}))
    except BaseException:
        if replacement is not None:
            replacement.abandon()
        raise


def _share_of_files(folder: Path, context: WorkerContext) -> dict[str, FileFacts]:
    """Each rank reads a part of what was written, for the checksums."""
    names = sorted(path.relative_to(folder).as_posix() for path in (folder / ENGINE).rglob("*") if path.is_file())
    return describe_files(folder, names[context.rank :: context.world_size])


def native_files(path: str, backend: str, *, optimizer: bool) -> Path:
    """The engine's folder in the directory `path`.

    A `DataError` where another backend wrote it, or where the `optimizer` that is asked for is not in it.
    """
    folder = Path(path)
    try:
        facts = json.loads((folder / NATIVE).read_text(encoding="utf-8"))
        writer, workers, with_optimizer = str(facts["backend"]), int(facts["workers"]), bool(facts["optimizer"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / NATIVE} cannot be read: {type(error).__name__}: {error}") from error
    if writer != backend:
        raise DataError(
            f"{folder} is a native checkpoint of {writer} ({workers} workers), whose files {backend} does not read. "
            "Go on under that backend, and save there as portable or sharded, which every backend reads"
        )
    if optimizer and not with_optimizer:
        raise DataError(f"{folder} was saved without its optimizer; load weights alone, or take another checkpoint")
    return folder / ENGINE
