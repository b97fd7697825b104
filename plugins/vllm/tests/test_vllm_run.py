"""A run whose engine is vLLM, in processes of its own. Runs in the environment of vLLM only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.plugins.configure import config_yaml

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment: make vllm"),
    pytest.mark.slow,
]

KEYS = (
    "algorithm.num_steps=1000",
    "algorithm.validation={at_start: false, at_end: false, every: 0}",
    "worker_group.name=processes",
    "generation.name=vllm",
    "generation.workers={num_workers: 1}",
    "generation.vllm.kv_cache_memory_bytes=67108864",
    "generation.refit.deadline=300",  # in which vLLM starts
)


def test_a_sigterm_for_all_processes_ends_it_with_143_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    """As `timeout` and job schedulers send it: trainer and vLLM are needed until the checkpoint is written."""
    from short_runs import short_run

    tokenizer = character_tokenizer("0123456789+= ?abcdefghijklmnopqrstuvwxyzUASI:\n<>|_")
    model = make_llama(tmp_path / "llama", tokenizer, hidden=64, layers=2, heads=2, kv_heads=2)
    config = tmp_path / "config.yaml"
    config.write_text(config_yaml(short_run(model, tmp_path, "grpo", *KEYS)))
    run = [sys.executable, "-m", "rlframework.cli", "train", str(config)]
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    own = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(run, env=own, stdout=out, stderr=out, start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 2:
        assert process.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2  # a trainer and an engine
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(120) == 143, (tmp_path / "out").read_text()
    assert "interrupted; the checkpoint is in" in (tmp_path / "out").read_text()
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert not psutil.wait_procs(started, timeout=60)[1]
