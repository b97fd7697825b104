"""The command `rlframework parity`: choose candidates and scenarios, compare, print, and return the exit code."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlframework.base.errors import ConfigError
from rlframework.base.files import check_writable
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.model_directories import model_sizes
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.manager import create_manager
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout, declared_layouts, quick_layouts
from rlframework_conformance.parity import parity_report
from rlframework_conformance.parity.algorithm_scenario import algorithm_scenarios
from rlframework_conformance.parity.compare import compare_with_oracle
from rlframework_conformance.parity.outcome import Candidate, Outcome
from rlframework_conformance.parity.recorded_step import (
    RecordedStep,
    against_run,
    read_step,
    recorded_scenario,
    require_trusted_policy,
    run_candidate,
    run_outcome,
)
from rlframework_conformance.parity.scenario import LOSSES, Scenario, random_scenario
from rlframework_conformance.sections import parse_section, section_of

if TYPE_CHECKING:
    from rlframework.plugins.manager import PluginManager

KIND = "policy_worker"
MODES = ("padded", "dynamic", "packed")
KEYS = re.compile(r"/(?=[\w.]+=)")
"""Separator before each key of a word; a slash within a value is not one."""
PRECISIONS: tuple[str, ...] = get_args(PolicyConfig.model_fields["precision"].annotation)


def parity(
    words: Sequence[str] = (),
    *,
    model: str | None = None,
    steps: int = 20,
    rows: int = 8,
    precisions: Sequence[str] = (),
    modes: Sequence[str] = (),
    checkpointing: bool = False,
    algorithms: Sequence[str] = (),
    device: str = "cpu",
    json_file: str | None = None,
    manager: PluginManager | None = None,
) -> int:
    """Compare the backends in `words`, `BACKEND[:LAYOUT][/KEY=VALUE]...`, with the oracle; return the exit code.

    Without words, all installed policy workers are compared. A backend that cannot be built is reported and the others
    continue; the command fails if it was named. `model`: a directory; by default a tiny model is created. `modes`:
    values of `policy.batching`, padded by default. `checkpointing`: repeat each with activation checkpointing.
    `algorithms`: compare the steps of these, `NAME[/KEY=VALUE]...`, in place of the losses in `LOSSES`.
    """
    _check(device, json_file, steps=steps, rows=rows)
    variants = list(_variants(modes, checkpointing))
    manager = manager or create_manager()
    candidates = _candidates(words, _known(precisions or ("float32", "bfloat16")), device, manager, quick=True)
    with _folder() as folder:
        path: Path | str = cases.model("untied", folder) if model is None else model
        vocabulary = None if model is None else _vocabulary(path)
        sizes: dict[str, Any] = {"steps": steps, "rows": rows}
        if algorithms:
            sizes |= {"vocabulary": vocabulary or _vocabulary(path), "backend": candidates[0][0].backend}
            named = [KEYS.split(word) for word in dict.fromkeys(algorithms)]
            other = cases.model("reward", folder) if model is None else path
            models = {"language": path, "score": other, "value": other}
            found = [algorithm_scenarios(name, keys, models, manager=manager, **sizes) for name, *keys in named]
            scenarios = [scenario for each in found for scenario in each]
        else:
            scenarios = [random_scenario(kind, path, vocabulary=vocabulary, **sizes) for kind in LOSSES]
        scenarios = [scenario.with_settings(variant, keys) for variant, keys in variants for scenario in scenarios]
        outcomes = list(_compare_all(scenarios, candidates, manager, folder))
        size = f"{_count(steps, 'step')} of {_count(rows, 'row')}"
        title = f"compared with the oracle: {model or 'a tiny model'}, {size}, {device}"
        settings: dict[str, Any] = {"model": model, "steps": steps, "rows": rows, "lr": scenarios[0].lr}
        settings |= {"algorithms": list(algorithms)} if algorithms else {}
        return _end(outcomes, title, json_file, settings, scenarios[0].slack)


def _compare_all(
    scenarios: Sequence[Scenario], candidates: Sequence[tuple[Candidate, bool]], manager: PluginManager, folder: Path
) -> Iterator[Outcome]:
    """Compare each candidate on each scenario; a backend that cannot be built in fp32 is reported once per layout."""
    not_built: set[tuple[str, str, str]] = set()
    for candidate, named in candidates:
        unavailable: set[str] = set()
        for scenario in scenarios:
            if (
                scenario.variant in unavailable
                or (candidate.backend, candidate.layout_and_keys, scenario.variant) in not_built
            ):
                continue
            outcome = _log_progress(
                compare_with_oracle(scenario, candidate, manager=manager, folder=folder, named=named)
            )
            yield outcome
            if not outcome.built:
                unavailable.add(scenario.variant)
                if candidate.precision == "float32":
                    not_built.add((candidate.backend, candidate.layout_and_keys, scenario.variant))


def replay(
    run: str,
    step: int,
    words: Sequence[str] = (),
    *,
    precisions: Sequence[str] = (),
    device: str = "cpu",
    json_file: str | None = None,
    trust_run: bool = False,
    manager: PluginManager | None = None,
) -> int:
    """Replay step `step` of the run in the folder `run`, print all differences, and return the exit code.

    Without words, the run's own backend and every other one that can be built are compared, with one worker. Without
    precisions, the run's and float32 are used. `trust_run`: the run may decide what code runs, see `config.trust`.
    """
    _check(device, json_file, step=step)
    recorded = read_step(Path(run), step, trust_run=trust_run)
    manager = manager or create_manager(recorded.config["plugins"])
    if not trust_run:
        require_trusted_policy(Path(run), recorded, manager)
    own = run_candidate(recorded)
    chosen = _known(precisions or ("float32", own.precision))
    candidates = _candidates(words, chosen, device, manager, quick=False)
    if not words:  # the run's own backend first; only a failure of that one is an error
        candidates = sorted(
            ((candidate, candidate.backend == own.backend) for candidate, _ in candidates),
            key=lambda entry: not entry[1],
        )
    with _folder() as folder:
        scenario = recorded_scenario(recorded)
        outcomes = [run_outcome(recorded, scenario)]
        for outcome in _compare_all([scenario], candidates, manager, folder):
            if outcome.observed is not None and outcome.candidate.precision == own.precision:
                outcome = replace(outcome, against_run=against_run(recorded, scenario, outcome.observed))
            outcomes.append(outcome)
        settings = {"run": run, "step": step, "lr": scenario.lr, "recorded_with": dict(recorded.versions)}
        return _end(outcomes, _title(recorded, scenario), json_file, settings, scenario.slack)


def _title(recorded: RecordedStep, scenario: Scenario) -> str:
    rows, steps = _count(recorded.data.size, "row"), _count(len(scenario.batches), "optimizer step")
    return (
        f"compared with the oracle: step {recorded.step} of {recorded.path.parents[1]}, {rows} in {steps}, "
        "with a fresh optimizer (its moments are not recorded)"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _check(device: str, json_file: str | None, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name} is {count}; it must be at least 1")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}; it must be cpu or cuda")
    if json_file is not None:
        check_writable(Path(json_file).absolute().parent)


def _known(precisions: Sequence[str]) -> list[str]:
    for precision in precisions:
        if precision not in PRECISIONS:
            raise ConfigError(f"--precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    return list(dict.fromkeys(precisions))


def _candidates(
    words: Sequence[str], precisions: Sequence[str], device: str, manager: PluginManager, *, quick: bool
) -> list[tuple[Candidate, bool]]:
    """Return the candidates and whether the user named them. `quick`: add a layout of two workers if none is named."""
    found: list[tuple[str, Layout, tuple[str, ...], bool]] = []
    for word in words or manager.registered(KIND):
        place, *keys = KEYS.split(word)
        name, colon, text = place.partition(":")
        record = manager.select(KIND, name).record
        if colon and not text:
            raise ConfigError(f"{word!r} has no layout after the colon: write dtensor or dtensor:data=2")
        if keys:
            section_of(record, parse_section(keys))
        if colon:
            layouts = declared_layouts(record) if text == "all" else [Layout.parse(text)]
        else:
            layouts = quick_layouts(record) if quick else [Layout()]
        found += [(name, layout, tuple(keys), bool(words)) for layout in layouts]
    return [
        (Candidate(name, layout, precision, device, keys=keys), named)
        for name, layout, keys, named in dict.fromkeys(found)
        for precision in precisions
    ]


def _variants(modes: Sequence[str], checkpointing: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each batching mode as a description and as keys of `policy`.

    The token limit is low, so that there are several microbatches.
    """
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"--batching is {mode!r}; it must be one of {', '.join(MODES)}")
    tokens = 3 * cases.WIDTH - 2
    for again in (False, True)[: 1 + checkpointing]:
        for mode in dict.fromkeys(modes) or ("padded",):
            words = [mode] * bool(modes) + ["checkpointed"] * again
            yield " ".join(words), {"batching": {"mode": mode, "tokens": tokens}, "activation_checkpointing": again}


def _vocabulary(model: Path | str) -> int:
    """Return the number of token ids that both the tokenizer and the model have."""
    tokens = len(load_tokenizer(str(model)))
    size = model_sizes(str(model))[1]
    return tokens if size is None else min(tokens, size)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rlframework-parity-") as folder:
        yield Path(folder)


def _log_progress(outcome: Outcome) -> Outcome:
    """Report a finished comparison on stderr if it is a terminal: a comparison may take minutes."""
    if sys.stderr.isatty():
        print(f"{outcome.candidate}, {outcome.scenario}: {outcome.verdict}", file=sys.stderr, flush=True)
    return outcome


def _end(
    outcomes: Sequence[Outcome], title: str, json_file: str | None, settings: Mapping[str, Any], slack: float
) -> int:
    parity_report.print_outcomes(outcomes, title)
    if json_file is not None:
        parity_report.write_json(json_file, parity_report.as_json(outcomes, settings, slack))
        print(f"written to {json_file}")
    if not any(outcome.measurements for outcome in outcomes if not outcome.is_run):
        print("nothing was compared: no backend produced any figures")
        return 1
    return int(any(outcome.fails for outcome in outcomes))
