"""Completions of single prompts on the engines of a run: what a rollout of several turns asks for."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from rlframework.base.errors import RefitError
from rlframework.generation.client import GenerationClient
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams
from rlframework.observers.timeline import Timeline


class Completions:
    """Completes prompts one by one on `client`, and notes the versions of the weights that were used.

    Belongs to the event loop that it is called in, like the client.
    """

    several_versions: ClassVar[bool] = False
    """Whether completions may be sampled with weights of several versions."""

    def __init__(
        self, client: GenerationClient, sampling: SamplingParams, *, max_new_tokens: int, positions: int | None
    ) -> None:
        """`positions`: the model's longest row, in tokens; None: unknown."""
        self.max_new_tokens, self.positions = max_new_tokens, positions
        self.versions: set[int] = set()
        """The versions of the weights that tokens were sampled with."""
        self._client, self.sampling = client, sampling
        self._name, self._numbers = uuid.uuid4().hex, count()

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the run, if it records one."""
        return self._client.timeline

    def session(self) -> str:
        """Return a session id that no other process uses."""
        return f"{self._name}:session:{next(self._numbers)}"

    async def complete(
        self,
        prompt_ids: Sequence[int] | Tensor,
        seed: int,
        max_new_tokens: int,
        session_id: str | None = None,
        sampling: SamplingParams | None = None,
        media: Mapping[str, Tensor] | None = None,
    ) -> GenerationResult:
        """Return the completion of a prompt, sampled as the rollout is unless `sampling` is given.

        `media`: the model's multimodal inputs for the prompt, by name; None: it has none.

        Raises like `GenerationClient.generate`.
        """
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64)
        name = f"{self._name}:{next(self._numbers)}"
        sampling = sampling or self.sampling
        request = GenerationRequest(name, prompt, seed, max_new_tokens, sampling, session_id, media or {})
        result = await self._client.generate(request)
        self.versions.update(span.version for span in result.spans)
        return result


def require_version(used: set[int], version: int | None) -> None:
    """Raise `RefitError` unless all tokens were sampled with the weights of `version`; None: of any single one."""
    if len(used) > 1 or (version is not None and used - {version}):
        raise RefitError(
            f"the engines sampled with weights of versions {sorted(used)}, but the batch needs "
            f"{'a single version' if version is None else f'version {version}'}: refit the engines, and report a bug "
            "of the engine's plugin if this happens again"
        )
