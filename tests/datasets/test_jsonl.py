"""JSON lines: line numbers, encodings, and rows read in place."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import DataError
from rlframework.datasets.sources.rows import JsonlRows


def test_numbers_count_blank_lines_and_odd_line_ends(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, no last newline, and a separator that str.splitlines would break at."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "x"}\r\n\r\n{"a": "y\xe2\x80\xa8z"}')
    rows = JsonlRows([path])
    assert list(rows) == [{"a": "x"}, {"a": "y\u2028z"}]
    assert [rows.label(index) for index in range(2)] == ["a-1", "a-3"]


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=3)
objects = st.dictionaries(st.text(max_size=3), values, max_size=3)
blanks = st.sampled_from(["", " ", "\t", " \r", "\r", "   \t "])


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    st.lists(objects.map(json.dumps) | blanks, max_size=12),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_rows_and_line_numbers_of_any_file(tmp_path_factory, lines, line_end, mark, ended) -> None:
    """Against splitting the whole text."""
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    text = line_end.join(lines) + (line_end if ended else "")
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.encode())
    expected = [(n, json.loads(line)) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not expected:
        with pytest.raises(DataError, match="the file is empty"):
            JsonlRows([path])
        return
    rows = JsonlRows([path])
    assert [(rows.label(n), row) for n, row in enumerate(rows)] == [(f"a-{line}", row) for line, row in expected]
    assert len(rows) == len(expected)
    assert rows.where(len(rows) - 1) == f"{path}, line {expected[-1][0]}"
    assert rows.sizes().sum() <= path.stat().st_size


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_several_files_are_one_sequence(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", {"a": 1}, {"a": 2}), write(tmp_path / "b.jsonl", {"a": 3, "b": "x" * 50})]
    rows = JsonlRows(paths)
    assert [row["a"] for row in rows] == [1, 2, 3]
    assert [rows.label(number) for number in range(3)] == ["a-1", "a-2", "b-1"]
    assert rows.where(2) == f"{paths[1]}, line 1"
    assert rows.sizes().tolist() == [9, 9, len(json.dumps({"a": 3, "b": "x" * 50})) + 1]


def test_only_the_row_that_is_asked_for_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{]\n{"a": 3}\n', encoding="utf-8")
    rows = JsonlRows([path])
    assert rows[2] == {"a": 3}
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not JSON"):
        rows[1]


@pytest.mark.parametrize("change", ['{"a": 9}\n', '{"a": 1}\n{"a": 2}\n{"a": 3}\n', ""])
def test_a_file_that_changes_gives_no_stale_rows(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "a.jsonl", {"a": 1}, {"a": 2})
    rows = JsonlRows([path])
    path.write_text(change, encoding="utf-8")
    with pytest.raises(DataError, match="the file has changed since it was opened"):
        rows[1]
    if change:
        assert JsonlRows([path])[0] == json.loads(change.splitlines()[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"a": 2}]', r"line 1: must be a JSON object with named fields, not list.*jq -c '\.\[\]'"),
        (b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}\n", r"line 2: not JSON \(Exceeds the limit"),
        (b'[\n  {"a": 1}\n]\n', r"line 1: not JSON.*jq -c"),
        (b'{"a": "x"}\n{"a": "\xff"}\n', "line 2: not UTF-8"),
        (b"[" * 200_000, "line 1: not JSON"),
        (b"3\n", "line 1: must be a JSON object with named fields, not int$"),
        (gzip.compress(b'{"a": 1}\n', mtime=0), r"line 1: not UTF-8 text .* is it compressed\?"),
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf\n \n", "the file is empty"),
        (b'\xff\xfe{\x00"\x00a\x00', "line 1: not UTF-8"),
    ],
)
def test_what_is_no_json_lines(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.jsonl.*{message}"):
        list(JsonlRows([path]))


@pytest.mark.slow
def test_a_large_file_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes((b'{"a": "' + b"x" * 990 + b'"}\n') * (16 << 10))
    tracemalloc.start()
    try:
        rows = JsonlRows([path])
        assert len(rows) == 16 << 10
        assert rows[len(rows) - 1] == {"a": "x" * 990}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_and_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    """Opening a pipe would wait for somebody who writes to it."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read \(it is not a file\)"):
        JsonlRows([tmp_path / "a.jsonl"])
    with pytest.raises(DataError, match=r"cannot be read \(embedded null byte\)"):
        JsonlRows(["a\0.jsonl"])
