"""The shared input of checks: the configuration, if given, the plugins, and the results of child processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.doctor.findings import Finding, Level

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.plugins.manager import PluginManager

PROBE_SECONDS = 90.0
"""Time limit of a child process: on a busy machine, the first import of torch can take most of a minute."""


class ProbeError(Exception):
    """A child process failed; the message says how."""


class Context:
    """The context of a check. `config` is None if none is given or it fails to load (see `config_error`)."""

    def __init__(self, source: str | None = None, overrides: Sequence[str] = ()) -> None:
        self.source = source
        self.config: RunConfig | None = None
        self.config_error: Exception | None = None
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._answers: dict[tuple[str, ...], dict[str, Any] | ProbeError] = {}
        if source is not None:
            self._load(source, overrides)

    def _load(self, source: str, overrides: Sequence[str]) -> None:
        from rlframework.configure import load_config

        try:
            self.config = load_config(source, overrides)
        except Exception as error:  # noqa: BLE001 - the check `configuration` reports it
            self.config_error = error

    @cached_property
    def manager(self) -> PluginManager:
        """The plugins, including those of the configuration."""
        from rlframework.plugins.manager import create_manager

        return create_manager(self.config.plugins if self.config is not None else ())

    @property
    def device(self) -> str:
        """The resolved `device` of the configuration, "cpu" or "cuda"; "cpu" without a configuration."""
        from rlframework.configure import resolve_device

        return resolve_device(self.config.device) if self.config is not None else "cpu"

    def uses_group(self, name: str) -> bool:
        """Whether the configuration's worker group is `name`."""
        return self.config is not None and self.config.worker_group.name == name

    def uses_backend(self, name: str) -> bool:
        """Whether the configuration's backend is `name`."""
        return self.config is not None and self.config.policy.backend == name

    def problem(self, text: str, remedy: str, *, needed: bool, **facts: Any) -> Finding:
        """Return a finding for a failure: broken if the run needs it or no run is given, else a warning."""
        level = Level.BROKEN if needed or self.source is None else Level.WARNING
        return Finding(level, text, remedy, facts)

    def probe(self, name: str, *arguments: str, seconds: float = PROBE_SECONDS) -> Mapping[str, Any]:
        """Return the result of `probes/NAME.py`, which runs in a child process once for all checks.

        Raises `ProbeError` if the process fails or times out.
        """
        key = (name, *arguments)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._answers:
                self._answers[key] = _ask(name, arguments, seconds)
        answer = self._answers[key]
        if isinstance(answer, ProbeError):
            raise answer
        return answer


def _ask(name: str, arguments: Sequence[str], seconds: float) -> dict[str, Any] | ProbeError:
    program = Path(__file__).with_name("probes") / f"{name}.py"
    command = [sys.executable, "-P", str(program), *arguments]  # -P: do not import from the current directory
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return ProbeError(f"no answer within {seconds:g} s")
    if done.returncode:
        return ProbeError(f"the process ended with {_how(done.returncode)}: {_last_line(done.stderr)}")
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return ProbeError(f"the process gave no readable output: {_last_line(done.stderr)}")
    return found


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no error output")
