"""Reward models and critics of vision-language models see the images: their numbers equal those of plain forwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vlm_directories
import torch
from image_rows import inputs_of_rows, write_images
from safetensors.torch import load_file
from transformers import AutoModel

from rlframework import load_config, run
from rlframework.algorithms.loop import Timer
from rlframework.algorithms.ppo import PPO
from rlframework.base.errors import ConfigError
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.step_rollouts import rollout
from rlframework.runner.parts import build_parts

pytestmark = pytest.mark.slow


def hidden(folder: Path, batch: Any) -> list[torch.Tensor]:
    """The last hidden states of each row by itself, `[L, H]`."""
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(**inputs).last_hidden_state[0] for inputs in inputs_of_rows(batch)]


@pytest.fixture
def settings(request: Any, tmp_path: Path) -> dict[str, Any]:
    model = tiny_vlm_directories.save(getattr(request, "param", "qwen2_vl"), tmp_path / "model")
    rows = []
    for number in range(8):
        names = write_images(number, tmp_path)
        answers = {"chosen": f"yes {number}", "rejected": "no", "answer": str(number)}
        rows.append({"prompt": f"{'<image>' * len(names)} {number}?", "images": names, **answers})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "policy": {"model_name": str(model), "train_global_batch_size": 4, "optimizer": {"lr": 0.01}},
        "environment": {"path": f"{tmp_path}/rows.jsonl", "images": {}, "validation_fraction": 0.3},
        "generation": {"max_new_tokens": 5},
        "observers": {"console": False},
        "output_dir": f"{tmp_path}/run",
    }


def configured(settings: dict[str, Any], folder: Path, **sections: Any) -> Any:
    merged = settings | {name: {**settings.get(name, {}), **section} for name, section in sections.items()}
    (folder / "run.yaml").write_text(json.dumps(merged))
    return load_config(folder / "run.yaml")


@pytest.mark.parametrize("settings", ["qwen2_vl", "llava"], indirect=True)
def test_the_scores_of_a_reward_model(settings: dict[str, Any], tmp_path: Path) -> None:
    """After training and saving, as rewards of rollouts: the head times the last hidden state of each row."""
    keys = {"algorithm": {"name": "reward_model", "num_steps": 2}, "environment": {"name": "preferences"}}
    trained = {"policy": {**settings["policy"], "head": "score", "head_init": "zeros"}}
    assert run(configured(settings | trained, tmp_path, **keys)).metrics["train/grad_norm"] > 0
    model = tmp_path / "run" / "model"
    keys = {
        "algorithm": {"name": "grpo", "prompts_per_step": 2, "samples_per_prompt": 2},
        "environment": {**settings["environment"], "name": "dataset", "check": "exact"},
        "reward_model": {"model_name": str(model), "environment_weight": 0.0},
    }
    with build_parts(configured(settings | {"output_dir": f"{tmp_path}/again"}, tmp_path, **keys)) as parts:
        samples = [sample for sample in parts.environment.samples("train") for _ in range(2)]
        result = rollout(parts, samples, row_seeds(0, 1, len(samples)))
    weight = load_file(model / "model.safetensors")["score.weight"]
    expected = torch.stack([states[-1] @ weight[0] for states in hidden(model, result.data)])
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(result.rewards, expected, rtol=1e-5, atol=1e-5)


PPO_KEYS = {
    "algorithm": {"name": "ppo", "num_steps": 2, "prompts_per_step": 4, "validation": {"every": 0}},
    "environment": {"name": "dataset", "check": "exact"},
}


@pytest.mark.parametrize("settings", ["qwen2_vl", "idefics3"], indirect=True)
def test_the_values_of_a_critic(settings: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """After a step of PPO, with a critic that began with a new head."""
    monkeypatch.setattr(DatasetEnvironment, "score", lambda self, sample, completion: int(sample.answer) / 8)
    with build_parts(configured(settings, tmp_path, **PPO_KEYS, critic={"optimizer": {"lr": 0.01}})) as parts:
        algorithm = PPO(parts)
        first = algorithm.train_step(1, Timer())[0]
        assert first["train/critic_grad_norm"] > 0 == first["train/value"]
        seen = []
        train = algorithm.train
        algorithm.train = lambda step, data, *more: seen.append(data) or train(step, data, *more)
        critic = algorithm.critic
        critic.save_pretrained(path=str(tmp_path / "critic"))
        assert algorithm.train_step(2, Timer())[0]["train/value"] != 0
    [batch] = seen
    assert {each is None for each in batch["pixel_values"].tensors} == {True, False}
    weight = load_file(tmp_path / "critic" / "model.safetensors")["score.weight"]
    for row, states in enumerate(hidden(tmp_path / "critic", batch)):
        mask = batch["token_mask"][row, 1 : len(states)].bool()
        expected = (states[:-1] @ weight[0])[mask]  # a token's value is that of the state before it
        assert float(expected.abs().max()) > 1e-4
        found = batch["values"][row, 1 : len(states)][mask]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_critic_that_takes_other_images(settings: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(settings["policy"]["model_name"])
    make_llama(tmp_path / "text", tokenizer, hidden=16, layers=1)
    other = tiny_vlm_directories.save("qwen2_vl", tmp_path / "other")
    changed = json.loads((other / "config.json").read_text())
    changed["vision_config"]["patch_size"] = 8
    (other / "config.json").write_text(json.dumps(changed))
    for folder, problem in (
        ("text", "model_type=llama where the policy has qwen2_vl, image_token_id=None where"),
        ("other", "its configuration has patch_size=8 where the policy has 4. With environment.images"),
    ):
        critic = {"model_name": str(tmp_path / folder), "head_init": "zeros"}
        config = configured(settings, tmp_path, **PPO_KEYS, critic=critic)
        with pytest.raises(
            ConfigError, match=rf"critic\.model_name=.* does not take the images of the policy: .*{problem}"
        ):
            run(config)
        assert not (tmp_path / "run").exists()
