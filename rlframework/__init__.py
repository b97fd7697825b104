"""RL post-training of language models with pluggable training backends.

`load_config` and `run` are what the command line calls; `build_parts` builds a run's policy, generation engine,
environment and other components for your own code, and `Session` for the cells of a notebook. All names are imported on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlframework.base import moved

__version__ = "0.2.0"

moved.install()

if TYPE_CHECKING:
    from rlframework.algorithms.algorithm import RunResult
    from rlframework.base.errors import RLFrameworkError, UserError
    from rlframework.config.sections import RunConfig
    from rlframework.plugins.configure import config_schema, config_yaml, load_config
    from rlframework.plugins.manager import PluginManager, create_manager
    from rlframework.rollout.parts import Parts
    from rlframework.runner.data import with_data
    from rlframework.runner.launch import resume, run
    from rlframework.runner.parts import build_parts
    from rlframework.runner.session import Session, loop_config

__all__ = [
    "Parts",
    "PluginManager",
    "RLFrameworkError",
    "RunConfig",
    "RunResult",
    "Session",
    "UserError",
    "__version__",
    "build_parts",
    "config_schema",
    "config_yaml",
    "create_manager",
    "load_config",
    "loop_config",
    "resume",
    "run",
    "with_data",
]

_MODULES = {
    "Parts": "rollout.parts",
    "PluginManager": "plugins.manager",
    "RLFrameworkError": "base.errors",
    "RunConfig": "config.sections",
    "RunResult": "algorithms.algorithm",
    "Session": "runner.session",
    "UserError": "base.errors",
    "build_parts": "runner.parts",
    "config_schema": "plugins.configure",
    "config_yaml": "plugins.configure",
    "create_manager": "plugins.manager",
    "load_config": "plugins.configure",
    "loop_config": "runner.session",
    "resume": "runner.launch",
    "run": "runner.launch",
    "with_data": "runner.data",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
