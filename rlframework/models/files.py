"""Read a pretrained model's weights from its safetensors files, slice by slice.

Files may omit the base model's prefix, store a tied weight under the head's name, and store the experts of a mixture
one by one or stacked. Not supported: quantised files, other formats and other names; `pretrained_weights` then loads a
full copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import DataError
from rlframework.huggingface.hub import local_files_only
from rlframework.models.adapters import external_name
from rlframework.models.file_names import FileWeight, file_weights, split_experts
from rlframework.models.loading import load_model
from rlframework.models.named_tensors import by_file_names, named_tensors
from rlframework.policy.checkpoint.pretrained import SavedTensors
from rlframework.policy.checkpoint.saved import Saved

logger = logging.getLogger(__name__)


def weights_folder(model_name: str) -> Path | None:
    """Return the directory with the safetensors files of `model_name`, downloading if necessary; None without files."""
    folder = Path(model_name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            patterns = ["model*.safetensors", "*.json"]
            local = local_files_only(model_name)
            folder = Path(snapshot_download(model_name, allow_patterns=patterns, local_files_only=local))
        except (OSError, ValueError) as error:
            raise DataError(
                f"policy.model_name={model_name!r} is not a directory and cannot be downloaded: {error}"
            ) from error
    return folder if any(folder.glob("model*.safetensors")) else None


class ModelFiles(Saved):
    """The weights of a model in the safetensors files of `folder`, under the names in `shapes`.

    `prefix`: the base model's, with its dot, which files may omit or add. `other_names`: of tied weights. `missing`:
    the weights that the files lack. Raises `DataError` for a weight of another shape.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        prefix: str,
        other_names: Mapping[str, Sequence[str]],
    ) -> None:
        self._files = SavedTensors(folder)
        stored: dict[str, FileWeight] = {}
        for name in self._files:
            stored[name] = FileWeight(name, name, self._files.shape(name))
            stored |= {part.name: part for part in split_experts(name, self._files.shape(name))}
        located: dict[str, FileWeight] = {}
        for name, shape in shapes.items():
            names = (name, *other_names.get(name, ()))
            candidates = [form for one in names for form in (one, one.removeprefix(prefix), prefix + one)]
            if found := next((stored[candidate] for candidate in candidates if candidate in stored), None):
                located[name] = found
                if found.shape != shape:
                    raise DataError(
                        f"{folder} has {found.name} with shape {found.shape}, but its config.json describes a model "
                        f"with shape {shape}"
                    )
        self.missing = [name for name in shapes if name not in located]
        super().__init__(folder, located)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        shape: tuple[int, ...] = self._entries[name].shape
        return shape

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.read_slice`."""
        part: FileWeight = self._entries[name]
        if part.expert is None:
            return self._files.read_slice(part.source, where)
        rows = slice(where[0].start + part.start, where[0].stop + part.start)
        return self._files.read_slice(part.source, (slice(part.expert, part.expert + 1), rows, *where[1:]))[0]


def pretrained_weights(
    wanted: Mapping[str, Tensor], model: Any, config: PolicyConfig, attention: str | None
) -> Mapping[str, Tensor]:
    """Return the weights of `config.model_name` under their names in files; each is read on access.

    `wanted`: tensors of `model` by name, of which only the shapes are used. If the files cannot be read by slice, loads
    a full copy as `load_model` does, and logs that.
    """
    folder = None if getattr(model.config, "quantization_config", None) else weights_folder(config.model_name)
    if folder is not None:
        shapes = {name: weight.shape for name, weight in file_weights(model, wanted).items()}
        files = ModelFiles(folder, shapes, f"{model.base_model_prefix}.", _other_names(model))
        if not files.missing:
            return files
    whole = load_model(config, attention)
    logger.warning(
        "%s is not a directory of safetensors files with the weight names of %s: every process loaded a full copy",
        config.model_name,
        type(whole).__name__,
    )
    return by_file_names(whole, named_tensors(whole))


def _other_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the further names of tied weights, by the first."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(external_name(name))
    return {first: others for first, *others in names.values()}
