"""Rollouts with images: training scores what was sampled, each row with its own images."""

from __future__ import annotations

import json

import pytest
import tiny_vlm_directories
import torch
from PIL import Image

from rlframework import load_config
from rlframework.algorithms.sft import SFT
from rlframework.models.loading import auto_class
from rlframework.rollout.rollouts import rollout
from rlframework.rollout.seeds import row_seeds
from rlframework.runner.parts import build_parts


@pytest.fixture
def config(request, tmp_path):
    """Rows with one image, two and none; images differ in size, and so in tokens, where the model allows it."""
    model = tiny_vlm_directories.save(request.param, tmp_path / "model")
    rows = []
    for number in range(9):
        images = [f"{number}-{image}.png" for image in range(number % 3)]
        for image, name in enumerate(images):
            made = Image.effect_noise((16, 16 + 8 * image), 90).convert("RGB")
            made.save(tmp_path / name)
        rows.append({"prompt": f"{'<image>' * len(images)} {number}?", "images": images, "answer": str(number)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "algorithm": {"name": "sft", "num_steps": 1},
        "environment": {"name": "dataset", "path": f"{tmp_path}/rows.jsonl", "images": {}, "check": "exact"},
        "policy": {"model_name": str(model), "train_global_batch_size": 4, "optimizer": {"lr": 0.1}},
        "generation": {"max_new_tokens": 5},
        "observers": {"console": False},
        "output_dir": f"{tmp_path}/run",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections))
    return load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("config", ["qwen2_vl", "llava"], indirect=True)
def test_training_scores_what_was_sampled_from_the_images(config):
    """Groups of two; and the loss of supervised rows is that of a plain forward of each."""
    with build_parts(config) as parts:
        samples = [sample for sample in parts.environment.samples("train") for _ in range(2)]
        result = rollout(parts, samples, row_seeds(0, 1, len(samples)))
        parts.policy.prepare_for_lp_inference()
        scored = parts.policy.get_logprobs(result.data)["logprobs"]
        mask = result.data["token_mask"].bool()
        assert int(mask.sum()) > len(samples)
        torch.testing.assert_close(scored[mask], result.data["generation_logprobs"][mask], rtol=1e-5, atol=1e-5)

        algorithm = SFT(parts)
        batch = algorithm.encode(list(parts.environment.samples("train"))[:4], "train")
        parts.policy.prepare_for_training()
        loss = parts.policy.train(batch, algorithm.loss, eval_mode=True)["loss"]
    model = auto_class(parts.images._config).from_pretrained(config.policy.model_name).eval()
    total = 0.0
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        media = batch.slice(row, row + 1).get_multimodal_dict(as_tensors=True)
        media = {name: value[:, :length] if "token_type" in name else value for name, value in media.items()}
        with torch.no_grad():
            logprobs = model(input_ids=ids, **media).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs.gather(1, ids[0, 1:, None])[:, 0] @ batch["token_mask"][row, 1:length])
    assert float(loss) == pytest.approx(total / float(batch["token_mask"][:, 1:].sum()), rel=1e-5)
