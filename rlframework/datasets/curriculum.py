"""Draws the prompts of a run, without those whose measured success is outside of a band (`algorithm.curriculum`).

A measurement of step s decides draws for steps from s + `delay` on, so that it does not matter when a prompt is drawn
ahead of its step: what is drawn depends on the steps and measurements before it alone.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import DataError
from rlframework.config.algorithms import CurriculumConfig
from rlframework.datasets.loader import PromptLoader

if TYPE_CHECKING:
    from rlframework.interfaces.environment import Sample

_LOG = logging.getLogger(__name__)

EASY, HARD, IN_BAND = "too_easy", "too_hard", "in_band"


class Curriculum:
    """Draws numbers of rows from `loader`, one at a time. Without `config` it draws every row that the loader gives.

    A row that was too easy or too hard is skipped in the next `config.skip_epochs` passes over the data, and is then
    drawn again, so that there is always a row to draw.
    """

    def __init__(self, loader: PromptLoader[int], rows: int, config: CurriculumConfig | None, *, delay: int) -> None:
        self._loader, self._rows, self._config, self._delay = loader, rows, config, delay
        self._kinds: dict[int, str] = {}
        """The last measurement of each row that has one."""
        self._counts = Counter[str]()
        """The number of rows of each kind in `_kinds`."""
        self._until: dict[int, int] = {}
        """The last epoch in which a row is skipped."""
        self._pending: deque[tuple[int, int, str]] = deque()
        """Step, row and kind of measurements that decide no draws yet."""
        self._skipped = 0
        self._warned = False

    def draw(self, step: int) -> int:
        """Return the row of the next prompt of `step`."""
        while self._pending and self._pending[0][0] + self._delay <= step:
            _, row, kind = self._pending.popleft()
            self._decide(row, kind, self._loader.epoch)
        while self._until.get(row := next(self._loader)[0], -1) >= self._loader.epoch:
            self._skipped += 1
        return row

    def note(self, step: int, successes: Iterable[tuple[int, float]]) -> None:
        """Take the success of rows that `step` has measured into account."""
        if self._config is not None:
            for row, success in successes:
                self._pending.append((step, row, self._count(row, success)))
            self._warn_of_an_empty_band(step, self._config)

    def _warn_of_an_empty_band(self, step: int, band: CurriculumConfig) -> None:
        """Warn, once, if the last measurement of every row is outside of the band."""
        easy, hard = self._counts[EASY], self._counts[HARD]
        if self._warned or easy + hard < self._rows:
            return
        self._warned = True
        keys = [*(["lower min_success"] if hard else []), *(["raise max_success"] if easy else [])]
        _LOG.warning(
            "step %d: none of the %d prompts is in the band of algorithm.curriculum, min_success=%g to max_success=%g "
            "(%d too easy, %d too hard by the mean accuracy of their last group), so that it only changes their order. "
            "In algorithm.curriculum, %s, or remove it (`~algorithm.curriculum`), as for a task that is measured by "
            "its reward, not by accuracy",
            *(step, self._rows, band.min_success, band.max_success, easy, hard, " and ".join(keys)),
        )

    def start_from(self, path: Path, samples: Sequence[Sample]) -> None:
        """Begin with the measurements in `path`, rows with `id` and `accuracy`, of those of `samples` with these ids.

        Raises `DataError` for rows without these, if none is of a sample, and if no prompt would be left to draw.
        """
        from rlframework.datasets.sources.opening import open_rows

        found, rows = defaultdict[str, list[float]](list), open_rows(path)
        for number in range(len(rows)):
            line = rows[number]
            if not isinstance(line.get("id"), str) or not isinstance(line.get("accuracy"), int | float):
                raise DataError(
                    f"{rows.where(number)}: a row of algorithm.curriculum.measured needs an `id` and a number as "
                    "`accuracy`, as completions.jsonl of `rlframework evaluate` has them"
                )
            found[line["id"]].append(float(line["accuracy"]))
        measured = [(row, found[sample.id]) for row, sample in enumerate(samples) if sample.id in found]
        if not measured:
            first = next(iter(found), None)
            raise DataError(
                f"algorithm.curriculum.measured={path} has no sample of the train split: its first id is {first!r}, "
                f"that of the split is {samples[0].id!r}; evaluate with --split train, on the data of this run"
            )
        for row, accuracies in measured:
            self._decide(row, self._count(row, sum(accuracies) / len(accuracies)), -1)
        _LOG.info("algorithm.curriculum: %s", json.dumps(self._counts | {"not_measured": self._rows - len(measured)}))
        if len(self._until) == self._rows:
            raise DataError(
                f"algorithm.curriculum leaves no prompt: of {self._rows}, {self._counts[EASY]} are too easy and "
                f"{self._counts[HARD]} too hard by {path}; widen min_success and max_success"
            )

    def _count(self, row: int, success: float) -> str:
        """Keep the kind of `row`, and return it."""
        assert self._config is not None
        low, high = self._config.min_success, self._config.max_success
        kind = HARD if success < low else EASY if success > high else IN_BAND
        if row in self._kinds:
            self._counts[self._kinds[row]] -= 1
        self._kinds[row] = kind
        self._counts[kind] += 1
        return kind

    def _decide(self, row: int, kind: str, epoch: int) -> None:
        """Skip `row`, of `kind` in `epoch`, for some epochs, if it is outside of the band."""
        if self._config is None or kind == IN_BAND:
            self._until.pop(row, None)
        else:
            self._until[row] = epoch + self._config.skip_epochs

    def pop_metrics(self) -> dict[str, float]:
        """Return the loader's metrics; with a configuration also the number of rows of each kind, and of skips."""
        metrics = self._loader.pop_metrics()
        if self._config is not None:
            metrics |= {f"train/prompts_{kind}": float(self._counts[kind]) for kind in (EASY, HARD, IN_BAND)}
            metrics["train/prompts_skipped"] = float(self._skipped)
            self._skipped = 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The position and the measurements, as JSON values."""
        state = self._loader.state_dict()
        if self._config is None:
            return state
        rows_of = {kind: [row for row, each in self._kinds.items() if each == kind] for kind in (EASY, HARD, IN_BAND)}
        return state | {
            "curriculum": {"rows": rows_of, "until": list(self._until.items()), "pending": list(self._pending)}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Without measurements in it, it begins without any."""
        self._loader.load_state_dict(state)
        saved = state.get("curriculum") if self._config is not None else None
        if saved is not None:
            self._kinds = {row: kind for kind, rows in saved["rows"].items() for row in rows}
            self._counts = Counter(self._kinds.values())
            self._until = dict(saved["until"])
            self._pending = deque((step, row, kind) for step, row, kind in saved["pending"])
