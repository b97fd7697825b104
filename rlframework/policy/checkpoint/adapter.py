"""Adapters on disk: the directory that peft writes and reads, and beside it which base they belong to.

    adapter_config.json          rank, alpha, layers, name of the base: peft's own
    adapter_model.safetensors    the matrices in fp32, `base_model.model.LAYER.lora_A.weight` and `lora_B`
    base.json                    what tells the base's files from others: sizes, and checksums of both their ends
    tokenizer files

`peft.PeftModel.from_pretrained(base, path)` reads it; what peft wrote is read here too. Left out: peft's other kinds of
adapters, biases, ranks that differ from layer to layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError
from rlframework.files import replacing_directory
from rlframework.policy.checkpoint.manifest import write_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.config.policy import LoraConfig
    from rlframework.policy.model_state import WeightSpec

PREFIX = "base_model.model."
CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
END_BYTES = 1 << 20
"""How much of each end of a file its checksum is of: a fine-tuned model has other numbers there."""
KINDS_LEFT_OUT = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
"""Keys of peft's that ask for something else than plain LoRA."""


def write_adapter(
    path: str | Path,
    adapters: Iterator[tuple[str, Tensor]],
    model_name: str,
    lora: LoraConfig,
    tokenizer: Any,
    *,
    checksums: bool = False,
) -> None:
    """Write the directory `path`, all or nothing; `adapters` is drained even on failure, being a collective.

    `checksums`: with a manifest of all files.
    """
    from safetensors.torch import save_file

    try:
        with replacing_directory(path) as folder:
            tensors = {PREFIX + name: tensor.detach().float().cpu().contiguous() for name, tensor in adapters}
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            _write_json(folder / CONFIG, _peft_config(model_name, lora))
            _write_json(folder / BASE, {"model_name": model_name, "files": base_files(model_name)})
            tokenizer.save_pretrained(folder)
            if checksums:
                write_manifest(folder)
    finally:
        for _ in adapters:
            pass


def _peft_config(model_name: str, lora: LoraConfig) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_adapter(
    path: str | Path, specs: Mapping[str, WeightSpec], model_name: str, lora: LoraConfig
) -> dict[str, Tensor]:
    """The matrices in the directory `path`, whole, by the names of `specs`.

    `DataError` for files that are missing, damaged, of other layers or shapes, of another scale, or trained on another
    base than `model_name` (told where `base.json` is there, which peft does not write).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    _require_scale(folder, _read_json(folder / CONFIG), lora)
    _require_base(folder, model_name)
    try:
        found = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{folder / WEIGHTS} is damaged or cannot be read: {error}") from error
    adapters = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
    _require_shapes(folder, adapters, specs)
    return adapters


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read, so its directory holds no adapters: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no table of settings")
    return found


def _require_scale(folder: Path, config: Mapping[str, Any], lora: LoraConfig) -> None:
    strange = [key for key in KINDS_LEFT_OUT if config.get(key)]
    if config.get("peft_type") != "LORA" or strange or config.get("bias", "none") != "none":
        kind = config.get("peft_type")
        raise DataError(f"{folder / CONFIG} describes no plain LoRA (peft_type {kind!r}, set: {strange or 'bias'})")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if rank != lora.rank or alpha != lora.alpha:
        raise DataError(
            f"the adapters in {folder} have rank {rank} and alpha {alpha}, and policy.lora has rank {lora.rank} and "
            f"alpha {lora.alpha}; set policy.lora.rank and policy.lora.alpha to theirs"
        )


def _require_base(folder: Path, model_name: str) -> None:
    if not (folder / BASE).exists():
        return
    told = _read_json(folder / BASE)
    if told.get("files") != base_files(model_name):
        raise DataError(
            f"the adapters in {folder} were trained on {told.get('model_name')!r}, whose files are not those of "
            f"policy.model_name={model_name!r}; take the base that they were trained on"
        )


def _require_shapes(folder: Path, adapters: Mapping[str, Tensor], specs: Mapping[str, WeightSpec]) -> None:
    missing, extra = sorted(specs.keys() - adapters.keys()), sorted(adapters.keys() - specs.keys())
    if missing or extra:
        raise DataError(
            f"the adapters in {folder} are of other layers than policy.lora.target_modules says: missing "
            f"{missing[:3] or 'none'}, not wanted {extra[:3] or 'none'}"
        )
    for name, spec in specs.items():
        if tuple(adapters[name].shape) != spec.shape:
            raise DataError(
                f"{name} in {folder} has shape {tuple(adapters[name].shape)}, and this model's is {spec.shape}"
            )


def base_files(model_name: str) -> dict[str, Any]:
    """Size and checksum of the ends of each weight file of `model_name`, a directory or a name on the hub.

    Local files only: the model has been loaded from them. Empty where there are no safetensors.
    """
    folder = Path(model_name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(model_name, local_files_only=True))
        except (LocalEntryNotFoundError, HfHubHTTPError, ValueError):
            return {}
    return {path.name: _ends(path) for path in sorted(folder.glob("model*.safetensors"))}


def _ends(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(END_BYTES))
        file.seek(max(size - END_BYTES, 0))
        digest.update(file.read(END_BYTES))
    return {"bytes": size, "sha256_of_ends": digest.hexdigest()}
