"""`rlframework evaluate` and `rlframework generate`, with tiny models: output, files and errors."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from probe_runs import call, rows_of

from rlframework_tools.evaluation.plan import split_words

pytestmark = pytest.mark.slow

ADDITION = ["environment.name=addition", "environment.digits=1", "environment.validation_samples=10"]
SHORT = "generation.max_new_tokens=4"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][:1] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """The directory of a run that has learnt some one-digit addition."""
    from rlframework import load_config, run

    out = tmp_path_factory.mktemp("runs") / "trained"
    values = {
        "seed": 3,
        "output_dir": str(out),
        "device": "cpu",
        "algorithm": {"name": "sft", "num_steps": 120, "validation": {"samples": 10, "at_start": False}},
        "environment": {"name": "addition", "digits": 1, "validation_samples": 10},
        "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 64, "optimizer": {"lr": 5e-3}},
        "generation": {"max_new_tokens": 4},
        "observers": {"console": False, "tensorboard": False, "curve": False},
    }
    run(load_config(values))
    return out


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_a_run_is_evaluated_as_it_was_validated(trained, folder, capsys, caplog):
    assert call("evaluate", trained, "--out", "out") == 0
    captured = capsys.readouterr()
    assert "10 validation prompts, greedy" in captured.out
    assert "accuracy" in captured.out
    assert captured.err == ""
    assert not [record for record in caplog.records if record.name.startswith("rlframework")]
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["completions.jsonl", "summary.json"]
    rows = rows_of(folder / "out" / "completions.jsonl")
    sums = [sum(map(int, row["id"].split("+"))) for row in rows]
    right = [row["completion"].strip() == str(total) for row, total in zip(rows, sums, strict=True)]
    assert [row["accuracy"] == 1.0 for row in rows] == right
    assert [row["answer"] for row in rows] == list(map(str, sums))
    assert rows[0]["prompt"] == [{"role": "user", "content": rows[0]["id"] + "="}]
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["metrics"]["accuracy"]["value"] == sum(right) / 10
    assert summary["metrics"]["accuracy"]["method"] == "wilson"
    validated = [row for row in rows_of(trained / "metrics.jsonl") if "validation/accuracy" in row][-1]
    assert summary["metrics"]["accuracy"]["value"] == pytest.approx(validated["validation/accuracy"])
    assert sum(right) > 0, "the run learnt nothing, so this test tells little"
    assert (summary["prompts"], summary["seed"], summary["greedy"]) == (10, 3, True)
    assert summary["machine"]["devices"] == ["cpu"]
    assert {"python", "torch", "transformers", "rlframework"} <= summary["versions"].keys()
    assert summary["config"]["generation"]["max_new_tokens"] == 4


def test_by_default_a_run_keeps_its_evaluations(trained, capsys):
    assert call("evaluate", trained, "--samples", 2, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    (found,) = (trained / "evaluations").iterdir()
    assert json.loads((found / "summary.json").read_text()) == printed
    assert printed["prompts"] == 2
    shutil.rmtree(trained / "evaluations")


def test_several_attempts(trained, folder):
    words = ["--attempts", 4, "--k", "1,2,4", "--temperature", 1.5, "--out", "out"]
    assert call("evaluate", trained, *words) == 0
    rows = rows_of(folder / "out" / "completions.jsonl")
    assert [row["attempt"] for row in rows] == [0, 1, 2, 3] * 10
    right = [sum(row["accuracy"] for row in rows[start : start + 4]) for start in range(0, 40, 4)]
    metrics = json.loads((folder / "out" / "summary.json").read_text())["metrics"]
    assert metrics["pass@1"]["value"] == pytest.approx(sum(right) / 40)
    assert metrics["accuracy"]["value"] == pytest.approx(sum(right) / 40)
    # of the 6 pairs of attempts: none, 3, 5, 6, 6 hold a right one
    assert metrics["pass@2"]["value"] == pytest.approx(sum([0, 3, 5, 6, 6][int(n)] / 6 for n in right) / 10)
    assert metrics["pass@4"]["value"] == pytest.approx(sum(n > 0 for n in right) / 10)
    assert metrics["pass@4"]["method"] == "wilson"
    assert len({row["completion"] for row in rows}) > 10  # attempts have seeds of their own


def test_completions_depend_on_neither_workers_nor_what_else_is_asked(trained, folder):
    words = [trained, "--temperature", 1.2]
    assert call("evaluate", *words, "--attempts", 3, "--out", "one") == 0
    two = ["worker_group.name=processes", "worker_group.num_workers=2"]
    assert call("evaluate", *words, "--attempts", 3, "--out", "two", *two) == 0
    assert call("evaluate", *words, "--samples", 3, "--attempts", 2, "--out", "part", "generation.batch_size=1") == 0
    one, part = (rows_of(folder / name / "completions.jsonl") for name in ("one", "part"))
    assert rows_of(folder / "two" / "completions.jsonl") == one
    assert part == [row for row in one if row["attempt"] < 2][:6]


def test_models_are_compared_prompt_by_prompt(tiny_llama, trained, folder, capsys):
    assert call("evaluate", tiny_llama, trained, "--out", "out") == 0
    printed = capsys.readouterr().out
    assert "B - A" in printed
    before = rows_of(folder / "out" / f"1-{tiny_llama.name}" / "completions.jsonl")
    after = rows_of(folder / "out" / "2-trained" / "completions.jsonl")
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after]
    gained = [b["accuracy"] - a["accuracy"] for a, b in zip(before, after, strict=True)]
    compared = json.loads((folder / "out" / "comparison.json").read_text())
    (other,) = compared["differences"]
    assert (compared["from"], other["subject"]) == (str(tiny_llama), str(trained))
    found = other["metrics"]["accuracy"]
    assert found["value"] == pytest.approx(sum(gained) / 10)
    assert found["low"] < found["value"] < found["high"]


def test_rewards_by_name_are_metrics_of_the_prompts_that_have_them(tiny_llama, folder, capsys):
    (folder / "named_rewards.py").write_text(
        "def length(completion, sample):\n    return float(len(completion))\n\n"
        "def even(completions, answer, **kwargs):\n    return [1.0 if int(n) % 2 == 0 else None for n in answer]\n"
    )
    for name, numbers in (("train", [7]), ("rows", range(3))):
        rows = (f'{{"prompt": "{n}+0=", "answer": "{n}"}}\n' for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    rewards = "environment.reward={length: {function: named_rewards:length}, even: {function: named_rewards:even}}"
    data = ["environment.name=dataset", "environment.path=train.jsonl", "environment.validation_path=rows.jsonl"]
    assert call("evaluate", tiny_llama, *data, rewards, SHORT, "--attempts", 2, "--out", "out") == 0
    assert "even" in capsys.readouterr().out
    lines = rows_of(folder / "out" / "completions.jsonl")
    assert [line["metrics"].get("even") for line in lines] == [1.0, 1.0, None, None, 1.0, 1.0]
    metrics = json.loads((folder / "out" / "summary.json").read_text())["metrics"]
    assert metrics["even"]["value"] == 1.0
    assert metrics["length"]["value"] == pytest.approx(sum(len(line["completion"]) for line in lines) / 6)


def test_a_configuration_file_goes_with_a_model(tiny_llama, folder):
    (folder / "c.yaml").write_text(
        "seed: 5\nalgorithm: {name: grpo, samples_per_prompt: 4, loss: {kl_coef: 0.1}}\n"
        "environment: {name: addition, digits: 1}\ngeneration: {max_new_tokens: 2, top_k: 5}\n"
        "policy: {model_name: other, chat_template: other, train_global_batch_size: '${algorithm.samples_per_prompt}', "
        "scheduler: {warmup_steps: 500}}\n"
    )
    assert call("evaluate", tiny_llama, "--config", "c.yaml", "--split", "train", "--samples", 3, "--out", "out") == 0
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["seed"], summary["split"], summary["max_new_tokens"]) == (5, "train", 2)
    assert summary["config"]["policy"]["model_name"] == str(tiny_llama)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("MODEL", "`environment.name`: required key is missing"),
        ("environment.name=addition", "no model given; give the output_dir of a run"),
        ("/no/such", "there is no directory /no/such"),
        ("empty", "empty is neither a run (it has no config.yaml) nor a model"),
        ("unfinished", "so it has not finished. Wait for it, or take its newest checkpoint"),
        ("MODEL ADDITION --split test", "--split test: it must be train or validation"),
        ("MODEL ADDITION --attempts 2 --temperature 0", "--attempts 2: all attempts at temperature 0 are the same"),
        ("MODEL ADDITION policy.model_name=x", "the model is RUN_OR_MODEL"),
        ("MODEL ADDITION --out full", "--out full: the folder is not empty, and nothing is overwritten"),
        ("MODEL environment={name: dataset, path: euro.jsonl}", "does not score completions as configured"),
        ("MODEL environment={name: dataset, path: euro.jsonl, check: exact}", "the tokenizer has no token for ['€']"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_written(tiny_llama, folder, capsys, words, message):
    rows = [{"prompt": f"€{number}", "answer": "1"} for number in range(4)]
    (folder / "euro.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("empty", "full", "unfinished/checkpoints/step-000003"):
        (folder / name).mkdir(parents=True)
    (folder / "full" / "precious").write_text("x")
    (folder / "unfinished" / "config.yaml").write_text("seed: 1\n")
    before = sorted(folder.rglob("*"))
    given: list[str] = []
    for word in words.replace(": ", ":").replace(", ", ",").split(" "):
        spaced = word.replace(":", ": ").replace(",", ", ") if word.startswith("environment={") else word
        given += [str(tiny_llama)] if word == "MODEL" else ADDITION if word == "ADDITION" else [spaced]
    assert call("evaluate", *given) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.out == ""
    assert sorted(folder.rglob("*")) == before


@pytest.mark.thorough
def test_ctrl_c_ends_the_workers_and_keeps_what_was_answered(tiny_llama, folder):
    words = [tiny_llama, *ADDITION, "worker_group.name=processes", "worker_group.num_workers=2"]
    words += ["--attempts", 64, "--out", "out", "generation.max_new_tokens=40"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "rlframework.cli", "evaluate", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    partial = folder / "out" / "completions.partial.jsonl"
    deadline = time.monotonic() + 100
    while not (partial.is_file() and partial.stat().st_size):
        assert driver.poll() is None, driver.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = psutil.Process(driver.pid).children(recursive=True)
    assert len(workers) >= 2
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: to all processes of the foreground
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 130, errors
    assert "the completions so far are in out/completions.partial.jsonl" in errors
    assert errors.endswith("interrupted\n")
    assert "Traceback" not in errors
    _, left = psutil.wait_procs(workers, timeout=60)
    assert [worker for worker in left if worker.status() != psutil.STATUS_ZOMBIE] == []
    assert [path.name for path in (folder / "out").iterdir()] == ["completions.partial.jsonl"]
    assert {"prompt", "completion", "reward"} <= rows_of(partial)[0].keys()


# -- generate ---------------------------------------------------------------------------------------------------------


def test_several_prompts_are_shown_with_their_answers(tiny_llama, capsys):
    assert call("generate", tiny_llama, "1+1=", "2+2=", "--samples", 2, "--max-new-tokens", 3) == 0
    captured = capsys.readouterr()
    shown = captured.out.split("\n")
    assert [shown[0], shown[1][:4], shown[2][:4]] == ["> 1+1=", "[1] ", "[2] "]
    assert "\n\n> 2+2=\n[1] " in captured.out
    assert "cut; --max-new-tokens is 3)" in captured.err


def answers(capsys, *words: object) -> list[dict]:
    assert call("generate", *words, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_special_tokens_that_a_text_hides_are_shown(tiny_llama, capsys):
    """Each token of the tokenizer is a character or special; the end of an answer is not shown by itself."""
    rows = answers(capsys, tiny_llama, "1+1=", "--samples", 12, "--max-new-tokens", 6)
    hiding = [len(row["completion"]) < row["tokens"] - (not row["truncated"]) or not row["completion"] for row in rows]
    assert ["model_output" in row for row in rows] == hiding
    assert set(hiding) == {True, False}


def test_the_seed_counts(tiny_llama, capsys):
    words = [tiny_llama, "1+1=", "--samples", 3, "--max-new-tokens", 8]
    first = answers(capsys, *words)
    assert [row["sample"] for row in first] == [0, 1, 2]
    assert len({row["completion"] for row in first}) == 3
    assert answers(capsys, *words) == first
    assert answers(capsys, *words, "--seed", 7) != first
    assert answers(capsys, *words, "generation.batch_size=1") == first


def test_settings_are_told_from_prompts():
    settings = ["seed=1", "policy.precision=float32", "~environment.name", "generation.stop=['=']"]
    prompts = ["1+1=", "x=2", "a.b=c", "seed", "is policy.x=1?", "~", "policy .x=1"]
    assert split_words([*prompts, *settings]) == (settings, prompts)


def test_the_old_form_of_settings_is_accepted_with_a_warning(tiny_llama, capsys, caplog):
    words = [tiny_llama, "1+1=", "--max-new-tokens", 2]
    assert answers(capsys, *words, "--set", "seed=3") == answers(capsys, *words, "seed=3")
    assert caplog.messages == ["warning: --set will be removed: write seed=3 without it, as for the other commands"]


def test_prompts_of_files_and_of_stdin(tiny_llama, folder, capsys, monkeypatch):
    (folder / "p.txt").write_text("1+1=\n\n2+2=\n")
    turns = [{"role": "system", "content": "add"}, {"role": "user", "content": "3+3="}]
    rows = [{"prompt": "1+1="}, {"messages": [*turns, {"role": "assistant", "content": "6"}]}]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [tiny_llama, "--max-new-tokens", 2]
    assert [row["prompt"][-1]["content"] for row in answers(capsys, *asked, "--file", "p.txt")] == ["1+1=", "2+2="]
    assert answers(capsys, *asked, "--file", "p.jsonl")[1]["prompt"] == turns
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+1=\n2+2=\n"))
    assert answers(capsys, *asked) == answers(capsys, *asked, "1+1=", "2+2=")


def test_the_chat_template_is_used_unless_raw(tiny_llama, folder, capsys):
    from transformers import AutoTokenizer

    shutil.copytree(tiny_llama, folder / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder / "chat")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "chat")
    options = ["--greedy", "--max-new-tokens", 8]
    plain = answers(capsys, tiny_llama, "1+1=", *options)[0]["completion"]
    written_out = answers(capsys, tiny_llama, "u:1+1=\na:", *options)[0]["completion"]
    assert plain != written_out
    assert answers(capsys, "chat", "1+1=", *options)[0]["completion"] == written_out
    assert answers(capsys, "chat", "1+1=", *options, "--raw")[0]["completion"] == plain


def test_typed_lines_are_answered_until_the_end(tiny_llama, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    typed = iter(["1+1=", "", "é", "2+2="])

    def type_line(_: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", type_line)
    assert call("generate", tiny_llama, "--max-new-tokens", 3, "--json") == 0
    captured = capsys.readouterr()
    shown = [json.loads(line)["prompt"][0]["content"] for line in captured.out.splitlines()]
    assert shown == ["1+1=", "2+2="]
    assert "error: line 1: the tokenizer has no token for ['é']" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--file", "gone.txt"], "--file gone.txt: cannot be read (No such file"),
        (["--file", "empty.txt"], "empty.txt has no prompts"),
        (["--file", "bad.jsonl"], "bad.jsonl, line 1: not JSON"),
        (["1", "--file", "empty.txt"], "give either prompts or --file, not both"),
        (["1", " "], "prompt 2 is empty"),
        (["1", "--greedy", "--samples", "2"], "all greedy completions of a prompt are the same"),
        (["1", "--greedy", "--temperature", "1"], "contradict each other"),
        (["1", "1" * 128], "prompt 2 has 128 tokens, which leaves no room for an answer"),
        (["1", "policy.precisionn=float32"], "Did you mean `policy.precision`?"),
    ],
)
def test_a_mistake_in_generate_is_one_message(tiny_llama, folder, capsys, words, message):
    (folder / "empty.txt").write_text("\n")
    (folder / "bad.jsonl").write_text("{]\n")
    assert call("generate", tiny_llama, *words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
