"""`RewardData`: token sequences with rewards.

A tensordict tensorclass: it can be indexed, stacked, moved and saved memory-mapped like a tensor. The constructor
checks nothing, so that it can hold meta tensors, nested tensordicts and incomplete data; `check()` and the conversions
do. Pairs of a better and a worse sequence are in `rlframework_preferences.pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework_preferences.memmap import MemmapTensorClass

_CHUNK = 1 << 24
"""Elements of a mask to check at a time, so that checking mapped data takes little memory."""


class RewardData(MemmapTensorClass):
    """Right-padded sequences, with a reward per token or per sequence, and a score at the end.

    | field            | shape                                | dtype                                       |
    |------------------|--------------------------------------|---------------------------------------------|
    | `input_ids`      | `[*batch, S]`                        | integers                                    |
    | `attention_mask` | `[*batch, S]`                        | bool or integers: 1 on tokens, 0 on padding |
    | `rewards`        | `[*batch]` or `[*batch, S]`, or None | floats, integers or bool                    |
    | `end_scores`     | `[*batch]`, or None                  | floats, integers or bool                    |

    `*batch` is `B`, or empty for a single row. `rewards` and `end_scores` may have an extra last dimension of 1, as
    reward models return. Pass `batch_size=[B]`: the default of a tensorclass is `[]`, which has no rows to index.
    """

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor | None = None
    end_scores: Tensor | None = None

    @property
    def input_lengths(self) -> Tensor:
        """Number of tokens of each row, `[*batch]` int64. Raises a `BatchError` unless the mask is right padding."""
        _check_shapes(self.input_ids, self.attention_mask, self.rewards, self.end_scores)
        if not has_values(self.attention_mask):
            return self.attention_mask.sum(-1)
        return torch.cat([*_lengths(self.attention_mask)]).view(self.attention_mask.shape[:-1])

    def check(self) -> Self:
        """Check the fields as described above, and return self.

        Reads the whole mask; on the meta device and for fake tensors, only shapes and dtypes are checked. Raises a
        `BatchError`, or a `BatchTypeError` for a wrong type or dtype.
        """
        _ = self.input_lengths
        return self

    @classmethod
    def from_lengths(
        cls, input_ids: Tensor, input_lengths: Tensor, rewards: Tensor | None = None, end_scores: Tensor | None = None
    ) -> Self:
        """Make rows of `input_ids [*batch, S]` with `input_lengths [*batch]` tokens each (0 to S).

        `attention_mask` is a new bool tensor; the other fields share storage with the arguments.
        """
        mask = right_padding_mask(input_lengths, need_tensor("input_ids", input_ids).shape).to(input_ids.device)
        _check_shapes(input_ids, mask, rewards, end_scores)
        return cls(input_ids, mask, rewards, end_scores, batch_size=input_ids.shape[:-1])

    def to_fields(self) -> dict[str, Tensor]:
        """Return the rows as plain tensors for `BatchedDataDict(data.to_fields())`, sharing storage.

        `input_ids [B, S]`, `attention_mask [B, S]`, `input_lengths [B]` (from the mask), and, if present, `rewards`
        (`[B]` or `[B, S]`) and `end_scores [B]`, without the extra last dimension of 1.
        """
        shape = need_tensor("input_ids", self.input_ids).shape
        if len(shape) != 2:
            raise BatchError(f"input_ids has shape {list(shape)}; it must be [B, S]. unsqueeze(0) a single row")
        lengths = self.input_lengths
        fields = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "input_lengths": lengths}
        if self.rewards is not None:
            fits = self.rewards.shape[1:] in ((), self.input_ids.shape[1:])
            fields["rewards"] = self.rewards if fits else self.rewards.squeeze(-1)
        if self.end_scores is not None:
            fields["end_scores"] = self.end_scores.view(-1)
        return {name: value.as_subclass(Tensor) for name, value in fields.items()}


def right_padding_mask(lengths: Tensor, shape: torch.Size) -> Tensor:
    """Return a bool mask of `shape` `[*batch, S]`, true on the first `lengths [*batch]` positions (0 to S)."""
    lengths = need_tensor("input_lengths", lengths)
    if not _is_integer(lengths) or lengths.shape != shape[:-1]:
        raise BatchError(
            f"input_lengths is {lengths.dtype} of shape {list(lengths.shape)}; it must be integers of shape "
            f"{list(shape[:-1])}, one for each row of input_ids {list(shape)}"
        )
    if has_values(lengths) and lengths.numel():
        least, most = map(int, lengths.aminmax())
        if not 0 <= least <= most <= shape[-1]:
            raise BatchError(
                f"input_lengths are from {least} to {most}; for input_ids {list(shape)} they must be from 0 to "
                f"{shape[-1]}"
            )
    return torch.arange(shape[-1], device=lengths.device) < lengths.unsqueeze(-1)


def _check_shapes(ids: Any, mask: Any, rewards: Any, end_scores: Any) -> None:
    ids, mask = need_tensor("input_ids", ids), need_tensor("attention_mask", mask)
    if ids.ndim < 1 or not _is_integer(ids):
        raise BatchTypeError(f"input_ids is {ids.dtype} of shape {list(ids.shape)}; it must be integers [B, S]")
    if mask.shape != ids.shape:
        raise BatchError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(ids.shape)}; they must be equal"
        )
    if mask.dtype != torch.bool and not _is_integer(mask):
        raise BatchTypeError(f"attention_mask is {mask.dtype}; it must be bool or integers, 1 on tokens, 0 on padding")
    rows, tokens = ids.shape[:-1], ids.shape
    for name, value, shapes in (
        ("rewards", rewards, [rows, (*rows, 1), tokens, (*tokens, 1)]),
        ("end_scores", end_scores, [rows, (*rows, 1)]),
    ):
        if value is not None and (need_tensor(name, value).shape not in shapes or value.is_complex()):
            allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
            raise BatchError(
                f"{name} is {value.dtype} of shape {list(value.shape)}; with input_ids {list(tokens)} it must be real "
                f"numbers of shape {allowed}"
            )


def _lengths(mask: Tensor) -> Iterator[Tensor]:
    """Yield the lengths of the rows of `mask` in chunks; a `BatchError` if a row is not ones followed by zeros."""
    rows = mask.as_subclass(Tensor)
    rows = rows.flatten(0, -2) if rows.ndim > 1 else rows.unsqueeze(0)
    if rows.dtype == torch.bool:
        rows = rows.view(torch.uint8)  # a damaged file may hold values other than 0 and 1
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for start in range(0, max(1, len(rows)), step):
        chunk = rows[start : start + step]
        for wrong, what in (
            ((chunk < 0) | (chunk > 1), "is neither 0 nor 1 at position"),
            (chunk[:, 1:] > chunk[:, :-1], "has padding before a token, at position"),
        ):
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                raise BatchError(
                    f"attention_mask of row {start + row} {what} {column}; a row must be tokens (1) followed by "
                    "padding (0): move the padding to the right"
                )
        yield chunk.sum(-1, dtype=torch.int64)


def has_values(tensor: Tensor) -> bool:
    """Whether `tensor` has values: it is neither on the meta device nor a fake tensor."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def need_tensor(name: str, value: Any) -> Tensor:
    """Return `value` if it is a tensor; else raise a `BatchTypeError` with its `name`."""
    if not isinstance(value, Tensor):
        raise BatchTypeError(f"{name} is a {type(value).__name__}; it must be a tensor")
    return value
