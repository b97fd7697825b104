"""Special tokens that the text of an answer hides: in records of single turns and of episodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Sample
from rlframework.rollout.result import Rollout, with_special_tokens

TOKENIZER: Any = character_tokenizer("ab")
PAD, EOS = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
A, B = TOKENIZER.convert_tokens_to_ids(["a", "b"])
SHOWN_PAD, SHOWN_EOS = TOKENIZER.pad_token, TOKENIZER.eos_token


@pytest.mark.parametrize(
    ("ids", "ended", "shown"),
    [
        ([A, B, EOS], True, ""),
        ([A, B], False, ""),
        ([], True, ""),
        ([EOS], True, SHOWN_EOS),
        ([PAD, PAD], False, SHOWN_PAD * 2),
        ([A, PAD, B, EOS], True, f"a{SHOWN_PAD}b{SHOWN_EOS}"),
        ([A, PAD], False, f"a{SHOWN_PAD}"),
    ],
)
def test_what_the_text_hides(ids: list[int], ended: bool, shown: str) -> None:
    assert with_special_tokens(TOKENIZER, ids, ended=ended) == shown


def record(ids: list[int], mask: list[int], transcripts: Any = (), *, truncated: bool = False) -> Any:
    """The record of a sample whose answer, or the last row of whose episode, has these tokens; padded by two."""
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.tensor([[A] * (len(ids) + 2), [*ids, PAD, PAD]]),
            "token_mask": torch.tensor([[0] * (len(ids) + 2), [*mask, 0, 0]]),
            "sample_mask": torch.ones(2),
        }
    )
    zero, episodes = torch.zeros(1), torch.zeros(2, dtype=torch.int64)
    samples = [Sample("one", ({"role": "user", "content": "a"},), "b")]
    result = Rollout(
        samples, [""], data, zero, zero, zero, torch.tensor([truncated]), {}, episodes, zero.bool(), transcripts, [""]
    )
    return result.records(1, "train", 1, TOKENIZER)[0]


def test_a_fresh_model_that_writes_padding() -> None:
    assert record([A, PAD, PAD], [0, 1, 1], truncated=True).model_output == SHOWN_PAD * 2


def test_the_end_of_an_answer_is_not_hidden() -> None:
    assert record([A, B, EOS], [0, 1, 1]).model_output == ""


@pytest.mark.parametrize(
    ("more", "shown"), [({}, SHOWN_PAD + SHOWN_EOS), ({"tool_calls": [{}]}, ""), ({"reasoning_content": "b"}, "")]
)
def test_the_last_turn_of_an_episode(more: dict[str, Any], shown: str) -> None:
    """Of the turns `b` and `<pad><eos>`; a turn whose special tokens were read as something hides nothing."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "trained": False},
        {"role": "assistant", "content": "b", "trained": True, "reward": 0.0},
        {"role": "user", "content": "a", "trained": False},
        {"role": "assistant", "content": "", "trained": True, "reward": 0.0, **more},
    ]
    assert record([A, B, EOS, A, PAD, EOS], [0, 1, 1, 0, 1, 1], [turns]).model_output == shown
