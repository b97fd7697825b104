"""The policy-gradient algorithms on the quickstart's task: the same start, budget and seeds; one table and one picture.

    python benchmarks/algorithms.py [--seeds 0,1,2] [--algorithms grpo,dapo,cispo:verl] [--output runs/algorithms]
        [--json FILE] [a.b=value ...]

For each seed the quickstart's supervised phase makes one start, and each algorithm (`NAME`, or `NAME:PRESET`) trains it
with `examples/quickstart/grpo.yaml` and overrides of yours, such as `algorithm.num_steps=50`. The accuracy is that of
greedy answers to held-out sums. What is in the output directory already is not run again, so that a comparison can be
continued. Dynamic sampling takes more rollouts for the same number of steps: the table has the samples of each run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
ALGORITHMS = "grpo,dr_grpo,dapo,gspo,cispo,rloo,reinforce_plus_plus,reinforce_plus_plus_baseline,ppo"
SECTIONS = {"ppo": ["critic={optimizer: {lr: 1.0e-3}}"]}
"""Sections that an algorithm needs besides its own."""
ACCURACY = "validation/accuracy"

History = list[dict[str, float]]


def main() -> None:
    """Run what is missing, print a table, and draw the picture."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as in the quickstart
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="changes to each algorithm's run, such as algorithm.num_steps=50")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--algorithms", default=ALGORITHMS, help=f"default: {ALGORITHMS}")
    parser.add_argument("--output", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_intermixed_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    starts = {seed: start(options.output / f"seed-{seed}", seed) for seed in seeds}
    found: dict[str, list[History]] = {}
    for name in options.algorithms.split(","):
        found[name] = [
            history(options.output / f"seed-{seed}" / name.replace(":", "-"), name, model, seed, options.overrides)
            for seed, model in starts.items()
        ]
        print_row(name, found[name])
    print(f"picture: {draw(found, options.output / 'algorithms.png')}")
    if options.json:
        from interleave import machine, write_json

        results = {name: [curve(rows) for rows in histories] for name, histories in found.items()}
        write_json(options.json, {"machine": machine(), "seeds": seeds, "accuracy": results})


def start(folder: Path, seed: int) -> Path:
    """Return the model after the quickstart's supervised phase with `seed`; run it if it is missing."""
    sys.path.insert(0, str(QUICKSTART))
    from run import make_start, run_phase  # the quickstart's script

    model = folder / "sft" / "model"
    if not model.exists():
        base = folder / "start"
        run_phase("sft", folder / "sft", base if base.exists() else make_start(base, seed), seed, [])
    return model


def history(folder: Path, name: str, model: Path, seed: int, overrides: Sequence[str]) -> History:
    """Return the metrics of a run's steps, of a run that has ended or of a new one."""
    from rlframework import load_config, run
    from rlframework.observers.jsonl import METRICS_FILE, read_history

    if (folder / "model").exists():
        return [dict(row) for row in read_history(folder / METRICS_FILE)]
    algorithm, _, preset = name.partition(":")
    keys = [f"algorithm.name={algorithm}", f"algorithm.preset={preset or 'null'}", *SECTIONS.get(algorithm, ())]
    keys += [*overrides, f"seed={seed}"]
    places = [f"output_dir={str(folder)!r}", f"policy.model_name={str(model)!r}"]
    return run(load_config(QUICKSTART / "grpo.yaml", [*keys, *places])).history


def curve(rows: History) -> list[tuple[float, float]]:
    """Return the steps and accuracies of a run's validations."""
    return [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row]


def print_row(name: str, histories: list[History]) -> None:
    """Print the accuracies before and after, by seed, and the mean."""
    first, last = ([curve(rows)[place][1] for rows in histories] for place in (0, -1))
    rounds = mean(row.get("train/sampling_rounds", 1.0) for rows in histories for row in rows if row["step"] > 0)
    after = " ".join(f"{value:6.1%}" for value in last)
    print(
        f"{name:34} {mean(first):6.1%} -> {mean(last):6.1%}  by seed {after}  rollouts a step {rounds:.2f}", flush=True
    )


def draw(found: dict[str, list[History]], path: Path) -> Path:
    """Draw the mean accuracy of each algorithm over steps, with the range of its seeds; return `path`."""
    import matplotlib.pyplot as plt
    from matplotlib import rc_context

    from rlframework.observers.curve import STYLE

    with rc_context(STYLE):
        figure: Any
        figure, axes = plt.subplots(figsize=(8, 5))
        for name, histories in found.items():
            curves = [dict(curve(rows)) for rows in histories]
            steps = sorted(set.intersection(*(set(points) for points in curves)))
            values = [[points[step] for points in curves] for step in steps]
            (line,) = axes.plot(steps, [mean(each) for each in values], label=name)
            axes.fill_between(steps, list(map(min, values)), list(map(max, values)), alpha=0.12, color=line.get_color())
        axes.set(xlabel="step", ylabel="held-out accuracy", title="Two-digit addition: mean and range of the seeds")
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=150)
        plt.close(figure)
    return path


if __name__ == "__main__":
    main()
