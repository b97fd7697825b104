"""`rlframework init`: the files that it writes pass the checks and train, and each key has its description."""

from __future__ import annotations

import io
import json
import re
import sys
from itertools import product
from pathlib import Path

import pytest
from probe_runs import call, rows_of

from rlframework.config.algorithms import GRPOConfig
from rlframework.config.policy import OptimizerConfig
from rlframework.plugins.configure import load_config
from rlframework.plugins.manager import create_manager
from rlframework_tools.estimates.plan import PlannedGpus, plan_run
from rlframework_tools.estimates.printing import estimate_run

ALGORITHMS = tuple(create_manager().registered("algorithm"))
PAIRS = ("dpo", "ipo", "kto", "orpo", "reward_model", "simpo")
ROWS = {
    "pairs.jsonl": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "steps.jsonl": {"prompt": "1+1=", "completions": ["2", "3"], "labels": [True, False]},
    "rows.jsonl": {"prompt": "1+1=", "completion": "2", "answer": "2"},
}
"""A row of each kind of data."""
SCORE = "scores_for_init:score"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with rows of each kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, row in ROWS.items():
        rows = ({**row, "prompt": f"{number}+1="} for number in range(40))
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    return tmp_path


def options(algorithm: str, model: Path) -> list[object]:
    """The answers of which core has no defaults that need no network."""
    data = "pairs.jsonl" if algorithm in PAIRS else "steps.jsonl" if algorithm == "process_reward_model" else "addition"
    teacher = ["--teacher", model] if algorithm == "distillation" else []
    return ["--algorithm", algorithm, "--model", model, "--data", data, *teacher, "--yes"]


def uncommented(text: str) -> list[str]:
    """The lines with a key that have no comment above."""
    lines = text.splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"\s*\w+:", line)]
    return [lines[number] for number in keys if not lines[number - 1].lstrip().startswith("# ")]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "gpus"), [("grpo", 1), *product(ALGORITHMS, (0, 6))])
def test_the_file_of_every_algorithm_passes_the_checks_as_written(algorithm: str, gpus: int, tiny_llama: Path) -> None:
    assert call("init", "run.yaml", *options(algorithm, tiny_llama), "--gpus", gpus) == 0
    config = load_config("run.yaml")
    assert (config.algorithm.name, config.worker_group.num_workers) == (algorithm, max(gpus, 1))
    assert config.policy.train_global_batch_size == {0: 64, 1: 256, 6: 288}[gpus]
    assert estimate_run(config).warnings() == []
    if gpus:
        plan = plan_run("run.yaml", [], PlannedGpus.parse(f"{gpus}xH100"))
        assert plan.changes == ("device=cuda",)
        assert estimate_run(plan.config, planned=plan.gpus).verdict().startswith("fits on")
    assert uncommented(Path("run.yaml").read_text()) == []


def test_each_key_has_its_description_and_the_next_commands_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("init", *options("grpo", Path("no model yet")), "--batch", 24) == 0
    text = Path("grpo.yaml").read_text()
    assert f"  # {GRPOConfig.model_fields['num_steps'].description}\n  num_steps: 100\n" in text
    assert f"    # {OptimizerConfig.model_fields['lr'].description}\n    lr: 1.0e-06\n" in text
    assert "  prompts_per_step: 3\n" in text
    assert uncommented(text) == []
    assert max(map(len, text.splitlines())) <= 100
    assert capsys.readouterr().out.split("\n\n")[1].splitlines() == [
        "  rlframework config grpo.yaml",
        "  rlframework train grpo.yaml --dry-run",
        "  rlframework train grpo.yaml",
        "  rlframework report runs/grpo",
    ]
    config = load_config("grpo.yaml")
    assert config.environment.name == "addition"
    assert config.device == "cpu"


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--data", "rows.jsonl"], {"path": "rows.jsonl", "check": "math", "reward": None}),
        (["--data", "rows.jsonl", "--reward", "exact"], {"check": "exact"}),
        (["--data", "rows.jsonl", "--reward", SCORE], {"check": "none", "reward": SCORE}),
        (["--data", "rows.jsonl", "--algorithm", "sft"], {"check": "none", "reward": None}),
        (["--data", "gsm8k"], {"name": "gsm8k", "dataset": "openai/gsm8k"}),
    ],
)
def test_the_data_and_its_reward(words: list[str], environment: dict[str, object]) -> None:
    Path("scores_for_init.py").write_text("def score(completion, answer):\n    return float(completion == answer)\n")
    assert call("init", "run.yaml", "--yes", *words) == 0
    section = load_config("run.yaml").environment
    assert {key: getattr(section, key) for key in environment} == environment


WRONG = [
    (["--algorithm", "gpro", "--yes"], "there is no algorithm 'gpro'"),
    (["--algorithm", "dpo", "--yes"], "give --data"),
    (["--algorithm", "distillation", "--yes"], "give --teacher"),
    ([], "give --algorithm, or --yes to use defaults"),
    (["--batch", "20", "--yes"], "must be a multiple of that, such as 16"),
    (["--batch", "16", "--gpus", "3", "--yes"], "must be a multiple of 3, the number of data-parallel workers"),
    (["--reward", "math", "--yes"], "--reward is for an algorithm that scores completions, on your own rows"),
    (["--teacher", "t", "--yes"], "--teacher is for a distillation"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_mistake_is_an_error_and_nothing_is_written(
    words: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert call("init", *words) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == set(ROWS)


def test_a_file_is_replaced_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    Path("grpo.yaml").write_text("mine")
    assert call("init", "--yes") == 2
    assert "grpo.yaml exists" in capsys.readouterr().err
    assert Path("grpo.yaml").read_text() == "mine"
    assert call("init", "--yes", "--overwrite") == 0
    assert capsys.readouterr().out.startswith("replaced grpo.yaml")


class Terminal(io.StringIO):
    """Somebody who types these lines."""

    def isatty(self) -> bool:
        return True


def test_the_questions_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those whose options are given are not asked; an empty answer is the default."""
    monkeypatch.setattr(sys, "stdin", Terminal("dr_grpo\n2\nmy model\nrows.jsonl\nexact\n\n"))
    assert call("init", "run.yaml") == 0
    config = load_config("run.yaml")
    assert (config.algorithm.name, config.policy.model_name) == ("dr_grpo", "my model")
    assert (config.worker_group.num_workers, config.algorithm.prompts_per_step) == (2, 32)
    assert config.environment.check == "exact"
    written = Path("run.yaml").read_text()
    monkeypatch.setattr(sys, "stdin", Terminal("\n-1\n"))
    assert call("init", "other.yaml") == 2
    assert not Path("other.yaml").exists()
    monkeypatch.setattr(sys, "stdin", Terminal("pairs.jsonl\n\nn\n"))
    assert call("init", "run.yaml", "--algorithm", "dpo", "--gpus", 0, "--model", "m") == 2
    assert "run.yaml exists. Replace it?" in capsys.readouterr().out
    assert Path("run.yaml").read_text() == written


@pytest.mark.slow
def test_a_run_trains_with_the_file(tiny_llama: Path) -> None:
    assert call("init", "run.yaml", *options("grpo", tiny_llama), "--batch", 8) == 0
    assert call("train", "run.yaml", "--dry-run") == 0
    assert call("train", "run.yaml", "algorithm.num_steps=3") == 0
    assert [row["step"] for row in rows_of(Path("runs/grpo")) if "train/loss" in row] == [1, 2, 3]
