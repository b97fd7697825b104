"""Engines in processes of their own: the GPUs that they take, and the memory of each. Sums are by hand."""

from __future__ import annotations

import json

import pytest

from rlframework import load_config
from rlframework.plugins.types import GenerationEngineRecord
from rlframework_tools.estimates.engines import engines_of, gpus_taken
from rlframework_tools.estimates.model_size import model_size
from rlframework_tools.estimates.row_sizes import Rows
from rlframework_tools.estimates.state_layout import PlannedWorker
from rlframework_tools.estimates.worker_memory import CUDA_CONTEXT

GIB = 1 << 30
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192
PARAMETERS = 2 * 128_256 * 8192 + 80 * LAYER + 8192  # 70,553,706,496
ROW = 82 * 2 * 1024 * 1024 * 2  # two layers more than 80, keys and values of 8 heads of 128, 1,024 tokens, bfloat16
SAMPLING = 3 * 4 * 128_256
H100 = PlannedWorker("cuda", PARAMETERS, 79 * GIB)


@pytest.fixture(scope="module")
def run_of_70b(tmp_path_factory):
    """`run_of_70b(trainer, engines, count)`: a run with 64 workers in the group `trainer`, and `count` engines."""
    folder = tmp_path_factory.mktemp("70b")
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))

    def build(trainer: str, engines: str, count: int):
        policy = {"model_name": str(folder), "precision": "bfloat16", "train_global_batch_size": 64}
        generation = {"max_new_tokens": 1024, "workers": {"group": engines, "num_workers": count}}
        return load_config(
            {
                "algorithm": {"name": "grpo"},
                "environment": {"name": "addition"},
                "policy": policy,
                "generation": generation,
                "worker_group": {"name": trainer, "num_workers": 64},
            }
        )

    return build


def _engines(config, *, gpus=1, staged=False, beside=0):
    record = GenerationEngineRecord("own", "own:Engine", 2, gpus_per_engine=lambda _: gpus)
    rows = Rows(512, 1024.0, 1024, 512 * 1024)
    found = engines_of(config, record, staged, model_size(config.policy), rows, H100, beside=beside)
    assert found is not None
    return found


def test_an_engine_has_the_whole_model_and_a_row_on_its_gpu(run_of_70b):
    config = run_of_70b("ray", "ray", 8)
    found = _engines(config)
    assert found.device_bytes == CUDA_CONTEXT + 2 * PARAMETERS + ROW + SAMPLING  # 132.3 GiB
    assert found.device_bytes > 79 * GIB
    assert found.rows == 0
    assert not found.shares
    staged = _engines(config, staged=True)
    assert staged.device_bytes == CUDA_CONTEXT + 2 * 2 * PARAMETERS  # in an update, which the row is not in


def test_several_gpus_share_model_and_row(run_of_70b):
    found = _engines(run_of_70b("ray", "ray", 8), gpus=4)
    assert found.device_bytes == CUDA_CONTEXT + 2 * PARAMETERS // 4 + ROW // 4 + SAMPLING  # 33.5 GiB
    left = 79 * GIB - CUDA_CONTEXT - 2 * PARAMETERS // 4
    assert int(0.9 * left) // (ROW // 4 + SAMPLING) > 512 // 8  # so that all rows of an engine fit
    assert found.rows == 512 // 8
    assert _engines(run_of_70b("processes", "processes", 8), gpus=4, beside=left).rows == 0


@pytest.mark.parametrize(
    ("trainer", "engines", "gpus", "taken"),
    [
        ("ray", "ray", 1, 64 + 8),
        ("ray", "ray", 4, 64 + 32),
        ("processes", "processes", 1, 64),  # both begin at the first GPU
        ("processes", "processes", 9, 72),
        ("ray", "processes", 1, 64),
    ],
)
def test_gpus_are_counted_as_the_groups_are_placed(run_of_70b, trainer, engines, gpus, taken):
    config = run_of_70b(trainer, engines, 8)
    found = _engines(config, gpus=gpus)
    assert gpus_taken(config, [], found) == taken
    assert found.shares == (trainer != engines or trainer != "ray")


def test_ray_reserves_gpus_for_further_policies_too(run_of_70b):
    config = run_of_70b("ray", "ray", 8)
    assert gpus_taken(config, [config], _engines(config)) == 2 * 64 + 8
    others = run_of_70b("processes", "processes", 8)
    assert gpus_taken(others, [others], _engines(others)) == 64
