"""The native form of a checkpoint: files in the engine's own format, for programs that read it.

    weights_path/                    config.json and tokenizer, as in a Hugging Face directory
        native.json                  the backend that wrote `engine/`, its workers, and whether it has the optimizer
        engine/                      written by `Engine.save_native`
        checksums.json               sizes and checksums of all files
    optimizer_path/
        training.json, random.safetensors, checksums.json     as in the portable form, without moments

Only the backend that wrote it can resume from it; the forms that every backend reads are `portable.py` and
`sharded.py`. All workers write into one folder, on a file system that all machines share. The format
of the engine's files, and whether they can be read under another layout, is up to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rlframework.errors import DataError
from rlframework.files import reporting_full_disk
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.checkpoint.manifest import FileFacts, describe_file, reading
from rlframework.policy.checkpoint.saved import NATIVE
from rlframework.policy.checkpoint.shared_directory import SharedDirectory

ENGINE = "engine"


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
        with reporting_full_disk(path):
            write(directory.folder / ENGINE)
        directory.commit(share_of_files)


def native_files(path: str, backend: str, *, optimizer: bool) -> Path:
    """Return the engine's folder in the directory `path`.

    Raises a `DataError` if another backend wrote it, or if the requested `optimizer` is not in it.
    """
    folder = Path(path)
    with reading(folder / NATIVE):
        facts = json.loads((folder / NATIVE).read_text(encoding="utf-8"))
        writer, workers, with_optimizer = str(facts["backend"]), int(facts["workers"]), bool(facts["optimizer"])
    if writer != backend:
        raise DataError(
            f"{folder} is a native checkpoint of {writer} ({workers} workers), which {backend} cannot read. "
            "Resume with that backend, and save in the form portable or sharded, which every backend reads"
        )
    if optimizer and not with_optimizer:
        raise DataError(f"{folder} was saved without its optimizer; load the weights only, or use another checkpoint")
    return folder / ENGINE
