"""The page as text: our style sheet and scripts, and the runs' data, in one file.

Completions and configurations are not ours. They are in the page as JSON only, in which `<`, `>` and `&` are written as
escapes, and the scripts put them on the screen as text, never as HTML. The page's policy lets no other script run, and
nothing be fetched, should either ever fail.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = ("base.js", "chart.js", "curves.js", "phases.js", "samples.js", "tables.js", "main.js")


def render(data: Mapping[str, Any]) -> str:
    """The HTML of `data` (see `content`)."""
    style = _asset("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = html.escape(str(data["title"])).encode("utf-8", "replace").decode()
    parts = {"policy": policy, "title": title, "style": style, "script": script}
    pieces = _asset("page.html").split("%%")  # text and names of parts in turn, so that parts are not looked into
    return "".join(
        piece if index % 2 == 0 else _json(data) if piece == "data" else parts[piece]
        for index, piece in enumerate(pieces)
    )


def _json(data: Mapping[str, Any]) -> str:
    """JSON that no HTML reader takes for markup, and that can be written as UTF-8 whatever a model wrote."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return re.sub(r"[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("rlframework.observers.report").joinpath("assets", name).read_text(encoding="utf-8")
