"""Convert checkpoints between formats (`rlframework convert`) in one process, without workers or a GPU.

The formats are portable, sharded (both in `rlframework.policy.checkpoint`) and `huggingface`, a model directory without
optimizer state. Tensors are read one by one. Writing a sharded checkpoint keeps one of them in memory, and writing
safetensors as many as fit into one file (`pretrained.SHARD_BYTES`). Not supported: adapters (training merges them) and
files other than safetensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.errors import DataError, UserError
from rlframework.files import replacing_directory
from rlframework.policy.checkpoint.manifest import MANIFEST, check_files, write_manifest
from rlframework.policy.checkpoint.reader import open_saved
from rlframework.policy.checkpoint.saved import INDEX, SHARD_SUFFIX, Saved, is_sharded, reject_native
from rlframework.training.checkpoints import newest_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("portable", "sharded", "huggingface")
RUN, MODEL, OPTIMIZER = "run.json", "model", "optimizer"

Progress = Callable[[int, int], None]
"""Called with the number of converted tensors and the total."""


@dataclass(frozen=True)
class Source:
    """The folders to convert: the weights, and for a checkpoint also the optimizer and the folder with `run.json`."""

    model: Path
    optimizer: Path | None = None
    run: Path | None = None

    @property
    def folders(self) -> list[Path]:
        """The folders with tensors."""
        return [self.model] if self.optimizer is None else [self.model, self.optimizer]

    @property
    def format(self) -> str:
        """The format of the source."""
        if any(map(is_sharded, self.folders)):
            return "sharded"
        return "portable" if self.optimizer is not None or (self.model / MANIFEST).exists() else "huggingface"


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    source: Source
    dest: Path
    to: str
    tensors: int

    def summary(self) -> str:
        """One line for the terminal."""
        weights_only = self.source.optimizer is None and self.to != "huggingface"
        note = "; weights only, as the source has no optimizer state" if weights_only else ""
        return f"done: {self.tensors:,} tensors of {self.source.model.parent}, {self.to}, in {self.dest}{note}"


def convert(
    source: str, dest: str, to: str, *, overwrite: bool = False, progress: Progress = lambda done, total: None
) -> Converted:
    """Convert the checkpoint or model `source` to the format `to` and write it atomically to the folder `dest`.

    `dest` gets `model/` and, for a checkpoint, `optimizer/` and `run.json`; with `huggingface` it is a model directory.
    With `overwrite` it may exist, and may be `source`. Raises `UserError` if `source` cannot be converted or
    `dest` is in use.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to}: must be one of {', '.join(FORMATS)}")
    found = find_source(source)
    if found.format == to:
        raise UserError(f"{source} is already {to}; there is nothing to convert")
    _require_free(Path(dest), overwrite)
    for folder in (*found.folders, *filter(None, [found.run])):
        check_files(folder, required=is_sharded(folder))
    with ExitStack() as stack:
        saved = [stack.enter_context(open_saved(folder)) for folder in found.folders]
        counter = _Counter(sum(map(len, saved if to != "huggingface" else saved[:1])), progress)
        with replacing_directory(dest) as folder:
            if to == "huggingface":
                _write_whole(folder, saved[0], counter)
            else:
                write = _write_sharded if to == "sharded" else _write_portable
                for name, tensors in zip((MODEL, OPTIMIZER), saved, strict=False):
                    write(folder / name, tensors, counter)
                if found.run is not None:
                    shutil.copyfile(found.run / RUN, folder / RUN)
                    write_manifest(folder)
    return Converted(found, Path(dest), to, counter.total)


# -- source -----------------------------------------------------------------------------------------------------


def find_source(given: str) -> Source:
    """Find the newest checkpoint of a run, a checkpoint, or a model directory. Anything else raises `UserError`."""
    path = Path(given)
    if not path.is_dir():
        raise UserError(f"there is no directory {given}; give a run, a checkpoint of one, or a model directory")
    checkpoint = newest_checkpoint(path) or path
    if (checkpoint / RUN).exists() or (checkpoint / OPTIMIZER).is_dir():
        optimizer = checkpoint / OPTIMIZER
        found = Source(
            checkpoint / MODEL,
            optimizer if optimizer.is_dir() else None,
            checkpoint if (checkpoint / RUN).exists() else None,
        )
    else:
        found = Source(path / MODEL if (path / MODEL).is_dir() else path)
    if (found.model / "adapter_config.json").exists():
        raise UserError(f"{found.model} holds adapters, which need no conversion: peft reads them directly")
    reject_native(found.model)
    if not is_sharded(found.model) and not any(found.model.glob("model*.safetensors")):
        raise DataError(
            f"{found.model} has neither model*.safetensors nor the shards of a checkpoint; give a run, a "
            "checkpoint of one, or a model directory with safetensors"
        )
    return found


def _require_free(dest: Path, overwrite: bool) -> None:
    if not dest.exists() and not dest.is_symlink():
        return
    if not overwrite:
        raise UserError(f"{dest} already exists; choose another folder, or replace it with --overwrite")
    known = (RUN, MODEL, "config.json", INDEX)
    if not dest.is_dir() or (any(dest.iterdir()) and not any((dest / name).exists() for name in known)):
        raise UserError(
            f"{dest} holds no checkpoint or model, so --overwrite does not replace it; choose another folder"
        )


# -- writing ---------------------------------------------------------------------------------------------------


class _Counter:
    """Reads tensors and reports progress."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self._done, self._progress = total, 0, progress

    def read(self, saved: Saved, name: str) -> Tensor:
        """Read the tensor `name`, a floating-point one as fp32."""
        tensor = saved[name]
        self._done += 1
        self._progress(self._done, self.total)
        return tensor.float() if tensor.is_floating_point() else tensor

    def all_of(self, saved: Saved) -> Iterator[tuple[str, Tensor]]:
        for name in saved:
            yield name, self.read(saved, name)


def _write_whole(folder: Path, saved: Saved, counter: _Counter) -> None:
    from rlframework.policy.checkpoint.pretrained import write_tensors

    _copy_others(saved.folder, folder)
    write_tensors(folder, counter.all_of(saved))


def _write_portable(folder: Path, saved: Saved, counter: _Counter) -> None:
    folder.mkdir()
    _write_whole(folder, saved, counter)
    write_manifest(folder)


def _write_sharded(folder: Path, saved: Saved, counter: _Counter) -> None:
    """Write every tensor as one shard in its own file, so that only one is in memory."""
    import torch

    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework.policy.checkpoint.sharded import CheckpointSave, DirectoryPlan
    from rlframework.policy.model_state import TensorShard

    class StoredTensor(TensorShard):
        def value(self) -> Tensor:
            return counter.read(saved, self.name)

    def stored(name: str) -> TensorShard:
        shape, dtype = saved.shape(name), saved.dtype(name)
        dtype = torch.float32 if dtype.is_floating_point else dtype
        return StoredTensor(name, torch.empty(shape, dtype=dtype, device="meta"), (0,) * len(shape), shape)

    plan = DirectoryPlan(
        str(folder), [stored(name) for name in saved], lambda made: _copy_others(saved.folder, made), one_file=False
    )
    CheckpointSave([plan], WorkerContext(), asynchronous=False).finish()


def _copy_others(source: Path, folder: Path) -> None:
    """Copy all files except tensors and their indices; set the dtype in `config.json` to fp32."""
    for path in source.iterdir():
        is_weights = path.name.startswith("model") and ".safetensors" in path.name
        if not path.is_file() or is_weights or path.name in (INDEX, MANIFEST) or path.suffix == SHARD_SUFFIX:
            continue
        shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    if config.exists():
        values = json.loads(config.read_text(encoding="utf-8")) | {"dtype": "float32"}
        values.pop("torch_dtype", None)
        config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
