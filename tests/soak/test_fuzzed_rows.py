"""Rows of hostile values and bytes: each data set is read, or rejected by one error that names file and line."""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlframework.base.errors import DataError
from rlframework.config.environments import DatasetConfig
from rlframework.environments.dataset import DatasetEnvironment

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}], "answer": "2"},
    {"conversations": [{"from": "human", "value": "1+2"}, {"from": "gpt", "value": "3"}], "answer": 3},
    {"prompt": "1+3", "completion": "4", "answer": "4"},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+3"}]}], "completion": "5", "answer": 5.0},
]
HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**4000, 0.5, 1e308, float("inf"), float("nan"), "", "x", "\0", "\ud800", "x" * 100_000),
    *([], [[]], [None], {}, {"role": []}, [{"role": "user"}], [{"role": {}, "content": "x"}], {"type": "text"}),
)
BYTES = (
    b"\0",
    b"\xff",
    b"\n",
    b"\r",
    b'"',
    b"[",
    b"}",
    b"\\u0000",
    b"\\ud83d",
    b"\xef\xbb\xbf",
    b"1e999",
    b"\xe2\x80\xa8",
)


def with_value(row: dict[str, Any], dice: random.Random) -> bytes:
    """The line of `row` after one of its values, at any depth, became a hostile one."""
    row = copy.deepcopy(row)
    target: Any = row
    while True:
        key = dice.choice(list(target) if isinstance(target, dict) else range(len(target)))
        if not isinstance(target[key], (dict, list)) or not target[key] or dice.random() < 0.3:
            target[key] = dice.choice(HOSTILE)
            return json.dumps(row).encode()
        target = target[key]


def with_bytes(row: dict[str, Any], dice: random.Random) -> bytes:
    """The line of `row` after some of its bytes became others."""
    line = json.dumps(row).encode()
    start = dice.randrange(len(line))
    return line[:start] + dice.choice(BYTES) + line[start + dice.randrange(4) :]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row_is_read_or_named(soak: Any, tmp_path: Path) -> None:
    dice, counts = soak.random(), Counter[str]()
    path, unnamed = tmp_path / "rows.jsonl", list[str]()
    for _ in range(soak.times(300, 10_000)):
        line = dice.choice((with_value, with_bytes))(dice.choice(ROWS), dice)
        good = [json.dumps(row).encode() for row in ROWS]
        good[2] = line
        path.write_bytes(b"\n".join(good))
        check = dice.choice(("none", "exact", "math")) if b"answer" in line else "none"
        config = DatasetConfig(path=str(path), check=check, validation_fraction=0.3)
        try:
            environment = DatasetEnvironment(config, seed=0)
            read = [*environment.samples("train"), *environment.samples("validation")]
        except DataError as error:
            counts["rejected"] += 1
            if not re.match(rf"{re.escape(str(path))}, line \d+", str(error)):
                unnamed.append(ascii(f"{line!r:.300}: {error}"))
        except BaseException as error:
            raise AssertionError(ascii(f"{line!r:.300} raised {type(error).__name__}: {error}")) from error
        else:
            assert all(isinstance(turn["content"], str) for sample in read for turn in sample.messages)
            counts["read"] += 1
    soak.figures |= {"inputs": counts.total(), **counts}
    assert unnamed == []
    assert min(counts["rejected"], counts["read"]) > counts.total() / 20
