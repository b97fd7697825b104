"""RL post-training of language models with pluggable training backends.

`load_config` and `run` are what the command line calls; `build_parts` builds a run's policy, generation engine,
environment and other components for your own code, and `Session` for the cells of a notebook. All names are imported on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframework.base import moved
from rlframework.base.lazy_names import lazy_names

__version__ = "0.2.0"

moved.install()

if TYPE_CHECKING:
    from rlframework.algorithms.algorithm import RunResult as RunResult
    from rlframework.base.errors import RLFrameworkError as RLFrameworkError
    from rlframework.base.errors import UserError as UserError
    from rlframework.config.sections import RunConfig as RunConfig
    from rlframework.plugins.configure import config_schema as config_schema
    from rlframework.plugins.configure import config_yaml as config_yaml
    from rlframework.plugins.configure import load_config as load_config
    from rlframework.plugins.manager import PluginManager as PluginManager
    from rlframework.plugins.manager import create_manager as create_manager
    from rlframework.rollout.parts import Parts as Parts
    from rlframework.runner.data import with_data as with_data
    from rlframework.runner.launch import resume as resume
    from rlframework.runner.launch import run as run
    from rlframework.runner.parts import build_parts as build_parts
    from rlframework.runner.session import Session as Session
    from rlframework.runner.session import loop_config as loop_config

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__, "__version__")
