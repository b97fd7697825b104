"""Your own data: questions, prompts, conversations or texts from files or the hub, for training and scoring.

Samples are made on access. Data of up to `SCANNED` rows is scanned once at the start: a row of unknown shape is an
error before any work, rows without an answer are known (`LazySamples.without_answer`), and no validation prompt is
trained on, ignoring case and spacing. Of larger data only `PROBED` rows are checked; validation is then held out by
row, and copies of its rows may stay in training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from rlframework.config.environments import DatasetConfig
from rlframework.datasets.conversations import Conversation, conversation_of
from rlframework.datasets.loader import shuffled
from rlframework.datasets.rendering import has_answer
from rlframework.datasets.sources.opening import is_local, open_rows
from rlframework.datasets.sources.rows import Rows
from rlframework.environments.math_answers import is_comparable, same_answer
from rlframework.environments.own_reward import OwnReward
from rlframework.environments.verifiable import VerifiableEnvironment
from rlframework.errors import DataError
from rlframework.interfaces.environment import Message, Sample, Split, StepOutcome

SCANNED = 100_000
PROBED = 2_000


class LazySamples(Sequence[Sample]):
    """The samples of the rows `numbers` of `rows`, made by `make` on access. A slice is lazy too.

    `unanswered`: the numbers of rows known to have no assistant turn.
    """

    def __init__(
        self,
        rows: Rows,
        numbers: npt.NDArray[np.int64],
        make: Callable[[Rows, int], Sample],
        unanswered: Sequence[int] = (),
    ) -> None:
        self._rows, self._numbers, self._make, self._unanswered = rows, numbers, make, unanswered

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> LazySamples: ...
    def __getitem__(self, index: int | slice) -> Sample | LazySamples:
        if isinstance(index, slice):
            return LazySamples(self._rows, self._numbers[index], self._make, self._unanswered)
        return self._make(self._rows, int(self._numbers[index]))

    def sizes(self) -> npt.NDArray[np.int64]:
        """Approximate number of characters of each sample, `[n]` int64, without making it."""
        return self._rows.sizes()[self._numbers]

    def without_answer(self) -> npt.NDArray[np.int64]:
        """Indices of the samples known to have no assistant turn, in order, int64."""
        return np.flatnonzero(np.isin(self._numbers, np.array(self._unanswered, np.int64)))


class DatasetEnvironment(VerifiableEnvironment):
    """The samples that `DatasetConfig` describes. With `check: none` and no reward, answers cannot be scored."""

    def __init__(self, config: DatasetConfig, *, seed: int) -> None:
        """Open the data. Raises a `DataError` that names file and row if it cannot be read as configured."""
        self._config = config
        self._unanswered: list[int] = []
        train, validation = _open(config)
        self.scores = config.scores_completions
        self._reward = None if config.reward is None else OwnReward(config)
        if validation is None:
            kept, held_out = self._hold_out(train, seed)
            validation = train
        else:
            held_out = np.arange(len(validation))[: config.max_validation_samples]
            kept = self._without(train, {_key(self._sample(validation, int(number))) for number in held_out})
        if not len(kept):
            raise DataError(f"{config.path}: no training row is left, because every prompt is also in validation")
        self._samples: dict[Split, Sequence[Sample]] = {
            "train": LazySamples(train, kept[: config.max_samples], self._sample, self._unanswered),
            "validation": LazySamples(validation, held_out, self._sample),
        }

    def samples(self, split: Split) -> Sequence[Sample]:
        """The samples of `split`, in the order of the data; `id` is the file and line, or the split and row."""
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
        return self._reward.score(samples, self.answers(samples, conversations))

    def shutdown(self) -> None:
        """End the process of the user's reward function."""
        if self._reward is not None:
            self._reward.close()

    def _sample(self, rows: Rows, number: int) -> Sample:
        where, row = rows.where(number), rows[number]
        conversation = conversation_of(row, self._config.columns, where)
        own = self._reward is not None
        answer = self._gold(conversation, where) if self.scores and not own else conversation.answer or ""
        if own and not conversation.messages:
            raise DataError(f"{where}: a text without a prompt cannot be scored; remove environment.reward")
        messages = _with_texts(conversation.messages, self._config.system_prompt, self._config.instruction)
        return Sample(rows.label(number), messages, answer, conversation.completion, row if own else {})

    def _gold(self, conversation: Conversation, where: str) -> str:
        """The gold answer; with `check: math`, the text after the last `####`."""
        column = self._config.columns.answer
        if conversation.answer is None:
            raise DataError(
                f"{where}: the column {column!r} has no value to check answers against. Set environment.check=none to "
                "score nothing, or set environment.columns.answer to the name of the column"
            )
        if not conversation.messages:
            raise DataError(f"{where}: a text without a prompt cannot be scored; set environment.check=none")
        if self._config.check == "exact":
            return conversation.answer
        gold = conversation.answer.rpartition("####")[2].strip()
        if not is_comparable(gold):
            raise DataError(
                f"{where}: environment.check=math cannot compare the answer {gold!r} (only numbers, fractions, and "
                "sums and products of them); remove such rows, or set environment.check=exact"
            )
        return gold

    def _hold_out(self, rows: Rows, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Row numbers for training and validation, in order. Copies of a prompt stay together."""
        keys = self._keys(rows)
        different = np.unique(keys)
        if len(different) < 2:
            raise DataError(
                f"{self._config.path}: a single prompt cannot be split; give environment.validation_path or "
                "validation_split, or more data"
            )
        share = round(len(different) * self._config.validation_fraction)
        count = min(len(different) - 1, self._config.max_validation_samples, max(1, share))
        out = np.isin(keys, different[shuffled(len(different), seed, 0)[:count]])
        return np.flatnonzero(~out), np.flatnonzero(out)

    def _without(self, rows: Rows, keys: set[int]) -> npt.NDArray[np.int64]:
        """The rows whose prompt is not in `keys`; all rows if there are too many to scan."""
        if len(rows) > SCANNED:
            return self._keys(rows).astype(np.int64)
        return np.flatnonzero(~np.isin(self._keys(rows), np.array(sorted(keys), np.uint64)))

    def _keys(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """A key per row, equal for equal prompts; for data too large to scan, the row number, after probing rows."""
        count = len(rows)
        if count <= SCANNED:
            return np.fromiter((self._scan(rows, number) for number in range(count)), np.uint64, count)
        for number in np.linspace(0, count - 1, PROBED, dtype=np.int64).tolist():
            self._scan(rows, number)
        return np.arange(count, dtype=np.uint64)

    def _scan(self, rows: Rows, number: int) -> int:
        sample = self._sample(rows, number)
        if not has_answer(sample):
            self._unanswered.append(number)
        return _key(sample)


def _key(sample: Sample) -> int:
    asked = [message["content"] for message in sample.messages if message["role"] != "system"]
    text = " ".join(" ".join(asked or [sample.completion]).lower().split())
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _open(config: DatasetConfig) -> tuple[Rows, Rows | None]:
    train = open_rows(config.path, subset=config.subset, split=config.split)
    if config.validation_path is not None:
        subset = None if is_local(config.validation_path) else config.subset
        return train, open_rows(config.validation_path, subset=subset, split=config.validation_split)
    if config.validation_split is not None:
        return train, open_rows(config.path, subset=config.subset, split=config.validation_split)
    return train, None


def _with_texts(messages: tuple[Message, ...], system: str | None, instruction: str) -> tuple[Message, ...]:
    """Append `instruction` to the last user turn, and put `system` first unless there is a system message."""
    turns = list(messages)
    users = [number for number, message in enumerate(turns) if message["role"] == "user"]
    if users and instruction:
        turns[users[-1]] = {"role": "user", "content": turns[users[-1]]["content"] + instruction}
    if system is not None and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return tuple(turns)
