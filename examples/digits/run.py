"""A small Qwen2-VL with random weights learns to read handwritten digits: supervised warm-up, then GRPO.

    pip install scikit-learn pillow
    python examples/digits/run.py [--seed 0] [--output runs/digits] [[phase:]key=value ...]

The images are the 1,797 digits of 8 x 8 pixels that scikit-learn ships (Alpaydin and Kaynak, 1998); 297 of them are
held out. Accuracy is that of greedy answers to these. Overrides are those of `rlframework train`, for both phases or
for one: `policy.precision=bfloat16`, `grpo:algorithm.num_steps=20`. The run is in OUTPUT/seed-SEED: data, start (the
random model), sft, grpo.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HELD_OUT = 297


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/digits"))
    parser.add_argument("overrides", nargs="*", metavar="[phase:]key=value", help="such as grpo:algorithm.num_steps=5")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a small model gains little from more

    from rlframework.base.errors import RLFrameworkError, UserError

    try:
        train(arguments.output, arguments.seed, arguments.overrides)
    except RLFrameworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def train(folder: Path, seed: int, overrides: Sequence[str]) -> None:
    """Make data and a random model, and run both phases."""
    from rlframework import load_config, run

    output = folder / f"seed-{seed}"
    data = write_data(output / "data", seed)
    models = {"sft": make_start(output / "start", seed), "grpo": output / "sft" / "model"}
    for phase, model in models.items():
        given = {
            "seed": seed,
            "output_dir": output / phase,
            "policy.model_name": model,
            "environment.path": data / "train.jsonl",
            "environment.validation_path": data / "held_out.jsonl",
        }
        others = models.keys() - {phase}
        own = [text.removeprefix(f"{phase}:") for text in overrides if text.partition(":")[0] not in others]
        started = time.monotonic()
        result = run(load_config(HERE / f"{phase}.yaml", [*(f"{key}={value}" for key, value in given.items()), *own]))
        measured = [row["validation/accuracy"] for row in result.history if "validation/accuracy" in row]
        seconds = time.monotonic() - started
        print(f"{phase:5} held-out accuracy {measured[0]:6.1%} -> {measured[-1]:6.1%}   {seconds:4.0f} s")


def write_data(folder: Path, seed: int) -> Path:
    """Write the digits as images, and rows for training and validation that name them, to `folder`."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(f"error: this example needs {error.name}: pip install scikit-learn pillow") from error
    digits: Any = load_digits()
    rows = []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        name = f"images/{number:04}.png"
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).save(folder / name)
        rows.append({"prompt": "<image>digit?", "image": name, "answer": str(digit)})
    random.Random(seed).shuffle(rows)
    for name, part in {"train.jsonl": rows[HELD_OUT:], "held_out.jsonl": rows[:HELD_OUT]}.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return folder


def make_start(path: Path, seed: int) -> Path:
    """Make a random Qwen2-VL of 0.3 million parameters, with its tokenizer and its image processor, in `path`.

    An image of 8 x 8 pixels is 16 patches, and 4 tokens.
    """
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from rlframework.huggingface.tokenizer import character_tokenizer

    tokenizer = character_tokenizer("0123456789digt?")
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    start, end, image, video = tokenizer.convert_tokens_to_ids(special)
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 4,
            "patch_size": 2,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    size = {"shortest_edge": 64, "longest_edge": 64}
    Qwen2VLImageProcessorPil(patch_size=2, temporal_patch_size=2, merge_size=2, size=size).save_pretrained(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
