"""Find a model's safetensors files and read shards of their weights.

The caller maps a weight to its slice on this rank (`LocalSlice`). Not supported: quantised files, other formats, and
names other than the model's; `read_weights` then returns False, and the caller loads a full copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.errors import DataError
from rlframework.huggingface.hub import local_files_only
from rlframework.models.file_names import FileWeight, by_source, file_weights
from rlframework.policy.checkpoint.reader import SavedTensors
from rlframework.policy.checkpoint.saved import Saved

Where = tuple[slice, ...]
LocalSlice = Callable[[FileWeight, Tensor], tuple[Tensor, Where] | None]
"""Maps a weight and this rank's shard of its source tensor to the view of the shard that stores values of the weight,
and the region of the weight that it stores; None if the shard stores nothing of it."""


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


def _names(wanted: Mapping[str, Tensor], saved: Mapping[str, Any], model: Any) -> dict[str, FileWeight] | None:
    """Return the weights to read, by name in the files; None if one is missing.

    Files may store experts separately or in one tensor, and may omit the base model's prefix.
    """
    names = {}
    split = by_source(file_weights(model, wanted))
    for source, tensor in wanted.items():
        full = FileWeight(source, source, tuple(tensor.shape))
        for weight in [full] if _name_of(full, saved, model) else split[source]:
            name = _name_of(weight, saved, model)
            if name is None:
                return None
            names[name] = weight
    return names


def _name_of(weight: FileWeight, saved: Mapping[str, Any], model: Any) -> str | None:
    prefix, name = f"{model.base_model_prefix}.", weight.name
    candidates = [name, name.removeprefix(prefix), prefix + name]
    found = next((candidate for candidate in candidates if candidate in saved), None)
    return found or next((candidate for candidate in _tied_names(name, model) if candidate in saved), None)


def _tied_names(name: str, model: Any) -> list[str]:
    """Return other names of the weight `name`, for files that store a tied weight under the head's name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    weight = model.get_parameter(name) if name in dict(model.named_parameters()) else None
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [
        f"{path}.weight" for path, module in modules.items() if module in ends and module.weight is weight is not None
    ]


def read_weights(wanted: Mapping[str, Tensor], folder: Path, model: Any, local_slice: LocalSlice) -> bool:
    """Read this rank's shards; return False and read nothing if the files in `folder` have other names."""
    with SavedTensors(folder) as saved:
        names = _names(wanted, saved, model)
        if names is None:
            return False
        for name, weight in names.items():
            require_shape(saved, name, weight.shape)
            if (found := local_slice(weight, wanted[weight.source])) is not None:
                found[0].copy_(saved.read_slice(name, found[1]))
    return True


class _Renamed(Saved):
    """Weights in files under the names of `file_weights`; `names` maps those to the names in the files."""

    def __init__(self, saved: SavedTensors, names: Mapping[str, str]) -> None:
        super().__init__(saved.folder)
        self._saved, self._entries = saved, names

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return self._saved.shape(self._entries[name])

    def read_slice(self, name: str, where: Where) -> Tensor:
        """See `Saved.read_slice`."""
        return self._saved.read_slice(self._entries[name], where)


@contextmanager
def named_weights(wanted: Mapping[str, Tensor], folder: Path, model: Any) -> Iterator[Saved | None]:
    """Open the files in `folder` to read the weights `wanted` under the names of `file_weights`.

    Uses only the shapes of `wanted`. Yields None if the files have other names, or have experts in one tensor.
    """
    with SavedTensors(folder) as saved:
        names = _names(wanted, saved, model)
        if names is None or {weight.name for weight in names.values()} != file_weights(model, wanted).keys():
            yield None
            return
        for name, weight in names.items():
            require_shape(saved, name, weight.shape)
        yield _Renamed(saved, {weight.name: name for name, weight in names.items()})


def require_shape(saved: SavedTensors, name: str, wanted: tuple[int, ...]) -> None:
    """Raise `DataError` if the tensor `name` has another shape than the model described by config.json."""
    if saved.shape(name) != wanted:
        raise DataError(
            f"{saved.folder} has {name} with shape {saved.shape(name)}, but its config.json describes a model with "
            f"shape {wanted}"
        )
