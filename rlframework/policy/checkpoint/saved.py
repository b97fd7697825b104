"""Reading checkpoints: tensors and moments as mappings that read each one on access, and detection of the form."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlframework.base.errors import DataError
from rlframework.policy.checkpoint.manifest import MANIFEST, reading, require_one_save
from rlframework.policy.engine import Moments, WeightSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INDEX = ".metadata"
"""The file of the sharded form that maps shards to files."""
SHARD_SUFFIX = ".distcp"
"""Suffix of the files of the sharded form that contain shards."""
NATIVE, ENGINE = "native.json", "engine"
"""In the native form: the file that names the backend, and the folder with its files."""
TRAINING = "training.json"
"""In the optimizer's folder: steps and progress of training."""
ADAPTER_CONFIG = "adapter_config.json"
"""Of adapters: the file that describes them, in peft's format."""
FIRST = "exp_avg."
"""Prefix of the name of a weight's first moment."""
SECOND = "exp_avg_sq."
"""Prefix of the name of a weight's second moment."""


class Saved(Mapping[str, "Tensor"]):
    """The tensors in the directory `folder`, by name; the end of the context closes its files."""

    def __init__(self, folder: str | Path, entries: Mapping[str, Any]) -> None:
        """`entries`: an object for each tensor, with which a subclass finds it."""
        self.folder, self._entries = Path(folder), entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._entries = {}

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name` without reading it."""

    @abstractmethod
    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """Read only `where` of the tensor `name`."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the tensor `name`, reading a single element."""
        return self.read_slice(name, tuple(slice(0, min(size, 1)) for size in self.shape(name))).dtype

    def __getitem__(self, name: str) -> Tensor:
        return self.read_slice(name, tuple(slice(0, size) for size in self.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


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


class SavedMoments(Mapping[str, Moments]):
    """The moments in an optimizer's directory, by weight; each is read on access.

    `steps`: of `training.json`. `optimizer`: with Muon some weights have no second moment.
    """

    def __init__(self, tensors: Saved, steps: Mapping[str, int], optimizer: str = "adamw") -> None:
        self.tensors, self.steps = tensors, steps
        first, second = ({start + name for name in steps} for start in (FIRST, SECOND))
        required = first if optimizer == "muon" else first | second
        if not required <= set(tensors) <= first | second:
            raise DataError(
                f"{tensors.folder} is damaged: training.json and the moments next to it name different weights"
            )

    def __getitem__(self, name: str) -> Moments:
        return self.read_slice(name, tuple(slice(0, size) for size in self.tensors.shape(FIRST + name)))

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Moments:
        """Read only `where` of the moments of the weight `name`."""
        first = self.tensors.read_slice(FIRST + name, where)
        has_second = SECOND + name in self.tensors
        second = self.tensors.read_slice(SECOND + name, where) if has_second else first.new_empty(0)
        return Moments(self.steps[name], first, second)

    def __iter__(self) -> Iterator[str]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def slice_of(tensors: Mapping[str, Tensor], name: str, where: tuple[slice, ...]) -> Tensor:
    """Return `where` of `tensors[name]`, reading no more than that from files."""
    return tensors.read_slice(name, where) if isinstance(tensors, Saved) else tensors[name][where]


def moments_slice(moments: Mapping[str, Moments], name: str, where: tuple[slice, ...]) -> Moments:
    """Return `where` of `moments[name]`, reading no more than that from files."""
    if isinstance(moments, SavedMoments):
        return moments.read_slice(name, where)
    whole = moments[name]
    return Moments(whole.steps, whole.exp_avg[where], whole.exp_avg_sq[where])


def differences(shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, WeightSpec]) -> str:
    """Describe how saved tensors of `shapes` differ from `specs`, as a clause about what was saved; "" if equal."""
    missing, extra = sorted(specs.keys() - shapes.keys()), sorted(shapes.keys() - specs.keys())
    other = sorted(name for name in specs.keys() & shapes.keys() if shapes[name] != specs[name].shape)
    found = [f"lacks {missing[:3]}"] * bool(missing) + [f"has unexpected {extra[:3]}"] * bool(extra)
    found += [f"has {name} of shape {shapes[name]} instead of {specs[name].shape}" for name in other[:3]]
    return ", ".join(found)


def has_adapters(folder: Path) -> bool:
    """Whether `folder` holds adapters, and not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def is_sharded(folder: str | Path) -> bool:
    """Return True if `folder` contains the sharded form, complete or not."""
    folder = Path(folder)
    return (folder / INDEX).exists() or any(folder.glob(f"*{SHARD_SUFFIX}"))


def is_native(folder: str | Path) -> bool:
    """Return True if `folder` contains an engine's own files."""
    return (Path(folder) / NATIVE).exists()


def reject_native(folder: str | Path) -> None:
    """Raise a `DataError` if `folder` contains an engine's own files."""
    if is_native(folder):
        raise DataError(
            f"{folder} is a checkpoint in the format of the engine that wrote it (named in {NATIVE}), which only that "
            "engine reads; resume the run with checkpoints.format=portable or sharded, and use what it saves"
        )


def require_checkpoint(weights: Path, optimizer: str | None) -> None:
    """Raise a `DataError` unless the folders are those of weights and of an optimizer, and of one save."""
    if (weights / TRAINING).exists():
        raise DataError(f"weights_path: {weights} is the optimizer's folder of a checkpoint; give the weights' folder")
    marked = is_sharded(weights) or is_native(weights) or (weights / MANIFEST).exists()  # workers name what is missing
    if not (marked or any(weights.glob("*model*.safetensors"))):
        raise DataError(f"weights_path: {weights} has no weights; give a folder that save_checkpoint wrote")
    if optimizer and not Path(optimizer, TRAINING).exists():
        kind = "a model, such as an export" if Path(optimizer, "config.json").exists() else "of no optimizer"
        raise DataError(
            f"optimizer_path: {optimizer} is {kind}: it has no {TRAINING}. Give the optimizer_path of a "
            "save_checkpoint, or none to load the weights alone"
        )
    require_one_save(weights, *([Path(optimizer)] if optimizer else []))


def native_files(path: str, backend: str, *, optimizer: bool) -> Path:
    """Return the engine's folder in `path`; a `DataError` if another backend wrote it, or it lacks the `optimizer`."""
    folder = Path(path)
    with reading(folder / NATIVE):
        facts = json.loads((folder / NATIVE).read_text(encoding="utf-8"))
        writer, workers, with_optimizer = str(facts["backend"]), int(facts["workers"]), bool(facts["optimizer"])
    if writer != backend:
        raise DataError(
            f"{folder} is a native checkpoint of {writer} ({workers} workers), which {backend} cannot read. "
            "Resume with that backend, and save in the form portable or sharded, which every backend reads"
        )
    if optimizer and not with_optimizer:
        raise DataError(f"{folder} was saved without its optimizer; load the weights only, or use another checkpoint")
    return folder / ENGINE
