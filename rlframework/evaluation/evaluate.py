"""Asking a model all prompts of a split, once or several times each, and saying how good the answers are.

    with build_evaluation(config) as parts:
        result = evaluate(parts, settings, Path("out"))

Every completion goes to `completions.partial.jsonl` as it comes, which becomes `completions.jsonl` at the end, when
`summary.json` is written. Evaluating trains nothing and keeps nothing between prompts, so models can be compared prompt
by prompt.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
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

COMPLETIONS, PARTIAL, SUMMARY = "completions.jsonl", "completions.partial.jsonl", "summary.json"

_FILE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EEXIST)

ROWS_ON_CPU = 128
"""Rows of one worker that are answered together on a CPU: more are hardly faster, and tell of themselves later."""

Progress = Callable[[int, int], None]
"""Called with the completions that are done, and all there will be."""


@dataclass(frozen=True)
class EvaluationSettings:
    """What is asked: the first `samples` prompts (None: all) of `split`, `attempts` times each."""

    split: Split = "validation"
    samples: int | None = None
    attempts: int = 1
    ks: tuple[int, ...] = ()
    greedy: bool = True


@dataclass
class Evaluation:
    """What came of it. `values`: for each metric one value a prompt, in the order of `ids`.

    `failures`: answers that a reward function of the user's own failed on.
    """

    ids: list[str] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    failures: int = 0
    seconds: float = 0.0


def settle(
    config: RunConfig,
    *,
    split: Split = "validation",
    samples: int | None = None,
    attempts: int | None = None,
    ks: Sequence[int] = (),
    sampled: bool = False,
) -> EvaluationSettings:
    """Settings that go together, or a `ConfigError`.

    Without `attempts`, as many as the greatest of `ks` needs. One attempt is greedy unless `sampled` is true; several
    are sampled at `generation.temperature`. Without `ks`, pass@k is told for powers of two and for all attempts.
    """
    attempts = attempts or max(ks, default=1)
    if wrong := [k for k in ks if not 1 <= k <= attempts]:
        raise ConfigError(f"--k {wrong[0]}: pass@k is told from the attempts, of which there are {attempts}: 1 to that")
    temperature = config.generation.temperature
    if attempts > 1 and temperature == 0.0:
        raise ConfigError(
            f"{attempts} attempts at temperature 0 are {attempts} times the same answer; give --temperature, such as 1"
        )
    if not ks and attempts > 1:
        ks = [*(k for k in (2**power for power in range(20)) if k < attempts), attempts]
    greedy = attempts == 1 and (not sampled or temperature == 0.0)
    return EvaluationSettings(split, samples, attempts, tuple(sorted(set(ks))), greedy)


def evaluate(
    parts: Parts, settings: EvaluationSettings, out: Path, *, progress: Progress = lambda done, total: None
) -> Evaluation:
    """Ask, judge and save every completion to `out`; see the module.

    A split without samples, answers that cannot be judged, or a prompt that the model cannot take, is a `DataError`
    before the first is asked. The same seed gives the same completions, however many workers there are and whatever
    else is asked (up to the rounding of the forward).
    """
    samples = _samples(parts, settings)
    started = time.perf_counter()
    result = Evaluation()
    total = len(samples) * settings.attempts
    together = max(1, _rows_together(parts) // settings.attempts)
    progress(0, total)
    with _growing(out) as file:
        for start in range(0, len(samples), together):
            some = list(samples[start : start + together])
            _add(result, some, _asked(parts, settings, some, start), settings, file)
            progress(len(result.ids) * settings.attempts, total)
    result.estimates = {name: estimate(values) for name, values in result.values.items()}
    result.seconds = time.perf_counter() - started
    return result


def differences(first: Evaluation, other: Evaluation) -> dict[str, Estimate]:
    """How much more `other` has than `first` of each metric, over the same prompts."""
    if first.ids != other.ids:
        raise DataError("the models were not asked the same prompts: the data changed in between. Evaluate again")
    return {name: paired_difference(values, other.values[name]) for name, values in first.values.items()}


def plain(estimates: dict[str, Estimate]) -> dict[str, dict[str, Any]]:
    """For JSON, which knows no NaN."""
    return {name: {key: json_value(value) for key, value in asdict(e).items()} for name, e in estimates.items()}


def json_value(value: Any) -> Any:
    """`value`, or its name where it is a number that is not finite."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_out(out: Path) -> None:
    """A `UserError` where `out` could not be written to, or holds something."""
    try:
        check_writable(out)
    except UserError as error:
        raise UserError(f"{error} (--out DIR)") from error
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty, and nothing in it is overwritten. Take another folder, or remove it")


def _samples(parts: Parts, settings: EvaluationSettings) -> Sequence[Sample]:
    name = parts.config.environment.name
    if not parts.environment.scores:
        raise DataError(
            f"environment {name!r} cannot judge answers as it is set up, so there is nothing to evaluate by; choose "
            "another one (environment.name=...), or say how answers are checked (environment.check=exact)"
        )
    samples = parts.environment.samples(settings.split)[: settings.samples]
    if not len(samples):
        raise DataError(f"environment {name!r} has no {settings.split} samples; take another --split, or give it data")
    InputCheck(parts).prompts(settings.split, samples)
    return samples


def _rows_together(parts: Parts) -> int:
    size = parts.config.generation.batch_size
    if resolve_device(parts.config.device) == "cpu":
        size = min(size, ROWS_ON_CPU)
    return size * parts.policy.data_parallel_size


def _asked(parts: Parts, settings: EvaluationSettings, samples: Sequence[Sample], start: int) -> Rollout:
    """All attempts at `samples`, of which the first is the split's `start`-th; those of a prompt side by side."""
    rows = [sample for sample in samples for _ in range(settings.attempts)]
    # by prompt: an attempt has the same seed however many prompts and attempts there are
    numbers = range(start, start + len(samples))
    seeds = torch.cat([row_seeds(parts.config.seed, number, settings.attempts) for number in numbers])
    return rollout(parts, rows, seeds, greedy=settings.greedy)


def _add(
    result: Evaluation, samples: Sequence[Sample], asked: Rollout, settings: EvaluationSettings, file: TextIO
) -> None:
    columns = {
        "accuracy": asked.accuracies.tolist(),
        "reward": asked.rewards.tolist(),
        "truncated_fraction": asked.truncated.float().tolist(),
        "completion_length": asked.completion_lengths.float().tolist(),
    }
    result.failures += int(asked.metrics.get("reward_failures", 0))
    attempts = settings.attempts
    for number, sample in enumerate(samples):
        rows = range(number * attempts, (number + 1) * attempts)
        _write(file, [_line(sample, asked, row, row - rows.start) for row in rows])
        result.ids.append(sample.id)
        right = sum(columns["accuracy"][row] >= 1.0 for row in rows)
        told = {name: sum(values[row] for row in rows) / attempts for name, values in columns.items()}
        passed = {f"pass@{k}": pass_at_k(attempts, right, k) for k in settings.ks}
        for name, value in ({"accuracy": told.pop("accuracy")} | passed | told).items():
            result.values.setdefault(name, []).append(value)


def _line(sample: Sample, asked: Rollout, row: int, attempt: int) -> dict[str, Any]:
    return {
        "id": sample.id,
        "attempt": attempt,
        "prompt": list(sample.messages),
        "completion": asked.completions[row],
        "answer": sample.answer,
        "reward": json_value(round(float(asked.rewards[row]), 6)),
        "accuracy": json_value(round(float(asked.accuracies[row]), 6)),
        "tokens": int(asked.completion_lengths[row]),
        "truncated": bool(asked.truncated[row]),
    }


def _write(file: TextIO, rows: Sequence[dict[str, Any]]) -> None:
    file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    file.flush()


@contextmanager
def _growing(out: Path) -> Iterator[TextIO]:
    """The file that completions go to. It gets its name when all are there; what a failure leaves keeps the other."""
    path = out / PARTIAL
    try:
        out.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            yield file
            os.fsync(file.fileno())
        os.replace(path, out / COMPLETIONS)
    except KeyboardInterrupt:
        print(f"what was answered until now lies in {path}", file=sys.stderr, flush=True)
        raise
    except OSError as error:
        if error.errno not in _FILE_ERRORS:  # it is somebody else's
            raise
        raise UserError(f"cannot write {path}: {error.strerror}; what is there is kept") from error
