"""How an exception of a worker travels to the driver, and which of several failures is to blame.

The exception itself is not sent: its class may live in a module that the driver must not import.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlframework.errors import RLFrameworkError, WorkerError, WorkerLost

_CONNECTION_GONE = ("connection closed by peer", "connection reset by peer", "connection refused", "remote process")
_LOST_PEER = (*_CONNECTION_GONE, "gloo")


@dataclass(frozen=True)
class HostFailure:
    """An exception, told in strings: its classes from most to least special, message and traceback.

    `died`: the process ended instead of answering.
    """

    classes: tuple[tuple[str, str], ...]
    message: str
    traceback: str
    died: bool = False

    @classmethod
    def of(cls, error: BaseException) -> HostFailure:
        """Describe `error`, in the process that raised it."""
        classes = tuple((kind.__module__, kind.__qualname__) for kind in type(error).__mro__)
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        return cls(classes, str(error) + notes, "".join(traceback.format_exception(error)))

    @property
    def is_about_a_lost_peer(self) -> bool:
        """True when this looks like the echo of another rank's failure: its connection went away."""
        names = {name for _, name in self.classes}
        text = self.message.lower()
        return "DistError" in names or ("RuntimeError" in names and any(words in text for words in _LOST_PEER))

    @property
    def tells_of_a_lost_worker(self) -> bool:
        """True when a process is gone: this one, or the one at the other end of a connection that was cut."""
        cut = any(words in self.message.lower() for words in _CONNECTION_GONE)
        return self.died or (cut and self.is_about_a_lost_peer)


def blame(failures: Mapping[int, HostFailure]) -> int:
    """The rank whose failure explains the others: a dead process, then any error that is not the echo of one."""
    return min(failures, key=lambda rank: (not failures[rank].died, failures[rank].is_about_a_lost_peer, rank))


def as_exception(
    failures: Mapping[int, HostFailure], world_size: int, doing: str, where: Callable[[int], str] = lambda rank: ""
) -> Exception:
    """What the driver raises: an error of rlframework as its own class and message, anything else as `WorkerError`.

    A `WorkerLost` where a process died, or where nothing but connections that were cut tells of one on a lost machine.
    `where` says of a rank where it ran, in words to stand behind it.
    """
    rank = blame(failures)
    failure = failures[rank]
    who = f"rank {rank} of {world_size}{where(rank)}"
    others = [other for other in sorted(failures) if other != rank]
    also = f"\n(also failed: rank {', '.join(map(str, others))})" if others else ""
    if failure.died:
        return WorkerLost(f"the process of {who} died in {doing}: {failure.message}{also}")
    kind = failure.classes[0][1]
    remote = (WorkerLost if failure.tells_of_a_lost_worker else WorkerError)(
        f"{who} failed in {doing}: {kind}: {failure.message}{also}\n\n{failure.traceback}"
    )
    own = _own_class(failure)
    if own is None:
        return remote
    error = own.__new__(own)
    error.args = (failure.message,)
    error.add_note(f"raised by {who} in {doing}")
    error.__cause__ = remote
    return error


def _own_class(failure: HostFailure) -> type[RLFrameworkError] | None:
    """The most special class of the error that this process has, if it is one of rlframework's."""
    for module, name in failure.classes:
        if module.startswith("rlframework."):
            importlib.import_module(module)
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, RLFrameworkError):
            return found
    return None
