"""Preference pairs as samples: the chosen answer is the completion, the rejected one is in `metadata["rejected"]`.

| columns | content |
| --- | --- |
| `prompt`, `chosen`, `rejected` | texts, or lists of messages |
| `chosen`, `rejected` | conversations that differ in their last turn, which is the assistant's |
| `question`, `ground_truth`, names of models | graded solutions: see `rlframework.datasets.gsm8k_preferences` |
"""

from __future__ import annotations

from collections.abc import Sequence

from rlframework.config.environments import ColumnsConfig
from rlframework.config.preference_environment import PreferenceColumnsConfig, PreferencesConfig
from rlframework.datasets.conversations import conversation_of
from rlframework.datasets.gsm8k_preferences import graded_question, is_graded, pair_solutions
from rlframework.datasets.loader import shuffled
from rlframework.datasets.preferences import PreferenceRow
from rlframework.datasets.sources.opening import is_local, open_rows
from rlframework.datasets.sources.rows import Row, Rows
from rlframework.environments.dataset import with_texts
from rlframework.errors import DataError
from rlframework.interfaces.environment import Environment, Sample, Split
from rlframework.interfaces.messages import text_of


class PreferencesEnvironment(Environment):
    """The pairs that `PreferencesConfig` describes. Answers of a model cannot be scored."""

    scores = False

    def __init__(self, config: PreferencesConfig, *, seed: int) -> None:
        """Read the data. Raises a `DataError` that names file and row if it cannot be read as configured."""
        self._config, self._seed = config, seed
        rows = open_rows(config.path, subset=config.subset, split=config.split)
        train = self._samples(rows, config.pairs)
        if config.validation_path is None and config.validation_split is None:
            held_out = _hold_out(train, config.validation_fraction, seed)
            validation = [sample for sample in self._samples(rows, "one") if _prompt(sample) in held_out]
        else:
            path = config.validation_path
            subset = config.subset if path is None or not is_local(path) else None
            rows = open_rows(path or config.path, subset=subset, split=config.validation_split)
            validation = self._samples(rows, "one")
        validation = validation[: config.max_validation_samples]
        known = {_prompt(sample) for sample in validation}
        kept = [sample for sample in train if _prompt(sample) not in known]
        if not kept:
            raise DataError(f"{config.path}: no training pair is left, because every prompt is also in validation")
        self._pairs: dict[Split, list[Sample]] = {"train": kept[: config.max_samples], "validation": validation}

    def samples(self, split: Split) -> Sequence[Sample]:
        """The pairs of `split`, in the order of the data."""
        return self._pairs[split]

    def _samples(self, rows: Rows, pairs: str) -> list[Sample]:
        if len(rows) and is_graded(rows[0]):
            questions = [graded_question(row, rows.where(n), rows.label(n)) for n, row in enumerate(rows)]
            found = pair_solutions(questions, pairs="one" if pairs == "one" else "all", seed=self._seed)
        else:
            columns = self._config.columns
            found = [_pair(row, columns, rows.where(number), rows.label(number)) for number, row in enumerate(rows)]
        return [self._sample(pair) for pair in found]

    def _sample(self, pair: PreferenceRow) -> Sample:
        messages = with_texts(pair.messages, self._config.system_prompt, self._config.instruction)
        return Sample(pair.id, messages, "", pair.chosen, {"rejected": pair.rejected})


def _pair(row: Row, columns: PreferenceColumnsConfig, where: str, label: str) -> PreferenceRow:
    """The pair in `row`; a `DataError` that begins with `where` if there is none."""
    for name in (columns.chosen, columns.rejected):
        if row.get(name) is None:
            raise DataError(
                f"{where}: there is no {name!r}; the columns are {sorted(row)}. Set environment.columns to the names "
                "of your columns"
            )
    sides = []
    for name in (columns.chosen, columns.rejected):
        if row.get(columns.prompt) is not None:
            given, names = {"prompt": row[columns.prompt], "completion": row[name]}, ColumnsConfig()
        else:
            given, names = {name: row[name]}, ColumnsConfig(messages=name)
        sides.append(conversation_of(given, names, where))
    chosen, rejected = sides
    if not (chosen.messages and chosen.completion and rejected.completion):
        raise DataError(f"{where}: a pair needs a prompt, and two answers of the assistant in plain text")
    if chosen.messages != rejected.messages:
        raise DataError(f"{where}: {columns.chosen!r} and {columns.rejected!r} have different prompts")
    return PreferenceRow(chosen.messages, chosen.completion, rejected.completion, label)


def _prompt(sample: Sample) -> str:
    asked = [text_of(message) for message in sample.messages if message["role"] != "system"]
    return " ".join(" ".join(asked).lower().split())


def _hold_out(samples: Sequence[Sample], fraction: float, seed: int) -> set[str]:
    """The prompts to hold out, a share of those that differ."""
    prompts = sorted({_prompt(sample) for sample in samples})
    if len(prompts) < 2:
        raise DataError(
            "environment preferences: pairs of a single prompt cannot be split; give environment.validation_path or "
            "validation_split, or more data"
        )
    count = min(len(prompts) - 1, max(1, round(len(prompts) * fraction)))
    return {prompts[number] for number in shuffled(len(prompts), seed, 0)[:count].tolist()}
