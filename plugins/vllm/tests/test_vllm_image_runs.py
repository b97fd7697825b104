"""GRPO on rows and episodes with images: the trainer runs in this environment and vLLM in that of `VLLM_PYTHON`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_vlm_directories
from PIL import Image
from safetensors.torch import load_file, save_file
from vllm_python import BESIDE_VLLM, PYTHON

from rlframework import load_config, run

pytestmark = BESIDE_VLLM
EPISODES = ("~environment.path", "~environment.reward", "environment.name=probe_sights:Sights")


@pytest.fixture
def config(tmp_path: Path, ray_session: None) -> Path:
    """A run of three steps that change all weights, large ones, on rows with one image, two and none."""
    model = tiny_vlm_directories.save("qwen2_vl", tmp_path / "model", num_attention_heads=1, num_key_value_heads=1)
    weights = load_file(model / "model.safetensors")
    save_file({name: 10 * one if one.ndim > 1 else one for name, one in weights.items()}, model / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    rows = []
    for number in range(9):
        images = [f"{number}-{image}.png" for image in range(number % 3)]
        for image, name in enumerate(images):
            Image.effect_noise((16, 16 + 8 * image), 90).convert("RGB").save(tmp_path / name)
        rows.append({"prompt": f"{'<image>' * len(images)}{number}?", "images": images, "answer": "red0"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "algorithm": {"name": "grpo", "num_steps": 3, "prompts_per_step": 3, "samples_per_prompt": 4,
                      "validation": {"at_start": False, "at_end": False, "every": 0}},
        "environment": {"name": "dataset", "path": f"{tmp_path}/rows.jsonl", "images": {},
                        "reward": "probe_sights:colors"},
        "policy": {"model_name": str(model), "train_global_batch_size": 12, "optimizer": {"lr": 0.03},
                   "scheduler": {"warmup_steps": 0}},
        "generation": {"name": "vllm", "max_new_tokens": 6, "stop_token_ids": [*range(8, 30, 2)],
                       "workers": {"group": "ray", "python": PYTHON}, "refit": {"deadline": 300},
                       "vllm": {"kv_cache_memory_bytes": 1 << 26}},
        "worker_group": {"name": "processes"},
        "observers": {"console": False, "curve": False},
        "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(sections))
    return path


@pytest.mark.parametrize("overrides", [(), EPISODES], ids=["rows", "episodes"])
def test_the_trainer_scores_what_vllm_sampled_from_the_same_images(config: Path, overrides: tuple[str, ...]) -> None:
    run(load_config(config, list(overrides)))
    steps = [json.loads(line) for line in (config.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["refit/version"] for step in steps] == [0, 1, 2]
    assert max(step["train/generation_logprob_difference_max"] for step in steps) < 1e-4
    assert steps[0]["train/entropy"] < 3.5  # ln(46) is 3.8: the large weights matter
