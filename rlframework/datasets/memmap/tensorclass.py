"""`MemmapTensorClass`: a tensordict tensorclass that saves atomically and checks what it loads.

tensordict writes a folder file by file, and maps any file that it finds. Here, a folder is written under a temporary
name and renamed, its disk space is allocated before the first write, and it is checked before it is mapped. Also fixed,
as of tensordict 0.15: `memmap_refresh_` after `load_memmap`; `memmap()` without a folder on mapped data; `saved_path`;
folders of another class, or of another batch size than that of `out`; pickled data. Not supported: archives (`.tdz`),
and values other than dense tensors (text, nested tensors, lazy stacks).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorClass
from tensordict.base import _register_tensor_class
from tensordict.utils import TensorDictFuture

from rlframework.datasets.memmap.folder import CLASSES, FORMER_MODULES, check_folder
from rlframework.datasets.memmap.saving import folder_of, nodes, save, save_in_place
from rlframework.errors import BatchError, BatchTypeError, DataError

T = TypeVar("T")


class SaveFuture(TensorDictFuture):
    """The result of `return_early=True`: `result()` waits for the save and returns the saved object."""

    def __init__(self, future: Future[Any]) -> None:
        self.futures = [future]

    def result(self) -> Any:
        """Wait for the save and return its result, or raise its error."""
        return self.futures[0].result()


class MemmapTensorClass(TensorClass):
    """Base class of tensorclasses that are saved to and memory-mapped from a folder, and may be larger than memory.

    Saving replaces the folder atomically: an object that maps the old folder keeps its data until `memmap_refresh_`
    maps the new one. A process that opens a folder while it is being replaced may briefly find none. A mapped object is
    pickled as the paths of its files, so the unpickling process must see the same files.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        CLASSES[str(cls)] = cls
        if cls.__module__ in FORMER_MODULES:
            _register_former_name(cls, FORMER_MODULES[cls.__module__])

    def memmap(  # type: ignore[override] # the arguments of the interface; tensordict has more, here and below
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
    ) -> Self:
        """Write all fields to the folder `prefix`, and return the same data mapped from there, locked.

        `prefix` is new, empty, or written by an earlier save, which is replaced atomically. Default: the folder that
        the data is mapped from, or else anonymous shared memory. A field that is mapped from another folder raises a
        `RuntimeError` unless `copy_existing`. `num_threads` threads write the files; with `return_early` as well, a
        `SaveFuture` is returned at once. `share_non_tensor` has no effect: all fields are tensors.
        """
        write = partial(save, self, prefix, like=False, copy_existing=copy_existing, num_threads=num_threads)
        return _now_or_later(write, return_early and num_threads > 0)

    def memmap_(  # type: ignore[override]
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
    ) -> Self:
        """Like `memmap`, but maps this object itself from `prefix`, and locks it."""
        write = partial(save_in_place, self, prefix, copy_existing=copy_existing, num_threads=num_threads)
        return _now_or_later(write, return_early and num_threads > 0)

    def memmap_like(  # type: ignore[override]
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
    ) -> Self:
        """Create a folder of zeros with these shapes and dtypes, mapped, to be filled row by row.

        Use it to create data larger than memory. Disk space is allocated immediately. This object may be expanded from
        one row, or be on the meta device; its values are ignored, but it must have all fields that will be needed:

        >>> import torch
        >>> from rlframework.datasets.reward_data import RewardData
        >>> row = {"input_ids": torch.zeros(8, dtype=torch.int32), "attention_mask": torch.zeros(8, dtype=torch.bool)}
        >>> one = RewardData(**row, end_scores=torch.zeros(()), batch_size=[])
        >>> rows = one.expand(1_000).memmap_like("rows")
        >>> ids = torch.arange(8, dtype=torch.int32)
        >>> rows[7] = RewardData.from_lengths(ids, torch.tensor(5), end_scores=torch.tensor(0.5))
        >>> RewardData.load_memmap("rows")[7].input_lengths
        tensor(5)
        """
        write = partial(save, self, prefix, like=True, copy_existing=copy_existing, num_threads=num_threads)
        return _now_or_later(write, return_early and num_threads > 0)

    def save(  # type: ignore[override]
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
    ) -> Self:
        """An alias of `memmap`."""
        options = {"num_threads": num_threads, "return_early": return_early, "share_non_tensor": share_non_tensor}
        return self.memmap(prefix, copy_existing, **options)  # type: ignore[arg-type] # int and bool

    dumps = save  # type: ignore[assignment]

    @classmethod
    def load_memmap(  # type: ignore[override]
        cls,
        prefix: str | Path,
        device: torch.device | str | None = None,
        non_blocking: bool = False,
        *,
        out: Self | None = None,
    ) -> Self:
        """Load the folder `prefix`, memory-mapped and not locked: data is read when it is used.

        `device`: copy the data there; `"meta"` (or a `FakeTensorMode` around the call) opens no data file and gives
        only shapes and dtypes. `out`: an object of this class and batch size to fill and return. Raises a `DataError`
        if the folder is missing, damaged, incomplete or of another class.
        """
        folder = Path(prefix)
        batch = check_folder(folder, cls)
        if out is not None:
            _check_out(out, cls, batch)
            if out.is_locked:
                raise BatchError("out is locked; give an unlocked object, or call out.load_memmap_")
        base: Any = super()
        try:
            loaded: Self = base.load_memmap(folder, device, non_blocking, out=out, allow_pickle=False)
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise DataError(f"{folder}: cannot be loaded: {error}") from error
        return loaded

    @classmethod
    def load(cls, prefix: str | Path, *args: Any, **kwargs: Any) -> Self:
        """An alias of `load_memmap`."""
        return cls.load_memmap(prefix, *args, **kwargs)

    def load_memmap_(self, prefix: str | Path) -> Self:  # type: ignore[override]
        """Replace all fields by those saved in `prefix`, which must have the same batch size; return self.

        A mapped (locked) object is mapped and locked again. If the folder cannot be loaded, the object is unchanged.
        """
        _check_out(self, type(self), check_folder(Path(prefix), type(self)))
        mapped = self.is_memmap()
        if mapped:
            self.unlock_()
        try:
            type(self).load_memmap(prefix, self.device, out=self)
        finally:
            if mapped:
                for node in nodes(self):
                    node._is_memmap = True
                self.lock_()
        return self

    def load_(self, prefix: str | Path, *args: Any, **kwargs: Any) -> Self:
        """An alias of `load_memmap_`."""
        return self.load_memmap_(prefix, *args, **kwargs)

    def memmap_refresh_(self) -> Self:  # type: ignore[override]
        """Load `saved_path` again, to which another process may have saved new data; return self.

        Works after `load_memmap` too. Values written into the mapped files are visible without it. Raises a `DataError`
        if this object is not mapped from a folder.
        """
        return self.load_memmap_(self.saved_path)

    def state_dict(
        self,
        destination: OrderedDict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = False,
    ) -> OrderedDict[str, Any]:
        """Return the fields by name, for `load_state_dict`, with nested fields as dictionaries.

        `flatten`: name nested fields `outer.inner` instead (tensordict's default). `load_state_dict` accepts both.
        """
        base: Any = super()
        state: OrderedDict[str, Any] = base.state_dict(destination, prefix, keep_vars, flatten)
        return state

    @property
    def saved_path(self) -> Path:  # type: ignore[override]
        """The folder that this object is mapped from. Raises a `DataError` if there is none."""
        folder = folder_of(self)
        if folder is None:
            raise DataError(f"this {type(self).__name__} is not mapped from a folder; save() it, or load it from one")
        return folder


def _register_former_name(current: Any, module: str) -> None:
    """Have `check_folder` and tensordict load folders of the class by the name that it had in `module`.

    tensordict looks up saved classes by `str(class)` in a registry, so one of that name is added.
    """

    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        return current._load_memmap(*args, **kwargs)

    former = type(current.__name__, (), {"__module__": module, "_load_memmap": classmethod(load)})
    CLASSES[str(former)] = current
    _register_tensor_class(former)  # type: ignore[no-untyped-call]


def _now_or_later(write: Callable[[], T], later: bool) -> T:
    if not later:
        return write()
    executor = ThreadPoolExecutor(1)
    try:
        future: Any = SaveFuture(executor.submit(write))
    finally:
        executor.shutdown(wait=False)
    return future  # type: ignore[no-any-return] # declared like tensordict


def _check_out(out: MemmapTensorClass, wanted: type, batch: torch.Size) -> None:
    if type(out) is not wanted:
        raise BatchTypeError(f"out is a {type(out).__name__}; it must be a {wanted.__name__}")
    if out.batch_size != batch:
        raise BatchError(
            f"the batch size of the folder is {list(batch)}, that of this object {list(out.batch_size)}; load a new "
            f"object with {wanted.__name__}.load_memmap"
        )
