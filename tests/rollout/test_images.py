"""Rollouts with images, of single turns, of episodes and asynchronous: training scores what was sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vlm_directories
import torch
from image_rows import inputs_of_rows, write_images
from PIL import Image
from probe_runs import rows_of

from rlframework import load_config, run
from rlframework.algorithms.sft import SFT
from rlframework.base.errors import UserError
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.interfaces.environment import Environment, Episode, Sample, StepOutcome
from rlframework.interfaces.messages import pictures_of
from rlframework.models.loading import auto_class
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.step_rollouts import rollout
from rlframework.runner.parts import build_parts


@pytest.fixture
def config(request, tmp_path):
    """Rows with one image, two and none; images differ in size, and so in tokens, where the model allows it."""
    model = tiny_vlm_directories.save(request.param, tmp_path / "model")
    rows = []
    for number in range(9):
        images = write_images(number, tmp_path)
        rows.append({"prompt": f"{'<image>' * len(images)} {number}?", "images": images, "answer": str(number)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "algorithm": {"name": "sft", "num_steps": 1},
        "environment": {"name": "dataset", "path": f"{tmp_path}/rows.jsonl", "images": {}, "check": "exact"},
        "policy": {"model_name": str(model), "train_global_batch_size": 4, "optimizer": {"lr": 0.1}},
        "generation": {"max_new_tokens": 5},
        "observers": {"console": False, "curve": False},
        "output_dir": f"{tmp_path}/run",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections))
    return load_config(tmp_path / "run.yaml")


@pytest.mark.slow
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
    for inputs, mask in zip(inputs_of_rows(batch), batch["token_mask"], strict=True):
        targets = inputs["input_ids"][0, 1:, None]
        with torch.no_grad():
            logprobs = model(**inputs).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs.gather(1, targets)[:, 0] @ mask[1 : len(targets) + 1])
    assert float(loss) == pytest.approx(total / float(batch["token_mask"][:, 1:].sum()), rel=1e-5)


class Look(Environment):
    """Three turns: the first sees one image, the others two, one of them wider. All turns draw on the same canvas."""

    def __init__(self, config, *, seed):
        self.broken = ""

    def samples(self, split):
        return [
            Sample(name, ({"role": "user", "content": "?"},), "red") for name in ("12" if split == "train" else "3")
        ]

    def episode(self, sample, seed):
        return Looking(self.broken, int(sample.id))


class Looking(Episode):
    def __init__(self, broken, number):
        self.broken, self.number, self.turn, self.canvas = broken, number, 0, Image.new("RGB", (16, 16))

    def seen(self):
        self.canvas.paste(((91 * self.turn * self.number) % 256, 85 * self.turn, 80 * self.number), (0, 0, 16, 16))
        content = [{"type": "image", "image": self.canvas}, {"type": "text", "text": f"{self.turn}?"}]
        if self.turn:
            noise = Image.effect_noise((16, 24), 90 + self.turn)
            content.insert(0, {"type": "image", "image": noise if self.broken == "" else self.broken})
        return {"role": "user", "content": content}

    async def reset(self):
        return [self.seen()]

    async def step(self, message):
        self.turn += 1
        return StepOutcome(0.5, done=self.turn == 3, observations=(self.seen(),))


@pytest.fixture
def looking(config, monkeypatch):
    """The parts of a run, with the environment `Look`. Every second token ends a turn: the model knows no end."""
    with build_parts(config) as parts:
        ends = {*range(1, len(parts.tokenizer), 2), parts.tokenizer.eos_token_id}
        monkeypatch.setattr(ChatFormat, "turn_end_ids", frozenset(ends))
        parts.environment = Look(config.environment, seed=0)
        yield parts


def play(parts):
    samples = [sample for sample in parts.environment.samples("train") for _ in range(2)]
    return rollout(parts, samples, row_seeds(0, 1, len(samples)))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["qwen2_vl", "llava", "idefics3"], indirect=True)
def test_training_scores_the_turns_of_episodes_with_the_images_that_they_saw(looking):
    """As the engine did, also where the environment draws on the same image again; swapped images are noticed."""
    result = play(looking)
    assert result.metrics["episode_turns"] == 3.0
    assert result.metrics["episode_rows"] == 1.0
    seen = [pictures_of(turns) for turns in result.transcripts]
    assert [[picture.source.width for picture in row] for row in seen] == [[16, 16, 16, 16, 16]] * 4
    assert len({picture.digest for picture in seen[0]}) == 5
    mask = result.data["token_mask"].bool()
    assert int(mask.sum()) >= 3 * len(seen)
    sampled = result.data["generation_logprobs"][mask]
    looking.policy.prepare_for_lp_inference()
    scored = looking.policy.get_logprobs(result.data)["logprobs"][mask]
    torch.testing.assert_close(scored, sampled, rtol=1e-5, atol=1e-5)

    swapped = [(row[2], row[1], row[0], *row[3:]) for row in seen]
    result.data.update(looking.images.columns(swapped, result.data["input_ids"]))
    scored = looking.policy.get_logprobs(result.data)["logprobs"][mask]
    assert float((scored - sampled).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("config", ["qwen2_vl"], indirect=True)
def test_a_message_whose_image_cannot_be_used_ends_the_rollout(looking):
    where = "environment 'dataset', for sample '[12]' in turn 1"
    for broken, problem in (
        (b"no image", f"{where}: the image is in no known format, or damaged"),
        (
            "https://example.com/a.png",
            f"{where}, https://example.com/a.png: an address on the network is not read here",
        ),
        (None, "for sample '[12]' in turn 1 a part of the type image without an image"),
    ):
        looking.environment.broken = broken
        with pytest.raises(UserError, match=problem):
            play(looking)
    looking.environment.broken = Image.new("RGB", (16, 16))
    looking.tokenizer.chat_template += "<|image_pad|>"
    with pytest.raises(UserError, match=r"wrote 2 placeholders '<.image_pad.>' for 1 images"):
        play(looking)


def test_images_need_the_key_that_reads_them(make_parts):
    parts = make_parts(lambda sample, seed: Looking("", 1))
    with pytest.raises(UserError, match=r"for sample .* in reset .* images need environment\.images"):
        play(parts)


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


@pytest.mark.slow
def test_stale_tokens_are_scored_with_their_images(sections: Any, tmp_path: Path) -> None:
    """With one step of staleness, what the engines sampled is within a step's change of what the trainer computes."""
    found = rows_of(finished(tmp_path / "run", sections, "algorithm.num_steps=5", "algorithm.async={max_staleness: 1}"))
    stale = [row["async/staleness_max"] for row in found if "async/staleness_max" in row]
    assert len(stale) == 5
    assert max(stale) <= 1
    assert found[0]["train/generation_logprob_difference_max"] < 1e-4
