"""Runs whose reward is a judge: a served model, a resumed run, and errors before the start."""

from __future__ import annotations

import json
from typing import Any

import pytest
from judge_server import PROMPT, Answer, Server, completion, serving
from probe_runs import call, numbers_of

from rlframework import run
from rlframework.runner.launch import dry_run
from rlframework.runner.output_folder import read_contents

pytestmark = pytest.mark.slow

VARIABLE, KEY = "KEY_OF_JUDGE", "very-private-0123456789"


@pytest.fixture
def judged(run_config, tmp_path, monkeypatch):
    """Make the configuration of a GRPO run whose rewards are of the judge at a URL."""
    monkeypatch.setenv(VARIABLE, KEY)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+{n}="}}\n' for n in range(20)))

    def make(url: str, *changes: str, **keys: Any):
        judge = {"base_url": url, "model": "policy", "prompt": PROMPT, "scale": [0, 9], **keys}
        reward = {"quality": {"judge": {"api_key_env": VARIABLE, **judge}}}
        section = {"name": "dataset", "path": str(rows), "reward": reward, "max_reward_failures": 1.0}
        words = ["algorithm.num_steps=2", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2"]
        words += ["policy.train_global_batch_size=4", "algorithm.validation.samples=2", "checkpoints.every=1"]
        return run_config("grpo", *words, "~environment", f"environment={json.dumps(section)}", *changes)

    return make


def by_length(prompt: str, attempt: int) -> Answer:
    return completion(f"Score: {len(prompt) % 10}")


def test_a_resumed_run_asks_nothing_twice_and_ends_with_the_same_numbers(judged, tmp_path, capfd):
    with serving(by_length) as server:
        config = judged(server.url)
        run(config)
        wanted, asked = numbers_of(tmp_path / "run"), server.asked()
        assert len(asked) == len(set(asked))
        replies = tmp_path / "run" / "judge" / "quality.jsonl"
        assert len(replies.read_text().splitlines()) == len(asked)
        assert wanted[2]["train/reward/quality"] == pytest.approx(wanted[2]["train/reward"])
        assert wanted[2]["train/reward_failures"] == 0.0
        last = next((tmp_path / "run" / "checkpoints").glob("*2"))
        last.rename(tmp_path / "last")  # as if the second step had not been saved
        assert call("train", "--resume", tmp_path / "run") == 2
        assert "environment.reward.quality.judge.base_url" in capfd.readouterr().err
        assert call("train", "--resume", tmp_path / "run", "--trust-run") == 0
        assert numbers_of(tmp_path / "run") == wanted
        assert server.asked() == asked
    written = [path.read_text(errors="replace") for path in (tmp_path / "run").glob("*.*") if path.is_file()]
    out = capfd.readouterr()
    assert KEY not in "".join([*written, replies.read_text(), out.out, out.err])
    assert VARIABLE in (tmp_path / "run" / "config.yaml").read_text()


def test_a_plan_makes_no_request(judged):
    server = Server(by_length, url="http://127.0.0.1:9/v1")
    dry_run(judged(server.url))


def test_a_run_that_failed_after_the_first_replies_can_be_started_again(judged, tmp_path, monkeypatch):
    with serving(by_length) as server:
        with monkeypatch.context() as patch:
            patch.setattr("rlframework.policy.client.Policy.train", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(judged(server.url))
        assert (tmp_path / "run" / "judge" / "quality.jsonl").exists()
        found = read_contents(tmp_path / "run")
        assert ("judge" in found.startup, found.results, found.foreign) == (True, (), ())
        run(judged(server.url))
    found = read_contents(tmp_path / "run")
    assert "judge" in found.results
    assert "judge" in found.deletable
