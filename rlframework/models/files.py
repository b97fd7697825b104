"""A model's weights in safetensors files: where the files are, under which names, and reading pieces of them.

What of a weight goes where in this process the caller says (`Here`). Files whose names are not the model's, quantised
ones and those not in safetensors are not read: `read_weights` says so, and the caller loads a whole copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.errors import DataError
from rlframework.models.file_names import FileWeight, by_source, file_weights
from rlframework.policy.checkpoint.reader import SavedTensors
from rlframework.policy.checkpoint.saved import Saved

Where = tuple[slice, ...]
Here = Callable[[FileWeight, Tensor], tuple[Tensor, Where] | None]
"""What of a weight is in this rank's part of a tensor, sharing its memory, and where that lies in the weight."""


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


def read_weights(wanted: Mapping[str, Tensor], folder: Path, model: Any, here: Here) -> bool:
    """Read this rank's pieces; False, and nothing is read, where the files in `folder` have other names."""
    with SavedTensors(folder) as saved:
        names = _names(wanted, saved, model)
        if names is None:
            return False
        for name, weight in names.items():
            require_shape(saved, name, weight.shape)
            if (found := here(weight, wanted[weight.source])) is not None:
                found[0].copy_(saved.part(name, found[1]))
    return True


class _Renamed(Saved):
    """Weights in files by the names of `file_weights`; `names` has what the files call them."""

    def __init__(self, saved: SavedTensors, names: Mapping[str, str]) -> None:
        super().__init__(saved.folder)
        self._saved, self._names = saved, names

    def __enter__(self) -> _Renamed:
        return self

    def __exit__(self, *exception: object) -> None:
        """They are those of `named_weights`, which closes them."""

    def __getitem__(self, name: str) -> Tensor:
        return self._saved[self._names[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return self._saved.shape(self._names[name])

    def part(self, name: str, where: Where) -> Tensor:
        """See `Saved.part`."""
        return self._saved.part(self._names[name], where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def named_weights(wanted: Mapping[str, Tensor], folder: Path, model: Any) -> Iterator[Saved | None]:
    """The weights `wanted`, whose shapes alone are looked at, by the names of `file_weights`, as files have them.

    None where the files in `folder` have other names, or experts that lie together.
    """
    with SavedTensors(folder) as saved:
        names = _names(wanted, saved, model)
        if names is None or {part.name for part in names.values()} != file_weights(model, wanted).keys():
            yield None
            return
        for name, weight in names.items():
            require_shape(saved, name, weight.shape)
        yield _Renamed(saved, {weight.name: name for name, weight in names.items()})


def require_shape(saved: SavedTensors, name: str, wanted: tuple[int, ...]) -> None:
    """A `DataError` where the tensor `name` has another shape than the model that its config.json describes."""
    if saved.shape(name) != wanted:
        raise DataError(
            f"{saved.folder} has {name} of shape {saved.shape(name)}, and its config.json describes a model with "
            f"{wanted}"
        )
