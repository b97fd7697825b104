"""Every command with arguments that make no sense: a message and exit code 2, no traceback, and nothing written."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from probe_runs import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = "device: cpu\npolicy: {model_name: m}\nalgorithm: {name: grpo}\nenvironment: {name: addition}\n"
PATHS = (
    "", "folder", "bytes", "empty.yaml", "loop", "gone.yaml", "\udcff", "x" * 300, "x" * 1_000_000, "a/" * 3000,
    "/dev/null", "/proc/self/mem", "/dev/null/x", "../..", "-", "~root", "%", "@run.yaml", "\x1b[31m", "\n", "\u202e",
    "http://x/y",
)  # fmt: skip
WORDS = ("--nosuch", "--=x", "=", "=1", "~x", "a=b", "a=[", "policy.model_name=x", "-h1", "--debug=1", "seed=${seed}")
NUMBERS = ("-1", "0", "nan", "1e400", "9" * 5000, "0x10", "\u0661", "x", "")
COMMANDS = (
    "train", "evaluate", "generate", "config", "schema", "plugins", "doctor", "report", "convert", "tokenize",
    "conformance", "parity", "new-backend", "init",
)  # fmt: skip
LIGHT = ("config", "init", "new-backend", "plugins", "report", "schema", "train")
"""Commands that reject arguments before they import torch: those of the short form."""
OF_PATHS = (
    "train {}", "train --resume {}", "train {} --dry-run", "evaluate {}", "evaluate folder --config {}",
    "evaluate folder --out {}", "generate {} x", "generate folder --file {}", "config {}", "report {}",
    "report . --out {}", "report . --png {}", "convert {} new --to portable", "convert folder {} --to portable",
    "convert folder new --to {}", "tokenize {} out", "tokenize run.yaml {}", "conformance {}", "parity {}",
    "parity --replay {} --step 1", "parity --model {}", "doctor {}", "train run.yaml --dry-run --on {}",
    "evaluate folder --k {}", "conformance dtensor --device {}", "parity --precision {}", "parity --batching {}",
    "conformance dtensor --layout {}",
)  # fmt: skip
OF_WORDS = (
    "train run.yaml {}",
    "config run.yaml {}",
    "tokenize run.yaml out {}",
    "evaluate folder {}",
    "convert a b {}",
)
OF_NUMBERS = (
    "generate folder x --samples {}", "generate folder x --temperature {}", "generate folder x --max-new-tokens {}",
    "generate folder x --seed {}", "evaluate folder --attempts {}", "evaluate folder --temperature {}",
    "parity --steps {}", "report . --smooth {}", "train --resume . algorithm.num_steps={}", "parity --rows {}",
    "conformance dtensor --workers {}",
)  # fmt: skip


VALID = ["config", "run.yaml", "policy.model_name=x"]


def command_lines() -> list[list[str]]:
    """All combinations of the words above, and each command alone or with a word that it does not have."""
    found = [[command, word] for command in COMMANDS for word in WORDS if word != "--debug=1"]
    for patterns, values in ((OF_PATHS, PATHS), (OF_WORDS, WORDS), (OF_NUMBERS, NUMBERS)):
        found += [[word.replace("{}", value) for word in text.split()] for text in patterns for value in values]
    return found


def contents(folder: Path) -> list[str]:
    """All paths below `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a right configuration, files and folders that are none, and nothing on standard input."""
    folder = tmp_path / "work"
    (folder / "folder").mkdir(parents=True)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "bytes").write_bytes(bytes(range(256)))
    (folder / "empty.yaml").touch()
    (folder / "loop").symlink_to("loop")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return folder


def test_every_command_line_ends_with_a_message(
    soak: Any, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, before, slowest = command_lines(), contents(folder), 0.0
    if not soak.full:
        lines = [words for words in lines if words[0] in LIGHT and "--resume" not in words]
    soak.random().shuffle(lines)
    wrong = []
    for words in lines[: soak.times(30, len(lines))]:
        shown, begin = [word[:50] for word in words], time.process_time()
        code = call(*words)
        took = time.process_time() - begin
        slowest = max(slowest, took)
        captured = capsys.readouterr()
        text = captured.out + captured.err
        harmless = code == 2 or (code in (0, 1) and words[0] in ("schema", "plugins", "doctor")) or words == VALID
        if not harmless or "Traceback" in text or "unexpected error" in text or took > 20.0:
            wrong.append((shown, code, took, captured.err[-300:]))
        if contents(folder) != before:
            wrong.append((shown, sorted({*contents(folder)} - {*before})))
            before = contents(folder)
        os.chdir(folder)
    assert wrong == []
    soak.figures |= {"inputs": len(lines), "slowest_seconds": round(slowest, 2)}
