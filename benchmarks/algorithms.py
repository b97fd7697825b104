"""The policy-gradient algorithms on the quickstart's task: the same start, budget and seeds; one table and one picture.

    python benchmarks/algorithms.py [--seeds 0,1,2] [--algorithms grpo,dapo,cispo:verl] [--output runs/algorithms]
        [--json FILE] [a.b=value ...]

For each seed the quickstart's supervised phase makes one start, and each algorithm (`NAME`, or `NAME:PRESET`) trains it
with `examples/quickstart/grpo.yaml` and overrides of yours, such as `algorithm.num_steps=50`. The accuracy is that of
greedy answers to held-out sums. What is in the output directory already is not run again, and an interrupted run goes
on from its checkpoint. Runs that only FILE has stay in it, and are in the table and the picture; they must have had the
same overrides. Dynamic sampling takes more rollouts for the same number of steps: the table has them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
ALGORITHMS = "grpo,dr_grpo,dapo,gspo,cispo,rloo,reinforce_plus_plus,reinforce_plus_plus_baseline,ppo"
SECTIONS = {"ppo": ["critic={optimizer: {lr: 1.0e-3}}"]}
"""Sections that an algorithm needs besides its own."""
ACCURACY = "validation/accuracy"

History = list[dict[str, float]]
Curve = list[tuple[float, float]]
"""Steps and accuracies of a run's validations."""
Curves = dict[str, dict[int, Curve]]
"""The curve of each algorithm and seed."""


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
    found = stored(options.json, options.overrides)
    starts = {seed: start(options.output / f"seed-{seed}", seed) for seed in seeds}
    for name in options.algorithms.split(","):
        place = name.replace(":", "-")
        runs = {
            seed: history(options.output / f"seed-{seed}" / place, name, model, seed, options.overrides)
            for seed, model in starts.items()
        }
        curves = found.get(name, {}) | {seed: curve(rows) for seed, rows in runs.items()}
        found[name] = dict(sorted(curves.items()))
        print_row(name, found[name], list(runs.values()))
        store(options.json, found, options.overrides)
    print(f"picture: {draw(found, options.output / 'algorithms.png')}")


def stored(path: Path | None, overrides: Sequence[str]) -> Curves:
    """Return the curves in the file `path`, none if there is no such file; it must be of the same overrides."""
    if path is None or not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if sorted(data["overrides"]) != sorted(overrides):
        raise SystemExit(
            f"{path} has runs with the overrides {data['overrides']}, not {list(overrides)}; they cannot be compared. "
            "Give the same overrides, or another file"
        )
    return {
        name: {int(seed): [(step, value) for step, value in rows] for seed, rows in curves.items()}
        for name, curves in data["accuracy"].items()
    }


def store(path: Path | None, found: Curves, overrides: Sequence[str]) -> None:
    """Write the curves to the file `path`, if there is one."""
    if path is not None:
        from interleave import machine, write_json

        accuracy = {name: {str(seed): rows for seed, rows in curves.items()} for name, curves in found.items()}
        write_json(path, {"machine": machine(), "overrides": list(overrides), "accuracy": accuracy})


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
    """Return the metrics of a run's steps: of one that has ended, an interrupted one that goes on, or a new one."""
    from rlframework import load_config, resume, run
    from rlframework.observers.jsonl import METRICS_FILE, read_history

    if (folder / "model").exists():
        return [dict(row) for row in read_history(folder / METRICS_FILE)]
    if any((folder / "checkpoints").glob("step-*")):
        resume(folder)
        return [dict(row) for row in read_history(folder / METRICS_FILE)]
    algorithm, _, preset = name.partition(":")
    keys = [f"algorithm.name={algorithm}", f"algorithm.preset={preset or 'null'}", *SECTIONS.get(algorithm, ())]
    keys += [*overrides, f"seed={seed}"]
    places = [f"output_dir={str(folder)!r}", f"policy.model_name={str(model)!r}"]
    # a run that was stopped before its first checkpoint begins again
    return run(load_config(QUICKSTART / "grpo.yaml", [*keys, *places]), overwrite=True).history


def curve(rows: History) -> Curve:
    """Return the steps and accuracies of a run's validations."""
    return [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row]


def print_row(name: str, curves: dict[int, Curve], histories: Sequence[History]) -> None:
    """Print the accuracies before and after, by seed, and the mean; the rollouts a step are of `histories`."""
    first, last = ([points[place][1] for points in curves.values()] for place in (0, -1))
    rounds = mean(row.get("train/sampling_rounds", 1.0) for rows in histories for row in rows if row["step"] > 0)
    after = " ".join(f"{value:6.1%}" for value in last)
    print(
        f"{name:34} {mean(first):6.1%} -> {mean(last):6.1%}  by seed {after}  rollouts a step {rounds:.2f}", flush=True
    )


def draw(found: Curves, path: Path) -> Path:
    """Draw a panel for each algorithm: its seeds, their mean, and the means of the others in grey; return `path`."""
    import matplotlib.pyplot as plt
    from matplotlib import rc_context

    from rlframework_report.curve import STYLE

    means = {name: mean_curve(seeds) for name, seeds in found.items()}
    with rc_context(STYLE):
        figure, panels = plt.subplots(
            -(-len(found) // 3), 3, figsize=(9, 7), sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        for axes in panels.flat[len(found) :]:
            axes.set_visible(False)
        for axes, (name, seeds) in zip(panels.flat, found.items(), strict=False):
            for steps, values in means.values():
                axes.plot(steps, values, color="0.85", linewidth=1)
            for seed, points in sorted(seeds.items()):
                axes.plot(*zip(*points, strict=True), linewidth=1, linestyle="--", label=f"seed {seed}")
            axes.plot(*means[name], color="black", linewidth=2, label="mean")
            axes.set_title(name, fontsize=9)
        panels.flat[0].legend(fontsize=7)
        figure.suptitle("Two-digit addition: held-out accuracy over steps; grey: means of the other algorithms")
        figure.savefig(path, dpi=130)
        plt.close(figure)
    return path


def mean_curve(seeds: dict[int, Curve]) -> tuple[list[float], list[float]]:
    """Return the steps that all `seeds` have, and the mean of their accuracies at each."""
    curves = [dict(points) for points in seeds.values()]
    steps = sorted(set.intersection(*map(set, curves)))
    return steps, [mean(points[step] for points in curves) for step in steps]


if __name__ == "__main__":
    main()
