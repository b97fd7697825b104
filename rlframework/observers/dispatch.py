"""Dispatches the events of a run to its observers, and protects the run from their errors.

Built-in observers and those of plugins implement the same four hooks (`rlframework.plugins.hookspec`). Each is called
independently: an observer that raises is reported once and not called again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from rlframework.observers.secrets import hide_in_text
from rlframework.plugins.hookspec import SampleRecord
from rlframework.plugins.loading import load_target
from rlframework.plugins.reading import new_pluggy

if TYPE_CHECKING:
    from pluggy import HookImpl, HookRelay, PluginManager

    from rlframework.config.sections import ObserversConfig
    from rlframework.plugins.hookspec import RunInfo

_LOG = logging.getLogger(__name__)

__all__ = ["CORE_OBSERVERS", "Observers", "SampleRecord"]

CORE_OBSERVERS = {
    "console": "rlframework.observers.console:ConsoleObserver",
    "jsonl": "rlframework.observers.jsonl:JsonlObserver",
    "tensorboard": "rlframework.observers.tensorboard:TensorBoardObserver",
    "curve": "rlframework.observers.curve:CurveObserver",
    "wandb": "rlframework.observers.wandb:WandbObserver",
    "mlflow": "rlframework.observers.mlflow:MlflowObserver",
}
"""Import paths of the built-in observers by their key in the `observers` section; constructed without arguments.

Besides hooks, each has `close()`, and may have `ended(state)`, which is called first, no matter how the run ended.
"""

State = Literal["finished", "failed", "killed"]
"""How a run ended; "killed" means by Ctrl-C or a signal."""


class Observers:
    """All observers of a run, notified together.

    `hook` is the hook relay of the plugin manager (None: built-in observers only). As a context manager, it calls
    `run_started` on entry and `close` on exit. The caller calls `run_finished`, because a failed run does not finish.
    """

    def __init__(self, config: ObserversConfig, info: RunInfo, hook: HookRelay | None = None) -> None:
        self._info = info
        self._relays = [] if hook is None else [hook]
        self._dropped: set[int] = set()
        self._core = self._make_core(config)
        self._closed = self._finished = False
        self.last_step = 0
        """The last finished step; 0 before the first."""

    def run_started(self) -> None:
        """Notify observers that all parts are built and the first step is about to start."""
        self._notify("rlframework_run_started")

    def step_finished(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord] = ()) -> None:
        """Notify observers of finished step `step` (0: before the first), with its metrics and some of its samples."""
        self.last_step = step
        self._notify("rlframework_step_finished", step=step, metrics=_numbers(metrics), samples=tuple(samples))

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """Notify observers that a checkpoint is complete at `path`."""
        self._notify("rlframework_checkpoint_saved", step=step, path=path)

    def run_finished(self, metrics: Mapping[str, float]) -> None:
        """Notify observers that the run has finished with these final metrics."""
        self._notify("rlframework_run_finished", metrics=_numbers(metrics))
        self._finished = True

    def close(self, state: State | None = None) -> None:
        """Report to the built-in observers how the run ended, and close their files and displays. Idempotent.

        By default, `state` is "finished" if `run_finished` was called, otherwise "failed".
        """
        if self._closed:
            return
        self._closed = True
        state = state or ("finished" if self._finished else "failed")
        for observer in self._core.get_plugins():
            name = self._core.get_name(observer)
            if hasattr(observer, "ended") and id(observer) not in self._dropped:
                self._guarded(observer, name, observer.ended, {"state": state})
            self._guarded(observer, name, observer.close, {})

    def __enter__(self) -> Self:
        self.run_started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close("killed" if kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit)) else None)

    def _make_core(self, config: ObserversConfig) -> PluginManager:
        manager = new_pluggy()
        for name, target in CORE_OBSERVERS.items():
            if getattr(config, name):
                self._guarded(target, name, _register, {"manager": manager, "name": name, "target": target})
        return manager

    def _notify(self, hook: str, **arguments: Any) -> None:
        arguments["run"] = self._info
        for relay in (self._core.hook, *self._relays):
            for implementation in getattr(relay, hook).get_hookimpls():
                if id(implementation.plugin) not in self._dropped:
                    self._call(implementation, arguments)

    def _call(self, implementation: HookImpl, arguments: Mapping[str, Any]) -> None:
        if implementation.wrapper or implementation.hookwrapper:
            self._drop(implementation.plugin, implementation.plugin_name, "observer hooks cannot be wrapped")
            return
        known = {name: arguments[name] for name in implementation.argnames}
        self._guarded(implementation.plugin, implementation.plugin_name, implementation.function, known)

    def _guarded(self, plugin: object, name: str | None, function: Any, arguments: Mapping[str, Any]) -> None:
        try:
            function(**arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - no exception of an observer may end the run
            self._drop(plugin, name, f"{type(error).__name__}: {error}")

    def _drop(self, plugin: object, name: str | None, reason: str) -> None:
        if id(plugin) in self._dropped:
            return
        self._dropped.add(id(plugin))
        _LOG.warning("observer %r failed and is disabled; the run continues: %s", name, hide_in_text(reason))


def _register(manager: PluginManager, name: str, target: str) -> None:
    manager.register(load_target(target)(), name=name)


def _numbers(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """A read-only copy, so that an observer cannot change the metrics that the next one gets."""
    return MappingProxyType({name: float(value) for name, value in metrics.items()})
