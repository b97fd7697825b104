"""How a run ends before its last step: by a signal, or because a metric has not improved in several measurements.

The exception that a signal's handler raises may be lost, so it is also remembered: Python drops an exception where
nobody could catch it, in a `__del__`, in the callback of a weak reference, in a function that C code calls. The run
would go on and end as if nothing had been asked of it.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlframework.base.errors import RunInterrupted, RunTerminated
from rlframework.config.sections import EarlyStoppingConfig

_received: list[RunTerminated] = []
"""The signal that has ended the run of this process, if any has: the first one counts."""


def end_run(message: str, number: int) -> None:
    """Raise `RunTerminated` for the signal `number`: now, and again in `raise_if_ended` if it is lost here."""
    _received.append(RunTerminated(message, number))
    raise _received[0]


def raise_if_ended() -> None:
    """Raise what `end_run` has raised, if it was lost. To be called at each phase and step of a run."""
    if _received:
        raise _received[0]


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Raise `RunTerminated` on SIGTERM and Ctrl-C, at the latest at the end of the context.

    Also where Ray, while it waits, replaces it by a `KeyboardInterrupt`. A program's own handler of Ctrl-C is kept.
    """
    _received.clear()
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        end_run("terminated" if number == signal.SIGTERM else "interrupted", number)

    with handling(end, *numbers):
        try:
            yield
            raise_if_ended()
        except (RunTerminated, RunInterrupted):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if _received:
                raise _received[0] from error
            raise
        finally:
            _received.clear()


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *signals: signal.Signals) -> Iterator[None]:
    """Handle `signals` with `handler` within the context. Only the main thread can; others change nothing."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in signals} if main else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


_LOG = logging.getLogger(__name__)


class EarlyStopping:
    """Follows `config.metric` over a run, as its checkpoints save it. Without a config, a run is never stopped."""

    def __init__(self, config: EarlyStoppingConfig | None) -> None:
        self._config = config
        self._best: float | None = None
        self._best_step = self._without = 0
        self._measured = self._warned = False

    @property
    def ended(self) -> bool:
        """Whether the metric has gone `patience` measurements without an improvement."""
        return self._config is not None and self._without >= self._config.patience

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take the metrics that `step` has measured; return whether the run ends."""
        if self._config is None:
            return False
        self.note_names(metrics)
        value = metrics.get(self._config.metric)
        if value is None:
            return self.ended
        self._measured = True
        if self._improves(value):
            self._best, self._best_step, self._without = value, step, 0
        else:
            self._without += 1
        if self.ended:
            best, change = math.nan if self._best is None else self._best, self._config.min_change
            _LOG.info(
                "step %d: the run ends, because %s has not improved on %g, that of step %d,%s in %d measurement%s "
                "(algorithm.early_stopping)", step, self._config.metric, best, self._best_step,
                f" by more than min_change={change:g}," * bool(change),
                self._without, "s" * (self._without > 1),
            )  # fmt: skip
        return self.ended

    def _improves(self, value: float) -> bool:
        """Whether `value` is better than the best by more than `min_change`; NaN never is."""
        assert self._config is not None
        if self._best is None:
            return not math.isnan(value)
        change = value - self._best if self._config.best == "highest" else self._best - value
        return change > self._config.min_change

    def finish(self) -> None:
        """Warn that the run has ended without a measurement of the metric, if it has."""
        if self._config is not None and not self._measured:
            _LOG.warning(
                "algorithm.early_stopping has compared nothing: no step of this run has measured %r",
                self._config.metric,
            )

    def note_names(self, metrics: Mapping[str, float]) -> None:
        """Warn, once per run, if `metrics` has some of the kind of the metric, but not the metric."""
        if self._config is None or self._config.metric in metrics:
            return
        kind = self._config.metric.partition("/")[0] + "/"
        others = sorted(name for name in metrics if name.startswith(kind))
        if others and not self._warned:
            self._warned = True
            _LOG.warning(
                "algorithm.early_stopping has nothing to compare: there is no metric %r; there are %s",
                self._config.metric,
                ", ".join(others),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON values."""
        return {"best": self._best, "best_step": self._best_step, "without": self._without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._best, self._best_step, self._without = state["best"], state["best_step"], state["without"]
        self._measured = self._best is not None or self._without > 0
