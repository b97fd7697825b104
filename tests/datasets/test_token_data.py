"""Token data: what is written is read, in any order, without reading the rest; and damage is told."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlframework.base.errors import DataError
from rlframework.datasets.tokens import TokenData, write_token_data

Rendered = tuple[list[int], list[bool]]
ROWS: list[Rendered] = [
    ([5, 6, 7], [False, True, True]),
    ([8], [True]),
    ([1, 2, 3, 4, 9], [False, False, False, True, False]),
]


def write(path: Path, rows: Any = ROWS, vocab_size: int = 10, **options: Any) -> TokenData:
    return write_token_data(path, rows, **{"vocab_size": vocab_size, "tokenizer": "t", "train_on": "last", **options})


def test_rows_come_back_in_any_order(tmp_path: Path) -> None:
    data = write(tmp_path / "d", max_tokens=7, source={"path": "a.jsonl"})
    data.verify()
    assert data.lengths.tolist() == [3, 1, 5]
    known = {"rows": 3, "tokens": 9, "trained_tokens": 4, "longest": 5, "vocab_size": 10, "dtype": "uint16"}
    known |= {"tokenizer": "t", "train_on": "last", "max_tokens": 7, "source": {"path": "a.jsonl"}}
    assert known.items() <= data.meta.items()
    rows = data.rows([1, 0, 1, 2], pad_id=9)
    assert rows.input_ids.tolist() == [[8, 9, 9, 9, 9], [5, 6, 7, 9, 9], [8, 9, 9, 9, 9], [1, 2, 3, 4, 9]]
    assert rows.input_lengths.tolist() == [1, 3, 1, 5]
    assert rows.token_mask.tolist() == [[1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
    assert [tensor.dtype for tensor in rows] == [torch.int64, torch.int64, torch.float32]


def test_the_number_type_goes_by_the_vocabulary(tmp_path: Path) -> None:
    two = write(tmp_path / "two", [([65535], [True])], 65536)
    four = write(tmp_path / "four", [([65536], [True])], 65537)
    assert (two.meta["dtype"], four.meta["dtype"]) == ("uint16", "uint32")
    assert (tmp_path / "two" / "tokens.bin").stat().st_size == 2
    assert (tmp_path / "four" / "tokens.bin").stat().st_size == 4
    assert two.rows([0]).input_ids.tolist() == [[65535]]
    assert four.rows([0]).input_ids.tolist() == [[65536]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no rows to write"),
        ([ROWS[0], ([], [])], "row 1 has 0 tokens"),
        ([([1, 2], [True])], "row 0 has 2 tokens and a mask of 1"),
        ([([10], [True])], "token ids are from 10 to 10, but the vocabulary has 10"),
        ([([-1], [True])], r"token ids are from -1"),
        ([([1], [False])], "no token of any row is trained on"),
    ],
)
def test_rows_that_cannot_be_written_leave_nothing(tmp_path: Path, rows, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write(tmp_path / "d", rows)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_on_the_way_leaves_what_was_there(tmp_path: Path) -> None:
    def broken() -> Iterator[Rendered]:
        yield ROWS[0]
        raise KeyboardInterrupt

    write(tmp_path / "d")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "d", broken())
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert len(TokenData(tmp_path / "d")) == 3


HUGE = """
import resource, sys
from rlframework.datasets.tokens import TokenData
import numpy as np

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

before = resident()
data = TokenData(sys.argv[1])
rows = data.rows([0, len(data) // 2, len(data) - 1])
assert rows.input_ids.shape == (3, 4096), rows.input_ids.shape
assert rows.input_ids[:, 0].tolist() == [0, 7, 0], rows.input_ids[:, 0]
assert int(data.lengths.max()) == 4096
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to tell what is in memory")
def test_data_larger_than_memory_is_not_read_into_it(tmp_path: Path) -> None:
    """48 GiB of tokens in a file with holes, which takes no place on disk; one row in the middle has a token."""
    rows, length = 6_000_000, 4096
    write(tmp_path / "d", [([0] * 2, [True] * 2)])
    folder, count = tmp_path / "d", rows * length
    np.arange(0, count + 1, length, dtype="<i8").tofile(folder / "offsets.bin")
    for name, size in (("tokens.bin", 2), ("mask.bin", 1)):
        with (folder / name).open("wb") as file:
            file.truncate(count * size)
    with (folder / "tokens.bin").open("r+b") as file:
        file.seek(rows // 2 * length * 2)
        file.write(b"\x07\x00")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "rows": rows, "tokens": count, "longest": length}))
    assert (folder / "tokens.bin").stat().st_size > 45 << 30
    done = subprocess.run([sys.executable, "-c", HUGE, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256 << 20  # the offsets of six million rows are 48 MB, and their differences as many


def refused(path: Path) -> str:
    with pytest.raises(DataError) as error:
        TokenData(path)
    return str(error.value)


def test_what_is_no_token_data(tmp_path: Path) -> None:
    assert "not token data" in refused(tmp_path / "nothing")
    assert "`rlframework tokenize`" in refused(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": "else"}')
    assert "does not describe token data" in refused(tmp_path)
    (tmp_path / "meta.json").write_text("[" * 100_000)
    assert "is damaged" in refused(tmp_path)


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin", "offsets.bin"])
def test_half_written_and_missing_files(tmp_path: Path, name: str) -> None:
    write(tmp_path / "d")
    path = tmp_path / "d" / name
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(content)
        message = refused(tmp_path / "d")
        assert f"{name}: is damaged: it has {len(content)} bytes instead of {len(whole)}" in message
    path.unlink()
    assert "No such file" in refused(tmp_path / "d")
    path.mkdir()
    assert name in refused(tmp_path / "d")


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 2},
        {"rows": True},
        {"rows": 10**30},
        {"tokens": 8},
        {"tokens": -9},
        {"longest": 4},
        {"dtype": "float32"},
        {"dtype": "uint32"},
        {"dtype": ["uint16"]},
        {"tokenizer": None},
        {"train_on": 3},
        {"max_tokens": 0},
        {"crc32": {}},
        {"version": 2},
        {"vocab_size": None},
    ],
    ids=str,
)
def test_a_description_that_cannot_be_right(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path / "d")
    path = tmp_path / "d" / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    message = refused(tmp_path / "d")
    assert "render" in message
    assert str(tmp_path / "d") in message


@pytest.mark.parametrize(
    "offsets", [[0, 3, 3, 9], [0, 4, 3, 9], [1, 3, 4, 9], [0, 3, 4, 8], [0, -1, 4, 9], [0, 2**62, 4, 9], [0, 1, 2, 9]]
)
def test_offsets_that_cannot_be_right(tmp_path: Path, offsets: list[int]) -> None:
    """Empty rows, rows that go back, other ends, and a row longer than the longest."""
    write(tmp_path / "d")
    np.array(offsets, "<i8").tofile(tmp_path / "d" / "offsets.bin")
    assert "its offsets are inconsistent" in refused(tmp_path / "d")


def test_numbers_that_are_no_tokens(tmp_path: Path) -> None:
    write(tmp_path / "d")
    for name, content in (("tokens.bin", np.array([5, 6, 7, 8, 1, 2, 3, 4, 10], "<u2")), ("mask.bin", b"\x02" * 9)):
        shutil.copy(tmp_path / "d" / name, tmp_path / "kept")
        (tmp_path / "d" / name).write_bytes(bytes(content))
        data = TokenData(tmp_path / "d")
        with pytest.raises(DataError, match="ids outside the vocabulary"):
            data.rows([0, 2])
        with pytest.raises(DataError, match=rf"{name}: is damaged: its checksum"):
            data.verify()
        shutil.copy(tmp_path / "kept", tmp_path / "d" / name)


@pytest.mark.slow
def test_any_damage_is_an_error_of_ours_or_found_by_verify(tmp_path: Path) -> None:
    rng, found = random.Random(0), {"opened": 0, "refused": 0}
    write(tmp_path / "d")
    original = {path: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    for _ in range(300):
        path = rng.choice(list(original))
        broken = bytearray(original[path])
        for _ in range(rng.choice([1, 1, 4])):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        path.write_bytes(bytes(broken[: rng.randrange(len(broken))] if rng.random() < 0.2 else broken))
        try:
            data = TokenData(tmp_path / "d")
            found["opened"] += 1
            if path.name != "meta.json" and path.read_bytes() != original[path]:
                with pytest.raises(DataError):
                    data.verify()
            data.rows(list(range(len(data))))
        except DataError:
            found["refused"] += 1
        path.write_bytes(original[path])
    assert min(found.values()) > 50, found
