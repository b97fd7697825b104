"""How many engines keep a trainer busy, and which staleness hides generation, from the rates of a run.

Of the steps after the first one, without validations:

- T: seconds of a step in which the trainer does not wait for completions;
- E: seconds in which an engine has requests, summed over the engines;
- L: seconds that a completion of `generation.max_new_tokens` tokens takes, while an engine decodes as many as it can.

With n engines a step takes S = max(T, E / n), so E / T engines are as busy as the trainer. Generation is hidden if the
longest completion takes at most half of K steps: K >= 2 L / S (`benchmarks/asynchrony.py`). Other numbers of rows and
of trainer workers than those of the run are accounted for in proportion.

Training skips groups of equal rewards, and a step without others refits no engine either, so T is too small where such
groups are many: always with random weights, whose rewards are all 0. A measurement trains on them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from rlframework.base.errors import RLFrameworkError, UserError
from rlframework.config.sections import RunConfig
from rlframework.generation.engine_environment import ProbeError, ask
from rlframework.observers.runs import Run, TimelineRow, read_run
from rlframework.observers.timeline import LITTLE, REFITS, TRAINER
from rlframework.plugins.configure import load_config
from rlframework.plugins.hookspec import DoctorFinding
from rlframework_tools.doctor.checks import Context, broken, judged, note

MEASURED_STEPS = 4
MEASURING_SECONDS = 3600.0
"""Time limit of a measurement."""

_WAITS = ("generate", "wait")
_SHORT = (
    f"algorithm.num_steps={MEASURED_STEPS}",
    "algorithm.num_epochs=null",
    "algorithm.validation={every: 0, at_start: false, at_end: false}",
    "checkpoints={every: 0, on_interrupt: false}",
    "policy.scheduler.warmup_steps=0",
    "observers={console: false, tensorboard: false, curve: false, samples: 0}",
    "observers={wandb: false, mlflow: false, trackio: false}",
)


@dataclass(frozen=True)
class Rates:
    """The rates of a run, in `source`: T and E as above, and the seconds that a row takes for a token.

    `rows`: completions of a step. `workers`: of the trainer. `setup`: what the rates are of. `skipped`: fraction of the
    groups that were not trained on, because their rewards were equal.
    """

    source: str
    trainer: float
    engine: float
    token: float
    rows: int
    workers: int
    setup: Mapping[str, str]
    skipped: float = 0.0


def rates_of(run: Run, source: str) -> Rates:
    """Return the rates of `run`. Raises `UserError` if it has no step to take them from."""
    steps = [row for row in run.timeline[1:] if not _validates(row)]
    taken = {row.step for row in steps}
    metrics = [row for row in run.history if row["step"] in taken and "train/completion_length" in row]
    if not metrics or run.config is None:
        raise UserError(
            f"{run.path} has no rates: it needs config.yaml, and timeline.jsonl and metrics.jsonl with a step after "
            "the first that generates and has no validation"
        )
    if not any(row.get("train/global_valid_toks", 1.0) for row in metrics):
        raise UserError(
            f"{run.path} has no rates: no step was trained, because the rewards of each group were equal, as those of "
            "random weights are"
        )
    config: Mapping[str, Any] = run.config
    workers, algorithm = int(config["worker_group"]["num_workers"]), config["algorithm"]
    apart = any(REFITS in row.lanes for row in run.timeline)
    engines = int(config["generation"]["workers"]["num_workers"]) if apart else workers
    rows = int(algorithm["prompts_per_step"]) * int(algorithm["samples_per_prompt"])
    busy = mean(row.engine_seconds for row in steps)
    engine = busy if apart else busy * workers  # those inside the trainer's workers have one lane
    at_once = min(int(config["generation"]["batch_size"]), math.ceil(rows / engines))
    tokens = rows * mean(row["train/completion_length"] * row.get("train/sampling_rounds", 1.0) for row in metrics)
    return Rates(
        source=f"{source}, steps {steps[0].step} to {steps[-1].step}",
        trainer=mean(row.seconds - _waited(row) for row in steps),
        engine=engine,
        token=engine * at_once / max(1.0, tokens),
        rows=rows,
        workers=workers,
        setup=_setup(config),
        skipped=_skipped(algorithm, metrics),
    )


def rates(context: Context, config: RunConfig) -> Iterator[DoctorFinding]:
    """The ratio of engines to trainers that is expected, and the staleness that hides generation."""
    if not hasattr(config.algorithm, "samples_per_prompt"):
        return
    try:
        found = _rates(context)
    except (ProbeError, RLFrameworkError) as error:
        yield broken(f"no rates: {error}", "Give --rates the output_dir of a run that generates")
        return
    if found is None:
        text = "the ratio of engines to trainers depends on rates, which have not been measured"
        yield note(text, f"--measure runs {MEASURED_STEPS} steps; --rates RUN_DIR takes those of a run")
        return
    yield from expected(config, found)


def expected(config: RunConfig, found: Rates) -> Iterator[DoctorFinding]:
    """The findings for `config` with the rates `found`."""
    setup = _setup(config.model_dump(mode="json", by_alias=True))
    if other := [name for name, value in found.setup.items() if setup[name] != value]:
        yield note(f"the rates are of a run with another {', another '.join(other)}: {found.source}")
    if found.skipped > LITTLE:
        text = (
            f"{found.skipped:.0%} of the groups had equal rewards and were not trained on, so T is that of the others"
        )
        yield note(f"{text}: {found.source}", "--measure trains on all groups: the largest T, the fewest engines")
    algorithm: Any = config.algorithm
    share = algorithm.prompts_per_step * algorithm.samples_per_prompt / found.rows
    workers, section = config.worker_group.num_workers, config.generation.workers
    trainer, engine = found.trainer * share * found.workers / workers, found.engine * share
    yield _engines(trainer, engine, workers, None if section is None else section.num_workers, found.source)
    longest = config.generation.max_new_tokens * found.token
    step = max(trainer, engine / (1 if section is None else section.num_workers))
    yield _staleness(longest, step, getattr(algorithm, "asynchronous", None), config.generation.max_new_tokens)


def _engines(trainer: float, engine: float, workers: int, engines: int | None, source: str) -> DoctorFinding:
    ratio = engine / trainer
    text = (
        f"E / T = {engine:.3g} s / {trainer:.3g} s = {ratio:.2g} engines for {workers} trainer worker(s) keep both "
        f"busy (E: engine seconds of a step, T: the trainer's without waiting; {source})"
    )
    facts = {"engine_seconds": engine, "trainer_seconds": trainer, "engines": ratio, "trainers": workers}
    best = max(1, round(ratio))
    if engines is None:
        return note(text, f"Engines of their own: generation.workers={{group: processes, num_workers: {best}}}", facts)
    step = max(trainer, engine / engines)
    idle = {"the trainer waits": 1.0 - trainer / step, "the engines are idle": 1.0 - engine / engines / step}
    worst = max(idle, key=lambda name: idle[name])
    text += f"; with the configured {engines}, {worst} in {idle[worst]:.0%} of the time"
    return judged(engines == best or idle[worst] <= LITTLE, text, f"generation.workers.num_workers={best}", facts)


def _staleness(longest: float, step: float, section: Any, tokens: int) -> DoctorFinding:
    needed = max(1, math.ceil(2.0 * longest / step))
    text = (
        f"K >= 2 L / S = 2 * {longest:.3g} s / {step:.3g} s, so max_staleness {needed} hides generation (L: up to the "
        f"time of a completion of {tokens} tokens, S: of a step)"
    )
    facts = {"longest_seconds": longest, "step_seconds": step, "max_staleness": needed}
    remedy = f"algorithm.async.max_staleness={needed}, more rows in a step, or a smaller generation.max_new_tokens"
    if section is None:
        return note(f"{text}; without algorithm.async, training and generation take turns", remedy, facts)
    given = section.max_staleness
    return judged(given >= needed, f"{text}; configured: {given}", remedy, facts)


def _rates(context: Context) -> Rates | None:
    if context.rates is not None:
        return rates_of(read_run(Path(context.rates), context.rates), context.rates)
    if not context.measure:
        return None
    program = f"from {__name__} import print_measured; print_measured()"
    found: Mapping[str, Any] = ask(
        [sys.executable, "-c", program, str(context.source), *context.overrides], MEASURING_SECONDS
    )
    return Rates(**found)


def print_measured() -> None:
    """Measure the rates of the configuration and overrides in `sys.argv`, with a short run; print them as JSON."""
    source, *overrides = sys.argv[1:]
    print(json.dumps(asdict(measured(source, overrides))))


def measured(source: str, overrides: Sequence[str]) -> Rates:
    """Return the rates of a run of the first steps of `source`, in which training and generation take turns."""
    from rlframework.runner.launch import run

    with TemporaryDirectory(prefix="rlframework-doctor-") as folder:
        path = Path(folder) / "run"
        config = load_config(source, overrides)
        run(load_config(source, [*overrides, *_SHORT, *_typical(config), f"output_dir={path}"]))
        return rates_of(read_run(path, "measured"), f"measured now in {MEASURED_STEPS} steps")


def _typical(config: RunConfig) -> Iterator[str]:
    """The overrides that make each step of `config` do all the work that a step in the middle of the run may do."""
    algorithm = config.algorithm
    if getattr(algorithm, "asynchronous", None) is not None:
        yield "algorithm.async=null"
    if getattr(algorithm, "skip_zero_variance", False):
        yield "algorithm.skip_zero_variance=false"
    if getattr(algorithm, "critic_warmup", 0):
        yield "algorithm.critic_warmup=0"
    if config.further_policies.get("critic") is not None:
        yield "critic.scheduler.warmup_steps=0"


def _skipped(algorithm: Mapping[str, Any], metrics: Sequence[Mapping[str, float]]) -> float:
    """The fraction of the groups that was not trained on, if the algorithm skips those of equal rewards."""
    if not algorithm.get("skip_zero_variance"):
        return 0.0
    return mean(row.get("train/zero_variance_groups", 0.0) for row in metrics) / int(algorithm["prompts_per_step"])


def _validates(row: TimelineRow) -> bool:
    return any(activity == "validation" for activity, *_ in row.lanes.get(TRAINER, ()))


def _waited(row: TimelineRow) -> float:
    return sum(ended - begun for activity, begun, ended in row.lanes.get(TRAINER, ()) if activity in _WAITS)


def _setup(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a configuration, as a mapping, that rates depend on most."""
    policy, generation = config["policy"], config["generation"]
    return {
        "model": str(policy["model_name"]),
        "backend": str(policy["backend"]),
        "generation engine": str(generation["name"]),
        "device": str(config["device"]),
    }
