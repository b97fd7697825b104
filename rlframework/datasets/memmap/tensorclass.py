"""`MemmapTensorClass`: a tensordict tensorclass whose saving and loading can be relied on.

tensordict writes a folder file by file, and maps what it finds. Here a folder is written beside and renamed, its room
on the disk is taken before a byte is written, and it is checked before it is mapped. Also mended, as of tensordict
0.15: `memmap_refresh_` after `load_memmap`; `memmap()` without a folder where one is mapped; `saved_path`; a folder of
another class, or of another batch size than `out` has; pickled data. Left out: archives (`.tdz`), and what is not a
dense tensor (text, nested tensors, lazy stacks).
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
from tensordict.utils import TensorDictFuture

from rlframework.datasets.memmap.folder import CLASSES, check_folder
from rlframework.datasets.memmap.saving import folder_of, nodes, save, save_in_place
from rlframework.errors import BatchError, BatchTypeError, DataError

T = TypeVar("T")


class SaveFuture(TensorDictFuture):
    """What `return_early=True` gives: `result()` waits for the save, and gives what it would have returned."""

    def __init__(self, future: Future[Any]) -> None:
        self.futures = [future]

    def result(self) -> Any:
        """Wait; an error of the save is raised here."""
        return self.futures[0].result()


class MemmapTensorClass(TensorClass):
    """Base of tensorclasses that are saved in a folder, mapped from it, and larger than memory where they must be.

    Saving replaces the folder as a whole: an object that maps the old one keeps its data, and `memmap_refresh_` brings
    it to the new. A process that opens a folder while another replaces it may miss it for a moment. Pickled, a mapped
    object is the paths of its files, so whoever unpickles it must see the same ones.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        CLASSES[str(cls)] = cls

    def memmap(  # type: ignore[override] # the arguments of the interface; tensordict has more, here and below
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
    ) -> Self:
        """Write all fields to `prefix`; returns the same data mapped from there, locked.

        `prefix` is new, empty, or a folder that was saved before, which is replaced: at any moment it is whole. None:
        the folder that the data is mapped from, or else shared memory without a name. A field that is already on disk
        elsewhere is a `RuntimeError` unless `copy_existing`. `num_threads` write the files; with `return_early` too,
        a `SaveFuture` comes back at once. `share_non_tensor` changes nothing: there are only tensors.
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
        """`memmap`, after which this object itself is mapped from `prefix`, and locked."""
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
        """A folder for data of these shapes and dtypes, filled with zeros and mapped, to be written row by row.

        So data larger than memory is made. The room on the disk is taken at once. This object may be expanded from one
        row, or be on the meta device; its values are not looked at, so give it all the fields that will be wanted:

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
        """`memmap`."""
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
        """What was saved in `prefix`: mapped, so that a byte is read when it is used, and not locked.

        `device`: all is copied there; `"meta"` (or a `FakeTensorMode` around the call) opens no data file and gives
        shapes and dtypes only. `out`: an object of this class and batch size whose fields are replaced, and which is
        returned. A folder that is missing, damaged, half-written or of another class is a `DataError` that says so.
        """
        folder = Path(prefix)
        batch = check_folder(folder, cls)
        if out is not None:
            _check_out(out, cls, batch)
            if out.is_locked:
                raise BatchError("out is locked; give an object that is not, or take out.load_memmap_")
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
        """`load_memmap`."""
        return cls.load_memmap(prefix, *args, **kwargs)

    def load_memmap_(self, prefix: str | Path) -> Self:  # type: ignore[override]
        """Replace all fields by what was saved in `prefix`, which must have this batch size; returns itself.

        A mapped (locked) object is mapped and locked after it. A folder that cannot be loaded leaves it as it was.
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
        """`load_memmap_`."""
        return self.load_memmap_(prefix, *args, **kwargs)

    def memmap_refresh_(self) -> Self:  # type: ignore[override]
        """Read `saved_path` again, where another process may have saved new data; returns itself.

        Also after `load_memmap`. Numbers written into the mapped files themselves are seen without it. `DataError` if
        this object is not mapped from a folder.
        """
        return self.load_memmap_(self.saved_path)

    def state_dict(
        self,
        destination: OrderedDict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = False,
    ) -> OrderedDict[str, Any]:
        """The fields by name, for `load_state_dict`, which takes both forms; nested ones as dictionaries.

        `flatten`: nested fields as `outer.inner` instead (tensordict's default).
        """
        base: Any = super()
        state: OrderedDict[str, Any] = base.state_dict(destination, prefix, keep_vars, flatten)
        return state

    @property
    def saved_path(self) -> Path:  # type: ignore[override]
        """The folder that this object as a whole is mapped from; `DataError` if there is none."""
        folder = folder_of(self)
        if folder is None:
            raise DataError(f"this {type(self).__name__} is not mapped from a folder: save() it, or load it from one")
        return folder


def _now_or_later(write: Callable[[], T], later: bool) -> T:
    if not later:
        return write()
    executor = ThreadPoolExecutor(1)
    try:
        future: Any = SaveFuture(executor.submit(write))
    finally:
        executor.shutdown(wait=False)
    return future  # type: ignore[no-any-return] # as tensordict, which declares the object too


def _check_out(out: MemmapTensorClass, wanted: type, batch: torch.Size) -> None:
    if type(out) is not wanted:
        raise BatchTypeError(f"out is a {type(out).__name__}; it must be a {wanted.__name__}")
    if out.batch_size != batch:
        raise BatchError(
            f"the batch size in the folder is {list(batch)}, of this object {list(out.batch_size)}; make a new one "
            f"with {wanted.__name__}.load_memmap"
        )
