"""The driver's checks of a batch: whatever can be known to be wrong with it raises before a worker gets anything.

A batch that a worker rejects ends the worker group, one that is rejected here leaves it as it was. Every value is read
once, without a copy of it; only the search for the row to name in an error takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batch_rows import count_rows, describe, is_integral, read_lengths
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.model_directories import first_size, read_config
from rlframework.huggingface.vision_models import TOKEN_TYPES, packs_images
from rlframework.interfaces.loss import TOKEN_SETS, LossColumn, LossInput, LossType
from rlframework.policy.microbatches.global_batch import (
    check_sequence_dim,
    check_tokens,
    read_group_ids,
    read_mask,
    real_tokens,
)

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES = {*_INTEGERS, *_FLOATS, torch.complex64, torch.complex128}  # torch cannot select rows of some others
_LARGEST = torch.finfo(torch.float32).max
_LOSS_ATTRIBUTES = ("loss_type", "input_type", "wants_entropy", "at_sampling_temperature")
_LOSS_TYPES = {"loss_type": LossType, "input_type": LossInput}


@dataclass(frozen=True)
class BatchLimits:
    """Sizes of a model's input; None where its configuration does not say.

    `vocabulary`: the number of tokens that it has embeddings for. `positions`: the longest row, in tokens.
    `no_media`: why rows may have no media, such as images; None if they may. `token_types`: the column that rows with
    media need, which tells their tokens from text; None if the model needs none.
    """

    vocabulary: int | None = None
    positions: int | None = None
    no_media: str | None = None
    token_types: str | None = None

    @classmethod
    def of(cls, config: PolicyConfig) -> BatchLimits:
        """Return the limits of the model in `config`."""
        model = read_config(config.model_name, config.trust_remote_code)
        text, no_media = model.get_text_config(), None
        if config.batching.packs and not packs_images(model):
            kind = f"{model.model_type} models"
            no_media = f"policy.batching.mode=packed takes text only for {kind}; set it to dynamic or padded"
        elif not (getattr(model, "sub_configs", None) or config.trust_remote_code):
            no_media = f"policy.model_name={config.model_name!r} is a model of text only; remove them"
        positions = first_size(text, "max_position_embeddings", "n_positions")
        return cls(first_size(text, "vocab_size"), positions, no_media, TOKEN_TYPES.get(model.model_type))

    def check(
        self,
        data: BatchedDataDict[Any],
        columns: Mapping[str, LossColumn] | None = None,
        *,
        token_sets: bool = False,
    ) -> None:
        """Raise `BatchError` unless a policy can train on `data`, or score it; first call `require_batch`, `detached`.

        `columns`: what a loss reads, see `LossFunction`. `token_sets`: the column of this name is read.
        """
        check_rows(data)
        check_contents(data, self)
        if token_sets:
            check_token_sets(data, self.vocabulary)
        check_columns(data, columns or {})
        self._check_media(data)

    def check_prompts(self, data: Any) -> None:
        """Raise `BatchError` unless `data` is an input of `GenerationEngine.generate` for this model."""
        require_batch("generate", data)
        width = check_tokens(data).shape[1]
        for key in ("input_lengths", "seeds"):
            if key not in data:
                raise BatchKeyError(f"generate needs input_ids, input_lengths and seeds; it got {_keys(data)}")
        if not is_integral(data["seeds"]) or data["seeds"].ndim != 1:
            raise BatchTypeError(f"seeds must be a tensor [B] of integers, got {describe(data['seeds'])}")
        lengths = read_lengths(data["input_lengths"], width)
        most = width if self.positions is None else min(width, self.positions - 1)
        for row, length in enumerate(lengths):
            if not 1 <= length <= most:
                why = "the columns of input_ids" if most == width else "so that the model has a position left"
                raise BatchError(f"input_lengths of row {row} is {length}; a prompt may have 1 to {most}, {why}")
        _check_ids(data, real_tokens(data), self.vocabulary)

    def _check_media(self, data: BatchedDataDict[Any]) -> None:
        media = {key: value for key, value in data.items() if isinstance(value, PackedTensor)}
        for key, value in media.items():
            if value.has_media and self.no_media is not None:
                raise BatchError(f"{key} has media, but {self.no_media}")
            value.check_joinable(key)
        if self.token_types not in (None, *data) and any(value.has_media for value in media.values()):
            raise BatchKeyError(
                f"rows with media need {self.token_types} [B, S] beside input_ids, as the model's processor makes it; "
                f"the batch has {_keys(data)}"
            )
        for key in ("token_type_ids", "mm_token_type_ids") if media else ():
            shape = data["input_ids"].shape
            if key in data and not (is_integral(data[key]) and data[key].shape == shape):
                raise BatchError(f"{key} must be integers {list(shape)} like input_ids, got {describe(data[key])}")


def require_batch(method: str, data: Any) -> None:
    """Raise `BatchError` unless `data` is a `BatchedDataDict` with rows, equally many of each value, on one device."""
    if not isinstance(data, BatchedDataDict):
        raise BatchTypeError(
            f"{method} takes a BatchedDataDict, not a {type(data).__name__}; wrap it: BatchedDataDict(your_dict)"
        )
    devices = {}
    for key, value in data.items():
        if isinstance(value, Tensor):
            if value.is_nested or value.device.type == "meta":
                kind = "nested" if value.is_nested else "meta"
                raise BatchTypeError(f"the value of {key!r} is a {kind} tensor; {method} takes plain ones with values")
            if value.dtype not in _DTYPES:
                raise BatchTypeError(
                    f"the value of {key!r} is of {value.dtype}; {method} takes bool, uint8, int8 to int64, bfloat16, "
                    "float16 to float64, complex64 and complex128"
                )
            devices[key] = str(value.device)
    if len(set(devices.values())) > 1:
        raise BatchError(f"all tensors of the batch must be on one device, got {devices}; move them with `.to(device)`")
    if count_rows(data) == 0:
        raise BatchError(f"{method} got no rows; give at least one (the keys are {_keys(data)})")


def check_loss(loss_fn: Any) -> Mapping[str, LossColumn]:
    """Return the columns that a loss reads; raise `BatchTypeError` unless it is a `LossFunction`."""
    missing = [name for name in _LOSS_ATTRIBUTES if not hasattr(loss_fn, name)]
    if missing or not callable(loss_fn) or isinstance(loss_fn, type):
        given = (
            f"the class {loss_fn.__name__}; did you mean {loss_fn.__name__}()?"
            if isinstance(loss_fn, type)
            else f"a {type(loss_fn).__name__}"
        )
        raise BatchTypeError(
            f"loss_fn must be callable and have {', '.join(_LOSS_ATTRIBUTES)} "
            f"(rlframework.interfaces.loss.LossFunction), got {given}"
        )
    for name, kind in _LOSS_TYPES.items():
        _check_member(loss_fn, name, kind)
    columns: Mapping[str, LossColumn] = getattr(loss_fn, "reads", {})
    return columns


def _check_member(loss_fn: Any, name: str, kind: type[StrEnum]) -> None:
    """Raise `BatchTypeError` unless the attribute is a member of `kind` or its text."""
    given = getattr(loss_fn, name)
    if not any(given == member for member in kind):
        members = ", ".join(member.name for member in kind)
        raise BatchTypeError(
            f"{type(loss_fn).__name__}.{name} is {given!r}; it must be one of {members} of "
            f"rlframework.interfaces.loss.{kind.__name__}"
        )


def changed_attributes(before: Mapping[str, Any], loss_fn: Any) -> list[str]:
    """The attributes of `loss_fn` that are other objects now than in `before`; those that are new may be caches."""
    return [name for name, value in vars(loss_fn).items() if before.get(name, value) is not value]


def detached(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Return `data` as another process would get it: without gradients, and so that a loss can use it in its own.

    Tensors from `torch.inference_mode` cannot be saved for a backward, and are copied.
    """
    plain = {
        key: (value.clone() if value.is_inference() else value.detach()) if isinstance(value, Tensor) else value
        for key, value in data.items()
    }
    return BatchedDataDict(plain)


def check_rows(data: BatchedDataDict[Any]) -> None:
    """Raise `BatchError` unless the tensors of `data` have the required shapes and types.

    Required: `input_ids [B, S]`; `input_lengths [B]`, integers from 0 to S; `sample_mask [B]` and `token_mask [B, S]`,
    if present; and S or 1 at dimension 1 of all tensors that have it.
    """
    width = check_tokens(data).shape[1]
    if "input_lengths" not in data:
        raise BatchKeyError(f"input_lengths must be present in the data; it has {_keys(data)}")
    for key, dimensions in (("token_mask", 2), ("sample_mask", 1)):
        read_mask(data, key, dimensions)
    check_sequence_dim(data, skip_keys=[k for k, v in data.items() if isinstance(v, Tensor) and v.shape[1:2] == (1,)])
    read_lengths(data["input_lengths"], width)


def check_contents(data: BatchedDataDict[Any], limits: BatchLimits) -> None:
    """Raise `BatchError` unless the values of `data`, which has passed `check_rows`, are valid.

    At least one row must have a token, and none more than the model has positions; tokens, but not padding, must be ids
    of the vocabulary; masks must be in 0..1, and `token_mask` 0 on padding.
    """
    lengths, real = data["input_lengths"], real_tokens(data)
    longest = int(lengths.max())
    if longest == 0:
        raise BatchError(f"none of the {len(lengths)} rows has a token: all input_lengths are 0")
    if limits.positions is not None and longest > limits.positions:
        row = int(lengths.argmax())
        raise BatchError(
            f"input_lengths of row {row} is {longest}, but the model takes {limits.positions} tokens; shorten the row"
        )
    _check_ids(data, real, limits.vocabulary)
    for key in ("sample_mask", "token_mask"):
        if key in data:
            _check_bounds(key, data[key], 0.0, 1.0, "in 0..1")
    if "token_mask" not in data:
        return
    stray = data["token_mask"].bool() > real
    if bool(stray.any()):
        row, column = stray.nonzero()[0].tolist()
        raise BatchError(
            f"token_mask of row {row} is set at position {column}, which is padding, as the row has "
            f"{int(lengths[row])} tokens; set it to 0 there"
        )


def check_columns(data: BatchedDataDict[Any], columns: Mapping[str, LossColumn]) -> None:
    """Raise `BatchError` unless `data`, which has passed `check_rows`, has the `columns` of a loss."""
    for key, column in columns.items():
        if key not in data:
            if column.required:
                raise BatchKeyError(f"{key} must be present in the data, as the loss reads it; it has {_keys(data)}")
            continue
        value, shape = data[key], list(data["input_ids"].shape[: 2 if column.per_token else 1])
        if column.per_set:
            shape = list(data[TOKEN_SETS].shape)
        if not isinstance(value, Tensor) or value.dtype not in _FLOATS or list(value.shape) != shape:
            names = ("[B]", "[B, S]", "[B, S, K]")[len(shape) - 1]
            raise BatchTypeError(
                f"{key} must be a tensor {names} = {shape} of floating-point numbers, got {describe(value)}"
            )
        _check_bounds(key, value, -_LARGEST, _LARGEST, "finite, in fp32")


def check_token_sets(data: BatchedDataDict[Any], vocabulary: int | None) -> None:
    """Raise `BatchError` unless `data`, which has passed `check_rows`, has `token_sets [B, S, K]`, ids of tokens.

    Ids must be valid at every position, also where nothing is computed: 0 is.
    """
    if TOKEN_SETS not in data:
        raise BatchKeyError(f"{TOKEN_SETS} must be present in the data, as the loss reads it; it has {_keys(data)}")
    sets, shape = data[TOKEN_SETS], list(data["input_ids"].shape)
    if not is_integral(sets) or sets.ndim != 3 or list(sets.shape[:2]) != shape or not sets.shape[2]:
        raise BatchTypeError(
            f"{TOKEN_SETS} must be integers [B, S, K] = [{shape[0]}, {shape[1]}, 1 or more], got {describe(sets)}"
        )
    low, high = (int(bound) for bound in sets.aminmax())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        allowed = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}, the model's vocabulary"
        raise BatchError(
            f"{TOKEN_SETS} has the token {low if low < 0 else high}; allowed is {allowed}. Are they of another model's "
            "tokenizer?"
        )


def check_groups(data: BatchedDataDict[Any], batch_size: int, ranks: int) -> None:
    """Raise `BatchError` unless each global batch, `batch_size` rows, has whole groups, and at least one per rank."""
    ids = read_group_ids(data).cpu()
    batch = torch.arange(data.size) // batch_size
    groups, batches = torch.stack((ids.to(torch.int64), batch)).unique(dim=1)
    again = (groups[1:] == groups[:-1]).nonzero()
    if len(again):
        group = int(groups[again[0]])
        raise BatchError(
            f"group {group} has rows in the global batches {batches[groups == group].tolist()} of {batch_size} rows; "
            "all rows with the same group_ids must be in one: order the rows by groups, or choose a batch size that "
            "does not divide them"
        )
    fewest = int(batches.bincount().min())
    if fewest < ranks:
        raise BatchError(
            f"a global batch of {batch_size} rows has {fewest} groups for {ranks} data-parallel workers, each of which "
            "needs one; raise policy.train_global_batch_size or use fewer workers"
        )


def _check_ids(data: BatchedDataDict[Any], real: Tensor, vocabulary: int | None) -> None:
    ids = data["input_ids"]
    low, high = ids.aminmax()  # most batches are padded with a token, so that this suffices
    if low >= 0 and (vocabulary is None or high < vocabulary):
        return
    unknown = ((ids < 0) if vocabulary is None else (ids < 0) | (ids >= vocabulary)).logical_and_(real)
    if bool(unknown.any()):
        row, column = unknown.nonzero()[0].tolist()
        allowed = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}, the model's embeddings"
        raise BatchError(
            f"row {row} has token {int(ids[row, column])} at position {column}; allowed is {allowed}. Is it from "
            "another tokenizer, or is the row shorter than its input_lengths?"
        )


def _check_bounds(key: str, values: Tensor, least: float, most: float, allowed: str) -> None:
    """Raise `BatchError` naming the first of `values` that is NaN or not in `least..most`."""
    if values.dtype == torch.bool:
        return
    low, high = (float(bound) for bound in values.aminmax())  # NaN if there is one
    if low >= least and high <= most:
        return
    exact = values.double()  # bfloat16 would round the bounds to infinity
    position = ((exact >= least) & (exact <= most)).logical_not_().nonzero()[0].tolist()
    where = " at position ".join(map(str, position))
    raise BatchError(f"{key} must be {allowed}, but is {float(values[tuple(position)]):g} in row {where}")


def _keys(data: BatchedDataDict[Any]) -> list[Any]:
    return sorted(data, key=str)
