"""Log-probabilities of a generation engine compared with the trainer's, and the weights of the importance correction.

    python benchmarks/mismatch.py CONFIG [a.b=value ...] [--engine NAME] [--dtypes float32,bfloat16] [--json FILE]

Runs the GRPO configuration CONFIG once for each dtype of the engine, in a generation worker of its own, with a trainer
in fp32 and `importance_correction: truncated`. Validation is off, so that all time goes into steps. Metrics are those
of the run: means over its steps, and the maximum over all tokens. The differences come from the engine's arithmetic
only, because the weights of a step's rollout are those that the step starts from.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from interleave import machine, table, write_json

from rlframework import load_config, run
from rlframework.policy.microbatching import average_metrics

METRICS = {
    "generation_logprob_difference": "mean difference",
    "generation_logprob_difference_max": "largest",
    "generation_logprob_beyond_fraction": "beyond the bound",
    "generation_kl": "KL",
    "importance_weight": "mean weight",
    "importance_truncated_fraction": "weights at the cap",
}


def measure(config: str, overrides: list[str], engine: str, dtype: str) -> dict[str, float]:
    """Return the means over the steps of a run with `engine` in `dtype`."""
    own = [
        f"generation.name={engine}",
        f"generation.refit.dtype={dtype}",
        "generation.workers.num_workers=1",
        "policy.precision=float32",
        "algorithm.loss.importance_correction=truncated",
        "algorithm.validation={every: 0, at_start: false, at_end: false}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        result = run(load_config(config, [*overrides, *own, f"output_dir={folder}/run"]))
    rows = [row for row in result.history if "train/generation_kl" in row]  # not those whose groups are all constant
    found = average_metrics(rows)
    return {name: found[f"train/{name}"] for name in METRICS} | {
        "steps": len(rows),
        "tokens": sum(row["train/global_valid_toks"] for row in rows),
    }


def main() -> None:
    """Measure, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="configuration of a GRPO run")
    parser.add_argument("overrides", nargs="*", help="changes to it, such as algorithm.num_steps=8")
    parser.add_argument("--engine", default="transformers", help="generation.name (default: transformers)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the engine (default: float32,bfloat16)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_intermixed_args()
    found = {
        dtype: measure(options.config, options.overrides, options.engine, dtype) for dtype in options.dtypes.split(",")
    }
    rows = [[dtype, *(f"{values[name]:.4g}" for name in (*METRICS, "tokens"))] for dtype, values in found.items()]
    print(table([[options.engine, *METRICS.values(), "tokens"], *rows]))
    if options.json is not None:
        settings = {"config": options.config, "overrides": options.overrides, "engine": options.engine}
        write_json(options.json, {"machine": machine(), "settings": settings, "dtypes": found})


if __name__ == "__main__":
    main()
