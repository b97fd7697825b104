"""Read a checkpoint's weights in the portable or the sharded form; `open_saved` detects which."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlframework.errors import DataError
from rlframework.policy.checkpoint.manifest import reading
from rlframework.policy.checkpoint.saved import Saved, is_sharded, reject_native

if TYPE_CHECKING:
    from torch import Tensor


class SavedTensors(Saved):
    """The tensors in the safetensors files of a directory."""

    def __enter__(self) -> Self:
        from safetensors import safe_open

        paths = sorted(self.folder.glob("model*.safetensors"))
        if not paths:
            raise DataError(f"{self.folder} has no model*.safetensors: it is not a checkpoint, or an incomplete one")
        with ExitStack() as stack:
            entries: dict[str, Any] = {}
            for path in paths:
                with reading(path):
                    file = stack.enter_context(safe_open(path, framework="pt"))
                entries.update(dict.fromkeys(file.keys(), file))
            self._entries, self._stack = entries, stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__()
        self._stack.close()

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


def open_saved(folder: str | Path) -> Saved:
    """Open the tensors of `folder` in the portable or the sharded form; a `DataError` for the native one."""
    reject_native(folder)
    if is_sharded(folder):
        from rlframework.policy.checkpoint.sharded_reader import SavedShards

        return SavedShards(folder)
    return SavedTensors(folder)
