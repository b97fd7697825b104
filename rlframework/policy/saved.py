"""Tensors that lie in a directory, in whichever form, as mappings of which each is read when it is asked for.

`SavedTensors` reads safetensors files; the sharded form is in `sharded_reading.py`. `open_saved` takes whichever is
there. Files of an engine's own (`native.py`) are told from both and not read here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError

INDEX, PIECES = ".metadata", ".distcp"
"""Of the sharded form: the file that says where each piece lies, and the end of the names of those with pieces."""
NATIVE = "native.json"
"""Of the native form: the file that says which backend wrote the files beside it."""

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from torch import Tensor


class Saved(Mapping[str, "Tensor"]):
    """The tensors of the directory `folder`, by name. Use as a context manager."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @abstractmethod
    def __enter__(self) -> Saved: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor `name`, which is not read."""

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor `name`, of which one element is read."""
        return self.part(name, tuple(slice(0, min(size, 1)) for size in self.shape(name))).dtype

    @abstractmethod
    def part(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """The part `where` of the tensor `name`, of which no more is read."""


class SavedTensors(Saved):
    """The tensors in the safetensors files of a directory, by name; each is read when it is asked for.

    `DataError` for files that are missing or damaged. Use as a context manager.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> SavedTensors:
        from safetensors import SafetensorError, safe_open

        paths = sorted(self.folder.glob("model*.safetensors"))
        if not paths:
            raise DataError(f"{self.folder} has no model*.safetensors: it is no checkpoint, or not a whole one")
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path} is damaged or cannot be read: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def part(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.part`."""
        if not where or any(one.start == one.stop for one in where):  # safetensors slices neither
            return self[name][where]
        tensor: Tensor = self._files[name].get_slice(name)[where]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def is_sharded(folder: str | Path) -> bool:
    """Whether `folder` holds the sharded form, whole or not."""
    folder = Path(folder)
    return (folder / INDEX).exists() or any(folder.glob(f"*{PIECES}"))


def is_native(folder: str | Path) -> bool:
    """Whether `folder` holds an engine's own files."""
    return (Path(folder) / NATIVE).exists()


def require_no_native(folder: str | Path) -> None:
    """A `DataError` where `folder` holds an engine's own files."""
    if is_native(folder):
        raise DataError(
            f"{folder} holds a checkpoint in the format of the engine that wrote it ({NATIVE} says which), which that "
            "engine alone reads: resume the run with checkpoints.format=portable or sharded, and take what it saves"
        )


def open_saved(folder: str | Path) -> Saved:
    """The tensors of `folder`, in the form that they are there in; a `DataError` for the native one."""
    require_no_native(folder)
    if is_sharded(folder):
        from rlframework.policy.sharded_reading import SavedPieces

        return SavedPieces(folder)
    return SavedTensors(folder)


def part_of(tensors: Mapping[str, Tensor], name: str, where: tuple[slice, ...]) -> Tensor:
    """The part `where` of `tensors[name]`; of what lies in files no more is read than that."""
    return tensors.part(name, where) if isinstance(tensors, Saved) else tensors[name][where]
