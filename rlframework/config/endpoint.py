"""A model behind an OpenAI-compatible endpoint: the keys that a judge and a teacher share, and those of each."""

import re
import string
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from rlframework.config.base import NeedsTrust, Section
from rlframework.config.numbers import CountOrZero, Seconds, Workers


class EndpointConfig(Section):
    """A model behind an OpenAI-compatible endpoint."""

    base_url: Annotated[str, NeedsTrust("sends prompts and completions to this address")] = Field(
        pattern=r"^https?://\S+$", description="address of the endpoint, such as http://127.0.0.1:8000/v1"
    )
    model: str = Field(min_length=1, description="name of the model at the endpoint")
    api_key_env: Annotated[str | None, NeedsTrust("sends the value of this environment variable to base_url")] = Field(
        None,
        pattern=r"^[A-Za-z_]\w*$",
        description="name of the environment variable that holds the API key, never the key; null: send no key",
    )
    concurrency: Workers = Field(16, description="maximum requests at the same time")
    timeout: Seconds = Field(60.0, description="seconds for one attempt at a request")
    max_retries: CountOrZero = Field(
        10,
        description="retries of a request after a lost connection, a timeout, or the HTTP status 408, 409, 429 or 5xx, "
        "with exponential back-off or after what Retry-After says",
    )


class TeacherEndpointConfig(EndpointConfig):
    """A teacher behind an OpenAI-compatible endpoint that returns `prompt_logprobs` by token id, as vLLM's does."""

    timeout: Seconds = Field(120.0, description="seconds for one attempt at a request")


PROMPT_FIELDS = ("question", "completion", "answer")
SCORE_PATTERN = r"(?i)\bscore\b[\s:=*]*(-?\d+(?:\.\d+)?)"
"""Matches `Score: 7`, `**Score:** 7.5` and `score = 7/10`."""

Bound = Annotated[float, Field(ge=-1e6, le=1e6)]


class JudgeConfig(EndpointConfig):
    """A model that scores completions, over the chat completions of an OpenAI-compatible endpoint."""

    prompt: str = Field(
        description="user message to the judge, a template with {completion} and perhaps {question} (the last message "
        "before it) and {answer} (the reference answer); write {{ and }} for braces"
    )
    scale: tuple[Bound, Bound] = Field(
        description="the scores that mean reward 0 and reward 1, such as [1, 10], or [10, 1] if less is better; a "
        "score outside is a failure"
    )
    pattern: str = Field(
        SCORE_PATTERN,
        description="regular expression whose only group is the score in the judge's reply; its last match counts",
    )
    parameters: Mapping[str, Any] = Field(
        {"temperature": 0.0, "max_tokens": 512}, description="further fields of the request; replaced as a whole"
    )
    deadline: Seconds = Field(300.0, description="seconds for a completion's score, with all retries and waits")

    @field_validator("prompt")
    @classmethod
    def _template(cls, prompt: str) -> str:
        try:
            fields = [tuple(parts[1:]) for parts in string.Formatter().parse(prompt) if parts[1] is not None]
        except ValueError as error:
            raise ValueError(f"prompt is not a valid template: {error}; write {{{{ for a literal brace") from error
        plain = {(name, "", None) for name in PROMPT_FIELDS}
        if unknown := [name for name, *rest in fields if (name, *rest) not in plain]:
            raise ValueError(
                f"prompt has {', '.join(f'{{{name}}}' for name in unknown)}; its fields are {{question}}, "
                "{completion} and {answer}, and a literal brace is {{ or }}"
            )
        if ("completion", "", None) not in fields:
            raise ValueError("prompt must contain {completion}, which is what the judge scores")
        return prompt

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        if groups != 1:
            raise ValueError(f"pattern {pattern!r} has {groups} groups; it must have one, the score: (?:...) is none")
        return pattern

    @field_validator("parameters")
    @classmethod
    def _further(cls, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        if taken := sorted({"model", "messages", "stream", "n"} & set(parameters)):
            raise ValueError(f"parameters has {', '.join(taken)}; a request sets these itself, for one whole reply")
        return parameters

    @model_validator(mode="after")
    def _different_ends(self) -> Self:
        if self.scale[0] == self.scale[1]:
            raise ValueError(f"scale must be two different scores, not {list(self.scale)}")
        return self
