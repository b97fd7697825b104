"""Asynchronous runs on rows with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vlm_directories
from PIL import Image
from probe_runs import assert_same_weights, numbers_of, rows_of, weights

from rlframework import load_config, run

pytestmark = pytest.mark.slow

STOPS = [*range(8, 30, 2)]
"""Tokens that end a turn, which the untrained model does not."""


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    """A run on rows with images of different sizes; every third row has none."""
    model = tiny_vlm_directories.save("qwen2_vl", tmp_path / "model")
    rows = []
    for number in range(8):
        Image.effect_noise((16, 16 + 8 * (number % 2)), 90).convert("RGB").save(tmp_path / f"{number}.png")
        seen = {"prompt": f"<image>{number}?", "image": f"{number}.png"} if number % 3 else {"prompt": f"{number}?"}
        rows.append({**seen, "answer": "red0"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "algorithm": {"name": "grpo", "num_steps": 3, "prompts_per_step": 2, "samples_per_prompt": 4,
                      "validation": {"at_start": False, "at_end": False, "every": 0}},
        "environment": {"name": "dataset", "path": f"{tmp_path}/rows.jsonl", "images": {},
                        "reward": "probe_sights:colors"},
        "policy": {"model_name": str(model), "train_global_batch_size": 8, "optimizer": {"lr": 0.01}},
        "generation": {"max_new_tokens": 4, "stop_token_ids": STOPS, "workers": {"group": "processes"}},
        "observers": {"console": False, "curve": False},
    }  # fmt: skip


def finished(folder: Path, sections: dict[str, Any], *overrides: str) -> Path:
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps({**sections, "output_dir": str(folder)}))
    run(load_config(path, list(overrides)))
    return folder


EPISODES = ("~environment.path", "~environment.reward", "environment.name=probe_sights:Sights",
            "environment.gather_timeout=20")  # fmt: skip


@pytest.mark.thorough  # test_asynchronous does the same with text
@pytest.mark.parametrize("environment", [(), EPISODES], ids=["turns", "episodes"])
def test_without_staleness_a_run_on_images_is_the_synchronous_one_bit_for_bit(
    sections: Any, tmp_path: Path, environment: tuple[str, ...]
) -> None:
    together = finished(tmp_path / "sync", sections, *environment)
    apart = finished(tmp_path / "async", sections, *environment, "algorithm.async={max_staleness: 0}")
    assert_same_weights(together, apart)
    assert numbers_of(together) == numbers_of(apart)
    tower = [name for name in weights(apart) if "visual" in name]
    assert any(not weights(apart)[name].equal(weights(tmp_path)[name]) for name in tower)  # it was trained


def test_stale_tokens_are_scored_with_their_images(sections: Any, tmp_path: Path) -> None:
    """With one step of staleness, what the engines sampled is within a step's change of what the trainer computes."""
    found = rows_of(finished(tmp_path / "run", sections, "algorithm.num_steps=5", "algorithm.async={max_staleness: 1}"))
    stale = [row["async/staleness_max"] for row in found if "async/staleness_max" in row]
    assert len(stale) == 5
    assert max(stale) <= 1
    assert found[0]["train/generation_logprob_difference_max"] < 1e-4
