"""Write a model as a Hugging Face directory from weights that arrive one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.files import replacing_directory
from rlframework.policy.all_ranks import exhausting
from rlframework.policy.checkpoint.manifest import write_manifest

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

    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def close() -> None:
        save_file(pending, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, weight in weights:
        if pending and size + weight.nbytes > SHARD_BYTES:
            close()
            size = 0
        pending[name] = weight.detach().cpu().contiguous()
        size += weight.nbytes
        total += weight.nbytes
    close()
    _name_shards(folder, shards, total)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Rename the files to the names that transformers expects, with an index if there are several."""
    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"part-{number}").rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
