"""Weights from safetensors files straight into the pieces of a split model: no process holds a whole model.

The model is made with its parameters on the meta device (`empty_model`) and buffers for real, split, and filled
(`fill`): each rank reads its piece of each weight, memory-mapped, and casts it to fp32. Checkpoints whose names are not
the model's, quantised ones and those not in safetensors take a whole copy on every process, which is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import DataError
from rlframework.policy.file_names import FileWeight, file_weights
from rlframework.policy.saved import SavedTensors
from rlframework_dtensor.file_names import by_source, here
from rlframework_dtensor.lora import is_inside, outside
from rlframework_dtensor.offload import move_buffers
from rlframework_dtensor.parallelize import auto_class, load_model, ready
from rlframework_dtensor.pieces import put

logger = logging.getLogger(__name__)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it, modules keep the parameters that they make on the meta device; buffers have their values."""
    ordinary = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        ordinary(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = ordinary  # type: ignore[method-assign]


def empty_model(config: PolicyConfig, model_config: Any, attention: str | None) -> Any:
    """The model of `model_config` in evaluation mode, its parameters fp32 and on the meta device."""
    keys = {} if attention is None else {"attn_implementation": attention}
    with _parameters_on_meta():
        model = auto_class(model_config, config.head).from_config(
            model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **keys
        )
    model.config.use_cache = False
    return ready(model.eval(), config.head)


@torch.no_grad()
def fill(model: Any, config: PolicyConfig, attention: str | None, device: torch.device) -> None:
    """Give `model`, split and on the meta device, memory on `device` and the weights of `config.model_name`.

    With `policy.offload.parameters` the weights have CPU memory, and the buffers alone are on `device`.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if config.offload.parameters else device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    move_buffers(model, device)
    saved = set(model.state_dict())
    held = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in saved}
    wanted = {outside(name): tensor for name, tensor in held.items() if not is_inside(name)}
    folder = weights_folder(config.model_name) if not getattr(model.config, "quantization_config", None) else None
    if folder is None or not _read(wanted, folder, model):
        _copy(wanted, load_model(config, attention), config.model_name)


def weights_folder(model_name: str) -> Path | None:
    """Where the safetensors files of `model_name` are, fetched from the hub if need be; None where there are none."""
    folder = Path(model_name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model_name, allow_patterns=["model*.safetensors", "*.json"]))
        except (OSError, ValueError) as error:
            raise DataError(
                f"policy.model_name={model_name!r} is no directory and cannot be fetched: {error}"
            ) from error
    return folder if any(folder.glob("model*.safetensors")) else None


def _names(wanted: Mapping[str, Tensor], saved: Mapping[str, Any], model: Any) -> dict[str, FileWeight] | None:
    """What is read of the files, by name; None where a weight is not there. Experts may be there one by one, or not.

    Files may leave the base model's prefix out.
    """
    names = {}
    parts = by_source(file_weights(model, wanted))
    for source, weight in wanted.items():
        whole = FileWeight(source, source, tuple(weight.shape))
        for part in [whole] if _name_of(whole, saved, model) else parts[source]:
            name = _name_of(part, saved, model)
            if name is None:
                return None
            names[name] = part
    return names


def _name_of(weight: FileWeight, saved: Mapping[str, Any], model: Any) -> str | None:
    prefix, name = f"{model.base_model_prefix}.", weight.name
    candidates = [name, name.removeprefix(prefix), prefix + name]
    found = next((candidate for candidate in candidates if candidate in saved), None)
    return found or next((candidate for candidate in _tied_names(name, model) if candidate in saved), None)


def _tied_names(name: str, model: Any) -> list[str]:
    """Other names of the weight `name`: of a tied head, where files have it under that name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    weight = model.get_parameter(name) if name in dict(model.named_parameters()) else None
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [
        f"{path}.weight" for path, module in modules.items() if module in ends and module.weight is weight is not None
    ]


def _read(wanted: Mapping[str, Tensor], folder: Path, model: Any) -> bool:
    """Read this rank's pieces; False, and nothing is read, where the files in `folder` have other names."""
    with SavedTensors(folder) as saved:
        names = _names(wanted, saved, model)
        if names is None:
            return False
        for name, weight in names.items():
            _require_shape(saved, name, weight.shape)
            if (found := here(weight, wanted[weight.source])) is not None:
                found[0].copy_(saved.part(name, found[1]))
    return True


def _require_shape(saved: SavedTensors, name: str, wanted: tuple[int, ...]) -> None:
    if saved.shape(name) != wanted:
        raise DataError(
            f"{saved.folder} has {name} of shape {saved.shape(name)}, and its config.json describes a model with "
            f"{wanted}"
        )


def _copy(wanted: Mapping[str, Tensor], whole: Any, model_name: str) -> None:
    """From a whole model in this process, which is what this module is there to avoid."""
    logger.warning(
        "%s is no directory of safetensors named as %s names its weights: every process held a whole copy to load it",
        model_name,
        type(whole).__name__,
    )
    found = dict(whole.named_parameters()) | dict(whole.named_buffers())
    for name, weight in wanted.items():
        put(weight, found[name])
