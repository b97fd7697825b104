"""`rlframework convert`: checkpoints from one form into another, in one process, without workers or a GPU.

The forms are portable and sharded (`rlframework.policy.checkpoint`) and the Hugging Face directory, which holds a model
alone. Tensors are read one at a time: one in memory at once for the sharded form, and as many as fit one file
(`pretrained.SHARD_BYTES`) for safetensors. Not supported: adapters (they are merged where they are trained) and files
other than safetensors.
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
from rlframework.policy.checkpoint.saved import INDEX, PIECES, Saved, is_sharded, require_no_native
from rlframework.training.checkpoints import newest_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("portable", "sharded", "huggingface")
RUN, MODEL, OPTIMIZER = "run.json", "model", "optimizer"

Progress = Callable[[int, int], None]
"""Called with the tensors that are done, and all there are."""


@dataclass(frozen=True)
class Source:
    """What is converted: the folder with the weights, and of a checkpoint those around it."""

    model: Path
    optimizer: Path | None = None
    run: Path | None = None

    @property
    def folders(self) -> list[Path]:
        """Those with tensors."""
        return [self.model] if self.optimizer is None else [self.model, self.optimizer]

    @property
    def form(self) -> str:
        """The form that it is in."""
        if any(map(is_sharded, self.folders)):
            return "sharded"
        return "portable" if self.optimizer is not None or (self.model / MANIFEST).exists() else "huggingface"


@dataclass(frozen=True)
class Converted:
    """What was done."""

    source: Source
    dest: Path
    to: str
    tensors: int

    def told(self) -> str:
        """One line."""
        left = self.source.optimizer is None and self.to != "huggingface"
        what = "; weights only, there was no optimizer state to go on from" if left else ""
        return f"done: {self.tensors:,} tensors of {self.source.model.parent}, {self.to}, in {self.dest}{what}"


def convert(
    source: str, dest: str, to: str, *, overwrite: bool = False, progress: Progress = lambda done, total: None
) -> Converted:
    """Write the checkpoint or model `source` to the folder `dest` in the form `to`, whole or not at all.

    `dest` gets `model/` and, of a checkpoint, `optimizer/` and `run.json`; of `huggingface` it is the model itself. It
    may be `source`, with `overwrite`. A `UserError` for what cannot be converted, and for a `dest` that is taken.
    """
    if to not in FORMS:
        raise UserError(f"--to {to}: there are {', '.join(FORMS)}")
    found = find_source(source)
    if found.form == to:
        raise UserError(f"{source} is {to} already; there is nothing to convert")
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
                write = _write_pieces if to == "sharded" else _write_portable
                for name, tensors in zip((MODEL, OPTIMIZER), saved, strict=False):
                    write(folder / name, tensors, counter)
                if found.run is not None:
                    shutil.copyfile(found.run / RUN, folder / RUN)
                    write_manifest(folder)
    return Converted(found, Path(dest), to, counter.total)


# -- what is given -----------------------------------------------------------------------------------------------------


def find_source(given: str) -> Source:
    """The newest checkpoint of a run, a checkpoint, or a model directory; a `UserError` for anything else."""
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
        raise UserError(f"{found.model} holds adapters, which are not converted: peft reads them as they are")
    require_no_native(found.model)
    if not is_sharded(found.model) and not any(found.model.glob("model*.safetensors")):
        raise DataError(
            f"{found.model} has neither model*.safetensors nor pieces of a sharded checkpoint; give a run, a "
            "checkpoint of one, or a model directory with safetensors"
        )
    return found


def _require_free(dest: Path, overwrite: bool) -> None:
    if not dest.exists() and not dest.is_symlink():
        return
    if not overwrite:
        raise UserError(f"{dest} is there already, and nothing is overwritten; take another place, or give --overwrite")
    known = (RUN, MODEL, "config.json", INDEX)
    if not dest.is_dir() or (any(dest.iterdir()) and not any((dest / name).exists() for name in known)):
        raise UserError(f"{dest} holds something else than a checkpoint or a model, and is not overwritten")


# -- what is written ---------------------------------------------------------------------------------------------------


class _Counter:
    """Reads tensors, and tells how many there were."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self._done, self._progress = total, 0, progress

    def read(self, saved: Saved, name: str) -> Tensor:
        """The tensor `name` in fp32."""
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


def _write_pieces(folder: Path, saved: Saved, counter: _Counter) -> None:
    """A piece is a whole tensor, in a file of its own, so that no two are held at once."""
    import torch

    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework.policy.checkpoint.sharded import CheckpointSave, DirectoryPlan
    from rlframework.policy.model_state import Piece

    class Lying(Piece):
        def value(self) -> Tensor:
            return counter.read(saved, self.name)

    def lying(name: str) -> Piece:
        shape, dtype = saved.shape(name), saved.dtype(name)
        dtype = torch.float32 if dtype.is_floating_point else dtype
        return Lying(name, torch.empty(shape, dtype=dtype, device="meta"), (0,) * len(shape), shape)

    plan = DirectoryPlan(
        str(folder), [lying(name) for name in saved], lambda made: _copy_others(saved.folder, made), one_file=False
    )
    CheckpointSave([plan], WorkerContext(), asynchronous=False).finish()


def _copy_others(source: Path, folder: Path) -> None:
    """All files but those with tensors and those that describe them; a configuration that tells fp32."""
    for path in source.iterdir():
        is_weights = path.name.startswith("model") and ".safetensors" in path.name
        if not path.is_file() or is_weights or path.name in (INDEX, MANIFEST) or path.suffix == PIECES:
            continue
        shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    if config.exists():
        values = json.loads(config.read_text(encoding="utf-8")) | {"dtype": "float32"}
        values.pop("torch_dtype", None)
        config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
