"""The whole pipeline at small scale: a random Llama learns two-digit addition, first supervised, then with GRPO.

    python examples/quickstart/run.py [--seed 0] [--output runs/quickstart] [overrides...]
    python examples/quickstart/run.py --seeds 0,1,2

Overrides are those of `rlframework train` and apply to both phases (`policy.backend=...`,
`worker_group.name=ray worker_group.num_workers=2`), or to one of them: `sft:algorithm.num_steps=200`. Accuracy is that
of greedy answers to held-out sums. Each seed has its own directory under --output: start (the random model), sft and
grpo (metrics, samples, trained model), curve.png.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PHASES = ("sft", "grpo")
RESERVED = ("seed", "output_dir", "policy.model_name")


@dataclass(frozen=True)
class Outcome:
    """Held-out accuracy before and after a phase, and its duration in seconds."""

    before: float
    after: float
    seconds: float
    history: list[dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", help="several seeds in turn, such as 0,1,2; prints a table")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as algorithm.num_steps=5")
    arguments = parser.parse_args()
    try:
        seeds = [int(seed) for seed in arguments.seeds.split(",")] if arguments.seeds else [arguments.seed]
    except ValueError:
        parser.error(f"--seeds {arguments.seeds}: give integers separated by commas, such as 0,1,2")
    for override in arguments.overrides:
        if override.partition(":")[2].partition("=")[0] in RESERVED or override.partition("=")[0] in RESERVED:
            parser.error(f"{override}: {', '.join(RESERVED)} are set by this script; use --seed and --output")

    # before torch is imported: such a small model gains little from more threads, and loses much on shared cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rlframework.base.errors import RLFrameworkError, UserError

    try:
        outcomes = {seed: run_seed(seed, arguments.output, arguments.overrides) for seed in seeds}
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RLFrameworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    if len(seeds) > 1:
        print_table(outcomes)
    return 0


def run_seed(seed: int, output: Path, overrides: Sequence[str]) -> dict[str, Outcome]:
    """Run both phases with one seed and return their outcomes."""
    from rlframework_report.curve import draw_curve

    directory = free_directory(output / f"seed-{seed}")
    model = make_start(directory / "start", seed)
    outcomes: dict[str, Outcome] = {}
    for phase in PHASES:
        outcomes[phase] = run_phase(phase, directory / phase, model, seed, overrides)
        model = directory / phase / "model"
    curve = draw_curve(
        [(phase, outcome.history) for phase, outcome in outcomes.items()],
        directory / "curve.png",
        f"Two-digit addition, seed {seed}",
        along="seconds",
    )
    for phase, outcome in outcomes.items():
        print(f"{phase:5} held-out accuracy {outcome.before:6.1%} -> {outcome.after:6.1%}   {outcome.seconds:4.0f} s")
    print(f"curve: {curve}")
    return outcomes


def run_phase(phase: str, output: Path, model: Path, seed: int, overrides: Sequence[str]) -> Outcome:
    """Run one phase, as `rlframework train PHASE.yaml ...` does."""
    from rlframework import load_config, run

    own = [f"seed={seed}", f"output_dir={quoted(output)}", f"policy.model_name={quoted(model)}"]
    started = time.monotonic()
    result = run(load_config(HERE / f"{phase}.yaml", [*for_phase(overrides, phase), *own]))
    seconds = time.monotonic() - started
    measured = [row["validation/accuracy"] for row in result.history if "validation/accuracy" in row]
    return Outcome(measured[0], measured[-1], seconds, result.history)


def make_start(path: Path, seed: int) -> Path:
    """Make a random Llama of a million parameters with a character tokenizer in `path`."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    return make_llama(path, character_tokenizer("0123456789+="), hidden=128, layers=4, heads=4, seed=seed)


def free_directory(path: Path) -> Path:
    """`path`, or `path` with a number appended if it exists: runs are never overwritten."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def for_phase(overrides: Sequence[str], phase: str) -> list[str]:
    """The overrides for all phases and those for this one."""
    chosen = []
    for override in overrides:
        head, _, rest = override.partition(":")
        if head not in PHASES:
            chosen.append(override)
        elif head == phase:
            chosen.append(rest)
    return chosen


def quoted(path: Path) -> str:
    """A path as a YAML value."""
    return "'" + str(path).replace("'", "''") + "'"


def print_table(outcomes: dict[int, dict[str, Outcome]]) -> None:
    """Print a line per seed."""
    print("\nseed  start  after sft  after grpo  gain by grpo  seconds")
    for seed, phases in outcomes.items():
        sft, grpo = phases["sft"], phases["grpo"]
        gain = 100 * (grpo.after - grpo.before)
        seconds = sft.seconds + grpo.seconds
        print(f"{seed:4}  {sft.before:5.1%}  {sft.after:9.1%}  {grpo.after:10.1%}  {gain:5.1f} points  {seconds:7.0f}")


if __name__ == "__main__":
    sys.exit(main())
