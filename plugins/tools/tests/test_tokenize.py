"""The command `rlframework tokenize`: its files, and the errors after which it writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from probe_runs import call

from rlframework.datasets.tokens import TokenData

pytestmark = pytest.mark.slow

ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(9)]


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data and a configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "v.jsonl").write_text(json.dumps({"prompt": "x", "completion": "y"}) + "\n")
    (tmp_path / "run.yaml").write_text(
        f"policy: {{model_name: {tiny_llama}}}\nalgorithm: {{name: sft}}\n"
        "environment: {name: dataset, path: a.jsonl, validation_path: v.jsonl}\n"
    )
    return tmp_path


def test_rows_are_written_and_summed_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row has six tokens, two of them trained on: a sum of four characters, its result, end of sequence."""
    assert call("tokenize", "run.yaml", "out/tokens") == 0
    captured = capsys.readouterr()
    assert captured.out == ("done: 9 rows of at most 6 tokens, 54 in total, 18 of them trained on; in out/tokens\n")
    assert captured.err == ""  # no bar where there is no terminal
    data = TokenData(folder / "out" / "tokens")
    assert data.lengths.tolist() == [6] * 9
    assert data.rows([0]).token_mask.tolist() == [[0.0] * 4 + [1.0] * 2]
    assert data.meta["source"]["environment"]["path"] == "a.jsonl"
    assert data.meta["source"]["seed"] == 0


def test_overrides_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tokenize", "run.yaml", "out", "algorithm.train_on=all", "algorithm.max_tokens=5") == 0
    assert "9 rows of at most 5 tokens, 45 in total, 45 of them trained on" in capsys.readouterr().out
    assert TokenData(folder / "out").meta["train_on"] == "all"


def test_rows_are_shown(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained tokens are in brackets, or in green on a terminal; nothing is written."""
    before = sorted(folder.rglob("*"))
    assert call("tokenize", "run.yaml", "--show", "2", "environment.max_samples=1") == 0
    assert capsys.readouterr().out == "a-1: 6 tokens\n0+1=[[1<eos>]]\n\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert call("tokenize", "run.yaml", "--show", "1") == 0
    assert "\x1b[2m0+1=\x1b[0m\x1b[32m1<eos>\x1b[0m" in capsys.readouterr().out
    assert sorted(folder.rglob("*")) == before


def test_turns_without_an_end_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "1234", strict=True)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": turns[:n]}) + "\n" for n in (2, 4, 4)))
    every = "algorithm.train_on=assistant"
    train = ["train", "run.yaml", "--dry-run", "algorithm={name: sft, num_steps: 1, validation: {at_start: false}}"]
    for arguments in (["tokenize", "run.yaml", "--show", "3"], ["tokenize", "run.yaml", "out"], train):
        caplog.clear()
        assert call(*arguments, every) == 0
        [message] = [line for line in caplog.messages if "assistant turns" in line]
        assert message.startswith("2 of 3 rows have several assistant turns (the first: sample 'a-2')")
    caplog.clear()
    assert call(*train) == 0
    assert not any("assistant turns" in line for line in caplog.messages)


def test_the_prompts_of_rollouts_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own.jinja").write_text(
        "{% for m in messages %}={{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}+{% endif %}"
    )
    keys = ["algorithm.name=grpo", "environment.check=exact", "environment.columns.answer=completion"]
    keys.append("policy.chat_template=own.jinja")
    assert call("tokenize", "run.yaml", "--show", "1", *keys) == 0
    assert capsys.readouterr().out == "a-1: 7 tokens\n=0+1=<eos>+\n\n"


def test_both_rows_of_preference_pairs_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "999"} for n in range(2)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dpo.yaml").write_text(
        (folder / "run.yaml").read_text().partition("algorithm:")[0]
        + "algorithm: {name: dpo}\nenvironment: {name: preferences, path: pairs.jsonl}\n"
    )
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "5+5=", "chosen": "10", "rejected": "9"}) + "\n")
    keys = ["environment.validation_path=held.jsonl"]
    assert call("tokenize", "dpo.yaml", "--show", "1", *keys) == 0
    assert capsys.readouterr().out == (
        "pairs-1 chosen: 6 tokens\n0+1=[[1<eos>]]\n\npairs-1 rejected: 8 tokens\n0+1=[[999<eos>]]\n\n"
    )
    assert call("tokenize", "dpo.yaml", "--show", "1", *keys, "algorithm.max_tokens=6") == 0
    assert "rejected: 6 tokens\n0+1=[[99]]" in capsys.readouterr().out
    assert call("tokenize", "dpo.yaml", "--show", "1", *keys, "algorithm.name=process_reward_model") == 2
    assert "whose rows cannot be shown" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["out"], ["--show", "1"]])
def test_a_template_that_drops_the_texts_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (folder / "own.jinja").write_text("{% for m in messages %}{{ m.role }}={{ m.text }}{% endfor %}")
    assert call("tokenize", "run.yaml", *words, "policy.chat_template=own.jinja") == 2
    assert "the chat template does not write the text of a user message" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("out algorithm.name=grpo", "algorithm.name is 'grpo', but only supervised training reads token data"),
        ("out environment.path=gone.jsonl", "gone.jsonl: cannot be read (No such file"),
        ("out policy.model_name=/no/such", "policy.model_name='/no/such': there is no such directory"),
        ("out environment.path=bad.jsonl", "bad.jsonl, line 2: not JSON"),
        ("out environment.path=euro.jsonl", "sample 'euro-2': the tokenizer has no token for ['€']"),
        ("", "OUT is missing: give a new folder to write, or --show N"),
        ("full", "OUT='full': the folder is not empty, and nothing is overwritten"),
        ("a.jsonl", "a.jsonl: a component of the path is a file, not a directory"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    good = json.dumps(ROWS[0])
    (folder / "bad.jsonl").write_text(f"{good}\n{{]\n")
    (folder / "euro.jsonl").write_text(f"{good}\n{json.dumps({'prompt': '€', 'completion': '1'})}\n")

    (folder / "full").mkdir()
    (folder / "full" / "precious").write_text("x")
    before = sorted(folder.rglob("*"))
    if "grpo" in words:
        words += " environment.check=exact"
    assert call("tokenize", "run.yaml", *words.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.out == ""
    assert sorted(folder.rglob("*")) == before
