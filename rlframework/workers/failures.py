"""Worker exceptions on the driver: how they are sent, and which of several failures is the root cause.

The exception itself is not sent, because its class may be defined in a module that the driver must not import: a
process sends a `HostFailure`, a Ray actor raises a `portable` exception that carries one.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlframework.base.errors import RLFrameworkError, UnpicklableError, WorkerError, WorkerLost
from rlframework.base.secrets import hide_in_text

_CONNECTION_LOST = ("connection closed by peer", "connection reset by peer", "connection refused", "remote process")
_COLLECTIVE_FAILED = (*_CONNECTION_LOST, "gloo")
FAILURE = "rlframework_failure"
"""Attribute of a `portable` exception with the `HostFailure` that describes the original one in the worker."""

MOST_LISTED = 16
"""Ranks that a message names."""


@dataclass(frozen=True)
class HostFailure:
    """An exception as strings: its classes (module and name, in method resolution order), message and traceback.

    `died` is True if the process ended instead of replying.
    """

    classes: tuple[tuple[str, str], ...]
    message: str
    traceback: str
    died: bool = False

    @classmethod
    def of(cls, error: BaseException) -> HostFailure:
        """Describe `error`, in the process that raised it: the only one that knows the secrets of its environment."""
        classes = tuple((kind.__module__, kind.__qualname__) for kind in type(error).__mro__)
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        return cls(classes, hide_in_text(str(error) + notes), hide_in_text("".join(traceback.format_exception(error))))

    @property
    def is_lost_connection(self) -> bool:
        """Whether this looks like a consequence of another rank's failure: the connection to it was lost."""
        names = {name for _, name in self.classes}
        text = self.message.lower()
        return "DistError" in names or ("RuntimeError" in names and any(words in text for words in _COLLECTIVE_FAILED))

    @property
    def indicates_lost_worker(self) -> bool:
        """Whether a process is gone: this one, or the one at the other end of a connection that broke."""
        broken = any(words in self.message.lower() for words in _CONNECTION_LOST)
        return self.died or (broken and self.is_lost_connection)


def unsendable_variable(value: Any, searched: frozenset[int] = frozenset()) -> str:
    """Name a variable that a function of `value` uses and that cannot be sent, to append to a message; "" if none.

    `value`: an object or function, or the arguments of a call in tuples and dictionaries. `searched`: the ids of the
    functions on the way to `value`, which may call each other.
    """
    if isinstance(value, (tuple, dict)):
        values = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(unsendable_variable, values)), "")
    attributes = {} if inspect.isfunction(value) or isinstance(value, type) else getattr(value, "__dict__", {})
    for name, attribute in attributes.items():
        if not _is_sendable(attribute):
            return f". {type(value).__name__} has the attribute {name!r}, a {type(attribute).__name__}"
    methods = [function for _, function in inspect.getmembers(type(value), inspect.isfunction)]
    for function in [value] * inspect.isfunction(value) + methods:
        used = inspect.getclosurevars(function)
        for name, variable in {**used.nonlocals, **used.globals}.items():
            # `__class__` is the class itself, which `super()` uses
            if name == "__class__" or id(variable) in searched or _is_sendable(variable):
                continue
            if not inspect.isfunction(variable):
                return f". {function.__qualname__} uses the variable {name!r}, a {type(variable).__name__}"
            if inner := unsendable_variable(variable, searched | {id(function), id(variable)}):
                return inner
    return ""


def unpicklable(value: object, error: Exception) -> UnpicklableError:
    """Return the error for `value`, which pickling rejected with `error`."""
    reason = f"{type(error).__name__}: {error}{unsendable_variable(value)}"
    return UnpicklableError(f"values sent to worker processes must be picklable: {reason}")


def _is_sendable(value: Any) -> bool:
    import cloudpickle  # type: ignore[import-untyped]

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - of any kind: it cannot be sent
        return False
    return True


def root_cause(failures: Mapping[int, HostFailure]) -> int:
    """The rank whose failure explains the others: preferably a dead process, else any error but a lost connection."""
    return min(failures, key=lambda rank: (not failures[rank].died, failures[rank].is_lost_connection, rank))


def as_exception(
    failures: Mapping[int, HostFailure], world_size: int, doing: str, where: Callable[[int], str] = lambda rank: ""
) -> Exception:
    """The exception that the driver raises: an rlframework error as its own class, anything else as `WorkerError`.

    It is a `WorkerLost` if a process died, or if all that is left of a lost machine are broken connections to it.
    `where(rank)` returns a phrase such as " on node a" to append to the rank.
    """
    rank = root_cause(failures)
    failure = failures[rank]
    who = f"rank {rank} of {world_size}{where(rank)}"
    others = [other for other in sorted(failures) if other != rank]
    also = f"\n(also failed: rank {list_ranks(others)})" if others else ""
    if failure.died:
        return WorkerLost(f"the process of {who} died in {doing}: {failure.message}{also}")
    kind = failure.classes[0][1]
    remote = (WorkerLost if failure.indicates_lost_worker else WorkerError)(
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


def list_ranks(ranks: Sequence[int]) -> str:
    """List the first of `ranks`, and count the rest: a message about thousands of workers stays short."""
    first, rest = ", ".join(map(str, ranks[:MOST_LISTED])), len(ranks) - MOST_LISTED
    return f"{first} and {rest} more" if rest > 0 else first


def _own_class(failure: HostFailure) -> type[RLFrameworkError] | None:
    """The most derived class of the error that exists in this process, if it is an rlframework error."""
    for module, name in failure.classes:
        if module.startswith("rlframework."):
            importlib.import_module(module)
        found = getattr(sys.modules.get(module), name, None)
        if found is UnpicklableError:
            return None  # an answer of the worker, which is no mistake of the caller's
        if isinstance(found, type) and issubclass(found, RLFrameworkError):
            return found
    return None


def portable(error: Exception) -> Exception:
    """Convert `error` to an exception that the driver can unpickle without importing the worker's modules.

    Its class is the most derived base class of `error` that is a built-in or an rlframework error. It keeps the
    traceback, and its attribute `FAILURE` describes the original exception.
    """
    if hasattr(error, FAILURE):
        return error
    kind = type(error)
    known = _is_everywhere(kind)
    text = str(error) if known else f"{kind.__module__}.{kind.__qualname__}: {error}"
    candidates: list[Exception] = [error] if known else []
    for base in filter(_is_everywhere, kind.__mro__[: kind.__mro__.index(Exception)]):
        with suppress(TypeError):  # its constructor needs more arguments, like that of UnicodeDecodeError
            candidates.append(base(text))
    raised = next(filter(_pickles, candidates), RuntimeError(text))
    setattr(raised, FAILURE, HostFailure.of(error))
    return raised.with_traceback(error.__traceback__)


def _pickles(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - pickled on the same line
    except Exception:  # noqa: BLE001 - any exception means that this error cannot be sent
        return False


def _is_everywhere(kind: type) -> bool:
    if kind.__module__ == "builtins":
        return getattr(builtins, kind.__name__, None) is kind
    return issubclass(kind, RLFrameworkError) and kind.__module__.startswith("rlframework.")
