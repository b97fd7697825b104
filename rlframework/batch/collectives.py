"""Gather rows over a process group whose ranks hold different numbers of rows, on any device and backend.

All ranks exchange their values, or a description of what is wrong with them, as pickled objects in one call. So an
error on one rank is raised on all of them, and no rank waits for another. Gathered tensors carry no gradient.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch import batch_rows
from rlframework.batch.packed_tensor import PackedTensor, picklable


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
    sent: list[dict[str, bytes] | str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(sent, _pickled(data, kinds), group=group)
    problem = next((item for item in sent if isinstance(item, str)), None)
    if problem is not None:
        raise BatchError(problem)
    batches = [
        {key: pickle.loads(content) for key, content in values.items()}  # noqa: S301 - from a rank of the same run
        for values in sent
        if not isinstance(values, str)
    ]
    keys = sorted({key for batch in batches for key in batch}, key=str)
    return {key: _on_device(_joined(key, batches), data.get(key), group) for key in keys}


def _check_group(group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise BatchError("no process group to gather over; call torch.distributed.init_process_group first")
    if dist.get_rank(group) < 0:
        raise BatchError(
            f"rank {dist.get_rank()} is not in the process group it was to gather over; call this on the group's ranks "
            "only"
        )


def _pickled(data: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, bytes] | str:
    """Pickle this rank's values, on the CPU; on an error return its message, so that all ranks can raise it."""
    try:
        batch_rows.count_rows(data)
        return {key: _pickled_value(key, value, kinds) for key, value in data.items()}
    except BatchError as error:
        return f"rank {dist.get_rank()}: {error}"


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else type(value).__name__


def _pickled_value(key: str, value: Any, kinds: Sequence[str]) -> bytes:
    if _kind(value) not in kinds:
        raise BatchTypeError(f"{key!r} must be a {kinds[0]}, got a {type(value).__name__}")
    for tensor in value.tensors if isinstance(value, PackedTensor) else [value]:
        if isinstance(tensor, Tensor) and (tensor.device.type == "meta" or tensor.layout is not torch.strided):
            raise BatchTypeError(
                f"{key!r} has a tensor that cannot be sent: device {tensor.device}, layout {tensor.layout}; make it "
                "dense and give it data"
            )
    if isinstance(value, Tensor):
        value = picklable(value.detach().cpu())
    elif isinstance(value, PackedTensor):
        value = value.to("cpu")
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # pickling runs code of the elements' classes
        raise BatchTypeError(f"an element of {key!r} cannot be pickled: {error!r}") from error


def _joined(key: str, batches: Sequence[Mapping[str, Any]]) -> batch_rows.Rows:
    """Check that the values of all ranks match, and join them."""
    lacking = [rank for rank, batch in enumerate(batches) if key not in batch and any(map(len, batch.values()))]
    if lacking:
        raise BatchError(f"all_gather: key {key!r} is missing on rank {', '.join(map(str, lacking))} of {len(batches)}")
    present = [batch[key] for batch in batches if key in batch]
    filled = [value for value in present if len(value)] or present[:1]
    kinds = sorted({_kind(value) for value in filled})
    if len(kinds) > 1:
        raise BatchError(f"all_gather: {key!r} is a {' on some ranks and a '.join(kinds)} on others")
    if kinds == ["PackedTensor"]:
        what, layouts = "dim_to_pack", {value.dim_to_pack for value in filled}
    else:
        what = "more than the number of rows"
        layouts = {(tuple(value.shape[1:]), value.dtype) for value in filled if isinstance(value, Tensor)}
    if len(layouts) > 1:
        raise BatchError(f"all_gather: {key!r} differs between ranks in {what}: {sorted(layouts, key=str)}")
    return batch_rows.concatenate(key, filled, 0)


def _on_device(joined: batch_rows.Rows, local: Any, group: dist.ProcessGroup | None) -> batch_rows.Rows:
    if isinstance(joined, list):
        return joined
    tensors = local.tensors if isinstance(local, PackedTensor) else [local]
    own = next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), None)
    return joined.to(own or group_device(group))


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
