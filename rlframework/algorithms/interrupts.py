"""Signals that end a run. The exception that a signal's handler raises may be lost, so it is also remembered.

Python drops an exception where nobody could catch it: in a `__del__`, in the callback of a weak reference, in a
function that C code calls. The run would go on and end as if nothing had been asked of it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlframework.base.errors import RunInterrupted, RunTerminated

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
