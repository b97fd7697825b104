"""Write the best of several completions of each prompt, by the environment's reward, as rows for supervised training.

Rows are appended to `OUT.partial.jsonl` batch by batch, and the file is renamed to OUT at the end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.algorithms.recording import plain_json
from rlframework.base.errors import DataError, NotSupported
from rlframework.base.logs import ProgressCallback, printable
from rlframework.environments.reward_calls import FAILURES
from rlframework.interfaces.environment import Sample, has_episodes
from rlframework.rollout.seeds import prompt_seeds
from rlframework.rollout.single_turn import scored_turns
from rlframework_tools.evaluation.evaluate import partial_file, prompts_at_a_time, scored_samples
from rlframework_tools.evaluation.plan import BestOfPlan

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.rollout.parts import Parts


@dataclass(frozen=True)
class Candidate:
    """A completion with its reward; `usable` if it is not empty, ends by itself and could be scored."""

    text: str
    reward: float
    usable: bool


@dataclass
class BestOfResult:
    """Numbers of prompts, rows and completions, and the sums of the rewards of all completions and of the rows."""

    prompts: int = 0
    rows: int = 0
    completions: int = 0
    truncated: int = 0
    failures: int = 0
    reward: float = 0.0
    best_reward: float = 0.0

    def __str__(self) -> str:
        best, every = self.best_reward / max(self.rows, 1), self.reward / max(self.completions, 1)
        left_out = {"were cut at generation.max_new_tokens": self.truncated, "could not be scored": self.failures}
        notes = [f"{count:,} {what}" for what, count in left_out.items() if count]
        return (
            f"{self.rows:,} rows of {self.prompts:,} prompts; mean reward {best:.4g}, of all {self.completions:,} "
            f"completions {every:.4g}" + (f" ({' and '.join(notes)}; none of these is in a row)" if notes else "")
        )


def best_of(parts: Parts, plan: BestOfPlan, *, progress: ProgressCallback = lambda done, total: None) -> BestOfResult:
    """Sample `plan.candidates` completions of each prompt, score them, and write one row for each prompt to `plan.out`.

    The row has the completion with the highest reward, the first among equals, unless its reward is less than
    `plan.min_reward`. Completions that are empty, cut at `max_new_tokens` or not scored are not chosen. Completions
    depend only on the seed and the number of their prompt. `DataError` if no row is left.
    """
    if has_episodes(parts.environment):
        raise NotSupported(
            f"environment {parts.config.environment.name!r} has episodes of several turns; --best-of writes rows of "
            "single turns"
        )
    samples = scored_samples(parts, plan.split, plan.limit)
    count, result = plan.candidates, BestOfResult()
    batch_size = prompts_at_a_time(parts, count)
    progress(0, len(samples) * count)
    with partial_file(plan.partial, plan.out) as file:
        for start in range(0, len(samples), batch_size):
            batch = samples[start : start + batch_size]
            candidates = candidates_of(parts, batch, prompt_seeds(parts.config.seed, start, len(batch), count), result)
            for number, sample in enumerate(batch):
                row = best_row(sample, candidates[number * count : (number + 1) * count], plan.min_reward)
                if row is not None:
                    file.write(printable(json.dumps(plain_json(row), ensure_ascii=False, allow_nan=False)) + "\n")
                    result.rows += 1
                    result.best_reward += row["reward"]
            file.flush()
            result.prompts += len(batch)
            progress(result.completions, len(samples) * count)
        if not result.rows:
            plan.partial.unlink()
            raise DataError(f"no prompt has a completion to write: {_why(result, plan)}")
    return result


def candidates_of(parts: Parts, batch: Sequence[Sample], seeds: Tensor, result: BestOfResult) -> list[Candidate]:
    """The completions of `batch`, in which those of a prompt are adjacent; they are counted in `result`."""
    each = len(seeds) // len(batch)
    rows = [sample for sample in batch for _ in range(each)]
    output, texts, outcomes = scored_turns(parts, rows, seeds)
    truncated = output["truncated"].tolist()
    failed = [bool(outcome.metrics.get(FAILURES, 0.0)) for outcome in outcomes]
    result.completions += len(rows)
    result.truncated += sum(truncated)
    result.failures += sum(failed)
    result.reward += sum(float(outcome.reward) for outcome in outcomes)
    return [
        Candidate(text, float(outcome.reward), bool(text) and not cut and not fails)
        for text, outcome, cut, fails in zip(texts, outcomes, truncated, failed, strict=True)
    ]


def best_row(sample: Sample, candidates: Sequence[Candidate], min_reward: float | None) -> dict[str, Any] | None:
    """The row of the best of `candidates`, None if none is usable and good enough."""
    best = max((each for each in candidates if each.usable), key=lambda each: each.reward, default=None)
    if best is None or (min_reward is not None and best.reward < min_reward):
        return None
    return {
        "id": sample.id,
        "prompt": list(sample.messages),
        "completion": best.text,
        "answer": sample.answer,
        "reward": best.reward,
        "candidates": len(candidates),
    }


def _why(result: BestOfResult, plan: BestOfPlan) -> str:
    if result.truncated == result.completions:
        return "all were cut; raise --max-new-tokens"
    if plan.min_reward is not None:
        return f"none that ends by itself has a reward of at least --min-reward {plan.min_reward:g}; lower it"
    return "all are empty, cut at --max-new-tokens, or could not be scored"
