"""The keys of a model behind an OpenAI-compatible endpoint, which a judge and a teacher share."""

from typing import Annotated

from pydantic import Field

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
