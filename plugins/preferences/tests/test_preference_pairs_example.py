"""The example script of preference pairs, on real rows, offline."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
from probe_forked import run_program

from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework_preferences.pairs import PreferencePairs

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "preference_pairs.py"
SOLUTIONS = ROOT / "tests" / "fixtures" / "gsm8k_model_solutions.jsonl"


def run(patch: pytest.MonkeyPatch, *words: object) -> int:
    """The script in this process: its exit code."""
    patch.setattr(sys, "argv", list(map(str, [SCRIPT, *words])))
    return int(runpy.run_path(str(SCRIPT))["main"]())


@pytest.mark.slow
def test_it_makes_saves_and_measures_pairs(tmp_path: Path) -> None:
    done = run_program(SCRIPT, SOLUTIONS, "--output", tmp_path / "pairs")
    assert done.returncode == 0, done.stderr
    assert "11 questions with 15 right and 28 wrong solutions" in done.stdout  # one of 16 is there twice
    assert "6 of them (54.5%) have both kinds" in done.stdout
    assert "18 pairs, 0 dropped as too long" in done.stdout
    pairs = PreferencePairs.load_memmap(tmp_path / "pairs").check()
    assert len(pairs) == 18
    table = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[-3:]}
    assert int(table["prompt"][0]) == pairs.prompt_lengths.min()
    assert int(table["prompt"][-1]) == pairs.prompt_lengths.max()
    assert int(table["chosen"][-1]) == (pairs.chosen.input_lengths - pairs.prompt_lengths).max()


@pytest.mark.slow
def test_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    letters = set(SOLUTIONS.read_text()) | set("\n’é")  # noqa: RUF001 # as in the file, where it is escaped
    character_tokenizer(sorted(letters)).save_pretrained(tmp_path / "tokenizer")
    words = ["--pairs", "one", "--seed", 4, "--tokenizer", tmp_path / "tokenizer", "--max-length", 600]
    assert run(monkeypatch, SOLUTIONS, "--output", tmp_path / "pairs", *words) == 0
    pairs = PreferencePairs.load(tmp_path / "pairs")
    assert 0 < len(pairs) < 6
    assert f"{len(pairs)} pairs, {6 - len(pairs)} dropped as too long" in capsys.readouterr().out
    assert max(pairs.chosen.input_lengths.max(), pairs.rejected.input_lengths.max()) <= 600


def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, tmp_path / "nothing.jsonl") == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "nothing.jsonl: cannot be read" in told
    shutil.copy(SOLUTIONS, tmp_path / "mine")
    assert run(monkeypatch, SOLUTIONS, "--output", tmp_path / "mine") == 2
    assert "mine is a file" in capsys.readouterr().err
