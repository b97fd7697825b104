"""Hugging Face directories, written from rank 0 one weight at a time, and `open_saved`, which reads every form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.base.errors import PluginError
from rlframework.base.files import replacing_directory
from rlframework.huggingface.vision_models import scoring_architecture
from rlframework.policy.all_ranks import exhausting
from rlframework.policy.checkpoint.manifest import write_manifest
from rlframework.policy.checkpoint.saved import Saved, SavedTensors, is_sharded, reject_native

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.policy import PolicyConfig

SHARD_BYTES = 4 << 30
"""Size at which a safetensors file is closed and the next one started; bounds the memory in use."""


def write_from_rank_0(
    path: str | Path, rank: int, tensors: Iterator[object], write: Callable[[Path], None], *, checksums: bool
) -> None:
    """Fill the directory `path` by `write(folder)` on rank 0, atomically; with `checksums`, add a manifest.

    `tensors`, which `write` reads, is exhausted on every rank, even on failure: reading it is a collective.
    """
    with exhausting(tensors):
        if rank == 0:
            with replacing_directory(path) as folder:
                write(folder)
                if checksums:
                    write_manifest(folder)


def write_config(folder: Path, policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the non-weight files of a Hugging Face directory for the model of `policy`, with fp32 as the dtype."""
    from transformers import AutoConfig, GenerationConfig

    from rlframework.huggingface.image_processor import copy_processor

    model_name = policy.model_name
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=policy.trust_remote_code)
    config.dtype = "float32"
    if policy.head_init != "checkpoint":  # a language model's files, to which a head was added
        config.num_labels = 1
        config.architectures = [scoring_architecture(config)]
    config.save_pretrained(folder)
    with suppress(OSError):  # the model has none
        GenerationConfig.from_pretrained(model_name).save_pretrained(folder)
    copy_processor(model_name, folder)
    tokenizer.save_pretrained(folder)


def write_tensors(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors that arrive one at a time as `model*.safetensors`, with an index if there are several files."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    places: dict[int, str] = {}  # names of the pending tensors, by address
    size = total = 0

    def close() -> None:
        save_file(pending, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()
        places.clear()

    for name, weight in weights:
        if pending and size + weight.nbytes > SHARD_BYTES:
            close()
            size = 0
        pending[name] = weight.detach().cpu().contiguous()
        if weight.numel() and (same := places.setdefault(pending[name].data_ptr(), name)) != name:
            raise PluginError(
                f"`{same}` and `{name}` are one tensor: `weight_specs` must list a tied weight once, an output "
                "head that is tied to the embedding under the embedding's name"
            )
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


def open_saved(folder: str | Path) -> Saved:
    """Open the tensors of `folder` in the portable or the sharded form; a `DataError` for the native one."""
    reject_native(folder)
    if is_sharded(folder):
        from rlframework.policy.checkpoint.sharded import SavedShards

        return SavedShards(folder)
    return SavedTensors(folder)
