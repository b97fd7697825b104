"""Calls the hooks that act, one plugin at a time, so that a plugin that fails or is slow is named.

`ON_FAILURE` has, for each hook, whether what asked for it goes on without the plugin that has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import pluggy

from rlframework.base.errors import PluginError, RLFrameworkError, UserError
from rlframework.base.logs import log_if_slow
from rlframework.plugins.discovery import Plugin, one_line

T = TypeVar("T")

Hook = Callable[..., Any]
"""The hook of one plugin: takes the arguments of its specification by name, and returns what the plugin returns."""


class OnFailure(Enum):
    """The effect of an exception of a hook. The value has the classes of errors that are raised as they are."""

    STOP = (RLFrameworkError,)
    """Any other exception is a `PluginError` that names the plugin."""
    USER_ERRORS_STOP = (UserError,)
    """Any other exception is a warning that names the plugin."""
    GO_ON = ()
    """A warning that names the plugin."""


ON_FAILURE: Mapping[str, OnFailure] = {
    "rlframework_commands": OnFailure.GO_ON,
    "rlframework_key_hint": OnFailure.GO_ON,
    "rlframework_value_hint": OnFailure.GO_ON,
    "rlframework_configuration_hint": OnFailure.GO_ON,
    "rlframework_agent_endpoint": OnFailure.STOP,
    "rlframework_teacher_endpoint": OnFailure.STOP,
    "rlframework_judge": OnFailure.STOP,
    "rlframework_run_planned": OnFailure.USER_ERRORS_STOP,
    "rlframework_plan_elsewhere": OnFailure.STOP,
    "rlframework_state_layout": OnFailure.GO_ON,
    "rlframework_weights_are_staged": OnFailure.GO_ON,
    "rlframework_doctor_checks": OnFailure.GO_ON,
    "rlframework_resume_from": OnFailure.STOP,
    "rlframework_uploads": OnFailure.STOP,
    "rlframework_observers": OnFailure.GO_ON,
    "rlframework_observer_problems": OnFailure.USER_ERRORS_STOP,
}
"""The hooks that act, except the observer hooks, which `rlframework.observers.dispatch` calls."""

_LONG = ("rlframework_plan_elsewhere", "rlframework_resume_from")
"""Hooks that may read data or transfer checkpoints."""


def answers(
    hook: str,
    implementations: Iterable[tuple[Plugin, pluggy.HookImpl]],
    use: Callable[[Hook], T | None],
    warn: Callable[[str], None],
) -> Iterator[tuple[Plugin, T]]:
    """Yield the results of `use(hook of a plugin)`, for each plugin in turn, other than None.

    `use` calls the hook and checks its answer; an exception is raised or given to `warn`, as `ON_FAILURE` says.
    """
    on_failure, slow = ON_FAILURE[hook], logging.INFO if hook in _LONG else logging.WARNING
    for plugin, implementation in implementations:
        try:
            with log_if_slow(f"{hook} of {plugin}", slow, plugin.how_to_disable):
                result = use(partial(_answer, implementation))
        except (Exception, SystemExit) as error:
            if isinstance(error, on_failure.value):
                raise
            message = f"{hook} of {plugin} failed: {one_line(error).rstrip('.')}. {plugin.remedy}"
            if on_failure is OnFailure.STOP:
                raise PluginError(message) from error
            warn(message)
            continue
        if result is not None:
            yield plugin, result


def _answer(implementation: pluggy.HookImpl, **arguments: Any) -> Any:
    """Call the hook of one plugin with those of the arguments that it takes."""
    if implementation.wrapper or implementation.hookwrapper:
        raise PluginError("hooks that act cannot be wrapped")
    return implementation.function(**{name: arguments[name] for name in implementation.argnames})
