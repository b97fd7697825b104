"""Preference pairs as samples: the chosen answer is the completion, the rejected one is in `metadata["rejected"]`.

Rows have one of the layouts of `preference_rows`, or graded solutions to a question: `question`, `ground_truth`, and
names of models, see `gsm8k_preferences`. The difference of the scores of a pair, if they are known, is in
`metadata["margin"]`. Prompts of the first kind may have images (`environment.images`).

Rows with labelled steps are not pairs: the answer is the completion, its steps are in `metadata["steps"]` and their
labels in `metadata["labels"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlframework.base.errors import DataError, ImageError
from rlframework.datasets.conversations import with_texts
from rlframework.datasets.loader import shuffled
from rlframework.datasets.pictures import ImageAddresses, decoded, log_left_out, reader_of
from rlframework.datasets.sources.opening import open_splits
from rlframework.datasets.sources.rows import Row, Rows
from rlframework.interfaces.environment import Environment, Sample, Split
from rlframework.interfaces.messages import Message, pictures_of, text_of
from rlframework_preferences.config import PreferencesConfig
from rlframework_preferences.gsm8k_preferences import graded_question, is_graded, pair_solutions
from rlframework_preferences.pairs import PreferenceRow
from rlframework_preferences.preference_rows import check_pairs, has_steps, preference_of, steps_of


class PreferencesEnvironment(Environment):
    """The pairs that `PreferencesConfig` describes. Answers of a model cannot be scored."""

    scores = False

    def __init__(self, config: PreferencesConfig, *, seed: int) -> None:
        """Read the data. Raises a `DataError` that names file and row if it cannot be read as configured."""
        self._config, self._seed, self._addresses = config, seed, ImageAddresses()
        rows, given = open_splits(config, subset=config.subset, split=config.split, validation=config.validation_split)
        self._given = given
        train = self._samples(rows, config.pairs)
        if given is None:
            held_out = _hold_out(train, config.validation_fraction, seed)
            single = self._samples(rows, "one") if len(rows) and is_graded(rows[0]) else train
            validation = [sample for sample in single if _prompt(sample) in held_out]
        else:
            validation = self._samples(given, "one")
        validation = validation[: config.max_validation_samples]
        known = {_prompt(sample) for sample in validation}
        kept = [sample for sample in train if _prompt(sample) not in known]
        if not kept:
            raise DataError(f"{config.source}: no training pair is left, because every prompt is also in validation")
        self._pairs: dict[Split, list[Sample]] = {"train": kept[: config.max_samples], "validation": validation}

    def samples(self, split: Split) -> Sequence[Sample]:
        """The pairs of `split`, in the order of the data."""
        return self._pairs[split]

    def _samples(self, rows: Rows, pairs: str) -> list[Sample]:
        first: Row = rows[0] if len(rows) else {}
        labelled, graded = has_steps(first), is_graded(first)
        if self._config.images is not None and (labelled or graded):
            raise DataError(
                f"{self._config.source}: environment.images is for pairs with the columns prompt, chosen and rejected "
                "(or the other layouts of them), not for labelled steps or graded solutions; remove environment.images"
            )
        if labelled:
            answers = [steps_of(row, rows.where(n), rows.label(n)) for n, row in enumerate(rows)]
            return [replace(each, messages=self._texts(each.messages)) for each in answers]
        if graded:
            questions = [graded_question(row, rows.where(n), rows.label(n)) for n, row in enumerate(rows)]
            found = pair_solutions(questions, pairs="one" if pairs == "one" else "all", seed=self._seed)
        else:
            found = self._read(rows)
        return [self._sample(pair) for pair in found]

    def _read(self, rows: Rows) -> list[PreferenceRow]:
        """The pairs in `rows`. Decodes their images: one that cannot be used raises, or its row is left out."""
        columns, images = self._config.columns, self._config.images
        pictures = reader_of(self._config, self._addresses, validation=rows is self._given)
        found, numbers, problems = list[PreferenceRow](), list[int](), list[ImageError]()
        for number, row in enumerate(rows):
            try:
                pair = preference_of(row, rows.where(number), rows.label(number), columns, pictures)
                for picture in pictures_of(pair.messages):
                    decoded(picture)
            except ImageError as error:
                if images is None or images.invalid == "error":
                    raise
                problems.append(error)
            else:
                found.append(pair)
                numbers.append(number)
        log_left_out(problems, len(rows))
        check_pairs(found, lambda pair: rows.where(numbers[pair]))
        return found

    def _sample(self, pair: PreferenceRow) -> Sample:
        metadata: dict[str, object] = {"rejected": pair.rejected}
        if pair.scores is not None:
            metadata["margin"] = pair.scores[0] - pair.scores[1]
        return Sample(pair.id, self._texts(pair.messages), "", pair.chosen, metadata, pair.tools)

    def _texts(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return with_texts(messages, self._config.system_prompt, self._config.instruction)


def _prompt(sample: Sample) -> str:
    """A key of the prompt, equal for equal texts and images."""
    asked = [text_of(message) for message in sample.messages if message["role"] != "system"]
    seen = [picture.digest for picture in pictures_of(sample.messages)]
    return " ".join([*" ".join(asked).lower().split(), *seen])


def _hold_out(samples: Sequence[Sample], fraction: float, seed: int) -> set[str]:
    """The prompts to hold out, a share of those that differ."""
    if not fraction:
        return set()
    prompts = sorted({_prompt(sample) for sample in samples})
    if len(prompts) < 2:
        raise DataError(
            "environment preferences: pairs of a single prompt cannot be split; give environment.validation_path or "
            "validation_split, or more data, or set environment.validation_fraction=0"
        )
    count = min(len(prompts) - 1, max(1, round(len(prompts) * fraction)))
    return {prompts[number] for number in shuffled(len(prompts), seed, 0)[:count].tolist()}
