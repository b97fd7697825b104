"""Shared by `policy.py` and `generation.py`: models with random weights, rows, and the framework's side.

Shapes: a Llama of 4 layers x 256 with 2,048 tokens, which a CPU trains in a second, and those of Qwen2.5 0.5B and 3B
for a GPU.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from plain import PlainLoop, Rows

from rlframework import create_manager, load_config
from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.model_directories import make_llama, quiet_transformers
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.policy.client import Policy

VOCABULARY, ROWS, MICRO_ROWS = 2048, 32, 8
LR, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
PADDED, SORTED = "padded loop", "sorted loop"

QWEN: Mapping[str, dict[str, Any]] = {
    "qwen-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "qwen-3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
}
SHAPES = ("llama-4x256", *QWEN)


def make_model(path: Path, shape: str = SHAPES[0], longest: int = 512) -> Any:
    """Make a model with random weights in `path`; return its tokenizer, without an end-of-sequence token."""
    tokenizer = character_tokenizer([chr(0x4E00 + index) for index in range(VOCABULARY - 2)])
    tokenizer.eos_token = None
    if shape == SHAPES[0]:
        make_llama(path, tokenizer, hidden=256, layers=4, heads=4, init_std=0.08, max_positions=longest)
        return tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        **QWEN[shape],
    )
    with quiet_transformers():
        Qwen2ForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return tokenizer


def make_rows(lengths: str, count: int = ROWS, longest: int = 175, seed: int = 0) -> Rows:
    """`count` rows; the first quarter of each is a prompt, masked out of the loss.

    `lengths`: "even", uniform up to `longest` (from 12 if that is 175); "tailed", 8 plus an exponential with mean
    `longest / 2`, clipped at `longest * 512 / 175`: most are short and few are long, like a policy's answers.
    """
    rng = random.Random(seed)
    if lengths == "even":
        drawn = [rng.randint(longest * 12 // 175, longest) for _ in range(count)]
    else:
        drawn = [min(longest * 512 // 175, 8 + round(rng.expovariate(2 / longest))) for _ in range(count)]
    sizes = torch.tensor(drawn)
    columns = torch.arange(int(sizes.max()))
    ids = torch.randint(2, VOCABULARY, (count, len(columns)), generator=torch.Generator().manual_seed(seed))
    inside = columns < sizes[:, None]
    mask = inside & (columns >= sizes[:, None] // 4)
    return Rows(torch.where(inside, ids, 0), sizes, mask.float())


def padded_tokens(rows: Rows, order: str) -> int:
    """Tokens that the plain loop computes, including padding."""
    lengths = rows.lengths.sort().values if order == "sorted" else rows.lengths
    return sum(int(part.max()) * len(part) for part in lengths.split(MICRO_ROWS))


def as_batch(rows: Rows) -> BatchedDataDict[Any]:
    return BatchedDataDict(
        {
            "input_ids": rows.input_ids,
            "input_lengths": rows.lengths,
            "token_mask": rows.mask,
            "sample_mask": torch.ones(len(rows.lengths)),
        }
    )


@contextmanager
def make_policy(
    model: Path,
    tokenizer: Any,
    mode: str,
    *,
    backend: str = "dtensor",
    device: str = "cpu",
    rows: int = ROWS,
    generation: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Iterator[Policy]:
    """The framework's policy, in this process; `keys` of the section `policy`."""
    config = load_config(
        {
            "output_dir": str(model.parent / "run"),
            "device": device,
            "algorithm": {"name": "sft"},
            "environment": {"name": "addition"},
            "policy": {
                "model_name": str(model),
                "backend": backend,
                "batching": {"mode": mode},
                "train_global_batch_size": rows,
                "train_micro_batch_size": MICRO_ROWS,
                "logprob_batch_size": MICRO_ROWS,
                "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY},
                "max_grad_norm": CLIP,
                **keys,
            },
            "generation": dict(generation or {}),
            "worker_group": {"name": "inline"},
        }
    )
    with Policy(config, tokenizer, create_manager(), device=device) as policy:
        torch.set_num_threads(1)
        yield policy


BARE = {"dtensor": "torch", "deepspeed": "DeepSpeed", "megatron": "megatron-core"}
"""The engine of the plain loop for a backend; for all others it is torch."""


@contextmanager
def make_loop(
    model: Path,
    order: str,
    device: str = "cpu",
    precision: str = "float32",
    *,
    backend: str = "dtensor",
    section: Mapping[str, Any] | None = None,
    rows: int = ROWS,
) -> Iterator[PlainLoop]:
    """The plain loop, "padded" or "sorted", on the engine of `backend`, with `section` as that engine's keys.

    A loop on DeepSpeed or megatron-core needs a policy of that backend in the same process.
    """
    options: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY, "clip": CLIP}
    options |= {"device": device, "precision": precision}
    if BARE.get(backend) == "DeepSpeed":
        from bare_deepspeed import DeepSpeedLoop

        loop: PlainLoop = DeepSpeedLoop(model, order, MICRO_ROWS, count=rows, section=section or {}, **options)
    elif BARE.get(backend) == "megatron-core":
        from bare_megatron import MegatronLoop

        loop = MegatronLoop(model, order, MICRO_ROWS, section=section or {}, **options)
    else:
        loop = PlainLoop(model, order, MICRO_ROWS, **options)
    try:
        yield loop
    finally:
        loop.close()


def check_same(policy: Policy, name: str, loop: PlainLoop, rows: Rows, slack: float = 1.0) -> list[str]:
    """Do one step with `policy`, called `name`, and the sorted `loop`; return a line per comparison.

    Exits if they differ by more than the tolerance times `slack`.
    """
    batch, lines = as_batch(rows), []
    ours = policy.get_logprobs(batch, positions="token_mask")["logprobs"]
    trained = policy.train(batch, NLLLoss())
    theirs = loop.get_logprobs(rows).cpu() * rows.mask
    theirs[:, 0] = 0.0
    loss, norm = loop.train(rows)
    differences = {
        "log-probabilities": (float((ours - theirs).abs().max()), 1e-4 * slack),
        "loss": (abs(trained["loss"] / loss - 1.0), 1e-5 * slack),
    }
    if not math.isnan(norm):  # not available from DeepSpeed with stage 0
        differences["gradient norm"] = (abs(float(trained["grad_norm"][0]) / norm - 1.0), 1e-4 * slack)
    for what, (difference, allowed) in differences.items():
        lines.append(f"{what}, {name} against the {SORTED}: {difference:.1e} (allowed {allowed:.0e})")
        if not difference <= allowed:
            sys.exit(f"the two sides compute different values: {lines[-1]}")
    return lines


def matrix_product_flops(device: str, size: int = 8192) -> float:
    """FLOPs per second of a `size` x `size` matrix product in bf16, the best of ten."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(10):
        _synchronize(device)
        started = time.perf_counter()
        a @ b
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    return float(2 * size**3 / min(seconds[2:]))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
