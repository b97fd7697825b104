"""Engines whose software sets up the whole process that it runs in."""

from __future__ import annotations

import torch

from rlframework.base.errors import ConfigError


def require_own_process(engine: str) -> None:
    """Raise `ConfigError` if this process has a process group, such as that of another engine.

    `engine`: the name of the software.
    """
    if torch.distributed.is_initialized():
        raise ConfigError(
            f"{engine} needs a process of its own, and this one has a process group already: close the other engine, "
            "or set generation.workers.group to processes or ray"
        )
