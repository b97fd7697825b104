"""docs/write_an_engine.md has the code that `rlframework new-backend --kind generation_engine` writes; it conforms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlframework.interfaces.generation import GenerationEngine
from rlframework.plugins.types import Capability
from rlframework_tools.new_backend import ENGINE, plugin_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write_an_engine.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", ["plugin.py", "config.py", "engine.py"])
def test_the_code_of_the_page_is_that_of_the_files(path):
    name = f"rlframework_plain/{path}"
    assert "\n".join(text for title, text in BLOCKS if title == name) == plugin_files("plain", ENGINE)[name]


def test_methods_and_capabilities_that_are_named_are_there():
    words = set(re.findall(r"\b[a-z_]+\b", PAGE))
    optional = {"pause", "resume", "attach", "release", "restore", "close"}
    assert set(GenerationEngine.__abstractmethods__) - {"__init__"} | optional <= words
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {word for line in rows for word in re.findall(r"`([A-Z_]{4,})`", line)}
    assert named == {"IPC_REFIT", "COLLECTIVE_REFIT", "LORA_REFIT", "IN_FLIGHT_UPDATE", "EMBEDDED_GENERATION"}
    assert named <= set(Capability.__members__)


@pytest.mark.thorough
def test_the_engine_conforms(tmp_path):
    """As an installed distribution: its metadata are on the path of a process of its own."""
    for path, text in plugin_files("plain", ENGINE).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    metadata = tmp_path / "rlframework_plain-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rlframework-plain\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[rlframework]\nplain = rlframework_plain.plugin\n")
    found = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "rlframework.cli", "conformance", "plain"]
    own = os.environ | {"PYTHONPATH": found, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "CONFORMANT" in done.stdout
    assert "NOT CONFORMANT" not in done.stdout
