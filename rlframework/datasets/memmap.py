"""`MemmapTensorClass`: a tensordict tensorclass that saves atomically and checks what it loads.

tensordict writes a folder file by file, and maps any file that it finds: a full disk kills the process (SIGBUS), a file
that is too short is extended with zeros, and a missing one is skipped. Here, a folder is written under a temporary name
and renamed, its disk space is allocated before the first write, and shapes and dtypes must account for every byte of
its files. Not supported: archives (`.tdz`), and values other than dense tensors (text, nested tensors, lazy stacks).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack

import torch
from tensordict import TensorClass, is_tensor_collection, is_tensorclass
from tensordict.base import _register_tensor_class
from tensordict.utils import TensorDictFuture

from rlframework.datasets.memmap_folder import check_contents, check_files, load_errors, replacing_saved, reserve
from rlframework.errors import BatchError, BatchTypeError, DataError

T = TypeVar("T")

_FORMER_MODULES = {
    "rlframework.datasets.reward_data": "rlframework.data.reward_data",
    "rlframework.datasets.preferences": "rlframework.data.preferences",
}
"""Modules of tensorclasses, and their former names, which folders of earlier releases have in `meta.json`."""


class SaveOptions(TypedDict, total=False):
    """The keyword arguments of tensordict's methods that save; see `MemmapTensorClass.memmap`."""

    num_threads: int
    return_early: bool
    share_non_tensor: bool


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
        if cls.__module__ in _FORMER_MODULES:
            _register_former_name(cls, _FORMER_MODULES[cls.__module__])

    def memmap(  # type: ignore[override] # the arguments of the interface; tensordict has more, here and below
        self, prefix: str | Path | None = None, copy_existing: bool = False, **options: Unpack[SaveOptions]
    ) -> Self:
        """Write all fields to the folder `prefix`, and return the same data mapped from there, locked.

        `prefix` is new, empty, or written by an earlier save, which is replaced atomically. Default: the folder that
        the data is mapped from, or else anonymous shared memory. A field that is mapped from another folder raises a
        `RuntimeError` unless `copy_existing`. `num_threads` threads write the files; with `return_early` as well, a
        `SaveFuture` is returned at once. `share_non_tensor` has no effect. Raises a `BatchTypeError` for fields that
        could not be loaded again.
        """
        saved: Self = _now_or_later(partial(_save, self, prefix, copy_existing), **options)
        return saved

    def memmap_(  # type: ignore[override]
        self, prefix: str | Path | None = None, copy_existing: bool = False, **options: Unpack[SaveOptions]
    ) -> Self:
        """Like `memmap`, but maps this object itself from `prefix`, and locks it."""
        saved: Self = _now_or_later(partial(_save_in_place, self, prefix, copy_existing), **options)
        return saved

    def memmap_like(  # type: ignore[override]
        self, prefix: str | Path | None = None, copy_existing: bool = False, **options: Unpack[SaveOptions]
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
        saved: Self = _now_or_later(partial(_save, self, prefix, copy_existing, like=True), **options)
        return saved

    save = memmap  # type: ignore[assignment]
    dumps = memmap  # type: ignore[assignment]

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
        base: Any = super()
        folder = Path(prefix)
        with load_errors(folder):
            check_files(folder)
            load = partial(base.load_memmap, folder, allow_pickle=False)
            batch = check_contents(folder, cls, load(device="meta"))
        if out is not None:
            _check_out(out, cls, batch)
            if out.is_locked:
                raise BatchError("out is locked; give an unlocked object, or call out.load_memmap_")
        with load_errors(folder):
            loaded: Self = load(device=device, non_blocking=non_blocking, out=out)
        return loaded

    load = load_memmap

    def load_memmap_(self, prefix: str | Path) -> Self:  # type: ignore[override]
        """Replace all fields by those saved in `prefix`, which must have the same batch size; return self.

        A mapped (locked) object is mapped and locked again. If the folder cannot be loaded, the object is unchanged.
        """
        _check_out(self, type(self), type(self).load_memmap(prefix, "meta").batch_size)
        mapped = self.is_memmap()
        if mapped:
            self.unlock_()
        try:
            type(self).load_memmap(prefix, self.device, out=self)
        finally:
            if mapped:
                _lock_mapped(self)
        return self

    load_ = load_memmap_

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
        folder = _folder_of(self)
        if folder is None:
            raise DataError(f"this {type(self).__name__} is not mapped from a folder; save() it, or load it from one")
        return folder


def _register_former_name(current: Any, module: str) -> None:
    """Have tensordict load folders of the class by the name that it had in `module`: it looks them up by that name."""

    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        return current._load_memmap(*args, **kwargs)

    former = type(current.__name__, (), {"__module__": module, "_load_memmap": classmethod(load)})
    _register_tensor_class(former)  # type: ignore[no-untyped-call]


def _now_or_later(
    write: Callable[..., T], num_threads: int = 0, return_early: bool = False, share_non_tensor: bool = False
) -> T:
    if not (return_early and num_threads):
        return write(num_threads=num_threads)
    executor = ThreadPoolExecutor(1)
    future: Any = SaveFuture(executor.submit(write, num_threads=num_threads))
    executor.shutdown(wait=False)
    return future  # type: ignore[no-any-return] # declared like tensordict


def _save(data: Any, prefix: str | Path | None, copy_existing: bool, *, num_threads: int, like: bool = False) -> Any:
    """Write `data` (with `like`, zeros of its shapes), and return it mapped and locked."""
    _check_savable(data, values=not like)
    where = prefix if prefix is not None or like else _folder_of(data)
    base: Any = TensorClass
    if where is None:
        return base.memmap_like(data) if like else base.memmap(data)
    folder = Path(os.path.realpath(where))
    with replacing_saved(folder) as new:
        source = data if like else data.apply(partial(_detached_from, folder))
        base.memmap_like(source, new, num_threads=num_threads)
        reserve(new)
        if not like:
            base.memmap(source, new, copy_existing, num_threads=num_threads)
        _check_saved(data, new)
    return _lock_mapped(type(data).load_memmap(folder))


def _check_savable(data: Any, *, values: bool) -> None:
    for key, leaf in data.items(include_nested=True, leaves_only=True):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            given = getattr(leaf, "layout", type(leaf).__name__)
            raise BatchTypeError(f"{key!r} is {given} and cannot be saved; make it a dense tensor")
        if values and leaf.is_meta:
            raise BatchTypeError(f"{key!r} is on the meta device and has no values to save; use memmap_like")


def _check_saved(data: Any, folder: Path) -> None:
    """Check that loading `folder` would give all fields of `data`; a name may be unfit for a file or `meta.json`."""
    try:
        lost = set(data.keys(True, True)) - set(type(data).load_memmap(folder, "meta").keys(True, True))
    except DataError as error:
        raise BatchTypeError(
            f"this {type(data).__name__} cannot be saved: its fields must be dense tensors, or TensorDicts of them, "
            f"under plain names ({error.__cause__})"
        ) from error
    if lost:
        raise BatchTypeError(f"{lost} cannot be names of saved fields: use letters, digits and _")


def _save_in_place(data: Any, prefix: str | Path | None, copy_existing: bool, *, num_threads: int) -> Any:
    saved = _save(data, prefix, copy_existing, num_threads=num_threads)
    data.__dict__["_tensordict"] = saved._tensordict
    return data


def _detached_from(folder: Path, leaf: torch.Tensor) -> torch.Tensor:
    """`leaf`; if it is mapped from `folder`, as a plain tensor, which tensordict copies.

    Copying reads the mapping, not the file, which may have been replaced since.
    """
    name = getattr(leaf, "_filename", None)
    inside = name is not None and Path(os.path.realpath(name)).is_relative_to(folder)
    return leaf.as_subclass(torch.Tensor) if inside else leaf


def _lock_mapped(data: Any) -> Any:
    """Lock `data`, whose fields are mapped from files, and mark it as mapped."""
    inner = data._tensordict if is_tensorclass(data) else data
    inner._is_memmap = True
    for value in inner.values():
        if is_tensor_collection(value):
            _lock_mapped(value)
    return data.lock_()


def _folder_of(data: Any) -> Path | None:
    """The folder that the tensorclass `data` is mapped from, or None."""
    prefix = getattr(data._tensordict, "_memmap_prefix", None)
    return None if prefix is None else Path(prefix).parent


def _check_out(out: MemmapTensorClass, wanted: type, batch: torch.Size) -> None:
    if type(out) is not wanted:
        raise BatchTypeError(f"out is a {type(out).__name__}; it must be a {wanted.__name__}")
    if out.batch_size != batch:
        raise BatchError(
            f"the batch size of the folder is {list(batch)}, that of this object {list(out.batch_size)}; load a new "
            f"object with {wanted.__name__}.load_memmap"
        )
