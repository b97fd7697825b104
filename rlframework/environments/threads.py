"""Run synchronous code of environments in threads, so that the event loop of all episodes stays free."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what `function` returns: an async function is awaited, another runs in a daemon thread of its own.

    A thread that hangs keeps neither the event loop nor the end of the process waiting: if the caller is cancelled, it
    is abandoned and its result dropped. What is no `Exception` is raised here as one, see `failing_alone`.
    """
    if inspect.iscoroutinefunction(function):
        with failing_alone():
            return await function(*args, **kwargs)
    result: Future[Any] = Future()

    def run() -> None:
        try:
            with failing_alone():
                value = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            _settle(result, error=error)
        else:
            _settle(result, value)

    name = getattr(function, "__qualname__", type(function).__name__)
    threading.Thread(target=run, name=f"environment: {name}", daemon=True).start()
    return await asyncio.wrap_future(result)


@contextmanager
def failing_alone() -> Iterator[None]:
    """Context that raises a `RuntimeError` in place of what is no `Exception`, such as `SystemExit`.

    That would end the event loop of all episodes: it is the failure of one. Cancellation is raised as it is.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error
    except BaseException as error:
        raise RuntimeError(f"it raised {type(error).__name__}, which is no Exception: {error}") from error


def _settle(result: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Set the outcome of `result`, unless the caller has been cancelled."""
    if not result.set_running_or_notify_cancel():
        return
    if error is not None:
        if isinstance(error, StopIteration):  # cannot be raised through a coroutine
            error = RuntimeError(f"StopIteration: {error}")
        result.set_exception(error)
    else:
        result.set_result(value)
