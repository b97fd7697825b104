"""JSON-lines: line numbers, encodings."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframework.data.jsonl import read_jsonl
from rlframework.errors import DataError


def test_numbers_count_blank_lines_and_odd_line_ends(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, no last newline, and a separator that str.splitlines would break at."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "x"}\r\n\r\n{"a": "y\xe2\x80\xa8z"}')
    assert read_jsonl(path, {"a": str}) == [(1, {"a": "x"}), (3, {"a": "y\u2028z"})]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "x"}\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not UTF-8"):
        read_jsonl(path, {"a": str})


def test_nesting_without_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(DataError, match="line 1: not JSON"):
        read_jsonl(path, {"a": str})
