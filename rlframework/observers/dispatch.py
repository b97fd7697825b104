"""Dispatches the events of a run to its observers, built-in and of plugins (`rlframework.plugins.hookspec`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from rlframework.base.errors import ConfigError, PluginError, WriteError
from rlframework.base.logs import printable
from rlframework.base.secrets import hide_in_text
from rlframework.config.base import Section
from rlframework.config.sections import ObserversConfig
from rlframework.plugins.discovery import DISABLE_VARIABLE, load_target, new_pluggy
from rlframework.plugins.hookspec import RunInfo, SampleRecord, TimeSpan
from rlframework.plugins.installation import CORE

if TYPE_CHECKING:
    from rlframework.plugins.manager import PluginManager

_LOG = logging.getLogger(__name__)

CORE_OBSERVERS = {
    "console": "rlframework.observers.console:ConsoleObserver",
    "jsonl": "rlframework.observers.jsonl:JsonlObserver",
}
"""Import paths of core's own observers by their key in the `observers` section; see `rlframework_observers`."""

MOST_METRICS = 10_000
"""Different names of metrics that observers of a run get: services keep a curve for each."""

_LONGEST_NAME = 250

State = Literal["finished", "failed", "killed"]
"""How a run ended; "killed" means by Ctrl-C or a signal."""


def observer_problems(config: ObserversConfig, manager: PluginManager) -> list[str]:
    """Return why observers that `config` asks for cannot be used, such as a package that is not installed."""
    provided = _paths(config, manager)
    asked = [name for name in type(config).model_fields if isinstance(getattr(config, name), Section)]
    missing = [
        f"observers.{name} is set, but no plugin has it: {manager.how_to_get(name)}"
        for name in asked
        if name not in provided
    ]
    found = manager.call("rlframework_observer_problems", lambda hook: _texts(hook(config=config)))
    return [*missing, *chain.from_iterable(problems for _, problems in found)]


def require_observers(config: ObserversConfig, manager: PluginManager) -> None:
    """Raise a `ConfigError` for the first of `observer_problems`."""
    for problem in observer_problems(config, manager):
        raise ConfigError(problem)


def _paths(config: ObserversConfig, manager: PluginManager | None) -> dict[str, str]:
    """The import paths of the observers that `config` switches on, by key. Raises `PluginError` if two have one key."""
    answers = () if manager is None else manager.call("rlframework_observers", lambda hook: dict(hook() or {}))
    paths = dict[str, str]()
    owners = dict.fromkeys(CORE_OBSERVERS, CORE)
    for plugin, provided in answers:
        for name in provided:
            if not getattr(config, name, False):
                continue
            if name in owners:
                raise PluginError(
                    f"observers.{name}: 2 plugins provide this observer: {owners[name]} and {plugin}. Uninstall one of "
                    f"them, or add its distribution to {DISABLE_VARIABLE}."
                )
            owners[name], paths[name] = str(plugin), provided[name]
    return paths | {name: path for name, path in CORE_OBSERVERS.items() if getattr(config, name, False)}


def _texts(answer: Iterable[str] | None) -> list[str]:
    """The problems that a plugin has returned. Raises `TypeError` if they are one text, which has no problems in it."""
    if isinstance(answer, str):
        raise TypeError(f"it returned the text {answer!r}; it must return a list of texts")
    return list(answer or ())


class Observers:
    """All observers of a run, called independently: one that raises is reported once and not called again.

    One that raises a `WriteError` is called again, because a full disk may have space later.

    `manager` has the plugins (None: built-in observers only). As a context manager, it calls
    `run_started` on entry and `close` on exit. The caller calls `run_finished`, because a failed run does not finish.
    """

    def __init__(self, config: ObserversConfig, info: RunInfo, manager: PluginManager | None = None) -> None:
        self._info = info
        self._dropped: set[int] = set()
        self._reported: set[int] = set()
        self._core = new_pluggy()
        for name, target in _paths(config, manager).items():
            self._guarded(target, name, self._add, name=name, target=target)
        self._relays = [self._core.hook] if manager is None else [self._core.hook, manager.hook]
        self._names: set[str] = set()
        """The names of metrics so far."""
        self._noted_names = False
        self._finished = False
        self.last_step = 0
        """The last finished step; 0 before the first."""

    def run_started(self) -> None:
        """Notify observers that all parts are built and the first step is about to start."""
        self._notify("rlframework_run_started")

    def step_finished(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[SampleRecord] = (),
        timeline: Sequence[TimeSpan] = (),
    ) -> None:
        """Notify observers of finished step `step` (0: before the first), with its metrics and some of its samples.

        `timeline`: the spans of time that have ended since the last call.
        """
        self.last_step = step
        more = {"samples": tuple(samples), "timeline": tuple(timeline)}
        self._notify("rlframework_step_finished", step=step, metrics=self._bounded(metrics), **more)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """Notify observers that a checkpoint is complete at `path`."""
        self._notify("rlframework_checkpoint_saved", step=step, path=path)

    def run_finished(self, metrics: Mapping[str, float]) -> None:
        """Notify observers that the run has finished with these final metrics."""
        self._notify("rlframework_run_finished", metrics=self._bounded(metrics))
        self._finished = True

    def close(self, state: State | None = None) -> None:
        """Report to the built-in observers how the run ended, so that they close files and displays. Idempotent.

        By default, `state` is "finished" if `run_finished` was called, otherwise "failed".
        """
        for name, observer in self._core.list_name_plugin():
            self._core.unregister(observer)
            if hasattr(observer, "close"):
                state = state or ("finished" if self._finished else "failed")
                self._guarded(observer, name, observer.close, state=state)

    def __enter__(self) -> Self:
        self.run_started()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("killed" if kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit)) else None)

    def _bounded(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return a read-only copy, so that an observer cannot change the metrics that the next one gets.

        An environment or an agent may have chosen the names: they are made text that every service can store, and those
        that are new after `MOST_METRICS` are left out.
        """
        numbers: dict[str, float] = {}
        for metric, value in metrics.items():
            name = printable(metric)[:_LONGEST_NAME]
            if name in self._names or len(self._names) < MOST_METRICS:
                self._names.add(name)
                numbers[name] = float(value)
            elif not self._noted_names:
                self._noted_names = True
                _LOG.warning(
                    "the run has more than %d different metrics; new ones, such as %.80r, are left out. Does the "
                    "environment or an agent put data into the names of its metrics?", MOST_METRICS, name,
                )  # fmt: skip
        return MappingProxyType(numbers)

    def _add(self, name: str, target: str) -> None:
        self._core.register(load_target(target)(), name=name)

    def _notify(self, hook: str, **arguments: object) -> None:
        arguments["run"] = self._info
        for relay in self._relays:
            for found in getattr(relay, hook).get_hookimpls():
                if found.wrapper or found.hookwrapper:
                    self._drop(found.plugin, found.plugin_name, "observer hooks cannot be wrapped")
                elif id(found.plugin) not in self._dropped:
                    known = {name: arguments[name] for name in found.argnames}
                    self._guarded(found.plugin, found.plugin_name, found.function, **known)

    def _guarded(self, plugin: object, label: str | None, function: Callable[..., Any], **arguments: object) -> None:
        try:
            function(**arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - no exception of an observer may end the run
            if isinstance(error, WriteError):
                self._report(plugin, "observer %r failed and will try again; the run continues: %s", label, str(error))
            else:
                self._drop(plugin, label, f"{type(error).__name__}: {error}")

    def _drop(self, plugin: object, name: str | None, reason: str) -> None:
        self._dropped.add(id(plugin))
        self._report(plugin, "observer %r failed and is disabled; the run continues: %s", name, reason)

    def _report(self, plugin: object, text: str, name: str | None, reason: str) -> None:
        if id(plugin) not in self._reported:
            self._reported.add(id(plugin))
            _LOG.warning(text, name, hide_in_text(reason))
