"""Which tests the sound part has passed in this session: what a mutant must fail counts only then.

The processes of pytest-xdist share it, and the suite's own run counts, so that no test is run twice on a sound part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlframework.conformance.layouts import Layout
from rlframework.conformance.sections import plain_paths


class Passes:
    """A file for each test that was passed, in `folder`, which is made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, kind: str, name: str, section: Mapping[str, Any], layout: Layout, test: str) -> Path:
        """The file that says that the part `name`, with `section` and in `layout`, passed `test`."""
        of = json.dumps([kind, name, plain_paths(section), str(layout)], sort_keys=True, default=str)
        return self._folder / f"{test}-{hashlib.sha256(of.encode()).hexdigest()[:16]}"
