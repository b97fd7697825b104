"""Safetensors files: a model as a Hugging Face directory, written one weight at a time, and read by slice.

`open_saved` reads the sharded form too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError
from rlframework.files import replacing_directory
from rlframework.policy.all_ranks import exhausting
from rlframework.policy.checkpoint.manifest import reading, write_manifest
from rlframework.policy.checkpoint.saved import Saved, is_sharded, reject_native

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 4 << 30
"""Size in bytes at which a safetensors file is closed and the next one started; bounds the memory in use."""


def write_pretrained(
    path: str | Path,
    weights: Iterator[tuple[str, Tensor]],
    model_name: str,
    tokenizer: Any,
    trust_remote_code: bool = False,
    *,
    checksums: bool = False,
) -> None:
    """Write `weights`, and the configuration and tokenizer of `model_name`, to the directory `path` atomically.

    `checksums`: add a manifest, as checkpoints have. `weights` is exhausted even if writing fails, because it is a
    collective.
    """
    with exhausting(weights), replacing_directory(path) as folder:
        write_config(folder, model_name, tokenizer, trust_remote_code)
        write_tensors(folder, weights)
        if checksums:
            write_manifest(folder)


def write_config(folder: Path, model_name: str, tokenizer: Any, trust_remote_code: bool) -> None:
    """Write the non-weight files of a Hugging Face directory for `model_name`, with fp32 as the dtype."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    config.dtype = "float32"
    config.save_pretrained(folder)
    with suppress(OSError):  # the model has none
        GenerationConfig.from_pretrained(model_name).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_tensors(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors that arrive one at a time as `model*.safetensors`, with an index if there are several files."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def close() -> None:
        save_file(pending, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    for name, weight in weights:
        if pending and size + weight.nbytes > SHARD_BYTES:
            close()
            size = 0
        pending[name] = weight.detach().cpu().contiguous()
        size += weight.nbytes
        total += weight.nbytes
    close()
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file_name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"part-{number}").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class SavedTensors(Saved):
    """The tensors in the safetensors files of a directory."""

    def __init__(self, folder: str | Path) -> None:
        from safetensors import safe_open

        paths = sorted(Path(folder).glob("model*.safetensors"))
        if not paths:
            raise DataError(f"{folder} has no model*.safetensors: it is not a checkpoint, or an incomplete one")
        entries: dict[str, Any] = {}
        for path in paths:
            with reading(path):
                file: Any = safe_open(path, framework="pt")
            entries |= dict.fromkeys(file.keys(), file)
        super().__init__(folder, entries)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._entries[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return tuple(self._entries[name].get_slice(name).get_shape())

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.read_slice`."""
        if not where or any(one.start == one.stop for one in where):  # safetensors supports neither
            return self[name][where]
        tensor: Tensor = self._entries[name].get_slice(name)[where]
        return tensor


def open_saved(folder: str | Path) -> Saved:
    """Open the tensors of `folder` in the portable or the sharded form; a `DataError` for the native one."""
    reject_native(folder)
    if is_sharded(folder):
        from rlframework.policy.checkpoint.sharded import SavedShards

        return SavedShards(folder)
    return SavedTensors(folder)
