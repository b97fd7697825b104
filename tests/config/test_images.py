"""Runs that would lose the images of their rows are rejected before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframework.base.errors import ConfigError
from rlframework.plugins.configure import load_config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("algorithm.name=distillation", "is for sft, grpo and its presets, ppo, and algorithms on preference pairs"),
        ("algorithm.name=process_reward_model", "pairs, not for algorithm.name=process_reward_model"),
        ("algorithm.name=sft algorithm.token_data=tokens", "token data has no images"),
        ("teacher.model_name=m", "must be null with the further policy teacher, which gets no images"),
    ],
)
def test_what_would_lose_images_is_rejected(tmp_path: Path, overrides: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "policy: {model_name: m}\nalgorithm: {name: grpo}\n"
        "environment: {name: dataset, path: rows.jsonl, check: exact, images: {}}\n"
    )
    assert load_config(path).environment.images is not None
    assert load_config(path, ["algorithm.name=dapo"]).algorithm.name == "dapo"
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides.split())
    assert message in str(error.value)
