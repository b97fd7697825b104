"""The section `algorithm.async`: generation for later steps while a step is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from rlframework.config.base import Section
from rlframework.config.numbers import Count, Seconds

MaxStaleness = Annotated[int, Field(ge=0, le=1000)]
"""Training steps by which the weights that sample a token may be behind those that are trained on it."""


class AsyncConfig(Section):
    """Asynchronous training, with engines of their own (`generation.workers`): see `docs/asynchronous.md`."""

    max_staleness: MaxStaleness = Field(
        1,
        description="most training steps between the weights that sample a token and those that are trained with it, "
        "for every token; 0: generation waits for training, as without this section",
    )
    weight_updates: Literal["in_flight", "drain"] = Field(
        "in_flight",
        description="when engines get new weights. in_flight: at once, and completions in progress are continued with "
        "them; drain: when the requests in progress are complete",
    )
    deadline: Seconds | None = Field(
        None, description="seconds from the admission of a group after which it has failed; null: none"
    )
    attempts: Count = Field(3, description="groups of a prompt that may fail before the prompt is given up")


class WithAsync(Section):
    """The key `async` of an algorithm; in Python, `asynchronous`."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    asynchronous: AsyncConfig | None = Field(
        None,
        alias="async",
        description="generate for later steps while a step is trained (needs `generation.workers`); null: synchronous",
    )


def with_importance_correction(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an algorithm, with `loss.importance_correction` truncated where tokens may be stale.

    Not if the loss has a correction or a mask set, or is one of the user's own.
    """
    section, loss = values.get("async", values.get("asynchronous")), values.get("loss", {})
    staleness = getattr(section, "max_staleness", None)
    if isinstance(section, Mapping):
        staleness = section.get("max_staleness", AsyncConfig.model_fields["max_staleness"].default)
    keys = loss if isinstance(loss, Mapping) else dict.fromkeys(getattr(loss, "model_fields_set", ("name",)))
    if not staleness or keys.keys() & {"importance_correction", "importance_mask", "name"}:
        return dict(values)
    if isinstance(loss, Mapping):
        return {**values, "loss": {**loss, "importance_correction": "truncated"}}
    return {**values, "loss": loss.model_copy(update={"importance_correction": "truncated"})}
