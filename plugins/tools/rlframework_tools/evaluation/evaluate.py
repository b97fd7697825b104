"""Evaluate a model: sample completions of every prompt of a split, score them, and aggregate the scores.

Completions are appended to `completions.partial.jsonl` as they finish. At the end the file is renamed to
`completions.jsonl`, and `summary.json` is written. Prompts are independent of each other, so models can be compared
prompt by prompt.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from rlframework.algorithms.input_checks import InputCheck
from rlframework.algorithms.recording import plain_json
from rlframework.algorithms.validation import pass_rates
from rlframework.base.errors import DataError, WriteError
from rlframework.base.files import write_atomically, writing
from rlframework.base.logs import ProgressCallback, printable
from rlframework.config.sections import ObserversConfig, RunConfig
from rlframework.interfaces.environment import Sample, Split
from rlframework.observers.dispatch import Observers
from rlframework.plugins.configure import resolve_device
from rlframework.plugins.hookspec import RunInfo
from rlframework.plugins.manager import create_manager
from rlframework.rollout.parts import Parts
from rlframework.rollout.result import Rollout
from rlframework.rollout.seeds import prompt_seeds
from rlframework.rollout.step_rollouts import rollout
from rlframework.runner.parts import build_generation, open_environment, open_images, require_models
from rlframework_tools.evaluation.plan import EvaluationPlan
from rlframework_tools.evaluation.report import Evaluation, comparison, summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)

COMPLETIONS, PARTIAL = "completions.jsonl", "completions.partial.jsonl"

ROWS_ON_CPU = 128
"""Largest batch of one worker on a CPU: larger ones are hardly faster and report progress less often."""


def evaluate(
    parts: Parts, plan: EvaluationPlan, out: Path, *, progress: ProgressCallback = lambda done, total: None
) -> Evaluation:
    """Generate, score and save the completions to `out`; see the module docstring.

    A split without samples, an environment that cannot score, or a prompt that the model cannot take raises `DataError`
    before anything is generated. Completions depend only on the seed, not on the number of workers or the other prompts
    (up to rounding in the forward pass).
    """
    samples = scored_samples(parts, plan.split, plan.samples)
    started = time.perf_counter()
    result = Evaluation()
    attempts, total = plan.attempts, len(samples) * plan.attempts
    batch_size = prompts_at_a_time(parts, attempts)
    progress(0, total)
    with partial_file(out / PARTIAL, out / COMPLETIONS) as file:
        for start in range(0, len(samples), batch_size):
            batch = samples[start : start + batch_size]
            rows = [sample for sample in batch for _ in range(attempts)]
            seeds = prompt_seeds(parts.config.seed, start, len(batch), attempts)
            scored = rollout(parts, rows, seeds, temperature=0.0 if plan.greedy else None)
            _add(result, scored, plan, file, parts.tokenizer)
            progress(len(result.ids) * attempts, total)
    result.seconds = time.perf_counter() - started
    return result


def scored_samples(parts: Parts, split: Split, count: int | None) -> Sequence[Sample]:
    """The first `count` samples of `split` (None: all). Raises a `DataError` as `evaluate` says."""
    name = parts.config.environment.name
    if not parts.environment.scores:
        ways = (
            "set a reward (environment.reward=MODULE:FUNCTION) or a check (environment.check=exact)"
            if hasattr(parts.config.environment, "check")
            else "give rows with answers (environment.name=dataset environment.path=FILE environment.check=exact)"
        )
        raise DataError(
            f"environment {name!r} does not score completions as configured, so it cannot be evaluated; {ways}, or "
            "name a configuration that has one (--config FILE)"
        )
    samples = parts.environment.samples(split)[:count]
    if not len(samples):
        raise DataError(f"environment {name!r} has no {split} samples; choose another --split, or give it data")
    if count is not None and len(samples) < count:
        _LOG.warning("%d samples were requested, but the %s split has only %d", count, split, len(samples))
    InputCheck(parts).prompts(split, samples)
    return samples


def prompts_at_a_time(parts: Parts, attempts: int) -> int:
    """The number of prompts, with `attempts` completions each, whose completions fit into a batch of all workers."""
    rows_of_worker = parts.config.generation.batch_size
    if resolve_device(parts.config.device) == "cpu":
        rows_of_worker = min(rows_of_worker, ROWS_ON_CPU)
    return max(1, rows_of_worker * parts.policy.data_parallel_size // attempts)


def _add(
    result: Evaluation, scored: Rollout, plan: EvaluationPlan, file: TextIO, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the completions of `scored`, in which the rows of a prompt are adjacent, and add their values."""
    attempts = plan.attempts
    lines = [
        {
            "id": sample.id,
            "attempt": row % attempts,
            "prompt": list(sample.messages),
            "completion": scored.completions[row],
            "answer": sample.answer,
            "reward": round(float(scored.rewards[row]), 6),
            "accuracy": round(float(scored.accuracies[row]), 6),
            "tokens": int(scored.completion_lengths[row]),
            "truncated": bool(scored.truncated[row]),
            **({"model_output": hidden} if (hidden := scored.model_output(row, tokenizer)) else {}),
            **({"metrics": dict(scored.parts[row])} if scored.parts and scored.parts[row] else {}),
            **({"turns": scored.turns(row, training=False)} if scored.transcripts else {}),
            **({"failure": scored.failures[row]} if scored.failures and scored.failures[row] else {}),
        }
        for row, sample in enumerate(scored.samples)
    ]
    rows = (json.dumps(plain_json(line), ensure_ascii=False, allow_nan=False, default=str) for line in lines)
    file.writelines(printable(row) + "\n" for row in rows)
    file.flush()

    def means(values: Tensor) -> list[float]:
        return values.double().view(-1, attempts).mean(1).tolist()

    columns = {
        **_own_metrics(scored, attempts),
        "accuracy": means(scored.accuracies),
        **pass_rates(scored.accuracies, attempts, plan.ks),
        "reward": means(scored.rewards),
        "truncated_fraction": means(scored.truncated),
        "completion_length": means(scored.completion_lengths),
    }
    result.add([sample.id for sample in scored.samples[::attempts]], columns)
    result.failures += int(scored.metrics.get("reward_failures", 0))
    result.failed_episodes += int(scored.failed.sum())


def _own_metrics(scored: Rollout, attempts: int) -> dict[str, list[float]]:
    """The environment's own metrics, such as several rewards by name: the mean for each prompt, or NaN without one."""
    names = dict.fromkeys(name for metrics in scored.parts for name in metrics)
    columns = {name: [metrics.get(name, float("nan")) for metrics in scored.parts] for name in names}
    return {
        name: torch.tensor(values, dtype=torch.float64).view(-1, attempts).nanmean(1).tolist()
        for name, values in columns.items()
    }


@contextmanager
def partial_file(path: Path, final: Path) -> Iterator[TextIO]:
    """Open a new file at `path` for text, and rename it to `final` when the block ends without an error."""
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                yield file
                os.fsync(file.fileno())
            os.replace(path, final)
    except (KeyboardInterrupt, WriteError):
        _LOG.warning("the completions so far are in %s", path)
        raise


def evaluate_models(
    plan: EvaluationPlan, progress: Callable[[str], AbstractContextManager[ProgressCallback]]
) -> tuple[list[Evaluation], dict[str, Any]]:
    """Evaluate each model of `plan` in turn and write its summary.

    `progress(name)` opens a progress display for a model; its context yields a callable that takes the number of
    finished completions and the total. Returns the evaluations, and as JSON values the summary of one model, or the
    summaries of several and their comparison.
    """
    results: list[Evaluation] = []
    summaries: list[dict[str, Any]] = []
    for number, (source, config) in enumerate(zip(plan.models, plan.configs, strict=True)):
        out = plan.folder(number)
        with progress(source.name) as report, build_evaluation(config) as parts:
            results.append(evaluate(parts, plan, out, progress=report))
            summaries.append(summary(source, parts, plan, results[-1]))
        _write_json(out / "summary.json", summaries[-1])
    if len(results) == 1:
        return results, summaries[0]
    compared = comparison(plan.models, results)
    _write_json(plan.out / "comparison.json", compared)
    return results, {"evaluations": summaries, "comparison": compared}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


@contextmanager
def build_evaluation(config: RunConfig) -> Iterator[Parts]:
    """Build `Parts` for an evaluation: `build_generation`, the environment that scores, and no observers."""
    require_models(config)
    manager = create_manager(config.plugins)
    observers = Observers(
        ObserversConfig(console=False, jsonl=False, tensorboard=False, curve=False), RunInfo(config, config.output_dir)
    )
    with open_environment(config, manager) as environment:
        environment.start(None)
        with build_generation(config, manager=manager) as (tokenizer, policy, generation):
            images = open_images(config, tokenizer)
            yield Parts(config, tokenizer, policy, generation, environment, observers, images=images)
