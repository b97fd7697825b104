"""Convert checkpoints between formats (`rlframework convert`) in one process, without workers or a GPU.

The formats are portable, sharded (both in `rlframework.policy.checkpoint`) and `huggingface`, a model directory without
optimizer state: adapters are merged into their base model. Tensors are read one by one. Writing a sharded checkpoint
keeps one of them in memory, and writing safetensors as many as fit into one file (`pretrained.SHARD_BYTES`). Not
supported: sharded adapters, and files other than safetensors.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlframework.algorithms.checkpoints import newest_checkpoint
from rlframework.base.errors import DataError, UserError
from rlframework.base.files import replacing_directory
from rlframework.base.logs import ProgressCallback
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.hub import check_model_files, read_object
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.checkpoint.adapter import adapter_config, adapter_matrices, base_folder, require_base
from rlframework.policy.checkpoint.manifest import MANIFEST, SAVE, check_files, write_manifest
from rlframework.policy.checkpoint.pretrained import write_config, write_tensors
from rlframework.policy.checkpoint.saved import (
    INDEX,
    SHARD_SUFFIX,
    Saved,
    SavedTensors,
    has_adapters,
    is_sharded,
    reject_native,
)
from rlframework.policy.checkpoint.sharded import CheckpointSave, DirectoryPlan
from rlframework.policy.engine import TensorShard
from rlframework.policy.lora_math import A, B, is_adapter, merge
from rlframework.policy.trained_weights import open_saved

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("portable", "sharded", "huggingface")
RUN, MODEL, OPTIMIZER = "run.json", "model", "optimizer"

Read = Callable[[Saved, str], Tensor]
"""Reads the tensor of that name, a floating-point one as fp32, and reports progress."""


def convert(
    source: str, dest: str, to: str, *, overwrite: bool = False, progress: ProgressCallback = lambda done, total: None
) -> str:
    """Convert the checkpoint or model `source` to the format `to` and write it atomically to the folder `dest`.

    `dest` gets `model/` and, for a checkpoint, `optimizer/` and `run.json`; with `huggingface` it is a model directory.
    With `overwrite` it may exist, and may be `source`. Returns a line that sums up what was done. Raises `UserError` if
    `source` cannot be converted or `dest` is in use.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to}: must be one of {', '.join(FORMATS)}")
    folders, run = find_source(source)
    _require_change(source, folders, to)
    _require_free(Path(dest), overwrite)
    for folder in (*folders, *([] if run is None else [run])):
        check_files(folder, required=is_sharded(folder))
    with ExitStack() as stack:
        saved = [stack.enter_context(_opened(folder)) for folder in folders]
        total, done = sum(map(len, saved if to != "huggingface" else saved[:1])), itertools.count(1)

        def read(tensors: Saved, name: str) -> Tensor:
            tensor = tensors[name]
            progress(next(done), total)
            return tensor.float() if tensor.is_floating_point() else tensor

        with replacing_directory(dest) as folder:
            if to == "huggingface":
                _write_model(folder, folders[0], saved[0], read)
                (folder / SAVE).unlink(missing_ok=True)  # it is no part of a checkpoint any more
            else:
                for part, tensors in zip((folder / MODEL, folder / OPTIMIZER), saved, strict=False):
                    if to == "sharded":
                        _write_sharded(part, tensors, read)
                    else:
                        part.mkdir()
                        _write_whole(part, tensors, read)
                        write_manifest(part)
                if run is not None:
                    shutil.copyfile(run / RUN, folder / RUN)
                    write_manifest(folder)
    weights_only = len(folders) == 1 and to != "huggingface"
    note = "; weights only, as the source has no optimizer state" if weights_only else ""
    return f"done: {total:,} tensors of {folders[0].parent}, {to}, in {dest}{note}"


def _require_change(source: str, folders: Sequence[Path], to: str) -> None:
    """Raise a `UserError` if `source` has the form `to`, or cannot have it."""
    adapters, sharded = has_adapters(folders[0]), any(map(is_sharded, folders))
    whole = "portable" if adapters or len(folders) > 1 or (folders[0] / MANIFEST).exists() else "huggingface"
    if to == ("sharded" if sharded else whole):
        raise UserError(f"{source} is already {to}; there is nothing to convert")
    if adapters and to == "sharded":
        raise UserError(
            f"{folders[0]} holds adapters, which are not saved in shards; --to huggingface merges them into their base "
            "model"
        )


def _opened(folder: Path) -> Saved:
    return MergedWeights(folder) if has_adapters(folder) else open_saved(folder)


def find_source(given: str) -> tuple[list[Path], Path | None]:
    """Find the newest checkpoint of a run, a checkpoint, or a model directory. Anything else raises `UserError`.

    Returns the folders with tensors (weights, and for a checkpoint the optimizer), and the folder with `run.json`.
    """
    path = Path(given)
    if not path.is_dir():
        raise UserError(f"there is no directory {given}; give a run, a checkpoint of one, or a model directory")
    found = newest_checkpoint(path) or path
    run, optimizer = found if (found / RUN).exists() else None, found / OPTIMIZER
    model = found / MODEL if run is not None or optimizer.is_dir() or (found / MODEL).is_dir() else found
    reject_native(model)
    if not (is_sharded(model) or has_adapters(model) or any(model.glob("model*.safetensors"))):
        raise DataError(
            f"{model} has neither model*.safetensors nor the shards of a checkpoint; give a run, a "
            "checkpoint of one, or a model directory with safetensors"
        )
    check_model_files(model)
    return [model, optimizer] if optimizer.is_dir() else [model], run


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


def _write_model(folder: Path, source: Path, saved: Saved, read: Read) -> None:
    """Write a model directory: of adapters the merged model, with their tokenizer."""
    if not isinstance(saved, MergedWeights):
        _write_whole(folder, saved, read)
        return
    write_config(folder, PolicyConfig(model_name=saved.base), load_tokenizer(str(source)))
    write_tensors(folder, ((name, read(saved, name)) for name in saved))


def _write_whole(folder: Path, saved: Saved, read: Read) -> None:
    _copy_others(saved.folder, folder)
    write_tensors(folder, ((name, read(saved, name)) for name in saved))


def _write_sharded(folder: Path, saved: Saved, read: Read) -> None:
    """Write every tensor as one shard in its own file, so that only one is in memory."""

    class StoredTensor(TensorShard):
        def value(self) -> Tensor:
            return read(saved, self.name)

    shards = []
    for name in saved:
        shape, dtype = saved.shape(name), saved.dtype(name)
        like = torch.empty(shape, dtype=torch.float32 if dtype.is_floating_point else dtype, device="meta")
        shards.append(StoredTensor(name, like, (0,) * len(shape), shape))
    plan = DirectoryPlan(str(folder), shards, lambda made: _copy_others(saved.folder, made), one_file=False)
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
        values = read_object(config) | {"dtype": "float32"}
        values.pop("torch_dtype", None)
        config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


class MergedWeights(Saved):
    """The weights of the model that the adapters in `folder` belong to, with the adapters merged into them.

    A weight with an adapter is fp32, the others have the dtype of the base's files. `base`: the name of the base model,
    as the adapters' files have it. Raises a `DataError` if it is not here, has other files than those that the adapters
    were trained on, or lacks a layer of theirs.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        config = adapter_config(path)
        self.base = str(config.get("base_model_name_or_path"))
        if (base := base_folder(self.base)) is None:
            raise DataError(
                f"the adapters in {path} belong to {self.base!r}, which is neither a directory here nor a downloaded "
                "model; a relative path counts from the directory in which the run was started"
            )
        require_base(path, self.base)
        self._base, self._adapters = SavedTensors(base), adapter_matrices(path)
        self._scale = float(config["lora_alpha"]) / int(config["r"])
        layers = {name.removesuffix(A).removesuffix(B) for name in self._adapters if is_adapter(name)}
        if missing := sorted(layer for layer in layers if f"{layer}.weight" not in self._base):
            raise DataError(
                f"the files of {self.base!r} have no {missing[0]}.weight, to which an adapter in {path} belongs: its "
                "weights have other names in files; merge them with peft's merge_and_unload"
            )
        super().__init__(base, dict.fromkeys(self._base))

    def __getitem__(self, name: str) -> Tensor:
        weight, layer = self._base[name], name.removesuffix(".weight")
        if layer + A not in self._adapters:
            return weight
        return merge(weight.float(), self._adapters[layer + A], self._adapters[layer + B], self._scale)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return self._base.shape(name)

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.read_slice`."""
        return self[name][where]
