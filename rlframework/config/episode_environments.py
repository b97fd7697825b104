"""The sections of environments with episodes, and of tasks from other libraries."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlframework.config.base import ImportsCode, import_path
from rlframework.config.environments import DatasetConfig
from rlframework.config.numbers import Count, Seconds
from rlframework.config.sections import EnvironmentConfig

Number = Annotated[float, Field(ge=-1e6, le=1e6)]


class ToolDataConfig(DatasetConfig):
    """Rows of your data as tasks that the model solves with tools."""

    max_calls_per_turn: Count = Field(16, description="tool calls of one turn that are made; further ones are refused")
    max_result_characters: Count = Field(
        4000, description="characters of a tool's result that the model sees; the rest is cut"
    )

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """See `EnvironmentConfig.unseen_by_training`: tools do not change the rows."""
        return super().unseen_by_training | {"environment.max_calls_per_turn", "environment.max_result_characters"}


class ToolsConfig(ToolDataConfig):
    """The public methods of a class of yours as tools: a new object for each episode."""

    name: str = Field("tools", description="the methods of a class as tools")
    tools: Annotated[str, ImportsCode()] = Field(
        description="import path of the class; its method `reward(self, completion)`, if any, scores the answer"
    )

    @field_validator("tools", mode="before")
    @classmethod
    def _class_path(cls, tools: object) -> object:
        """Replace a class by its import path."""
        return import_path(tools) if callable(tools) else tools


class AttemptsConfig(EnvironmentConfig):
    """Attempts of agents with a loop of their own, which talk to the run's OpenAI-compatible endpoint."""

    agent_timeout: Seconds = Field(300.0, description="seconds for each attempt; one that takes longer fails, alone")
    agent_sampling: Literal["reject", "override"] = Field(
        "reject",
        description="what becomes of an agent's temperature or top_p that is not the run's: reject with an error, or "
        "override with the run's",
    )

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """See `EnvironmentConfig.unseen_by_training`: limits of attempts do not change the rows."""
        return super().unseen_by_training | {"environment.agent_timeout", "environment.agent_sampling"}
