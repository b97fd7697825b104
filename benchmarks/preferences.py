"""Training on preference pairs: the quickstart's supervised model learns to prefer right sums to wrong ones.

    python benchmarks/preferences.py [--seeds 0,1,2] [--algorithms dpo,ipo,...] [--output runs/algorithms]
        [--json FILE] [a.b=value ...]

The pairs are of training sums only: the right answer, and one with another digit in one place. For each seed, each
algorithm trains the same model on the same pairs: that of `benchmarks/algorithms.py`, in the same folder, made if it is
missing. The table has the fraction of held-out pairs in the right order, before and after, with Wilson's 95 %
interval over the pairs of all seeds, and for language models the accuracy of greedy answers to held-out sums.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ALGORITHMS = "dpo,ipo,simpo,orpo,kto,reward_model"
PAIRS, STEPS, ROWS = 8192, 100, 128
SETTINGS: dict[str, Any] = {
    "algorithm": {"num_steps": STEPS, "validation": {"every": 25}},
    "environment": {"name": "preferences", "validation_fraction": 0.05},
    "policy": {
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": ROWS,
        "optimizer": {"lr": 2e-4, "weight_decay": 0.0},
        "scheduler": {"warmup_steps": 5},
    },
}
OF_SCORES = {"reward_model": ["policy.head=score", "policy.head_init=zeros", "policy.optimizer.lr=1e-3"]}
"""Keys of algorithms that train a head of scores, which answers nothing."""


def main() -> None:
    """Train what is missing, and print a table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as in the quickstart
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="changes to each run, such as algorithm.num_steps=50")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--algorithms", default=ALGORITHMS, help=f"default: {ALGORITHMS}")
    parser.add_argument("--output", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_intermixed_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    from algorithms import start

    starts = {seed: start(options.output / f"seed-{seed}", seed) for seed in seeds}
    found = {}
    for name in options.algorithms.split(","):
        found[name] = [
            trained(options.output / f"seed-{seed}" / "preferences", name, model, seed, options.overrides)
            for seed, model in starts.items()
        ]
        print_row(name, found[name])
    if options.json:
        from interleave import machine, write_json

        write_json(options.json, {"machine": machine(), "seeds": seeds, "results": found})


def trained(folder: Path, name: str, model: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train `model`, unless that was done before; return its pair accuracies by step, and those of its answers."""
    from rlframework import load_config, run

    place = folder / f"{name}.json"
    if not place.exists():
        data = write_pairs(folder / "pairs.jsonl", seed)
        places = [f"output_dir={str(folder / name)!r}", f"policy.model_name={str(model)!r}", f"environment.path={data}"]
        keys = [f"algorithm.name={name}", f"seed={seed}", *OF_SCORES.get(name, ()), *places, *overrides]
        rows = [row for row in run(load_config(SETTINGS, keys)).history if "validation/accuracy" in row]
        names = ("step", *(f"validation/{which}" for which in ("accuracy", "samples", "loss")))
        result: dict[str, Any] = {"pairs": [{which: row[which] for which in names if which in row} for row in rows]}
        if name not in OF_SCORES:
            result["answers"] = [answered(which, seed, folder) for which in (model, folder / name / "model")]
        place.write_text(json.dumps(result))
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def sums(seed: int) -> Any:
    """Return the environment of the quickstart."""
    from rlframework.config.environments import AdditionConfig
    from rlframework.environments.addition import AdditionEnvironment

    return AdditionEnvironment(AdditionConfig(digits=2, validation_samples=256, train_samples=PAIRS), seed=seed)


def write_pairs(path: Path, seed: int) -> Path:
    """Write a pair for each training sum: the wrong answer has another digit in one place."""
    draw = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in sums(seed).samples("train"):
            digits = list(sample.answer)
            place = draw.randrange(len(digits))
            digits[place] = draw.choice([digit for digit in "123456789" if digit != digits[place]])
            row = {"prompt": sample.messages[0]["content"], "chosen": sample.answer, "rejected": "".join(digits)}
            file.write(json.dumps(row) + "\n")
    return path


def answered(model: Path, seed: int, folder: Path) -> float:
    """Return the accuracy of the model's greedy answers to held-out sums."""
    from rlframework import build_parts, load_config
    from rlframework.interfaces.environment import Sample
    from rlframework.rollout.seeds import row_seeds
    from rlframework.rollout.step_rollouts import rollout

    source = {
        "seed": seed,
        "output_dir": str(folder / "answers"),
        "algorithm": {"name": "sft", "num_steps": 1},
        "environment": {"name": "addition", "digits": 2, "validation_samples": 256},
        "policy": {"model_name": str(model)},
        "generation": {"max_new_tokens": 5},
    }
    with build_parts(load_config(source)) as parts:
        samples: Sequence[Sample] = parts.environment.samples("validation")
        result = rollout(parts, samples, row_seeds(seed, 0, len(samples)), temperature=0.0)
    return float(result.rewards.mean())


def print_row(name: str, results: Sequence[dict[str, Any]]) -> None:
    """Print the fraction of pairs in the right order and the accuracy of answers, before and after."""
    from rlframework.algorithms.intervals import wilson

    (first, last), pairs = (
        [mean(each["pairs"][place]["validation/accuracy"] for each in results) for place in (0, -1)],
        int(sum(each["pairs"][-1]["validation/samples"] for each in results)),
    )
    low, high = wilson(round(last * pairs), pairs)
    answers = [each["answers"] for each in results if "answers" in each]
    text = " -> ".join(f"{mean(each[place] for each in answers):6.1%}" for place in (0, 1)) if answers else ""
    print(f"{name:14} pairs {first:6.1%} -> {last:6.1%} [{low:.1%}, {high:.1%}]  answers {text or '-'}", flush=True)


if __name__ == "__main__":
    main()
