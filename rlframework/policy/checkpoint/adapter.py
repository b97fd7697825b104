"""Adapters on disk: a directory in peft's format, plus a description of the base model.

    adapter_config.json          rank, alpha, layers, name of the base: peft's own
    adapter_model.safetensors    the matrices in fp32, `base_model.model.LAYER.lora_A.weight` and `lora_B`
    base.json                    identifies the base's files: sizes, and checksums of their first and last bytes
    tokenizer files

`peft.PeftModel.from_pretrained(base, path)` reads it, and `read_adapter` reads adapters written by peft. Not supported:
peft's other kinds of adapters, biases, ranks that differ between layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.config.policy import LoraConfig
from rlframework.policy.checkpoint.manifest import reading
from rlframework.policy.checkpoint.saved import ADAPTER_CONFIG, differences
from rlframework.policy.engine import WeightSpec

PREFIX = "base_model.model."
CONFIG, WEIGHTS, BASE = ADAPTER_CONFIG, "adapter_model.safetensors", "base.json"
END_BYTES = 1 << 20
"""Bytes at each end of a file that its checksum covers; a fine-tuned model differs there."""
UNSUPPORTED_KEYS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
"""Keys of peft's configuration that ask for more than plain LoRA."""


def write_adapter(
    folder: Path, adapters: Iterator[tuple[str, Tensor]], model_name: str, lora: LoraConfig, tokenizer: Any
) -> None:
    """Write the files of adapters into `folder`."""
    tensors = {PREFIX + name: tensor.detach().float().cpu().contiguous() for name, tensor in adapters}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    layers = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.target_modules) if lora.selects_by_name else sorted(layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    for name, value in ((CONFIG, config), (BASE, {"model_name": model_name, "files": base_files(model_name)})):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)


def read_adapter(
    path: str | Path, specs: Mapping[str, WeightSpec], model_name: str, lora: LoraConfig
) -> dict[str, Tensor]:
    """Read the matrices in the directory `path`, whole, by the names of `specs`.

    Raises a `DataError` if files are missing or damaged, for other layers, shapes or scales, or if the adapters were
    trained on another base than `model_name` (checked if `base.json` exists, which peft does not write).
    """
    folder = Path(path)
    if not (folder / CONFIG).exists() and (folder / "config.json").exists():
        raise DataError(
            f"{folder} has a whole model and no adapters: it is of a run without policy.lora. Resume that run without "
            f"it, or start a run with policy.model_name={folder} to train adapters of these weights"
        )
    config = adapter_config(folder)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if rank != lora.rank or alpha != lora.alpha:
        raise DataError(
            f"the adapters in {folder} have rank {rank} and alpha {alpha}, but policy.lora has rank {lora.rank} and "
            f"alpha {lora.alpha}; set policy.lora.rank and policy.lora.alpha to match"
        )
    require_base(folder, model_name)
    adapters = adapter_matrices(folder)
    if found := differences({name: tuple(tensor.shape) for name, tensor in adapters.items()}, specs):
        raise DataError(f"{folder} is for other layers than policy.lora.target_modules: it {found}")
    return adapters


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return peft's configuration of the adapters in `folder`; a `DataError` if they are not plain LoRA."""
    config = _read_json(folder / CONFIG)
    kind, unsupported = config.get("peft_type"), [key for key in UNSUPPORTED_KEYS if config.get(key)]
    if kind != "LORA" or unsupported or config.get("bias", "none") != "none":
        raise DataError(f"{folder / CONFIG} is not plain LoRA (peft_type {kind!r}, set: {unsupported or 'bias'})")
    return config


def require_base(folder: Path, model_name: str) -> None:
    """Raise a `DataError` if the adapters in `folder` name other files of a base than those of `model_name`."""
    base = _read_json(folder / BASE) if (folder / BASE).exists() else None
    if base is not None and base.get("files") != base_files(model_name):
        raise DataError(
            f"the adapters in {folder} were trained on {base.get('model_name')!r}, whose files differ from "
            f"those of policy.model_name={model_name!r}; use the base that they were trained on"
        )


def adapter_matrices(folder: Path) -> dict[str, Tensor]:
    """Read the matrices in `folder`, by their layers' paths in the base model and `lora_math.A` or `B`."""
    with reading(folder / WEIGHTS):
        tensors = load_file(folder / WEIGHTS)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _read_json(path: Path) -> dict[str, Any]:
    with reading(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def base_folder(model_name: str) -> Path | None:
    """Return the directory of the model `model_name`, itself one or downloaded from the hub; None if neither."""
    if Path(model_name).is_dir():
        return Path(model_name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_name, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError):
        return None


def base_files(model_name: str) -> dict[str, Any]:
    """Return size and checksum of the ends of each safetensors file of `model_name`, a directory or on the hub."""
    folder = base_folder(model_name)
    if folder is None:
        return {}
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(END_BYTES))
            file.seek(max(size - END_BYTES, 0))
            digest.update(file.read(END_BYTES))
        found[path.name] = {"bytes": size, "sha256_of_ends": digest.hexdigest()}
    return found
