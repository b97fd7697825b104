"""`PreferencePairs`: a chosen and a rejected answer to each prompt, as tokens, for reward models and DPO.

A batch has two rows per pair: row 2 i is the chosen answer of pair i, row 2 i + 1 the rejected one. So every method for
sequences works unchanged. A loss with `needs_groups` gets whole pairs in every batching mode, as their rows have equal
`group_ids`; it finds them by these ids and `chosen`, since microbatches have pairs in any order. Results of scoring are
in the order of the batch, so that `[0::2]` and `[1::2]` are the two sides. Not supported: more than two answers to a
prompt, and ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from rlframework.base.errors import BatchError, BatchTypeError, DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.datasets.chat.rendering import render_completion, render_prompt
from rlframework.datasets.tokens import pad_rows
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message, ToolSpec, pictures_of
from rlframework_preferences.memmap import MemmapTensorClass
from rlframework_preferences.reward_data import RewardData, has_values, need_tensor, right_padding_mask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs

_MOST = torch.finfo(torch.float32).max

_CHUNK = 4096
"""Number of pairs whose tokens are compared at a time."""


@dataclass(frozen=True)
class PreferenceRow:
    """A pair as text. `scores`: those of the chosen and the rejected answer, if known. `tools`: as of `Sample`."""

    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    id: str = ""
    scores: tuple[float, float] | None = None
    tools: tuple[ToolSpec, ...] = ()


def pair_of(sample: Sample) -> PreferenceRow:
    """Return the pair in a sample of the environment `preferences`; raise `DataError` if it has none."""
    rejected = sample.metadata.get("rejected")
    if not isinstance(rejected, str) or not sample.completion:
        raise DataError(
            f"sample {sample.id!r} is not a preference pair: it needs a completion, and a rejected answer in "
            'metadata["rejected"], as the environment `preferences` has'
        )
    return PreferenceRow(sample.messages, sample.completion, rejected, sample.id, tools=sample.tools)


class PreferencePairs(MemmapTensorClass):
    """Pairs of sequences with a common prompt, `batch_size` `[P]`.

    `chosen`, `rejected`: `RewardData` of P rows, whose widths may differ. `prompt_lengths [P]`: int64, the number of
    prompt tokens, which are not trained on. Can be saved, mapped and filled row by row like `RewardData`.
    """

    chosen: RewardData
    rejected: RewardData
    prompt_lengths: Tensor

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[PreferenceRow],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
        too_long: Literal["error", "drop"] = "error",
        images: ImageInputs | None = None,
    ) -> Self:
        """Tokenise `rows` with the tokenizer's chat template, if any; an answer ends with its end-of-sequence token.

        Sequences are padded to the longest one. A pair with a sequence longer than `max_length` tokens raises a
        `DataError`, or is dropped (`too_long="drop"`). Raises a `DataError` if no pair is left. Scores become
        `end_scores`, fp32; either all rows have two finite scores, or none has any. `images`: puts the images of the
        prompts in their places; their tensors are not part of the pairs, see `media_of_pairs`. An image that cannot be
        used raises an `ImageError`.
        """
        if too_long not in ("error", "drop"):
            raise DataError(f"too_long is {too_long!r}; it must be 'error' or 'drop'")
        tokenised = [_tokenise(row, tokenizer, images) for row in rows]
        longest = [max(len(chosen), len(rejected)) for _, chosen, rejected in tokenised]
        long = {index for index, length in enumerate(longest) if max_length is not None and length > max_length}
        if long and too_long == "error":
            first = min(long)
            raise DataError(
                f"pair {first} ({rows[first].id or 'without id'}) has {longest[first]} tokens, more than max_length "
                f"{max_length}, and so have {len(long) - 1} others; raise max_length, or set too_long='drop'"
            )
        kept = [index for index in range(len(rows)) if index not in long]
        if not kept:
            why = f": all have more than {max_length} tokens" if rows else ""
            raise DataError(f"none of the {len(rows)} given pairs is left{why}")
        scored = [rows[index].scores is not None for index in kept]
        if any(scored) != all(scored):
            raise DataError(f"{sum(scored)} of {len(scored)} pairs have scores; all must have them, or none")
        scores = _scores([rows[index] for index in kept]) if all(scored) else None
        pad: Any = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        sides = [side for index in kept for side in tokenised[index][1:]]
        ids, lengths = (each.unflatten(0, (len(kept), 2)) for each in pad_rows(sides, int(pad)))
        both = RewardData.from_lengths(ids, lengths, end_scores=scores)
        prompts = torch.tensor([tokenised[index][0] for index in kept])
        return cls(both[:, 0], both[:, 1], prompts, batch_size=[len(kept)])

    def check(self) -> Self:
        """Check the shapes and contents described above, and return self. Raises a `BatchError`.

        Reads all data, unless it is on the meta device.
        """
        pairs = self.batch_size
        for name, side in (("chosen", self.chosen), ("rejected", self.rejected)):
            if not isinstance(side, RewardData):
                raise BatchTypeError(f"{name} is a {type(side).__name__}; it must be RewardData")
            shape = side.check().input_ids.shape
            if shape[:-1] != pairs or len(pairs) != 1:
                raise BatchError(
                    f"{name} has input_ids of shape {list(shape)} and batch_size is {list(pairs)}; they must be [P, S] "
                    "and [P]"
                )
        given = need_tensor("prompt_lengths", self.prompt_lengths)
        if given.shape != pairs or given.dtype not in (torch.int64, torch.int32):
            raise BatchError(f"prompt_lengths is {given.dtype} of shape {list(given.shape)}; it must be int64 [P]")
        if has_values(given):
            for start in range(0, len(self), _CHUNK):
                self[start : start + _CHUNK]._check_prompts(start)
        return self

    def to_fields(self) -> dict[str, Tensor]:
        """Return alternating chosen and rejected rows, for `BatchedDataDict(pairs.to_fields())`.

        `input_ids [2 P, S]`, `attention_mask [2 P, S]`, `input_lengths [2 P]`, `prompt_lengths [2 P]`, `token_mask [2
        P, S]` (fp32, 1 on the answer), `sample_mask [2 P]` (ones), `group_ids [2 P]` (int64, the number of the pair),
        `chosen [2 P]` (fp32, 1 or 0), and `rewards` and `end_scores` if both sides have them. The narrower side is
        padded with 0.
        """
        sides = [self.check().chosen.to_fields(), self.rejected.to_fields()]
        fields = {name: _interleave(name, sides[0][name], sides[1][name]) for name in sides[0] if name in sides[1]}
        prompts = self.prompt_lengths.to(torch.int64).repeat_interleave(2)
        before = right_padding_mask(prompts, fields["input_ids"].shape)
        answer = fields["attention_mask"].bool() & ~before
        rows = torch.arange(len(prompts), device=prompts.device)
        masks = {"token_mask": answer.float(), "sample_mask": torch.ones_like(rows, dtype=torch.float32)}
        return {**fields, **masks, "prompt_lengths": prompts, "group_ids": rows // 2, "chosen": (1 - rows % 2).float()}

    def _check_prompts(self, first: int) -> None:
        """Check the prompts of these pairs; messages number them from `first`."""
        prompts, lengths = self.prompt_lengths, (self.chosen.input_lengths, self.rejected.input_lengths)
        short = (prompts < 0) | (prompts > torch.minimum(*lengths))
        if short.any():
            row = int(short.nonzero()[0])
            prompt, *tokens = (int(each[row]) for each in (prompts, *lengths))
            raise BatchError(
                f"pair {first + row}: the prompt has {prompt} tokens, chosen {tokens[0]} and rejected {tokens[1]}; "
                "both must begin with the prompt"
            )
        width = int(prompts.max()) if len(prompts) else 0
        differ = self.chosen.input_ids[:, :width] != self.rejected.input_ids[:, :width]
        differ &= right_padding_mask(prompts, differ.shape)
        if differ.any():
            row, column = differ.nonzero()[0].tolist()
            raise BatchError(
                f"pair {first + row}: chosen and rejected differ at position {column}, within the prompt of "
                f"{int(prompts[row])} tokens; both must have the same prompt"
            )


def mismatched_rows(data: BatchedDataDict[Any], pad_id: int) -> BatchedDataDict[Any]:
    """Return each prompt of `data` with the answer of the same kind to the next pair's prompt, the last with the first.

    `data` has the rows of `PreferencePairs.to_fields`: two per pair, of two pairs or more. An answer is truncated where
    its row would be longer than the longest of `data`. Returns `input_ids`, `input_lengths`, `token_mask` and
    `sample_mask`, in the order of `data`, and the media of the prompts.
    """
    ids, ends, prompts = (data[name].tolist() for name in ("input_ids", "input_lengths", "prompt_lengths"))
    count, longest = len(ids), max(ends)
    if count < 4:
        raise BatchError(f"mismatched rows need at least two pairs, but the batch has {count} rows")
    others = [(row + 2) % count for row in range(count)]
    rows = [
        (ids[row][: prompts[row]] + ids[other][prompts[other] : ends[other]])[:longest]
        for row, other in enumerate(others)
    ]
    input_ids, lengths = pad_rows(rows, pad_id)
    answers = right_padding_mask(lengths, input_ids.shape) & ~right_padding_mask(
        data["prompt_lengths"], input_ids.shape
    )
    masks = {"token_mask": answers.float(), "sample_mask": data["sample_mask"]}
    media = data.get_multimodal_dict()
    for name, value in media.items():
        if not isinstance(value, PackedTensor):  # token types, by position: answers have no image
            types = value * right_padding_mask(data["prompt_lengths"], value.shape)
            media[name] = torch.nn.functional.pad(types, (0, input_ids.shape[1] - types.shape[1]))
    return BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, **masks, **media})


def media_of_pairs(
    rows: Sequence[PreferenceRow], input_ids: Tensor, images: ImageInputs
) -> dict[str, PackedTensor | Tensor]:
    """Return the media of `rows` as columns beside those of `PreferencePairs.to_fields`, with `input_ids`.

    Both rows of a pair share the tensors of their prompt, and so do pairs with the same images.
    """
    return images.columns([pictures_of(row.messages) for row in rows for _ in range(2)], input_ids)


def _tokenise(
    row: PreferenceRow, tokenizer: PreTrainedTokenizerBase, images: ImageInputs | None
) -> tuple[int, list[int], list[int]]:
    """The length of the prompt, and the ids of prompt and chosen answer, and of prompt and rejected answer."""
    prompt = render_prompt(tokenizer, row.messages, row.tools, images)
    answers = [
        Sample(row.id, row.messages, "", completion=text, tools=row.tools) for text in (row.chosen, row.rejected)
    ]
    chosen, rejected = (prompt + render_completion(tokenizer, answer) for answer in answers)
    if images is not None:  # an answer may have the text of an image token
        for ids in (chosen, rejected):
            images.check(ids, pictures_of(row.messages))
    return len(prompt), chosen, rejected


def _scores(rows: Sequence[PreferenceRow]) -> Tensor:
    """The scores of chosen and rejected answers, `[P, 2]` fp32."""
    for index, row in enumerate(rows):
        scores: Any = row.scores
        if not isinstance(scores, (tuple, list)) or len(scores) != 2 or not all(map(is_score, scores)):
            raise DataError(
                f"pair {index} ({row.id or 'without id'}) has scores {scores!r}; give two finite numbers, for the "
                "chosen and the rejected answer, or none for all pairs"
            )
    return torch.tensor([row.scores for row in rows], dtype=torch.float32)


def is_score(value: Any) -> bool:
    """Whether `value` is a number that is finite in fp32."""
    size: Any = abs(value) if isinstance(value, Real) else torch.inf
    return bool(size <= _MOST)


def _interleave(name: str, first: Tensor, second: Tensor) -> Tensor:
    if first.dtype != second.dtype or first.device != second.device or first.ndim != second.ndim:
        raise BatchError(
            f"{name} is {first.dtype} of shape {list(first.shape)} on {first.device} in chosen, and {second.dtype} of "
            f"shape {list(second.shape)} on {second.device} in rejected; they must match"
        )
    if first.ndim > 1 and first.shape[1] != second.shape[1]:
        width = max(first.shape[1], second.shape[1])
        first, second = (torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in (first, second))
    return torch.stack([first, second], dim=1).flatten(0, 1)
