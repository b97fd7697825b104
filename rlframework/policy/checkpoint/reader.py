"""Read a checkpoint's weights in the portable or the sharded form; `open_saved` detects which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError
from rlframework.policy.checkpoint.saved import Saved, is_sharded, reject_native

if TYPE_CHECKING:
    from torch import Tensor


class SavedTensors(Saved):
    """The tensors in the safetensors files of a directory, by name; each is read on access.

    Raises a `DataError` if files are missing or damaged. Use as a context manager.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> SavedTensors:
        from safetensors import SafetensorError, safe_open

        paths = sorted(self.folder.glob("model*.safetensors"))
        if not paths:
            raise DataError(f"{self.folder} has no model*.safetensors: it is not a checkpoint, or an incomplete one")
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

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.read_slice`."""
        if not where or any(one.start == one.stop for one in where):  # safetensors supports neither
            return self[name][where]
        tensor: Tensor = self._files[name].get_slice(name)[where]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_saved(folder: str | Path) -> Saved:
    """Open the tensors of `folder` in either form; a `DataError` for the native one."""
    reject_native(folder)
    if is_sharded(folder):
        from rlframework.policy.checkpoint.sharded_reader import SavedShards

        return SavedShards(folder)
    return SavedTensors(folder)
