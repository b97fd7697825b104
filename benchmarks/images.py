"""Cost of images: a batch of rows with and without images, and the turns of an episode that sees one more at each.

    python benchmarks/images.py [--hidden 256] [--layers 4] [--pixels 112] [--rows 8] [--turns 6] [--rounds 9]

A random Qwen2-VL on a CPU, one thread, fp32; images are noise, with patches of 14 pixels, of which four are a token.

- `mixed` against `apart`: log-probabilities and training of a batch whose rows are half texts and half texts with an
  image, interleaved, and of both halves as batches of their own. Below 1 the mixed batch is cheaper. Training apart has
  two optimizer steps, where the mixed batch has one.
- `episode`: CPU time to prepare the prompts of all turns of an episode, each of which has all images so far, from
  decoding the images to the features of the encoder; and how often an image was processed and encoded.

Interleaved rounds, CPU time of the process, medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from interleave import interleave, machine, write_json

SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz ?"


def make_model(folder: Path, given: argparse.Namespace) -> Path:
    """Write a random Qwen2-VL with its tokenizer and processor to `folder`."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from rlframework.huggingface.tokenizer import character_tokenizer

    tokenizer = character_tokenizer(LETTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(SPECIAL)
    heads = given.hidden // 32
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": given.hidden, "intermediate_size": 4 * given.hidden,
            "num_hidden_layers": given.layers, "num_attention_heads": heads, "num_key_value_heads": heads,
            "max_position_embeddings": 2048, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": given.layers, "embed_dim": given.hidden, "hidden_size": given.hidden, "num_heads": heads,
            "mlp_ratio": 4, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
        },
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": given.pixels**2}
    Qwen2VLImageProcessorPil(patch_size=14, temporal_patch_size=2, merge_size=2, size=size).save_pretrained(folder)
    return folder


def config_of(folder: Path, given: argparse.Namespace) -> Any:
    """Write `--rows` rows of each kind, one after the other in turn, and return the configuration of a run on them."""
    from PIL import Image

    from rlframework import load_config

    rows = []
    for number in range(2 * given.rows):
        text = LETTERS[number % 26] * 60
        if number % 2:
            Image.effect_noise((given.pixels, given.pixels), 90 + number).convert("RGB").save(folder / f"{number}.png")
            rows.append({"prompt": f"<image>{text}?", "image": f"{number}.png", "answer": text})
        else:
            rows.append({"prompt": f"{text}?", "answer": text})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_config(
        {
            "output_dir": str(folder / "run"),
            "device": "cpu",
            "algorithm": {"name": "sft", "num_steps": 1},
            "environment": {"name": "dataset", "path": str(folder / "rows.jsonl"), "images": {}, "check": "exact"},
            "policy": {"model_name": str(make_model(folder / "model", given)), "precision": "float32",
                       "train_global_batch_size": given.rows, "batching": {"mode": given.mode, "tokens": 1024}},
            "observers": {"console": False},
        }
    )  # fmt: skip


def mixed_batches(parts: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Measure a mixed batch against its two halves."""
    from rlframework.algorithms.sft import SFT

    algorithm = SFT(parts)
    samples = [sample for split in ("train", "validation") for sample in parts.environment.samples(split)]
    texts = [sample for sample in samples if isinstance(sample.messages[0]["content"], str)]
    images = [sample for sample in samples if sample not in texts]
    assert len(texts) == len(images) == given.rows
    turns = [each for pair in zip(texts, images, strict=True) for each in pair]
    whole, *halves = (algorithm.encode(rows, "train") for rows in (turns, texts, images))
    policy, rows = parts.policy, float(len(turns))

    def score(*batches: Any) -> float:
        for batch in batches:
            policy.get_logprobs(batch)
        return rows

    def train(*batches: Any) -> float:
        for batch in batches:
            policy.train(batch, algorithm.loss, gbs=len(batch["input_ids"]))
        return rows

    found: dict[str, Any] = {}
    policy.prepare_for_lp_inference()
    for work, run in (("log-probabilities", score), ("training", train)):
        if work == "training":
            policy.prepare_for_training()
        timings = interleave({"mixed": lambda: run(whole), "apart": lambda: run(*halves)}, given.rounds)  # noqa: B023
        ratio = timings.ratio("mixed", "apart")
        print(
            f"{work:18} mixed {timings.rate('mixed'):6.1f} rows/s  apart {timings.rate('apart'):6.1f} rows/s  {ratio}"
        )
        found[work] = {"seconds": timings.seconds, "ratio": vars(ratio)}
    return found


def episode(parts: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Measure the preparation of the turns of an episode, from PNG files to the features of the encoder."""
    import torch
    from PIL import Image

    from rlframework.datasets.image_inputs import ImageInputs
    from rlframework.generation.media import ImageEncoder, Media
    from rlframework.huggingface.model_directories import read_config
    from rlframework.interfaces.messages import Picture
    from rlframework.models.loading import auto_class

    name = parts.config.policy.model_name
    model_config = read_config(name)
    model = auto_class(model_config).from_pretrained(name).eval()
    stored = []
    for turn in range(given.turns):
        path = Path(name) / f"turn-{turn}.png"
        Image.effect_noise((given.pixels, given.pixels), 60 + turn).convert("RGB").save(path)
        stored.append(path)
    counts: dict[str, int] = {}

    def play() -> float:
        inputs, encoder = ImageInputs(name, model_config, parts.tokenizer), ImageEncoder()
        encoder.use(model, 1)
        for turn in range(1, given.turns + 1):
            pictures = [Picture(path, path.name) for path in stored[:turn]]
            media = Media.of(inputs.processed(pictures).tensors)
            encoder.features(model, media, torch.device("cpu"))
        counts.update(processed=inputs.made, encoder_runs=encoder.encoded)
        return 1.0

    timings = interleave({"episode": play}, given.rounds)
    milliseconds = 1000 * statistics.median(timings.seconds["episode"])
    print(f"episode of {given.turns} turns: {milliseconds:.0f} ms, {counts}")
    return {"seconds": timings.seconds, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"hidden": 256, "layers": 4, "pixels": 112, "rows": 8, "turns": 6, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--mode", default="auto", help="policy.batching.mode")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    import torch

    from rlframework.runner.parts import build_parts

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, build_parts(config_of(Path(folder), given)) as parts:
        found = {"mixed": mixed_batches(parts, given), "episode": episode(parts, given)}
    if given.json:
        write_json(given.json, {"machine": machine(), "options": vars(given) | {"json": None}, **found})


if __name__ == "__main__":
    main()
