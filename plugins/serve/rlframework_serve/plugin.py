"""The plugin of this distribution: the command `rlframework serve`, the environment `agent` and its endpoint, models
behind the endpoints of others: a teacher, a judge.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import typer
from pydantic import Field
from typer import Argument, Option

from rlframework.base.errors import UserError
from rlframework.cli.common import Debug, OldOverrides, Overrides, TrustRun, with_old_overrides
from rlframework.config.base import CallableAsPath, ImportsCode
from rlframework.config.environments import AttemptsConfig, DatasetConfig
from rlframework.config.sections import RunConfig
from rlframework.plugins.builtin import check_tools, problem_of
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import EnvironmentRecord, Problem
from rlframework.plugins.user_defined import load_agent


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


@hookimpl
def rlframework_environments() -> list[EnvironmentRecord]:
    """Return the record selected by `environment.name: agent`."""
    return [
        EnvironmentRecord(
            "agent",
            "rlframework_serve.agent_environment:AgentEnvironment",
            api_version=1,
            summary="an agent of yours that talks to an OpenAI-compatible endpoint of the run",
            config_model=AgentConfig,
            check=check_agent,
        )
    ]


@hookimpl
def rlframework_agent_endpoint() -> str:
    """Return the path of `agent_runner`."""
    return "rlframework_serve.agent_environment:agent_runner"


@hookimpl
def rlframework_teacher_endpoint() -> str:
    """Return the path of `TeacherEndpoint`."""
    return "rlframework_serve.teacher:TeacherEndpoint"


@hookimpl
def rlframework_judge() -> str:
    """Return the path of `Judge`."""
    return "rlframework_serve.judge:Judge"


@hookimpl
def rlframework_commands(app: typer.Typer) -> None:
    """Add `serve`."""
    app.command()(serve)


def check_agent(config: RunConfig, device: str) -> list[Problem]:
    """Check the agent's function, and the reward functions as `check_tools` does."""
    environment = config.environment
    unusable = (
        problem_of("environment.agent", load_agent, environment.agent) if isinstance(environment, AgentConfig) else []
    )
    return [*unusable, *check_tools(config, device)]


def serve(
    name: Annotated[str, Argument(metavar="RUN_OR_MODEL", help="A run's output_dir, or a model directory or name.")],
    overrides: Overrides = None,
    host: Annotated[
        str, Option(help="Address to listen on. Others than loopback are open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    token: Annotated[
        str | None,
        Option(envvar="RLFRAMEWORK_TOKEN", help="Bearer token that clients need. Default: a random one, printed."),
    ] = None,
    old_overrides: OldOverrides = None,
    trust_run: TrustRun = False,
    debug: Debug = False,
) -> None:
    """Serve a model with OpenAI's chat completions, completions and Responses, until Ctrl-C.

    \b
    rlframework serve runs/quickstart
    rlframework serve HuggingFaceTB/SmolLM2-135M-Instruct generation.max_new_tokens=512 --port 9000
    """
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token):
        raise UserError("--token: give at least 16 printable ASCII characters without spaces, or leave it out")
    from rlframework.runner.models import generation_config

    config = generation_config(name, overrides=with_old_overrides(overrides or (), old_overrides), trust_run=trust_run)
    from rlframework.runner.parts import build_generation, open_images
    from rlframework_serve.serving import serve as serve_model

    sampling = config.generation
    key = token or secrets.token_urlsafe(32)

    def started(base_url: str) -> None:
        print(f"base_url={base_url}\napi_key={key if token is None else '(as given)'}")
        print(
            f"requests without their own are answered with temperature={sampling.temperature:g}, "
            f"top_p={sampling.top_p:g} and at most {sampling.max_new_tokens} tokens, which is also the most; "
            "generation.temperature=... and generation.max_new_tokens=... change that"
        )
        print("Ctrl-C ends it", flush=True)

    with build_generation(config) as (tokenizer, policy, generation):
        section, inputs = config.environment.images, open_images(config, tokenizer)
        serve_model(
            tokenizer,
            generation,
            model="policy",
            token=key,
            host=host,
            port=port,
            started=started,
            policy=policy,
            images=None if section is None or inputs is None else (section, inputs),
        )
    print("ended")
