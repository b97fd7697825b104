"""Speed of generation compared with `model.generate` of transformers on the same work.

    python benchmarks/generation.py [--pairs 7] [--json FILE]

Work: a random Llama of 4 layers x 256, vocabulary 2,048, fp32, one thread; 8 prompts x 8 samples at temperature 1, once
with 48 tokens per row (no end-of-sequence token), once with rows that end at random (48 of the 2,048 tokens end a row,
at most 96 tokens).

Interleaved rounds, CPU time of the process; below 1 rlframework is faster. The sides differ: `model.generate` computes
each prompt once per sample, continues rows that have ended, and returns no log-probabilities; the framework returns
those of the sampled tokens. Tokens after a row's end count for neither side.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from interleave import Timings, interleave, machine, table, write_json
from work import VOCABULARY, make_loop, make_model, make_policy

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.generation.driver import Generation

PROMPTS, SAMPLES, TOKENS, END_TOKENS = 8, 8, 48, 48
OURS, PLAIN = "rlframework", "model.generate"


def measure_generation(
    model: Path, tokenizer: Any, pairs: int, samples: int, tokens: int, ends: tuple[int, ...]
) -> Timings:
    """Measure tokens per second: the sides sample different tokens, so times are compared per generated token."""
    rng = random.Random(1)
    prompts = [[rng.randrange(2, VOCABULARY) for _ in range(rng.randint(8, 40))] for _ in range(PROMPTS)]
    rows = [prompt for prompt in prompts for _ in range(samples)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
    settings = {"max_new_tokens": tokens, "temperature": 1.0, "stop_token_ids": list(ends)}
    with make_loop(model, "padded") as loop, make_policy(model, tokenizer, "auto", generation=settings) as policy:
        generation = Generation(policy, tokenizer)
        seeds = iter(range(10**9))

        def ours() -> float:
            data = {"input_ids": ids, "input_lengths": lengths, "seeds": torch.tensor([next(seeds) for _ in rows])}
            return float(generation.generate(BatchedDataDict(data))["generation_lengths"].sum())

        def plain() -> float:
            return float(loop.generate(prompts, samples, tokens, ends, pad=0))

        return interleave({OURS: ours, PLAIN: plain}, pairs)


def report(results: dict[str, Timings]) -> str:
    """A row per workload and opponent."""
    rows = [["work", "against", "rlframework tok/s", "other tok/s", "time ratio (quartiles)"]]
    for work, timings in results.items():
        for other in [name for name in timings.seconds if name != OURS]:
            speeds = [f"{timings.rate(name):,.0f}" for name in (OURS, other)]
            rows.append([work, other, *speeds, str(timings.ratio(OURS, other))])
    return table(rows)


def as_json(results: dict[str, Timings], given: argparse.Namespace) -> dict[str, Any]:
    measured = {
        work: {
            "tokens_per_second": {name: timings.rate(name) for name in timings.seconds},
            "time_ratio": {name: asdict(timings.ratio(OURS, name)) for name in timings.seconds if name != OURS},
            "cpu_seconds": timings.seconds,
        }
        for work, timings in results.items()
    }
    settings = {"pairs": given.pairs, "samples": given.samples, "tokens": given.tokens}
    return {"machine": machine(), **settings, "results": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"per prompt, of {PROMPTS} prompts ({SAMPLES})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"per sample, ragged ones twice ({TOKENS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as JSON")
    arguments = parser.parse_args()
    if min(arguments.pairs, arguments.samples, arguments.tokens) < 1:
        parser.error("--pairs, --samples and --tokens must be 1 or more")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        tokenizer = make_model(model)
        results: dict[str, Timings] = {}
        ends = tuple(range(2, 2 + END_TOKENS))
        for work, tokens, stops in (
            ("generation, fixed", arguments.tokens, ()),
            ("generation, ragged", 2 * arguments.tokens, ends),
        ):
            given = (arguments.pairs, arguments.samples, tokens, stops)
            results[work] = measure_generation(model, tokenizer, *given)
    found = machine()
    print(f"{found['cpu']}, {found['threads']} thread, torch {found['torch']}, transformers {found['transformers']}")
    print("", report(results), sep="\n")
    if arguments.json:
        write_json(arguments.json, as_json(results, arguments))


if __name__ == "__main__":
    main()
