"""The input of the checks (a `Context`) and their results (findings)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from rlframework.config.sections import RunConfig
from rlframework.generation.engine_environment import ask
from rlframework.plugins.configure import load_config, resolve_device
from rlframework.plugins.hookspec import DoctorFinding
from rlframework.plugins.manager import PluginManager, create_manager

PROBE_SECONDS = 90.0
"""Time limit of a child process: on a busy machine, the first import of torch can take most of a minute."""


@dataclass(frozen=True)
class Finding(DoctorFinding):
    """A finding with the topic and the name of its check."""

    topic: str = ""
    name: str = ""


Findings = Iterable[DoctorFinding]


class Check(NamedTuple):
    """A check: `rlframework doctor` shows its findings under `topic` and `name`. `remedy`: what to do if it raises."""

    topic: str
    name: str
    function: Callable[[Context], Findings]
    remedy: str = "Please report this bug in the doctor"


ok = partial(DoctorFinding, "ok")
note = partial(DoctorFinding, "note")
unknown = partial(DoctorFinding, "unknown")
warning = partial(DoctorFinding, "warning")
broken = partial(DoctorFinding, "broken")


def judged(good: bool, text: str, remedy: str, facts: Mapping[str, Any] | None = None) -> DoctorFinding:
    """Ok if `good`, else a warning with `remedy`."""
    return ok(text, facts=facts or {}) if good else warning(text, remedy, facts or {})


class Context:
    """The configuration, if given, the plugins, and the results of child processes.

    `config` is None if none is given or it fails to load (see `config_error`). `rates`: folder of a run whose rates
    count; `measure`: whether to measure them.
    """

    def __init__(
        self,
        source: str | None = None,
        overrides: Sequence[str] = (),
        *,
        rates: str | None = None,
        measure: bool = False,
    ) -> None:
        self.source, self.overrides = source, tuple(overrides)
        self.rates, self.measure = rates, measure
        self.config: RunConfig | None = None
        self.config_error: Exception | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor()
        self._answers: dict[tuple[str, ...], Future[Any]] = {}
        if source is not None:
            try:
                self.config = load_config(source, overrides)
            except Exception as error:  # noqa: BLE001 - the check `configuration` reports it
                self.config_error = error

    @cached_property
    def manager(self) -> PluginManager:
        """The plugins, including those of the configuration."""
        return create_manager(self.config.plugins if self.config is not None else ())

    @property
    def device(self) -> str:
        """The resolved `device` of the configuration, "cpu" or "cuda"; "cpu" without a configuration."""
        return resolve_device(self.config.device) if self.config is not None else "cpu"

    @property
    def policy_runs(self) -> list[RunConfig]:
        """The configuration and, for each further policy, that of `RunConfig.of`; empty without a configuration."""
        config = self.config
        return [] if config is None else [config, *(config.of(name) for name in config.further_policies)]

    def uses_group(self, name: str) -> bool:
        """Whether a worker group of the configuration is `name`."""
        return any(policy_run.worker_group.name == name for policy_run in self.policy_runs)

    def problem(self, text: str, remedy: str, *, needed: bool) -> DoctorFinding:
        """Return a finding for a failure: broken if the run needs it or no run is given, else a warning."""
        return (broken if needed or self.source is None else warning)(text, remedy)

    def probe(self, name: str, *arguments: str, seconds: float = PROBE_SECONDS) -> Any:
        """Return the result of `probes.NAME(*arguments)` in a child process, which all checks share.

        Raises `ProbeError` if the process fails or times out.
        """
        program = str(Path(__file__).with_name("probes.py"))
        command = (sys.executable, "-P", program, name, *arguments)  # -P: its folder hides no package
        with self._lock:
            if command not in self._answers:
                self._answers[command] = self._threads.submit(ask, command, seconds)
        return self._answers[command].result()
