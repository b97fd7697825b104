"""Mutations of good batches: those that change no result, those that make another good batch, and those that are wrong.

A mutation changes a `Case` in place, with the random numbers that it is given.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.config.algorithms import ClippedPGLossConfig

ROWS, WIDTH, POSITIONS = 4, 8, 64
METHODS = ("train", "get_logprobs", "get_reference_policy_logprobs", "get_topk_logits", "score", "generate")
COLUMNS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")


@dataclass
class Case:
    """A call of `method` with `data` and `options`. `read_by_loss`: the floating-point columns that count."""

    method: str
    data: Any
    options: dict[str, Any] = field(default_factory=dict)
    read_by_loss: Sequence[str] = ()

    @property
    def reads(self) -> list[str]:
        return [key for key in self.read_by_loss if key in self.data]

    @property
    def masks(self) -> list[str]:
        return [key for key in ("token_mask", "sample_mask") if self.method != "generate"]

    @property
    def whole_numbers(self) -> list[str]:
        return ["input_ids", "input_lengths", *(["seeds"] if self.method == "generate" else [])]


Mutation = Callable[[Case, random.Random], None]


def good_case(method: str, loss: str, seed: int, vocabulary: int) -> Case:
    """A case of ragged rows, in which all values are multiples of 1/8, so that half precision has them too."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    lengths[seed % ROWS] = WIDTH
    real = torch.arange(WIDTH) < lengths[:, None]
    data = {
        "input_ids": torch.randint(3, vocabulary, (ROWS, WIDTH), generator=generator) * real,
        "input_lengths": lengths,
        "token_mask": (real & (torch.rand(ROWS, WIDTH, generator=generator) < 0.8)).float(),
        "sample_mask": torch.ones(ROWS),
        "seeds": torch.arange(ROWS),
    }
    for key in COLUMNS:
        data[key] = torch.randint(-32, 9, (ROWS, WIDTH), generator=generator) / 8
    case = Case(method, BatchedDataDict(data))
    if method == "get_topk_logits":
        case.options["k"] = 2
    if method == "train":
        kl = {"kl_coef": 0.5, "kl_estimator": "k2"}
        case.options["loss_fn"] = NLLLoss() if loss == "nll" else ClippedPGLoss(ClippedPGLossConfig(**kl))
        case.read_by_loss = () if loss == "nll" else COLUMNS
    return case


# -- without an effect -------------------------------------------------------------------------------------------------


def other_dtypes(case: Case, pick: random.Random) -> None:
    key = pick.choice([*case.whole_numbers, *case.masks, *case.reads])
    integers = [torch.int16, torch.int32, torch.int64, torch.uint8]
    masks = [torch.bool, *integers, torch.float16, torch.bfloat16, torch.float64]
    dtypes = {"token_mask": masks, "sample_mask": masks}.get(key, integers)
    case.data[key] = case.data[key].to(pick.choice([torch.float16, torch.float64] if key in case.reads else dtypes))


def other_strides(case: Case, pick: random.Random) -> None:
    for key, value in case.data.items():
        if isinstance(value, Tensor) and pick.random() < 0.5:
            case.data[key] = torch.stack([value, value], -1)[..., 0]


def padding(case: Case, pick: random.Random) -> None:
    padded = torch.arange(case.data["input_ids"].shape[1]) >= case.data["input_lengths"].long()[:, None]
    ids = case.data["input_ids"].long()
    case.data["input_ids"] = ids.masked_fill(padded, pick.choice([-100, 10**6, 0, 3, -(2**63)]))


def more_columns(case: Case, pick: random.Random) -> None:
    columns: list[Any] = [
        [None] * ROWS,
        [object(), "x", {}, [1, 2]],
        torch.full((ROWS,), math.nan),
        torch.full((ROWS, 1), math.inf),
        torch.ones(ROWS, case.data["input_ids"].shape[1], 2, dtype=torch.complex64),
        torch.ones(ROWS, dtype=torch.uint16),
        PackedTensor([None] * ROWS, 0),
    ]
    case.data[pick.choice(["x", "entropy", "", 7, "planned_lengths"])] = pick.choice(columns)


def order_of_keys(case: Case, pick: random.Random) -> None:
    case.data = BatchedDataDict(dict(pick.sample(list(case.data.items()), len(case.data))))


def gradients(case: Case, pick: random.Random) -> None:
    for key in case.reads:
        if pick.random() < 0.5:
            case.data[key] = case.data[key].clone().requires_grad_() * 1.0
        else:
            with torch.inference_mode():
                case.data[key] = case.data[key] * 1.0


def plans(case: Case, pick: random.Random) -> None:
    case.data = SlicedDataDict(case.data)
    case.data.micro_batch_indices = [[[0, 99]]]
    case.data.micro_batch_lengths, case.data.elem_counts_per_gb = [[3]], [pick.randrange(99)]


def microbatch_sizes(case: Case, pick: random.Random) -> None:
    if case.method != "generate":
        case.options["mbs" if case.method == "train" else "micro_batch_size"] = pick.choice([1, 3, 99, 2**70, None])


HARMLESS = [other_dtypes, other_strides, padding, more_columns, order_of_keys, gradients, plans, microbatch_sizes]


# -- another good batch ------------------------------------------------------------------------------------------------


def other_values(case: Case, pick: random.Random) -> None:
    generator = torch.Generator().manual_seed(pick.randrange(2**32))
    scale = pick.choice([0.0, 1e-30, 1.0, 3.0])
    if case.reads:
        case.data[pick.choice(case.reads)] = scale * torch.randn(ROWS, WIDTH, generator=generator)


def other_masks(case: Case, pick: random.Random) -> None:
    key = pick.choice(["token_mask", "sample_mask"])
    generator = torch.Generator().manual_seed(pick.randrange(2**32))
    weights = torch.rand(case.data[key].shape, generator=generator)
    case.data[key] = case.data[key] * (weights if pick.random() < 0.5 else (weights < 0.5))


def shorter_rows(case: Case, pick: random.Random) -> None:
    least = 1 if case.method == "generate" else 0
    lengths = [pick.randint(least, int(length)) for length in case.data["input_lengths"]]
    lengths[pick.randrange(ROWS)] = 1 + pick.randrange(WIDTH)
    lengths = [min(one, int(other)) for one, other in zip(lengths, case.data["input_lengths"], strict=True)]
    case.data["input_lengths"] = torch.tensor(lengths)
    case.data["token_mask"] = case.data["token_mask"] * (torch.arange(WIDTH) < torch.tensor(lengths)[:, None])


def without_optional(case: Case, pick: random.Random) -> None:
    del case.data[pick.choice(["prev_logprobs", "generation_logprobs"])]


def other_tokens(case: Case, pick: random.Random) -> None:
    case.data["input_ids"] = case.data["input_ids"].roll(pick.randrange(9), 0)


def orders_of_rows(case: Case, pick: random.Random) -> None:
    case.data = case.data.select_indices([pick.randrange(ROWS) for _ in range(ROWS)])


DIFFERENT = [other_values, other_masks, shorter_rows, without_optional, other_tokens, orders_of_rows]


# -- wrong -------------------------------------------------------------------------------------------------------------


def _put(case: Case, key: str, pick: random.Random, value: float) -> None:
    changed = case.data[key].to(torch.int64 if isinstance(value, int) and key in case.whole_numbers else torch.float64)
    changed = changed.clone()
    rows = [row for row in range(ROWS) if key != "input_ids" or case.data["input_lengths"][row] > 0]
    row = pick.choice(rows)
    last = int(case.data["input_lengths"][row]) if key == "input_ids" else changed.shape[-1]
    changed[(row, pick.randrange(last))[: changed.ndim]] = value
    case.data[key] = changed


def bad_number(case: Case, pick: random.Random) -> None:
    key = pick.choice([*case.masks, *case.reads, "input_ids", "input_lengths"])
    outside = {
        "token_mask": [-1.0, 2.0, math.nan, math.inf, -1e-30, 1.0001],
        "sample_mask": [-1.0, 2.0, math.nan, -math.inf, 1e300],
        "input_ids": [-1, 2**62, -(2**63), 1000],
        "input_lengths": [-1, 10**3, 2**62, -(2**63)],
    }
    _put(case, key, pick, pick.choice(outside.get(key, [math.nan, math.inf, -math.inf, 1e39, -1e308])))


def missing_column(case: Case, pick: random.Random) -> None:
    required = [key for key in case.reads if key in ("advantages", "reference_policy_logprobs")]
    masks = case.masks if case.method == "train" else []
    del case.data[pick.choice([*case.whole_numbers, *masks, *required])]


def other_kind(case: Case, pick: random.Random) -> None:
    key = pick.choice([*case.whole_numbers, *case.masks, *case.reads])
    value = case.data[key].detach().float()
    kinds: list[Callable[[], Any]] = [
        value.tolist,
        lambda: None,
        lambda: "four",
        lambda: 1.5,
        value.numpy,
        lambda: value.to(torch.complex64),
        value.to_sparse,
        lambda: value.to("meta"),
        lambda: torch.quantize_per_tensor(value, 1.0, 0, torch.qint32),
        lambda: torch.nested.nested_tensor([torch.ones(2)] * ROWS, layout=torch.jagged),
        lambda: value.to(torch.uint16),
        lambda: PackedTensor(list(value[:, None]), 0),
    ]
    case.data[key] = pick.choice(kinds)()


def other_shape(case: Case, pick: random.Random) -> None:
    key = pick.choice([*case.whole_numbers, *case.masks, *case.reads])
    value = case.data[key]
    shapes = [value[:-1], torch.cat([value, value]), value[0], value[None], value[..., None], value[..., None, None]]
    if value.ndim == 2:
        shapes += [value[:, :0], value[:, 0]]
        shapes += [] if key == "input_ids" else [value[:, :-1], value[:, :1], torch.cat([value, value], 1)]
    case.data[key] = pick.choice(shapes)


def other_dtype(case: Case, pick: random.Random) -> None:
    key = pick.choice([*case.whole_numbers, *case.reads])
    dtypes = [torch.bool, torch.complex64, torch.float8_e5m2, torch.uint32]
    dtypes += [torch.int64, torch.uint8] if key in case.reads else [torch.float32, torch.float64]
    case.data[key] = case.data[key].to(pick.choice(dtypes))


def ragged(case: Case, pick: random.Random) -> None:
    lists: list[Any] = [[1], [], [1] * 9, torch.ones(3), torch.ones(ROWS + 1, 2), torch.tensor(1.0), "rows", 4]
    items = list(case.data.items())
    items.insert(pick.randrange(len(items)), ("z", pick.choice(lists)))
    case.data = BatchedDataDict(dict(items))


def no_rows(case: Case, pick: random.Random) -> None:
    case.data = pick.choice([case.data.slice(0, 0), BatchedDataDict(), {}, None, dict(case.data), [case.data], 7])


def no_tokens(case: Case, pick: random.Random) -> None:
    case.data["input_lengths"] = torch.zeros(ROWS, dtype=torch.int64)


def too_long(case: Case, pick: random.Random) -> None:
    width = POSITIONS + pick.randint(1, 9)
    values = {key: value for key, value in case.data.items() if isinstance(value, Tensor) and value.ndim == 2}
    for key, value in values.items():
        case.data[key] = torch.nn.functional.pad(value, (0, width - value.shape[1]))
    case.data["input_lengths"] = torch.full((ROWS,), width)


def mask_on_padding(case: Case, pick: random.Random) -> None:
    case.data["input_lengths"] = torch.full((ROWS,), WIDTH - 1)
    mask = torch.zeros(ROWS, WIDTH)
    mask[pick.randrange(ROWS), -1] = pick.choice([1.0, 1e-30])
    if case.method == "generate":
        no_tokens(case, pick)
    case.data["token_mask"] = mask


def bad_option(case: Case, pick: random.Random) -> None:
    sizes: list[Any] = [0, -1, 2.5, "2", True, math.nan, [2], -(2**70)]
    options: list[dict[str, Any]] = [{"micro_batch_size": pick.choice(sizes)}]
    if case.method == "train":
        options = [{"mbs": pick.choice(sizes)}, {"gbs": pick.choice([*sizes, 3, 8, 2**70])}]
        options += [{"loss_fn": loss} for loss in (None, NLLLoss, len, object(), "nll")]
    elif case.method == "get_topk_logits":
        options += [{"k": pick.choice([*sizes, None, 1000, 2**70])}]
    elif case.method != "score" and case.method != "generate":
        options += [{"positions": pick.choice(["some", None, 1, [], ""])}]
    if case.method == "generate":
        no_rows(case, pick)
    else:
        case.options |= pick.choice(options)


def media(case: Case, pick: random.Random) -> None:
    case.data["pixel_values"] = PackedTensor([torch.ones(2, 3), *[None] * (ROWS - 1)], 0)
    if case.method == "generate":  # an engine may take them
        ragged(case, pick)


WRONG = [
    bad_number,
    missing_column,
    other_kind,
    other_shape,
    other_dtype,
    ragged,
    no_rows,
    no_tokens,
    too_long,
    mask_on_padding,
    bad_option,
    media,
]
