"""GRPO on each adapter, with a random tiny model: its turns are answered, no episode fails, and nothing is left."""

import json
import string
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rlframework import run
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("mcp_test_server.py")

TOOLS = '''
class Counter:
    def count(self) -> int:
        """Count."""
        return 1

    def reward(self, completion):
        return len(completion) / 100
'''

ADAPTERS = {
    "tools": {"tools": "adapter_tools:Counter", "path": "rows.jsonl"},
    "mcp": {"command": [sys.executable, str(SERVER)], "path": "rows.jsonl", "check": "exact", "server_per": "run"},
    "gymnasium": {"id": "FrozenLake-v1", "train_samples": 8, "validation_samples": 2, "max_turns": 3},
    "reasoning_gym": {"task": "chain_sum", "train_samples": 8, "validation_samples": 2},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_run(run_config, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "adapter_tools.py").write_text(TOOLS)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+2=", "answer": "{n + 2}"}}\n' for n in range(20)))
    keys = ["~environment", "environment=" + json.dumps({"name": name, **ADAPTERS[name]})]
    model = make_llama(
        tmp_path / "m", character_tokenizer(string.printable), hidden=16, layers=1, heads=2, max_positions=2048
    )
    keys += ["algorithm.num_steps=2", "policy.batching.tokens=2048", f"policy.model_name={model}"]
    keys += [f"generation.stop_token_ids={list(range(20, 95))}"]  # else a random model seldom ends a turn
    row = run(run_config("grpo", *keys)).history[-1]
    assert row["train/reward"] >= 0.0
    if name != "reasoning_gym":  # which has single turns
        assert row["train/failed_episodes"] == 0.0
    if name == "gymnasium":  # a random model names no action, and gets another turn
        assert row["train/episode_turns"] > 1.0
        assert "is not an action; reply with one of: 0, 1, 2, 3" in (tmp_path / "run/samples.jsonl").read_text()
    assert not [command for command in commands_of_children() if SERVER.name in command]


def commands_of_children() -> Iterator[str]:
    """The command lines of this process's descendants; those that have ended have none."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # raised for zombies, too
            yield " ".join(child.cmdline())
