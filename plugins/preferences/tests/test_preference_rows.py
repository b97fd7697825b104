"""Preference pairs in the layouts in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from rlframework.base.errors import DataError
from rlframework.config.sections import ImagesConfig
from rlframework.datasets.pictures import PictureReader
from rlframework_preferences.config import PreferenceColumnsConfig
from rlframework_preferences.preference_rows import preference_of, read_preferences

TOOL = {"name": "half", "description": "Halve n", "parameters": {"type": "object", "properties": {}}}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, YES, NO = turn("user", "8 even?"), turn("assistant", "yes"), turn("assistant", "no")
LAYOUTS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "8 even?", "chosen": "yes", "rejected": "no"},
    "messages": {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
    "conversations": {"chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    "conversations with their prompt": {"prompt": "8 even?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "8 even?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "openai": {
        "input": {"messages": [ASKED], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [YES],
        "non_preferred_output": [NO],
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_pair(layout: str) -> None:
    pair = preference_of(LAYOUTS[layout] | {"source": "x", "prompt_id": None}, "here", "a-1")
    assert pair.messages == (ASKED,)
    assert (pair.chosen, pair.rejected, pair.id, pair.scores, pair.tools) == ("yes", "no", "a-1", None, ())


def test_prompts_of_several_turns_scores_and_tools() -> None:
    before = [turn("system", "Be brief."), turn("user", "hi"), turn("assistant", "hello"), ASKED]
    row = {"chosen": [*before, YES], "rejected": [*before, NO], "score_chosen": 8, "score_rejected": 2.5}
    pair = preference_of(row, "here")
    assert pair.messages == tuple(before)
    assert pair.scores == (8.0, 2.5)
    openai = LAYOUTS["openai"] | {"input": {"messages": before, "tools": [{"type": "function", "function": TOOL}]}}
    assert preference_of(openai, "here").tools == preference_of(row | {"tools": [TOOL]}, "here").tools
    assert preference_of(openai, "here").messages == tuple(before)


def test_columns_of_other_names() -> None:
    columns = PreferenceColumnsConfig(prompt="q", chosen="good", rejected="bad")
    pair = preference_of({"q": "1?", "good": 1, "bad": "x"}, "here", "", columns)
    assert (pair.messages, pair.chosen, pair.rejected) == ((turn("user", "1?"),), "1", "x")


def test_files_and_rows_of_python(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LAYOUTS.values()))
    pairs = read_preferences(path)
    assert [(pair.messages, pair.chosen, pair.rejected) for pair in pairs] == [((ASKED,), "yes", "no")] * 6
    assert [pair.id for pair in pairs] == [f"pairs-{line}" for line in range(1, 7)]
    rows = [LAYOUTS["conversations"], LAYOUTS["conversations"]]
    assert read_preferences(rows) == read_preferences(datasets.Dataset.from_list(rows))


PLACED = turn("user", "<image>8 even?")
SEEN = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "8 even?"}]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [SEEN], "chosen": "yes", "rejected": "no"},
        {"prompt": "8 even?", "image": "a.png", "chosen": [YES], "rejected": [NO]},
        {"chosen": [SEEN, YES], "rejected": [SEEN, NO]},
        {"chosen": [PLACED, YES], "rejected": [PLACED, NO], "images": ["a.png"]},
        {"input": {"messages": [SEEN]}, "preferred_output": [YES], "non_preferred_output": [NO]},
    ],
)  # fmt: skip
def test_prompts_with_images(tmp_path: Path, row: dict[str, Any]) -> None:
    pair = preference_of(row, "here", pictures=PictureReader(ImagesConfig(), tmp_path))
    [picture, text] = pair.messages[0]["content"]
    assert (picture["image"].source, text["text"], pair.chosen, pair.rejected) == (
        tmp_path / "a.png",
        "8 even?",
        "yes",
        "no",
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [SEEN, YES], "rejected": [turn("user", "8 even?"), NO]}, "here: .* have different prompts"),
        ({"prompt": "<image>?", "chosen": "yes", "rejected": "no"}, "here: there are 1 places for images .* and 0"),
        (
            {"prompt": "?", "chosen": "<image>", "rejected": "no", "image": "a.png"},
            "here, turn 2: an assistant turn has",
        ),
        (
            {"prompt": "?", "chosen": [SEEN | {"role": "assistant"}], "rejected": "no"},
            "here, turn 2: an assistant turn",
        ),
    ],
)
def test_images_out_of_place(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        preference_of(row, "here", pictures=PictureReader(ImagesConfig(), tmp_path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "8?", "chosen": "yes"}, r"line 2: there is no 'rejected'; the columns are \['chosen', 'prompt'\]"),
        ({"prompt": "8?", "chosen": "a", "rejected": None}, r"one of the layouts: prompt .*\(ShareGPT\).*\(OpenAI\)"),
        ({"chosen": "8? yes", "rejected": "8? no"}, "column 'chosen': the answer has no prompt before it. The layouts"),
        ({"chosen": [ASKED, YES], "rejected": [turn("user", "9?"), NO]}, "have different prompts"),
        ({"prompt": "9?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, "does not have the prompt of the row"),
        ({"prompt": "8?", "chosen": [YES, ASKED, YES], "rejected": "no"}, "one turn of the assistant, in plain text"),
        ({"prompt": "8?", "chosen": [ASKED], "rejected": "no"}, r"it ends with the turns \['user'\]"),
        ({"prompt": "8?", "chosen": "", "rejected": "no"}, "'chosen': must end with one turn of the assistant"),
        ({"prompt": "8?", "chosen": {"from": "gpt"}, "rejected": "no"}, "'chosen', turn 1: needs 'role' and 'content'"),
        (
            {"preferred_output": [YES], "non_preferred_output": [NO]},
            "'input': must be an object with 'messages'",
        ),
        ({"input": {"messages": [ASKED]}, "preferred_output": [YES]}, "there is no 'non_preferred_output'"),
        (LAYOUTS["texts"] | {"score_chosen": 1}, "score_chosen and score_rejected must both be numbers"),
        (LAYOUTS["texts"] | {"score_chosen": 10**400, "score_rejected": 1}, "must both be numbers, finite in fp32"),
        (LAYOUTS["texts"] | {"margin": float("inf")}, "margin must be a number, finite in fp32"),
        (LAYOUTS["texts"] | {"margin": 1e39}, "margin must be a number, finite in fp32"),
    ],
)
def test_a_row_in_no_layout_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (LAYOUTS["texts"], row)))
    with pytest.raises(DataError, match=message) as error:
        read_preferences(path)
    assert "pairs.jsonl, line 2" in str(error.value)
