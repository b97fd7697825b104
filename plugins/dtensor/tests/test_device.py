"""Scoring, generation, offloading, checkpoints and refit keep each tensor on its device; results equal the CPU's."""

from __future__ import annotations

import json

import pytest
from probe_device import compare
from probe_forked import run_forked

from rlframework.huggingface.model_directories import make_llama
from rlframework_conformance import cases


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}}])
def test_calls_on_a_device_equal_those_on_the_cpu(tmp_path, batches, settings):
    sizes = {"hidden": 32, "intermediate": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    model = make_llama(tmp_path / "model", cases.tokenizer(), **sizes, tied=False, init_std=0.2)
    done = run_forked(compare, model, batches(1)[0], settings, tmp_path)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout)
    assert len(differences) >= 10
    assert max(differences.values()) < 1e-4, differences
