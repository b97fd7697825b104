"""Preference pairs whose prompts have images: a step equals one of plain forwards, and media are stored once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vlm_directories
import torch
from image_rows import inputs_of_rows, write_images
from tiny_vlms import assert_gradients

from rlframework import load_config, run
from rlframework.algorithms.loop import Timer
from rlframework.base.errors import DataError, ImageError
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.models.loading import auto_class
from rlframework.runner.parts import build_parts
from rlframework_dtensor.engine import DTensorEngine
from rlframework_preferences.pairs import mismatched_rows
from rlframework_preferences.preference_training import PreferenceTraining

BETA, PAIRS = 0.5, 4


def pair(number: int, folder: Path) -> dict[str, Any]:
    """A pair with `number % 3` images of different sizes. A single one is in OpenAI's format, two are in LLaVA's."""
    names = write_images(number, folder)
    answers = {"chosen": f"yes {number}", "rejected": "no" * (1 + number % 2)}
    if len(names) == 1:
        parts = [{"type": "image_url", "image_url": {"url": names[0]}}, {"type": "text", "text": f" {number}?"}]
        return {"prompt": [{"role": "user", "content": parts}], **answers}
    return {"prompt": f"{'<image>' * len(names)} {number}?", "images": names, **answers}


@pytest.fixture
def settings(request: Any, tmp_path: Path) -> Path:
    model = tiny_vlm_directories.save(getattr(request, "param", "qwen2_vl"), tmp_path / "model")
    rows = [pair(number, tmp_path) for number in range(2 * PAIRS)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "algorithm": {"name": "dpo", "num_steps": 2, "beta": BETA, "validation": {"every": 0, "samples": 2}},
        "environment": {"name": "preferences", "path": f"{tmp_path}/pairs.jsonl", "images": {},
                        "validation_fraction": 0.3},
        "policy": {"model_name": str(model), "train_global_batch_size": 2 * PAIRS, "optimizer": {"lr": 0.01},
                   "max_grad_norm": None},
        "observers": {"console": False},
        "output_dir": f"{tmp_path}/run",
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(sections))
    return tmp_path / "run.yaml"


def answers(model: Any, batch: Any) -> torch.Tensor:
    """The log-probability of each answer, computed row by row."""
    found = []
    for inputs, mask in zip(inputs_of_rows(batch), batch["token_mask"], strict=True):
        targets = inputs["input_ids"][0, 1:, None]
        logits = model(use_cache=False, **inputs).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, targets)[:, 0]
        found.append((logprobs * mask[1 : len(targets) + 1]).sum())
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["qwen2_vl", "idefics3"], indirect=True)
def test_a_step_of_dpo_is_that_of_plain_forwards(settings: Path, monkeypatch: Any) -> None:
    """In the second step the policy is no longer the reference: -log sigmoid(beta (log-ratio_w - log-ratio_l))."""
    engines: list[Any] = []
    plain_step = DTensorEngine.clip_and_step

    def recording(engine: Any, *args: Any) -> Any:
        gradients = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
        weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        engines.append((weights, gradients))
        return plain_step(engine, *args)

    monkeypatch.setattr(DTensorEngine, "clip_and_step", recording)
    config = load_config(settings)
    with build_parts(config) as parts:
        algorithm, batches = PreferenceTraining(parts), list[Any]()
        encode = algorithm.encode
        monkeypatch.setattr(algorithm, "encode", lambda samples: batches.append(encode(samples)) or batches[-1])
        metrics = [algorithm.train_step(step, Timer())[0] for step in (1, 2)]
        kind = auto_class(parts.images._config)
    batch, (weights, gradients) = batches[-1], engines[1]
    assert {each is None for each in batch["pixel_values"].tensors} == {True, False}
    reference, policy = (kind.from_pretrained(config.policy.model_name).eval() for _ in range(2))
    policy.load_state_dict(weights, strict=False)
    with torch.no_grad():
        before = answers(reference, batch)
    ratios = (answers(policy, batch) - before).view(-1, 2)
    loss = -torch.nn.functional.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()
    loss.backward()
    assert abs(loss.item() - 0.6931472) > 1e-3
    assert metrics[1]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert any("vision" in name or "visual" in name for name in expected)
    assert_gradients({name: gradients[name] for name in expected}, expected)


def test_the_images_of_a_pair_are_stored_once(settings: Path) -> None:
    """Three pairs have an image of 16 patches, two have one of 16 and one of 24. A patch is 4 x 4 RGB pixels, twice."""
    with build_parts(load_config(settings)) as parts:
        algorithm = PreferenceTraining(parts)
        samples = [*parts.environment.samples("train"), *parts.environment.samples("validation")]
        batch = algorithm.encode(samples)
        answered = mismatched_rows(batch, parts.tokenizer.pad_token_id)
    sizes = {"pixel_values": (3 * 16 + 2 * 40) * 4 * 4 * 2 * 3 * 4, "image_grid_thw": 7 * 3 * 8}
    for name, value in batch.items():
        if isinstance(value, PackedTensor):
            assert all(chosen is rejected for chosen, rejected in zip(*[iter(value.tensors)] * 2, strict=True))
            kept = {id(each): each for each in value.tensors if each is not None}
            assert sum(each.nbytes for each in kept.values()) == sizes.pop(name), name
    assert not sizes
    token = parts.images.token
    for rows in (batch, answered):  # KTO's rows with other answers have the images of their own prompt
        assert torch.equal(rows["mm_token_type_ids"], (rows["input_ids"] == token).long())
        assert [*map(id, rows["pixel_values"].tensors)] == [*map(id, batch["pixel_values"].tensors)]
    assert not torch.equal(answered["input_lengths"], batch["input_lengths"])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["kto", "simpo"])
def test_other_losses_take_a_step(settings: Path, algorithm: str) -> None:
    result = run(load_config(settings, [f"algorithm.name={algorithm}", "algorithm.num_steps=1", "~algorithm.beta"]))
    assert result.metrics["train/grad_norm"] > 0


def test_images_that_cannot_be_used_are_named_or_left_out(settings: Path, caplog: Any) -> None:
    (settings.parent / "1-0.png").write_bytes(b"no image")
    with pytest.raises(
        ImageError, match=r"pairs\.jsonl, line 2, column 'prompt', turn 1, part 1: the image .*1-0\.png is"
    ):
        run(load_config(settings))
    with build_parts(load_config(settings, ["environment.images.invalid=skip"])) as parts:
        ids = {sample.id for split in ("train", "validation") for sample in parts.environment.samples(split)}
    assert ids == {f"pairs-{line}" for line in (1, 3, 4, 5, 6, 7, 8)}
    assert caplog.text.count("1 of 8 rows are left out, because their images cannot be used; the first: ") == 1
    with pytest.raises(DataError, match=r"line \d, .*image tokens, but the model makes \d+ features of its images"):
        run(load_config(settings, ["environment.images.invalid=skip", "algorithm.max_tokens=3"]))
