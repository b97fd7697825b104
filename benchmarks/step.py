"""How fast are generation, log-probabilities and training, against a plain torch + transformers loop on the same work?

    python benchmarks/step.py [--pairs 7] [--mode packed] [--json FILE]

Work: a random Llama of 4 layers x 256, vocabulary 2,048, fp32, one thread. Training and log-probabilities: 32 rows of
very different lengths, about 3,000 tokens, a quarter of each a prompt that does not count. Generation: 8 prompts x 8
samples at temperature 1, once 48 tokens for every row (no end token), once rows that end at random (48 of the 2,048
tokens are ends, at most 96 tokens).

First it checks that both sides compute the same. Then interleaved rounds, CPU time of the process; a ratio below 1
means that rlframework is the faster. What is not the same on both sides: the plain loop computes logits at every
position, the framework where the mask asks for them (`positions="token_mask"`). `model.generate` computes each prompt
once for each sample, goes on with rows that have ended, and gives no log-probabilities; the framework returns those of
what it sampled. Tokens after a row's end count for neither side.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from interleave import Timings, interleave, machine, table, write_json
from plain import PlainLoop, Rows

from rlframework import create_manager, load_config
from rlframework.algorithms.losses import NLLLoss
from rlframework.data.models import make_llama
from rlframework.data.tokenizer import character_tokenizer
from rlframework.distributed.batched_data_dict import BatchedDataDict
from rlframework.generation.driver import Generation
from rlframework.policy.policy import Policy

VOCABULARY, HIDDEN, LAYERS = 2048, 256, 4
ROWS, MICRO_ROWS = 32, 8
LR, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
PROMPTS, SAMPLES, FIXED_TOKENS, RAGGED_TOKENS, END_TOKENS = 8, 8, 48, 96, 48
OURS, PADDED, SORTED, PLAIN = "rlframework", "padded loop", "sorted loop", "model.generate"


def make_model(path: Path) -> Any:
    """A random Llama in `path`, and its tokenizer, which has no end token: nothing ends but what is asked to."""
    tokenizer = character_tokenizer([chr(0x4E00 + index) for index in range(VOCABULARY - 2)])
    tokenizer.eos_token = None
    make_llama(path, tokenizer, hidden=HIDDEN, layers=LAYERS, heads=4, init_std=0.08)
    return tokenizer


def ragged_rows(seed: int) -> Rows:
    """32 rows of 12 to 175 tokens, evenly drawn."""
    rng = random.Random(seed)
    lengths = torch.tensor([rng.randint(12, 175) for _ in range(ROWS)])
    columns = torch.arange(int(lengths.max()))
    ids = torch.randint(2, VOCABULARY, (ROWS, len(columns)), generator=torch.Generator().manual_seed(seed))
    inside = columns < lengths[:, None]
    mask = inside & (columns >= lengths[:, None] // 4)
    return Rows(torch.where(inside, ids, 0), lengths, mask.float())


@contextmanager
def make_policy(
    model: Path, tokenizer: Any, mode: str, generation: dict[str, Any]
) -> Iterator[tuple[Policy, Generation]]:
    """The framework's side, in this process."""
    config = load_config(
        {
            "output_dir": str(model.parent / "run"),
            "device": "cpu",
            "algorithm": {"name": "sft"},
            "environment": {"name": "addition"},
            "policy": {
                "model_name": str(model),
                "batching": {"mode": mode},
                "train_global_batch_size": ROWS,
                "train_micro_batch_size": MICRO_ROWS,
                "logprob_batch_size": MICRO_ROWS,
                "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY},
                "max_grad_norm": CLIP,
            },
            "generation": generation,
            "worker_group": {"name": "inline"},
        }
    )
    with Policy(config, tokenizer, create_manager(), device="cpu") as policy:
        torch.set_num_threads(1)
        yield policy, Generation(policy.worker_group, config.generation, tokenizer)


def as_batch(rows: Rows) -> BatchedDataDict[Any]:
    return BatchedDataDict(
        {
            "input_ids": rows.input_ids,
            "input_lengths": rows.lengths,
            "token_mask": rows.mask,
            "sample_mask": torch.ones(len(rows.lengths)),
        }
    )


def check_same(policy: Policy, loops: dict[str, PlainLoop], rows: Rows) -> list[str]:
    """One step on each side; a line for each comparison. Ends the program when they differ."""
    batch, lines = as_batch(rows), []
    ours = policy.get_logprobs(batch, positions="token_mask")["logprobs"]
    trained = policy.train(batch, NLLLoss())
    for name, loop in loops.items():
        theirs = loop.get_logprobs(rows) * rows.mask
        theirs[:, 0] = 0.0
        loss, norm = loop.train(rows)
        differences = {
            "log-probabilities": (float((ours - theirs).abs().max()), 1e-4),
            "loss": (abs(trained["loss"] / loss - 1.0), 1e-5),
            "gradient norm": (abs(float(trained["grad_norm"][0]) / norm - 1.0), 1e-4),
        }
        for what, (difference, allowed) in differences.items():
            lines.append(f"{what} against the {name}: {difference:.1e} (allowed {allowed:.0e})")
            if not difference <= allowed:
                sys.exit(f"the two sides do not compute the same: {lines[-1]}")
    return lines


def measure_training(model: Path, tokenizer: Any, mode: str, pairs: int) -> tuple[dict[str, Timings], list[str]]:
    """Log-probabilities and training."""
    rows = ragged_rows(seed=0)
    batch, tokens, loss = as_batch(rows), float(rows.lengths.sum()), NLLLoss()
    options = {"lr": LR, "weight_decay": WEIGHT_DECAY, "clip": CLIP}
    loops = {
        name: PlainLoop(model, order, MICRO_ROWS, **options) for name, order in ((PADDED, "padded"), (SORTED, "sorted"))
    }

    def counted(work: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            work()
            return tokens

        return run

    with make_policy(model, tokenizer, mode, {}) as (policy, _):
        checks = [f"{len(rows.lengths)} rows, {tokens:.0f} tokens, {rows.mask[:, 1:].sum():.0f} of them in the loss"]
        checks += check_same(policy, loops, rows)
        scoring = {OURS: counted(lambda: policy.get_logprobs(batch, positions="token_mask"))}
        training = {OURS: counted(lambda: policy.train(batch, loss))}
        for name, loop in loops.items():
            scoring[name] = counted(lambda loop=loop: loop.get_logprobs(rows))  # type: ignore[misc]
            training[name] = counted(lambda loop=loop: loop.train(rows))  # type: ignore[misc]
        return {"log-probabilities": interleave(scoring, pairs), "training": interleave(training, pairs)}, checks


def measure_generation(
    model: Path, tokenizer: Any, mode: str, pairs: int, tokens: int, ends: tuple[int, ...]
) -> Timings:
    """Tokens made per second: each side's samples differ, so time is compared per token made."""
    rng = random.Random(1)
    prompts = [[rng.randrange(2, VOCABULARY) for _ in range(rng.randint(8, 40))] for _ in range(PROMPTS)]
    rows = [prompt for prompt in prompts for _ in range(SAMPLES)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
    loop = PlainLoop(model, "padded", MICRO_ROWS, lr=LR, weight_decay=WEIGHT_DECAY, clip=CLIP)
    settings = {"max_new_tokens": tokens, "temperature": 1.0, "stop_token_ids": list(ends)}
    with make_policy(model, tokenizer, mode, settings) as (_, generation):
        seeds = iter(range(10**9))

        def ours() -> float:
            data = {"input_ids": ids, "input_lengths": lengths, "seeds": torch.tensor([next(seeds) for _ in rows])}
            return float(generation.generate(BatchedDataDict(data))["generation_lengths"].sum())

        def plain() -> float:
            return float(loop.generate(prompts, SAMPLES, tokens, ends, pad=0))

        return interleave({OURS: ours, PLAIN: plain}, pairs)


def report(results: dict[str, Timings]) -> str:
    """A row for each kind of work and opponent."""
    rows = [["work", "against", "rlframework tok/s", "other tok/s", "time ratio (quartiles)"]]
    for work, timings in results.items():
        for other in [name for name in timings.seconds if name != OURS]:
            speeds = [f"{timings.rate(name):,.0f}" for name in (OURS, other)]
            rows.append([work, other, *speeds, str(timings.ratio(OURS, other))])
    return table(rows)


def as_json(results: dict[str, Timings], checks: list[str], mode: str, pairs: int) -> dict[str, Any]:
    measured = {
        work: {
            "tokens_per_second": {name: timings.rate(name) for name in timings.seconds},
            "time_ratio": {name: asdict(timings.ratio(OURS, name)) for name in timings.seconds if name != OURS},
            "cpu_seconds": timings.seconds,
        }
        for work, timings in results.items()
    }
    return {"machine": machine(), "mode": mode, "pairs": pairs, "checks": checks, "results": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument(
        "--mode", choices=("padded", "dynamic", "packed"), default="packed", help="policy.batching.mode"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    arguments = parser.parse_args()
    if arguments.pairs < 1:
        parser.error("--pairs must be 1 or more")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        tokenizer = make_model(model)
        results, checks = measure_training(model, tokenizer, arguments.mode, arguments.pairs)
        ends = tuple(range(2, 2 + END_TOKENS))
        for work, tokens, stops in (
            ("generation, fixed", FIXED_TOKENS, ()),
            ("generation, ragged", RAGGED_TOKENS, ends),
        ):
            results[work] = measure_generation(model, tokenizer, arguments.mode, arguments.pairs, tokens, stops)
    found = machine()
    print(f"{found['cpu']}, {found['threads']} thread, torch {found['torch']}, transformers {found['transformers']}")
    print(*checks, "", report(results), sep="\n")
    if arguments.json:
        write_json(arguments.json, as_json(results, checks, arguments.mode, arguments.pairs))


if __name__ == "__main__":
    main()
