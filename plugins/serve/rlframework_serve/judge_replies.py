"""Replies of a judge by request, in memory and in a file, so that no request is made twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlframework.base.files import AppendedFile
from rlframework.base.logs import printable


class Replies:
    """The replies of the model `model` to prompts, with the `parameters` of the request.

    `path` is a file of JSON lines, each `key` and `reply`, which is read and appended to from the first call on; None
    keeps the replies in memory alone. A line that a killed process did not finish is ignored.
    """

    def __init__(self, model: str, parameters: Mapping[str, Any], path: Path | None) -> None:
        self._request, self._path = [model, dict(parameters)], path
        self._known: dict[str, str] | None = None
        self._file: AppendedFile | None = None

    def get(self, prompt: str) -> str | None:
        """Return the reply to `prompt`, None if there was none."""
        return self._opened().get(self._key(prompt))

    def add(self, prompt: str, reply: str) -> None:
        """Keep the reply to `prompt`. Raises a `WriteError` if the disk does not take it."""
        key = self._key(prompt)
        self._opened()[key] = reply
        if self._file is not None:
            line = json.dumps({"key": key, "reply": reply}, ensure_ascii=False)
            self._file.write((printable(line) + "\n").encode("utf-8"))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _key(self, prompt: str) -> str:
        text = json.dumps([*self._request, prompt], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _opened(self) -> dict[str, str]:
        if self._known is None:
            self._known = {}
            if self._path is not None:
                cut = self._read(self._path)
                self._file = AppendedFile(self._path)
                self._file.write(b"\n" if cut else b"")
        return self._known

    def _read(self, path: Path) -> bool:
        """Read the replies in the file `path`; whether its last line has no end."""
        assert self._known is not None
        line = b"\n"
        with suppress(FileNotFoundError), path.open("rb") as file:
            for line in file:
                with suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self._known[str(row["key"])] = str(row["reply"])
        return not line.endswith(b"\n")
