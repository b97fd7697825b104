"""The keys of `environment` for each of these environments."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rlframework.config.base import ImportsCode, NeedsTrust
from rlframework.config.environments import AttemptsConfig, Number, ToolDataConfig
from rlframework.config.numbers import Seconds, Steps
from rlframework.config.sections import EnvironmentConfig


class McpConfig(ToolDataConfig):
    """The tools of an MCP server, which is a program that is started and spoken to over its standard streams."""

    name: str = Field("mcp", description="the tools of an MCP server")
    command: Annotated[tuple[str, ...], NeedsTrust("runs this program"), Field(min_length=1)] = Field(
        description="the server's program and its arguments, such as [python, server.py]"
    )
    variables: Annotated[tuple[str, ...], NeedsTrust("gives these environment variables to the server")] = Field(
        (), description="names of environment variables that the server gets, besides PATH, HOME and the like"
    )
    server_per: Literal["episode", "run"] = Field(
        "episode", description="episode: a server for each, so that they share no state; run: one for all at once"
    )
    reset_tool: str = Field(
        "",
        description="tool of the server, without arguments, that forgets all of an episode: then servers are kept for "
        "later episodes, and reset before each; the model does not see it",
    )
    start_timeout: Seconds = Field(30.0, description="seconds for a server to start and list its tools")
    call_timeout: Seconds = Field(30.0, description="seconds for a tool call; one that takes longer is an observation")

    @model_validator(mode="after")
    def _resets_what_one_episode_uses(self) -> Self:
        if self.reset_tool and self.server_per == "run":
            raise ValueError(
                f"reset_tool {self.reset_tool!r} would take the state of other episodes with server_per: run; leave "
                "one of them out"
            )
        return self


class GymnasiumConfig(EnvironmentConfig):
    """An environment of Gymnasium whose actions are discrete or text. Requires the extra `gymnasium`."""

    name: str = Field("gymnasium", description="a Gymnasium environment")
    id: Annotated[str, ImportsCode()] = Field(
        description="what `gymnasium.make` takes: FrozenLake-v1, or my_games:Guess-v0 after importing my_games"
    )
    arguments: Mapping[str, Any] = Field(default_factory=dict, description="further arguments of `gymnasium.make`")
    prompt: str = Field(
        "Reply with one action: {actions}.\n\n{observation}",
        description="first user message; {actions} are the names of the actions, {observation} what is seen first",
    )
    observation_prompt: str = Field("{observation}", description="user message after each action, with {observation}")
    actions: tuple[str, ...] = Field((), description="names of discrete actions, in order; none: their numbers")
    render: bool = Field(False, description="show what the environment renders as text, instead of its observations")
    invalid_action_reward: Number = Field(0.0, description="reward of a reply that is not an action; it is not played")
    solved_reward: Number = Field(1.0, description="total reward from which an episode counts as solved (`accuracy`)")
    train_samples: Steps = Field(1024, description="number of training tasks, which are seeds of `reset`")
    validation_samples: Steps = Field(64, description="number of further seeds, held out for validation")

    @model_validator(mode="after")
    def _prompts(self) -> Self:
        for key in ("prompt", "observation_prompt"):
            if "{observation}" not in getattr(self, key):
                raise ValueError(f"{key} {getattr(self, key)!r} must contain {{observation}}")
        if len(set(self.actions)) != len(self.actions):
            raise ValueError(f"actions {list(self.actions)} must differ")
        return self


class ReasoningGymConfig(EnvironmentConfig):
    """A task of reasoning-gym, by name. Requires the extra `reasoning-gym`."""

    name: str = Field("reasoning_gym", description="tasks of reasoning-gym")
    task: str = Field(description="name of a data set of reasoning-gym, such as chain_sum")
    arguments: Mapping[str, Any] = Field(
        default_factory=dict, description="settings of the task, such as {min_terms: 2}"
    )
    train_samples: Steps = Field(1024, description="number of training tasks")
    validation_samples: Steps = Field(64, description="number of tasks held out for validation")
    instruction: str = Field("", description="text appended to each question")
    answer_after: str = Field(
        "", description="text after whose last occurrence the answer begins; empty: all is answer"
    )
    reward_timeout: Seconds = Field(
        10.0, description="seconds to score one answer, in a process of its own; one that takes longer counts as wrong"
    )

    @model_validator(mode="after")
    def _own_keys(self) -> Self:
        if taken := sorted({"seed", "size"} & set(self.arguments)):
            raise ValueError(f"arguments {taken} are given by `seed`, `train_samples` and `validation_samples`")
        return self


class OpenEnvConfig(EnvironmentConfig):
    """Episodes of an OpenEnv server, over a WebSocket. The server runs in a Python environment of its own."""

    name: str = Field("openenv", description="an OpenEnv server")
    url: Annotated[str, NeedsTrust("sends the model's turns to this address")] = Field(
        description="address of the server's WebSocket, such as ws://127.0.0.1:8000/ws"
    )
    action: str = Field("message", description="field of the server's action that is given the text of a turn")
    observation: str = Field(
        "", description="field of the server's observation that the model sees; empty: all of it, as JSON"
    )
    prompt: str = Field("{observation}", description="first user message; {observation} is what is seen first")
    solved_reward: Number = Field(1.0, description="total reward from which an episode counts as solved (`accuracy`)")
    train_samples: Steps = Field(1024, description="number of training tasks, which are seeds of `reset`")
    validation_samples: Steps = Field(64, description="number of further seeds, held out for validation")
    connect_timeout: Seconds = Field(
        10.0, description="seconds to connect, and to wait for a server that has reached its number of sessions"
    )

    @field_validator("url")
    @classmethod
    def _web_socket(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError(f"url {url!r} must be the address of a WebSocket, such as ws://127.0.0.1:8000/ws")
        return url

    @model_validator(mode="after")
    def _shows_observation(self) -> Self:
        if "{observation}" not in self.prompt:
            raise ValueError(f"prompt {self.prompt!r} must contain {{observation}}")
        return self


class VerifiersConfig(AttemptsConfig):
    """Tasks and agents of a verifiers environment, in a Python environment of its own. Requires the extra `serve`."""

    name: str = Field("verifiers", description="a verifiers environment")
    python: Annotated[str, NeedsTrust("runs this program")] = Field(
        description="the Python of an environment in which verifiers and the taskset are installed"
    )
    settings: Annotated[Mapping[str, Any], NeedsTrust("imports and runs what this names")] = Field(
        description="the `env` block of a verifiers configuration, such as {taskset: {id: my_tasks}}"
    )
    variables: Annotated[tuple[str, ...], NeedsTrust("gives these environment variables to the environment")] = Field(
        (), description="names of environment variables that it gets, besides PATH, HOME and the like"
    )
    train_samples: Steps = Field(1024, description="most tasks to train on, which follow those of validation")
    validation_samples: Steps = Field(64, description="the first tasks of the taskset, held out for validation")
    start_timeout: Seconds = Field(120.0, description="seconds to load the environment and its tasks")

    @field_validator("system_prompt")
    @classmethod
    def _own_system_prompt(cls, system_prompt: str | None) -> str | None:
        """Reject a system prompt, which the environment's agents would not see."""
        if system_prompt is not None:
            raise ValueError("must be null: verifiers makes the conversations; give the taskset a system prompt")
        return system_prompt

    @property
    def most_tasks(self) -> int:
        """The tasks of both splits."""
        return self.train_samples + self.validation_samples
