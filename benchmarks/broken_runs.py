"""GRPO on the quickstart's task, as it should be and broken in ways that happen, side by side in one picture.

    python benchmarks/broken_runs.py [--output runs/broken] [--steps 60] [--picture FILE] [--json FILE] [a.b=value ...]

The quickstart's supervised phase makes the start of all runs. What is in the output directory already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms import History

RUNS: Mapping[str, Sequence[str]] = {
    "as it should be": (),
    "learning rate x 30": ("policy.optimizer.lr=2.0e-2",),
    "reward for length": ("~environment", "environment={name: dataset, reward: 'broken_runs:longer'}"),
}
"""Name to changes of `examples/quickstart/grpo.yaml`."""
SMALL = (
    "algorithm.prompts_per_step=32",
    "policy.train_global_batch_size=128",  # two optimizer steps on a rollout
    "algorithm.validation={at_start: false, samples: 32}",
    "algorithm.loss.kl_coef=1.0e-3",  # so that the divergence is measured
    "generation.max_new_tokens=12",
)
METRICS = (
    "reward",
    "entropy",
    "kl",
    "clip_fraction",
    "ratio",
    "grad_norm",
    "completion_length",
    "zero_variance_groups",
)


def main() -> None:
    """Run what is missing, and draw the picture."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as in the quickstart
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="changes to each run, such as algorithm.samples_per_prompt=4")
    parser.add_argument("--output", type=Path, default=Path("runs/broken"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--picture", type=Path, help="default: broken_runs.png in the output directory")
    parser.add_argument("--json", type=Path, help="also write the metrics to this file")
    options = parser.parse_intermixed_args()
    from algorithms import history, start

    model, data = start(options.output, 0), write_sums(options.output / "sums.jsonl")
    found: dict[str, History] = {}
    for name, changes in RUNS.items():
        keys = [*changes, f"algorithm.num_steps={options.steps}", *SMALL, *options.overrides]
        keys += [f"environment.path={data}"] * ("~environment" in changes)
        found[name] = history(options.output / name.replace(" ", "_"), "grpo", model, 0, keys)
        last = {metric: round(found[name][-1].get(f"train/{metric}", 0.0), 3) for metric in METRICS}
        print(f"{name:20} {last}", flush=True)
    print(f"picture: {draw(found, options.picture or options.output / 'broken_runs.png')}")
    if options.json:
        from interleave import machine

        metrics = {name: series(rows) for name, rows in found.items()}
        options.json.write_text(json.dumps({"machine": machine(), "metrics": metrics}) + "\n", encoding="utf-8")


def longer(completions: Sequence[str]) -> list[float]:
    """Reward the length of each completion, as a reward that can be won without solving the task does."""
    return [len(text) / 12 for text in completions]


def write_sums(path: Path) -> Path:
    """Write prompts of the quickstart's task, for the run with a reward of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{a}+{b}="} for a in range(0, 100, 3) for b in range(0, 100, 7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def series(rows: History) -> dict[str, list[float]]:
    """The values of each of `METRICS` by step."""
    steps = [row for row in rows if row["step"]]
    return {metric: [round(row.get(f"train/{metric}", 0.0), 5) for row in steps] for metric in METRICS}


def draw(found: Mapping[str, History], path: Path) -> Path:
    """Draw each metric of all runs over steps; return `path`."""
    import matplotlib.pyplot as plt
    from matplotlib import rc_context

    from rlframework_report.curve import STYLE

    with rc_context(STYLE):
        figure: Any
        figure, panels = plt.subplots(2, 4, figsize=(14, 6), constrained_layout=True)
        for metric, axes in zip(METRICS, panels.flat, strict=True):
            for name, rows in found.items():
                values = series(rows)[metric]
                axes.plot(range(1, len(values) + 1), values, label=name, linewidth=1.2)
            scale = "log" if metric in ("kl", "grad_norm") else "linear"
            axes.set(title=f"train/{metric}", xlabel="step", yscale=scale)
            axes.yaxis.set_major_formatter("{x:g}")
        figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(found))
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return path


if __name__ == "__main__":
    main()
