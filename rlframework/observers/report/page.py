"""Renders the page: style sheet, scripts and the runs' data in one HTML file.

Completions and configurations are untrusted. The page contains them only as JSON in which `<`, `>` and `&` are escaped,
and the scripts display them as text, never as HTML. As a second line of defence, the page's Content-Security-Policy
blocks all other scripts and all requests.
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
    """Render `data` (see `content`) as HTML."""
    style = _asset("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = html.escape(str(data["title"])).encode("utf-8", "replace").decode()
    values = {"policy": policy, "title": title, "style": style, "script": script}
    fields = _asset("page.html").split("%%")  # alternately text and names; the inserted values are not scanned for %%
    return "".join(
        field if index % 2 == 0 else _json(data) if field == "data" else values[field]
        for index, field in enumerate(fields)
    )


def _json(data: Mapping[str, Any]) -> str:
    """Encode as JSON without characters that HTML could interpret as markup, and without lone surrogates."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return re.sub(r"[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("rlframework.observers.report").joinpath("assets", name).read_text(encoding="utf-8")
