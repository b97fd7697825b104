"""The keys of `environment` for `agent`."""

from typing import Annotated

from pydantic import Field

from rlframework.config.base import CallableAsPath, ImportsCode
from rlframework.config.environments import AttemptsConfig, DatasetConfig


class AgentConfig(AttemptsConfig, DatasetConfig):
    """Rows of your data as tasks for an agent of yours, which talks to the run's OpenAI-compatible endpoint."""

    name: str = Field("agent", description="an agent of yours")
    agent: Annotated[str, CallableAsPath, ImportsCode()] = Field(
        description="import path of `async def solve(sample, session)`; the session has base_url, api_key, model and id"
    )

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """See `EnvironmentConfig.unseen_by_training`: agents do not change the rows."""
        return super().unseen_by_training | {"environment.agent"}
