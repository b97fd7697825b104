"""Reading JSON-lines files, with errors that name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlframework.errors import DataError


def read_jsonl(path: Path, fields: Mapping[str, type]) -> list[tuple[int, dict[str, Any]]]:
    """All objects of the file with their line numbers, counted from 1; blank lines are left out.

    Each must be a JSON object with all `fields`, of the given types. Else, and for a file that is missing, not UTF-8
    or without any object: `DataError`.
    """
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            rows.append((number, _row(line, fields, f"{path}, line {number}")))
    if not rows:
        raise DataError(f"{path}: the file is empty; it must hold one JSON object a line")
    return rows


def _lines(path: Path) -> list[str]:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a JSONL file") from error
    lines = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        try:
            lines.append(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: not UTF-8 text ({error.reason})") from error
    return lines


def _row(line: str, fields: Mapping[str, type], where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a JSON object with {sorted(fields)}, not {type(row).__name__}")
    for name, kind in fields.items():
        if name not in row:
            raise DataError(f"{where}: the field {name!r} is missing; there are {sorted(row)}")
        if not isinstance(row[name], kind):
            raise DataError(f"{where}: the field {name!r} must be {kind.__name__}, not {type(row[name]).__name__}")
    return row
