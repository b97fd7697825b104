"""The entry point: the records of the environments. Imports none of the libraries that they need."""

from __future__ import annotations

from typing import Any

from rlframework.config.sections import EnvironmentConfig
from rlframework.plugins.builtin import check_dataset
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, EnvironmentRecord
from rlframework_environments.config import (
    GymnasiumConfig,
    McpConfig,
    OpenEnvConfig,
    ReasoningGymConfig,
    VerifiersConfig,
)


@hookimpl
def rlframework_environments() -> list[EnvironmentRecord]:
    """Return the records, selected by `environment.name`."""
    several = frozenset({Capability.EPISODES})
    servers = "the tools of an MCP server, with rows of your data as tasks"
    gym, reasoning = "a Gymnasium environment with text or discrete actions", "procedural tasks of reasoning-gym"
    sockets = "an OpenEnv server, which runs elsewhere, over a WebSocket"
    elsewhere = "a verifiers environment, in a Python environment of its own"
    return [
        _record("mcp", "mcp:McpEnvironment", servers, McpConfig, check=check_dataset, capabilities=several),
        _record("gymnasium", "gymnasium:GymnasiumEnvironment", gym, GymnasiumConfig, capabilities=several),
        _record("reasoning_gym", "reasoning_gym:ReasoningGymEnvironment", reasoning, ReasoningGymConfig),
        _record("openenv", "openenv:OpenEnvEnvironment", sockets, OpenEnvConfig, capabilities=several),
        _record("verifiers", "verifiers:VerifiersEnvironment", elsewhere, VerifiersConfig),
    ]


def _record(name: str, target: str, summary: str, model: type[EnvironmentConfig], **fields: Any) -> EnvironmentRecord:
    return EnvironmentRecord(
        name, f"rlframework_environments.{target}", api_version=1, summary=summary, config_model=model, **fields
    )
