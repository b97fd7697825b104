"""Is a step of an asynchronous run as short as the longer of training and generation?

`examples/grpo_asynchronous.yaml`, with random weights of which all groups are trained on, in two processes: one trainer
and one engine, a thread each. A synchronous run, in which they take turns, and an asynchronous one alternate. The first
gives the time of training and that of generation: seconds of a step in which the trainer does not wait for completions
(it includes the refit), and in which the engine has requests. The goal is a step of the second of at most 1.15 times
the longer of both. Needs two idle cores; takes about seven minutes there.

    python benchmarks/overlap.py [--rounds 3] [--steps 20] [--staleness 1] [--json FILE] [overrides...]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from interleave import machine, table, write_json

GOAL = 1.15
CONFIG = Path(__file__).parents[1] / "examples" / "grpo_asynchronous.yaml"
WARM_UP, REST = 3, 2
"""Steps at the beginning and at the end that do not count: the last ones generate nothing for later steps."""
WAITS = ("generate", "wait")
QUIET = (
    "algorithm.validation={every: 0, at_start: false, at_end: false}",
    "algorithm.skip_zero_variance=false",
    "observers={console: false, tensorboard: false, curve: false, samples: 0}",
    "policy.scheduler={name: constant, warmup_steps: 0}",
)


@dataclass(frozen=True)
class Step:
    """Mean seconds of a step, and those in which the trainer does not wait and the engine has requests."""

    seconds: float
    trainer: float
    engine: float


@dataclass(frozen=True)
class Round:
    """A synchronous and an asynchronous run, one after the other."""

    turns: Step
    both: Step

    @property
    def ratio(self) -> float:
        """The asynchronous step over the longer of training and generation in the synchronous one."""
        return self.both.seconds / max(self.turns.trainer, self.turns.engine)

    @property
    def speed(self) -> float:
        """The synchronous step over the asynchronous one."""
        return self.turns.seconds / self.both.seconds


def step_of(lines: Sequence[Any]) -> Step:
    """Return the means over the lines of a timeline, as `read_run` returns them, that count."""
    counted = lines[WARM_UP : len(lines) - REST]
    waited = [
        sum(ended - begun for activity, begun, ended in line.lanes.get("trainer", ()) if activity in WAITS)
        for line in counted
    ]
    seconds = mean(line.seconds for line in counted)
    return Step(seconds, seconds - mean(waited), mean(line.busy.get("engine 0", 0.0) for line in counted))


def measure(folder: Path, name: str, overrides: Sequence[str]) -> Step:
    """Run the configuration with `overrides` in `folder`; return its step."""
    from rlframework import load_config, run
    from rlframework.observers.runs import read_run

    run(load_config(CONFIG, [*QUIET, *overrides, f"output_dir={folder / name}"]))
    return step_of(read_run(folder / name, name).timeline)


def play(folder: Path, given: argparse.Namespace) -> list[Round]:
    """Return the rounds, each of which is printed when it is complete."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    model = make_llama(folder / "model", character_tokenizer("0123456789+="), hidden=128, layers=4, heads=4)
    common = [f"policy.model_name={model}", f"algorithm.num_steps={given.steps}", *given.overrides]
    found = []
    for number in range(given.rounds):
        turns = measure(folder, f"turns-{number}", [*common, "algorithm.async=null"])
        both = measure(folder, f"both-{number}", [*common, f"algorithm.async={{max_staleness: {given.staleness}}}"])
        found.append(Round(turns, both))
        print(f"round {number + 1}: {found[-1].ratio:.2f} x the longer of both", flush=True)
    return found


def report(rounds: Sequence[Round]) -> None:
    """Print the seconds of each round, and the medians."""
    head = ["round", "turns: step", "training", "generation", "asynchronous: step", "x the longer", "speed"]
    rows = [
        [str(number)]
        + [f"{value:.3f}" for value in (one.turns.seconds, one.turns.trainer, one.turns.engine, one.both.seconds)]
        + [f"{one.ratio:.2f}", f"{one.speed:.2f}"]
        for number, one in enumerate(rounds, start=1)
    ]
    print(table([head, *rows]))
    ratio = median(one.ratio for one in rounds)
    print(
        f"an asynchronous step takes {ratio:.2f} times the longer of training and generation (goal: at most {GOAL}: "
        f"{'met' if ratio <= GOAL else 'missed'}), and is {median(one.speed for one in rounds):.2f} times as fast as "
        f"with turns; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("steps", 20), ("staleness", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    if given.steps <= WARM_UP + REST:
        parser.error(f"--steps must be more than {WARM_UP + REST}, because the first and last ones do not count")
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a core for each process
    with tempfile.TemporaryDirectory() as folder:
        rounds = play(Path(folder), given)
    report(rounds)
    if given.json:
        each = [{"turns": vars(one.turns), "both": vars(one.both), "ratio": one.ratio} for one in rounds]
        write_json(given.json, {"machine": machine(), "staleness": given.staleness, "rounds": each})
    return 0


if __name__ == "__main__":
    sys.exit(main())
