"""Run synchronous code of environments in threads, so that the event loop of all episodes stays free."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what `function` returns: an async function is awaited, another runs in a daemon thread of its own.

    A thread that hangs keeps neither the event loop nor the end of the process waiting: if the caller is cancelled, it
    is abandoned and its result dropped. `SystemExit` is raised here as the error `exited`.
    """
    if inspect.iscoroutinefunction(function):
        try:
            return await function(*args, **kwargs)
        except SystemExit as error:
            raise exited(error) from error
    result: Future[Any] = Future()

    def run() -> None:
        try:
            value = function(*args, **kwargs)
        except SystemExit as error:
            _settle(result, error=exited(error))
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            _settle(result, error=error)
        else:
            _settle(result, value)

    name = getattr(function, "__qualname__", type(function).__name__)
    threading.Thread(target=run, name=f"environment: {name}", daemon=True).start()
    return await asyncio.wrap_future(result)


def exited(error: SystemExit) -> RuntimeError:
    """Return the error in place of `SystemExit`, which would end the event loop of all episodes."""
    found = RuntimeError(f"it called sys.exit({error.code!r})")
    found.__cause__ = error  # which has the line
    return found


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
