"""Evaluate a model: sample completions of every prompt of a split, score them, and aggregate the scores.

    with build_evaluation(config) as parts:
        result = evaluate(parts, settings, Path("out"))

Completions are appended to `completions.partial.jsonl` as they finish. At the end the file is renamed to
`completions.jsonl`, and `summary.json` is written. Prompts are independent of each other, so models can be compared
prompt by prompt.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from rlframework.configure import resolve_device
from rlframework.errors import ConfigError, DataError, UserError
from rlframework.evaluation.statistics import Estimate, estimate, paired_difference, pass_at_k
from rlframework.files import check_writable
from rlframework.rollout.rollout import Rollout, rollout, row_seeds
from rlframework.training.input_checks import InputCheck

if TYPE_CHECKING:
    from rlframework.algorithm import Parts
    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.environment import Sample, Split

_LOG = logging.getLogger(__name__)

COMPLETIONS, PARTIAL, SUMMARY = "completions.jsonl", "completions.partial.jsonl", "summary.json"

_FILE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EEXIST)

ROWS_ON_CPU = 128
"""Largest batch of one worker on a CPU: larger ones are hardly faster and report progress less often."""

Progress = Callable[[int, int], None]
"""Called with the number of finished completions and the total."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Which prompts to evaluate (the first `samples` of `split`, None: all), with `attempts` completions each."""

    split: Split = "validation"
    samples: int | None = None
    attempts: int = 1
    ks: tuple[int, ...] = ()
    greedy: bool = True


@dataclass
class Evaluation:
    """The result of an evaluation. `values` has one value per prompt for each metric, in the order of `ids`.

    `failures` counts the completions on which the user's reward function failed.
    """

    ids: list[str] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    failures: int = 0
    seconds: float = 0.0


def evaluation_settings(
    config: RunConfig,
    *,
    split: Split = "validation",
    samples: int | None = None,
    attempts: int | None = None,
    ks: Sequence[int] = (),
    sampled: bool = False,
) -> EvaluationSettings:
    """Fill in defaults and check that the settings are consistent, else raise `ConfigError`.

    `attempts` defaults to the largest of `ks`. A single attempt is greedy unless `sampled` is true; several are sampled
    at `generation.temperature`. `ks` defaults to the powers of two below `attempts`, and `attempts` itself.
    """
    attempts = attempts or max(ks, default=1)
    if wrong := [k for k in ks if not 1 <= k <= attempts]:
        raise ConfigError(f"--k {wrong[0]}: with {attempts} attempts, k must be from 1 to {attempts}; raise --attempts")
    temperature = config.generation.temperature
    if attempts > 1 and temperature == 0.0:
        raise ConfigError(
            f"--attempts {attempts}: all attempts at temperature 0 are the same; give --temperature, such as 1"
        )
    if not ks and attempts > 1:
        ks = [*(k for k in (2**power for power in range(20)) if k < attempts), attempts]
    greedy = attempts == 1 and (not sampled or temperature == 0.0)
    return EvaluationSettings(split, samples, attempts, tuple(sorted(set(ks))), greedy)


def evaluate(
    parts: Parts, settings: EvaluationSettings, out: Path, *, progress: Progress = lambda done, total: None
) -> Evaluation:
    """Generate, score and save the completions to `out`; see the module docstring.

    A split without samples, an environment that cannot score, or a prompt that the model cannot take raises `DataError`
    before anything is generated. Completions depend only on the seed, not on the number of workers or the other prompts
    (up to rounding in the forward pass).
    """
    samples = _samples(parts, settings)
    started = time.perf_counter()
    result = Evaluation()
    total = len(samples) * settings.attempts
    batch_size = max(1, _max_rows(parts) // settings.attempts)
    progress(0, total)
    with _completions_file(out) as file:
        for start in range(0, len(samples), batch_size):
            batch = list(samples[start : start + batch_size])
            _add(result, batch, _generate(parts, settings, batch, start), settings, file)
            progress(len(result.ids) * settings.attempts, total)
    result.estimates = {name: estimate(values) for name, values in result.values.items()}
    result.seconds = time.perf_counter() - started
    return result


def differences(first: Evaluation, other: Evaluation) -> dict[str, Estimate]:
    """The paired difference `other - first` of each metric. Both must have evaluated the same prompts."""
    if first.ids != other.ids:
        raise DataError(
            "the models were evaluated on different prompts, because the data changed in between. Evaluate again"
        )
    return {name: paired_difference(values, other.values[name]) for name, values in first.values.items()}


def plain(estimates: dict[str, Estimate]) -> dict[str, dict[str, Any]]:
    """The estimates for JSON, which has no NaN."""
    return {name: {key: json_value(value) for key, value in asdict(e).items()} for name, e in estimates.items()}


def json_value(value: Any) -> Any:
    """Return `value`; a non-finite number as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_out(out: Path) -> None:
    """Raise `UserError` if `out` is not writable or not empty."""
    try:
        check_writable(out)
    except UserError as error:
        raise UserError(f"{error} (--out DIR)") from error
    if out.exists() and any(out.iterdir()):
        raise UserError(
            f"--out {out}: the folder is not empty, and nothing is overwritten. Give another folder, or empty this one"
        )


def _samples(parts: Parts, settings: EvaluationSettings) -> Sequence[Sample]:
    name = parts.config.environment.name
    if not parts.environment.scores:
        raise DataError(
            f"environment {name!r} does not score completions as configured, so it cannot be evaluated; choose another "
            "one (environment.name=...), or set how answers are checked (environment.check=exact)"
        )
    samples = parts.environment.samples(settings.split)[: settings.samples]
    if not len(samples):
        raise DataError(
            f"environment {name!r} has no {settings.split} samples; choose another --split, or give it data"
        )
    InputCheck(parts).prompts(settings.split, samples)
    return samples


def _max_rows(parts: Parts) -> int:
    size = parts.config.generation.batch_size
    if resolve_device(parts.config.device) == "cpu":
        size = min(size, ROWS_ON_CPU)
    return size * parts.policy.data_parallel_size


def _generate(parts: Parts, settings: EvaluationSettings, samples: Sequence[Sample], start: int) -> Rollout:
    """Generate all attempts at `samples`, which begin at index `start` of the split; a prompt's rows are adjacent."""
    rows = [sample for sample in samples for _ in range(settings.attempts)]
    # seeded by prompt, so that the seeds do not depend on the number of prompts and attempts
    numbers = range(start, start + len(samples))
    seeds = torch.cat([row_seeds(parts.config.seed, number, settings.attempts) for number in numbers])
    return rollout(parts, rows, seeds, greedy=settings.greedy)


def _add(
    result: Evaluation, samples: Sequence[Sample], scored: Rollout, settings: EvaluationSettings, file: TextIO
) -> None:
    columns = {
        "accuracy": scored.accuracies.tolist(),
        "reward": scored.rewards.tolist(),
        "truncated_fraction": scored.truncated.float().tolist(),
        "completion_length": scored.completion_lengths.float().tolist(),
    }
    result.failures += int(scored.metrics.get("reward_failures", 0))
    attempts = settings.attempts
    for number, sample in enumerate(samples):
        rows = range(number * attempts, (number + 1) * attempts)
        _write(file, [_line(sample, scored, row, row - rows.start) for row in rows])
        result.ids.append(sample.id)
        right = sum(columns["accuracy"][row] >= 1.0 for row in rows)
        means = {name: sum(values[row] for row in rows) / attempts for name, values in columns.items()}
        passed = {f"pass@{k}": pass_at_k(attempts, right, k) for k in settings.ks}
        for name, value in ({"accuracy": means.pop("accuracy")} | passed | means).items():
            result.values.setdefault(name, []).append(value)


def _line(sample: Sample, scored: Rollout, row: int, attempt: int) -> dict[str, Any]:
    return {
        "id": sample.id,
        "attempt": attempt,
        "prompt": list(sample.messages),
        "completion": scored.completions[row],
        "answer": sample.answer,
        "reward": json_value(round(float(scored.rewards[row]), 6)),
        "accuracy": json_value(round(float(scored.accuracies[row]), 6)),
        "tokens": int(scored.completion_lengths[row]),
        "truncated": bool(scored.truncated[row]),
    }


def _write(file: TextIO, rows: Sequence[dict[str, Any]]) -> None:
    file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    file.flush()


@contextmanager
def _completions_file(out: Path) -> Iterator[TextIO]:
    """Open the partial file of completions, and rename it when the block ends without an error."""
    path = out / PARTIAL
    try:
        out.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            yield file
            os.fsync(file.fileno())
        os.replace(path, out / COMPLETIONS)
    except KeyboardInterrupt:
        _LOG.warning("the completions so far are in %s", path)
        raise
    except OSError as error:
        if error.errno not in _FILE_ERRORS:  # not about this file
            raise
        raise UserError(f"cannot write {path}: {error.strerror}. The completions so far are kept") from error
