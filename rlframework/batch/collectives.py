"""Gather rows over a process group whose ranks hold different numbers of rows, on any device and backend.

Ranks first describe their values to each other in one exchange of objects. So an error on one rank is raised on all of
them, and no rank waits for bytes that never arrive. Gathered tensors carry no gradient.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.batch import batch_rows
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.batch.tensor_pickling import bytes_of
from rlframework.errors import BatchError, BatchTypeError


def gather_jagged_object_lists(local_objects: list[Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Join the lists of all ranks, in rank order; the result is the same on every rank."""
    gathered: list[Any] = all_gather_batch({"objects": local_objects}, group, kinds=("list",))["objects"]
    return gathered


def rebalance_nd_tensor(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Join the rows of all ranks on dimension 0, in rank order; the result is the same on every rank.

    It is on the device of `tensor`. Dtype and the sizes from dimension 1 on must agree on all ranks that have rows;
    otherwise every rank raises `BatchError`.
    """
    gathered: Tensor = all_gather_batch({"tensor": tensor}, group, kinds=("tensor",))["tensor"]
    return gathered


@dataclass(frozen=True)
class _Entry:
    """One rank's description of one value.

    `layout` must agree between ranks that have rows: for a tensor, the shape of a row and the dtype; for a
    PackedTensor, its `dim_to_pack`. `content` is the pickle of a list; for a PackedTensor, the shape and dtype of each
    row, or None.
    """

    kind: str
    rows: int
    layout: Any = None
    content: Any = None


def all_gather_batch(
    data: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    kinds: Sequence[str] = ("tensor", "list", "PackedTensor"),
) -> dict[str, Any]:
    """Gather, for each key, the rows of all ranks in rank order. A rank without rows may lack keys.

    A rank's result is on the device of its own value, or if it has none, on a device that the backend supports. If the
    values of one rank do not match, cannot be sent, or are of a kind not in `kinds`, every rank raises `BatchError`.
    """
    _check_group(group)
    headers = _exchange(_describe(data, kinds), group)
    problem = next((header for header in headers if isinstance(header, str)), None)
    if problem is not None:
        raise BatchError(problem)
    keys = sorted({key for header in headers for key in header}, key=str)
    entries = {key: _matched(key, [header.get(key) for header in headers], headers) for key in keys}
    gathered = {
        key: _gather_value(data.get(key), entries[key], group) for key in keys if entries[key][0].kind != "list"
    }
    # Lists last: unpickling runs code of their elements, and a rank where that fails must not block the others.
    return {key: gathered[key] if key in gathered else _joined_lists(entries[key]) for key in keys}


def _check_group(group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise BatchError("no process group to gather over; call torch.distributed.init_process_group first")
    if dist.get_rank(group) < 0:
        raise BatchError(
            f"rank {dist.get_rank()} is not in the process group it was to gather over; call this on the group's ranks "
            "only"
        )


def _describe(data: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, _Entry] | str:
    """Describe this rank's values; on an error return its message, so that all ranks can raise it."""
    try:
        batch_rows.count_rows(data)
        return {key: _entry(key, value, kinds) for key, value in data.items()}
    except BatchError as error:
        return f"rank {dist.get_rank()}: {error}"


def _entry(key: str, value: Any, kinds: Sequence[str]) -> _Entry:
    kind = "tensor" if isinstance(value, Tensor) else "list" if isinstance(value, list) else "PackedTensor"
    if kind not in kinds:
        raise BatchTypeError(f"{key!r} must be a {kinds[0]}, got a {type(value).__name__}")
    if isinstance(value, list):
        try:
            return _Entry(kind, len(value), content=pickle.dumps(value, protocol=5))
        except Exception as error:  # pickling runs code of the elements' classes
            raise BatchTypeError(f"an element of {key!r} cannot be pickled: {error!r}") from error
    for tensor in (value,) if isinstance(value, Tensor) else value.tensors:
        if tensor is not None and (tensor.device.type == "meta" or tensor.layout is not torch.strided):
            raise BatchTypeError(
                f"{key!r} has a tensor that cannot be sent: device {tensor.device}, layout {tensor.layout}; make it "
                "dense and give it data"
            )
    if isinstance(value, Tensor):
        return _Entry(kind, len(value), (tuple(value.shape[1:]), value.dtype))
    rows = [None if row is None else (tuple(row.shape), row.dtype) for row in value.tensors]
    return _Entry(kind, len(value), value.dim_to_pack, rows)


def _matched(key: str, entries: Sequence[_Entry | None], headers: Sequence[Mapping[str, _Entry]]) -> list[_Entry]:
    """Check that the entries of all ranks match and return them; fill in an entry for ranks without rows."""
    lacking = [
        rank
        for rank, (entry, header) in enumerate(zip(entries, headers, strict=True))
        if entry is None and any(other.rows for other in header.values())
    ]
    if lacking:
        raise BatchError(f"all_gather: key {key!r} is missing on rank {', '.join(map(str, lacking))} of {len(entries)}")
    present = [entry for entry in entries if entry is not None]
    filled = [entry for entry in present if entry.rows] or present[:1]
    kinds = sorted({entry.kind for entry in filled})
    if len(kinds) > 1:
        raise BatchError(f"all_gather: {key!r} is a {' on some ranks and a '.join(kinds)} on others")
    layouts = {entry.layout for entry in filled}
    if len(layouts) > 1:
        what = "dim_to_pack" if kinds == ["PackedTensor"] else "more than the number of rows"
        raise BatchError(f"all_gather: {key!r} differs between ranks in {what}: {sorted(layouts, key=str)}")
    none = _Entry(kinds[0], 0, filled[0].layout, pickle.dumps([]) if kinds == ["list"] else [])
    return [entry if entry is not None and entry.rows else none for entry in entries]


def _joined_lists(entries: Sequence[_Entry]) -> list[Any]:
    return [item for entry in entries for item in pickle.loads(entry.content)]  # noqa: S301 - from a rank of the same run


def _gather_value(value: Any, entries: Sequence[_Entry], group: dist.ProcessGroup | None) -> Any:
    if entries[0].kind == "tensor":
        return _gather_tensor(value if isinstance(value, Tensor) else None, entries, group)
    return _gather_packed(value if isinstance(value, PackedTensor) else None, entries, group)


def _gather_tensor(local: Tensor | None, entries: Sequence[_Entry], group: dist.ProcessGroup | None) -> Tensor:
    row_shape, dtype = entries[0].layout
    device = group_device(group) if local is None else local.device
    counts = [entry.rows * math.prod(row_shape) * dtype.itemsize for entry in entries]
    tensors = [local] if local is not None and len(local) else []
    joined = _gather_bytes(tensors, counts, group).to(device)
    return joined.view(dtype).reshape(sum(entry.rows for entry in entries), *row_shape)


def _gather_packed(
    local: PackedTensor | None, entries: Sequence[_Entry], group: dist.ProcessGroup | None
) -> PackedTensor:
    tensors = [row for row in local.tensors if row is not None] if local is not None else []
    device = tensors[0].device if tensors else group_device(group)
    sizes = [[math.prod(row[0]) * row[1].itemsize for row in entry.content if row] for entry in entries]
    joined = _gather_bytes(tensors, [sum(of_rank) for of_rank in sizes], group).to(device)
    chunks = iter(joined.split([size for of_rank in sizes for size in of_rank]))
    rows = [
        None if row is None else next(chunks).clone().view(row[1]).reshape(row[0])
        for entry in entries
        for row in entry.content
    ]
    return PackedTensor(rows, entries[0].layout)


def _gather_bytes(local: Sequence[Tensor], counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Join the bytes of all ranks; rank i has `counts[i]`. Bytes, because backends do not support all dtypes.

    Each rank's bytes are padded to the largest count, because backends only gather tensors of equal size.
    """
    device = group_device(group, local[0].device if local else None)
    most = max(counts)
    if not most:
        return torch.empty(0, dtype=torch.uint8, device=device)
    sent = torch.cat(
        [torch.empty(0, dtype=torch.uint8, device=device), *(bytes_of(tensor).to(device) for tensor in local)]
    )
    if len(sent) < most:
        sent = torch.nn.functional.pad(sent, (0, most - len(sent)))
    joined = torch.empty(most * len(counts), dtype=torch.uint8, device=device)
    received = list(joined.split(most))
    dist.all_gather(received, sent, group=group)
    if min(counts) == most:
        return joined
    return torch.cat([of_rank[:count] for of_rank, count in zip(received, counts, strict=True)])


def _exchange(item: Any, group: dist.ProcessGroup | None) -> list[Any]:
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items


def group_device(group: dist.ProcessGroup | None, preferred: torch.device | None = None) -> torch.device:
    """Return `preferred` if the backend of `group` (None: the default group) supports it, else a device it supports."""
    served = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if preferred is not None and preferred.type in served:
        return preferred
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.accelerator.current_device_index())


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of `values` over `group`, on their device; `values` if `group` is None. May modify `values`."""
    return values if group is None else _reduce(values, dist.ReduceOp.SUM, group)


def max_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the elementwise maximum of `values` over `group`; see `sum_over_ranks`."""
    return values if group is None else _reduce(values, dist.ReduceOp.MAX, group)


def _reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    shared = values.to(group_device(group, values.device))
    dist.all_reduce(shared, op=op, group=group)
    return shared.to(values.device)
