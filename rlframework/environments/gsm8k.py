"""GSM8K: word problems with a numeric answer, from JSONL or Parquet files or a Hugging Face data set.

math-verify compares the answers, so 1,800, 1800.00 and \\boxed{1800} are equal; `math_answers` bounds its running time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlframework.base.errors import DataError
from rlframework.config.environments import Gsm8kConfig
from rlframework.datasets.sources.opening import open_rows
from rlframework.datasets.sources.rows import Rows, check_fields
from rlframework.environments.math_answers import same_answer
from rlframework.environments.verifiable import VerifiableEnvironment, prompt_messages
from rlframework.interfaces.environment import Sample, Split

_FIELDS = {"question": str, "answer": str}
_ANSWER = re.compile(r"####\s*(\S[^\n]*?)\s*$")
_ANNOTATION = re.compile(r"<<[^<>]*>>")
_ASKED_FORM = re.compile(r"(?:^|\n)####\s*-?\$?\d[\d,]*(?:\.\d+)?\s*$")


class Gsm8kEnvironment(VerifiableEnvironment):
    """Questions whose gold answer follows `####`. Validation questions are never in the training split."""

    def __init__(self, config: Gsm8kConfig, *, seed: int) -> None:
        """Read the data. Raises a `DataError` for a missing or empty file, and for a malformed row."""
        self._config = config
        train, validation = _load(config)
        if validation is None:
            train, validation = _hold_out(train, config.validation_fraction, seed)
        validation = validation[: config.max_validation_samples]
        held_out = {_normal(sample) for sample in validation}
        kept = [sample for sample in train if _normal(sample) not in held_out][: config.max_samples]
        if train and not kept:
            raise DataError(
                "environment gsm8k: no training sample is left, because every question is also in validation"
            )
        self._samples: dict[Split, list[Sample]] = {"train": kept, "validation": validation}

    def samples(self, split: Split) -> Sequence[Sample]:
        """The samples of `split`, in the order of the data."""
        return self._samples[split]

    def score(self, sample: Sample, completion: str) -> float:
        """1.0 if the final answer of `completion` equals the gold answer, else 0.0."""
        return float(same_answer(sample.answer, completion))

    def bonus(self, sample: Sample, completion: str) -> Mapping[str, float]:
        """`format`: `format_reward` if the completion ends in `#### number`."""
        if not self._config.format_reward:
            return {}
        return {"format": self._config.format_reward * bool(_ASKED_FORM.search(completion))}


def gold_answer(answer: str) -> str | None:
    """Return the text after `####` on the last line, without thousands separators; None if there is none."""
    found = _ANSWER.search(answer)
    return found.group(1).replace(",", "") if found else None


def _load(config: Gsm8kConfig) -> tuple[list[Sample], list[Sample] | None]:
    if config.dataset is not None:
        rows, split = partial(open_rows, config.dataset, subset=config.subset), config.validation_split
        train = _samples(config, rows(split=config.train_split))
        return train, None if split is None else _samples(config, rows(split=split))
    # `rlframework evaluate` needs no training data
    train = [] if config.train_path is None else _samples(config, open_rows(config.train_path))
    return train, None if config.validation_path is None else _samples(config, open_rows(config.validation_path))


def _samples(config: Gsm8kConfig, rows: Rows) -> list[Sample]:
    return [_sample(config, row, rows.label(number), rows.where(number)) for number, row in enumerate(rows)]


def _sample(config: Gsm8kConfig, row: dict[str, Any], identity: str, where: str) -> Sample:
    gold = gold_answer(check_fields(row, _FIELDS, where)["answer"])
    if gold is None:
        raise DataError(f"{where}: the last line of 'answer' must be '#### ' followed by the result")
    completion = row["answer"] if config.calculator_annotations else _ANNOTATION.sub("", row["answer"])
    messages = prompt_messages(config.system_prompt, row["question"] + config.instruction)
    return Sample(identity, messages, gold, completion, {"question": row["question"]})


def _normal(sample: Sample) -> str:
    return " ".join(sample.metadata["question"].lower().split())


def _hold_out(samples: list[Sample], fraction: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Split off a share of the distinct questions, each with all its copies."""
    if not fraction:
        return samples, []
    questions = sorted({_normal(sample) for sample in samples})
    if len(questions) < 2:
        raise DataError(
            "environment gsm8k: a single question cannot be split; give environment.validation_path, or more data, "
            "or set environment.validation_fraction=0"
        )
    count = min(len(questions) - 1, max(1, round(len(questions) * fraction)))
    chosen = set(random.Random(f"gsm8k-{seed}").sample(questions, count))
    train = [sample for sample in samples if _normal(sample) not in chosen]
    return train, [sample for sample in samples if _normal(sample) in chosen]
