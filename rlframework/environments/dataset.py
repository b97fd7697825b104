"""Your own data: questions, prompts, conversations or texts from files or the hub, for training and scoring.

Samples are made on access. Data of up to `SCANNED` rows is scanned once at the start: a row of unknown shape is an
error before any work, rows without an answer are known (`LazySamples.without_answer`), and no validation prompt is
trained on, ignoring case and spacing. Of larger data only `PROBED` rows are checked; validation is then held out by
row, and copies of its rows may stay in training.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from rlframework.base.errors import DataError, ImageError
from rlframework.config.environments import DatasetConfig
from rlframework.datasets.chat.rendering import has_answer
from rlframework.datasets.conversations import conversation_of, with_texts
from rlframework.datasets.loader import Source, shuffled
from rlframework.datasets.nested_columns import VERL_COLUMN, is_column
from rlframework.datasets.pictures import ImageAddresses, decoded, log_left_out, reader_of
from rlframework.datasets.sources.opening import open_rows, open_splits
from rlframework.datasets.sources.rows import JoinedRows, Rows
from rlframework.environments.counted_failures import require_few_failures
from rlframework.environments.math_answers import is_comparable, same_answer
from rlframework.environments.reward_arguments import EmptyColumns
from rlframework.environments.verifiable import VerifiableEnvironment
from rlframework.environments.weighted_rewards import reward_of
from rlframework.interfaces.environment import Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message, pictures_of, text_of

_LOG = logging.getLogger(__name__)

SCANNED = 100_000
PROBED = 2_000


@dataclass(frozen=True, eq=False)
class LazySamples(Sequence[Sample]):
    """The samples of the rows `numbers` of `rows`, made by `make` on access. A slice is lazy too.

    `unanswered`: the numbers of rows known to have no assistant turn. `mixture`: the sources of the samples, in order,
    for a loader that draws from each by its weight; none for a slice.
    """

    rows: Rows
    numbers: npt.NDArray[np.int64]
    make: Callable[[Rows, int], Sample]
    unanswered: Sequence[int] = ()
    mixture: Sequence[Source] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"<{len(self)} samples>"

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> LazySamples: ...
    def __getitem__(self, index: int | slice) -> Sample | LazySamples:
        if isinstance(index, slice):
            return replace(self, numbers=self.numbers[index], mixture=())
        return self.make(self.rows, int(self.numbers[index]))

    def sizes(self) -> npt.NDArray[np.int64]:
        """Approximate number of characters of each sample, `[n]` int64, without making it."""
        return self.rows.sizes()[self.numbers]

    def without_answer(self) -> npt.NDArray[np.int64]:
        """Indices of the samples known to have no assistant turn, in order, int64."""
        return np.flatnonzero(np.isin(self.numbers, np.array(self.unanswered, np.int64)))


class DatasetEnvironment(VerifiableEnvironment):
    """The samples that `DatasetConfig` describes. With `check: none` and no reward, answers cannot be scored.

    `counts_calls`: whether `step` applies `max_reward_failures` to the answers of each call. False where a call has
    only some of the answers that count together; the caller then calls `require_scored` with the outcomes of all.
    """

    counts_calls = True

    def __init__(self, config: DatasetConfig, *, seed: int) -> None:
        """Open the data. Raises a `DataError` that names file and row if it cannot be read as configured."""
        self._config = config
        self._unanswered: list[int] = []
        self._warnings: dict[Split, list[str]] = {"train": [], "validation": []}
        addresses = ImageAddresses()
        self._pictures = {held_out: reader_of(config, addresses, validation=held_out) for held_out in (False, True)}
        train, validation = self._open()
        self._validation = validation
        self.scores = config.scores_completions
        self._reward = reward_of(config)
        numbers, keys = self._keys(train)
        if validation is None:
            kept, held_out = self._hold_out(keys, seed)
            held_out = numbers[held_out]
            validation = train
        else:
            known = len(train) <= SCANNED  # else keys are row numbers
            held_out, out = self._scan(validation, np.arange(len(validation))[: config.max_validation_samples])
            kept = np.flatnonzero(~np.isin(keys, np.array(out if known else [], np.uint64)))
        kept = numbers[kept]
        if not len(kept):
            raise DataError(
                f"{config.source}: no training row is left, because every prompt is also in validation. Rows are "
                "compared by their prompts alone; give the two different prompts"
            )
        if validation is not train and len(kept) < len(numbers):
            self._warnings["train"].append(
                f"{len(numbers) - len(kept)} of {len(numbers)} rows of {config.source} are left out of training, "
                "because their prompts are also in validation"
            )
        kept, mixture = self._limited(train, kept)
        self._samples: dict[Split, Sequence[Sample]] = {
            "train": LazySamples(train, kept, self._sample, self._unanswered, mixture),
            "validation": LazySamples(validation, held_out, self._sample),
        }

    def samples(self, split: Split) -> Sequence[Sample]:
        """The samples of `split`, in the order of the data; `id` is the file and line, or the split and row.

        `metadata` is the whole row as it was read, with all its columns.
        """
        while self._warnings[split]:  # those of training are not for an evaluation, which trains on nothing
            _LOG.warning("%s", self._warnings[split].pop(0))
        return self._samples[split]

    def score(self, sample: Sample, completion: str) -> float:
        """1.0 if the answer is the gold answer: as stripped text, or by math-verify, as `check` says. Else 0.0."""
        if self._config.check == "math":
            return float(same_answer(sample.answer, completion))
        return float(completion.strip() == sample.answer.strip())

    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """See `VerifiableEnvironment.step`. Raises a `DataError` if there is neither a reward function nor a check."""
        if not self.scores:
            raise DataError(
                "environment.check is none, so answers cannot be scored; set it to exact or math, or set "
                "environment.reward to a function of your own"
            )
        if self._reward is None:
            return super().step(samples, conversations)
        outcomes = self._reward.score(samples, self.answers(samples, conversations), counted=self.counts_calls)
        if self.counts_calls:
            self.require_scored(outcomes)
        return outcomes

    def require_scored(self, outcomes: Sequence[StepOutcome]) -> None:
        """Raise `UserError` if more than `max_reward_failures` of the answers with `outcomes` could not be scored."""
        require_few_failures(outcomes, self._config.max_reward_failures)

    def start(self, folder: Path | None) -> None:
        """See `Environment.start`. Raises a `ConfigError` if a judge does not answer."""
        if self._reward is not None:
            self._reward.start(folder)

    def shutdown(self) -> None:
        """End the process of the user's reward function."""
        if self._reward is not None:
            self._reward.close()

    def _open(self) -> tuple[Rows, Rows | None]:
        """The rows to train on, and those given for validation, if any."""
        config, train = self._config, None
        if config.mixture is not None:
            sources = sorted(config.mixture.items())  # the order of the section changes nothing
            train = JoinedRows(
                {
                    name: open_rows(at.path, subset=at.subset, split=at.split, key=f"environment.mixture.{name}.path")
                    for name, at in sources
                }
            )
        return open_splits(
            config, subset=config.subset, split=config.split, validation=config.validation_split, train=train
        )

    def _limited(self, train: Rows, kept: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[Source, ...]]:
        """The first `max_samples` of the rows `kept`, or of those of each source of a mixture; and its sources."""
        limit, mixture = self._config.max_samples, self._config.mixture
        if mixture is None or not isinstance(train, JoinedRows):
            return kept[:limit], ()
        bounds = np.searchsorted(kept, train.starts)
        parts = [kept[start:end][:limit] for start, end in pairwise(bounds.tolist())]
        sources = tuple(
            Source(name, mixture[name].weight, len(part)) for name, part in zip(sorted(mixture), parts, strict=True)
        )
        for source in sources:
            if not source.rows:
                raise DataError(
                    f"environment.mixture.{source.name}: no training row is left, because every prompt is also in "
                    "validation; give it more rows, or set environment.validation_path"
                )
        return np.concatenate(parts), sources

    def _sample(self, rows: Rows, number: int) -> Sample:
        where, row = rows.where(number), rows[number]
        conversation = conversation_of(row, self._config.columns, where, self._pictures[rows is self._validation])
        own = self._reward is not None
        answer = conversation.answer or ""
        if conversation.answer is None and self._config.check != "none":
            raise DataError(
                f"{where}: the column {self._config.columns.answer!r} has no value to check answers against. Set "
                "environment.check=none to score nothing, or set environment.columns.answer to the name of the column"
            )
        if self.scores and not conversation.messages:
            remedy = "remove environment.reward" if own else "set environment.check=none"
            raise DataError(f"{where}: a text without a prompt cannot be scored; {remedy}")
        if self.scores and conversation.messages[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: the prompt ends with a turn of the assistant (an answer, tool calls or reasoning), which is "
                "only for supervised training; remove such turns or rows, or set environment.check=none and no "
                "environment.reward"
            )
        if self._config.check == "math":
            answer = answer.rpartition("####")[2].strip()
            if not is_comparable(answer):
                raise DataError(
                    f"{where}: environment.check=math cannot compare the answer {answer!r} (only numbers, fractions, "
                    "and sums and products of them); remove such rows, or set environment.check=exact"
                )
        messages = with_texts(conversation.messages, self._config.system_prompt, self._config.instruction)
        return Sample(rows.label(number), messages, answer, conversation.completion, row, conversation.tools)

    def _hold_out(self, keys: npt.NDArray[np.uint64], seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Row numbers for training and validation, in order. Copies of a prompt stay together."""
        if not self._config.validation_fraction:
            return np.arange(len(keys)), np.arange(0)
        different = np.unique(keys)
        if len(different) < 2:
            raise DataError(
                f"{self._config.source}: a single prompt cannot be split; give environment.validation_path or "
                "validation_split, or more data, or set environment.validation_fraction=0"
            )
        share = round(len(different) * self._config.validation_fraction)
        count = min(len(different) - 1, self._config.max_validation_samples, max(1, share))
        out = np.isin(keys, different[shuffled(len(different), seed, 0)[:count]])
        return np.flatnonzero(~out), np.flatnonzero(out)

    def _keys(self, rows: Rows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """The rows that can be used, and a key of each, equal for equal prompts.

        For data too large to scan, all rows, and their numbers as keys, after probing some.
        """
        every = np.arange(len(rows))
        if len(rows) <= SCANNED:
            numbers, keys = self._scan(rows, every, note=True)
            return numbers, np.array(keys, np.uint64)
        self._scan(rows, np.linspace(0, len(rows) - 1, PROBED, dtype=np.int64), note=True)
        return every, every.astype(np.uint64)

    def _scan(
        self, rows: Rows, numbers: npt.NDArray[np.int64], *, note: bool = False
    ) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Make the samples of `numbers`, and decode their images; return the rows that can be used, and their keys.

        `note`: keep the numbers of rows without an answer. Rows whose images cannot be used are counted in the log, or
        raise, as `environment.images.invalid` says. Raises a `ConfigError` if a reward asks for another column.
        """
        images = self._config.images
        usable, keys, problems, columns = list[int](), list[int](), list[ImageError](), set[str]()
        empty = EmptyColumns(rows)
        for number in numbers.tolist():
            try:
                sample = self._sample(rows, number)
                keys.append(_key(sample))
                columns.update(sample.metadata)
            except ImageError as error:
                if images is None or images.invalid == "error":
                    raise
                problems.append(error)
                continue
            usable.append(number)
            if self._reward is not None:
                empty.add(number, self._reward.asked_of(sample))
            if note and not has_answer(sample):
                self._unanswered.append(number)
        log_left_out(problems, len(numbers))
        if self._reward is not None and columns:
            held_out, source = rows is self._validation, self._config.source
            source = self._config.validation_path or "the validation split" if held_out else source
            self._reward.check_columns(sorted(columns), source)
            answered = VERL_COLUMN in columns or is_column(self._config.columns.answer, columns)
            named = columns | ({"answer", "ground_truth"} if answered else set())
            self._warnings["validation" if held_out else "train"] += empty.warnings(named, len(usable), source)
        return np.array(usable, np.int64), keys


def _key(sample: Sample) -> int:
    """A hash of the prompt without system messages, equal for equal texts and images. Decodes the images."""
    asked = [text_of(message) for message in sample.messages if message["role"] != "system"]
    text = " ".join(" ".join(asked or [sample.completion]).lower().split())
    for picture in pictures_of(sample.messages):
        decoded(picture)
        text += f" {picture.digest}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
