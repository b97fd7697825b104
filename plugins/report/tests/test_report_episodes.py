"""Episodes on the report page: their messages, tool calls and rewards, and which turns are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlframework.observers.runs import read_run
from rlframework_report.report.content import content

CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}], "trained": False},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL], "trained": True, "reward": 0},
    {"role": "tool", "content": "2", "tool_call_id": "c0", "trained": False},
    {"role": "assistant", "content": "2", "trained": True, "reward": 0.123456},
]


def written(folder: Path, *rows: dict[str, Any]) -> Any:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/reward": 1.0}\n')
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return content([read_run(folder, "a")], 1)["runs"][0]["samples"]["rows"]


def test_an_episode_is_shown_turn_by_turn(tmp_path: Path) -> None:
    row = {"step": 1, "kind": "train", "prompt": "1+1=", "completion": "2", "reward": 1.0, "turns": TURNS}
    found = written(tmp_path / "a", row, {**row, "turns": [], "failure": ""}, {**row, "failure": "it broke"})
    turns = [
        {"role": "user", "text": "1+1=", "trained": False},
        {"role": "assistant", "text": "", "trained": True, "reasoning": "hm", "calls": ['add({"a": 1})'], "reward": 0},
        {"role": "tool", "text": "2", "trained": False},
        {"role": "assistant", "text": "2", "trained": True, "reward": 0.1235},
    ]
    assert found[0] == [1, "train", 0, "2", 1.0, {}, turns]
    assert len(found[1]) == 6
    assert found[2][5:] == [{"failure": "it broke"}, turns]


def test_what_the_model_saw_and_the_parts_of_the_reward_are_shown(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "2", "trained": False, "sampled": True, "row": 2}]
    row = {"step": 1, "kind": "validation", "prompt": "1+1=", "completion": "2", "reward": 1.0, "turns": turns}
    more = {"sample": "rows-1", "metrics": {"right": 1.0, "brief": -0.123456}, "model_input": "tools: add. 1+1="}
    (found,) = written(tmp_path / "a", {**row, **more})
    assert found[5] == {"sample": "rows-1", "right": "1", "brief": "-0.1235"}
    assert found[6] == [
        {"role": "model input", "text": "tools: add. 1+1=", "trained": False},
        {"role": "assistant", "text": "2", "trained": False, "row": 2, "sampled": True},
    ]


def test_long_turns_count_towards_the_size_of_the_page(tmp_path: Path) -> None:
    """300 steps with 4 times 3,000 characters each are more than a page holds."""
    turns = [{"role": "tool", "content": "x" * 3000, "trained": False}] * 4
    rows = [{"step": n, "prompt": "a", "completion": "b", "turns": turns} for n in range(300)]
    found = written(tmp_path / "a", *rows)
    assert 10 < len(found) < 60
    long = written(tmp_path / "b", {**rows[0], "turns": [{"role": "tool", "content": "x" * 9000}]})
    assert long[0][6][0]["text"].endswith("… 5,000 more characters")
