"""Log-probabilities of given tokens from a model behind an OpenAI-compatible endpoint.

The request is `POST /completions` with the token ids as the prompt, one new token, and `prompt_logprobs`: for each
token of the prompt the reply has log-probabilities by token id, of the token itself and of the most likely ones, at
temperature 1. That is vLLM's extension, which `rlframework serve` has too. OpenAI's own fields name tokens by their
text, which does not identify them, and chat completions render the prompt again: neither is exact, and so not used.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import ConfigError, NotSupported, UserError
from rlframework.base.secrets import hide_in_text
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.endpoint import TeacherEndpointConfig
from rlframework.generation.driver import run_in_loop
from rlframework.policy.microbatches.data_processor import wanted_targets
from rlframework.policy.microbatches.global_batch import real_tokens
from rlframework.rollout.episode_thread import gather_or_cancel

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from transformers import PreTrainedTokenizerBase

Rows = BatchedDataDict[Any]
PromptLogprobs = Sequence[Mapping[int, tuple[float, str | None]]]
"""By token id: log-probability and text, at each position of a prompt; nothing at the first one."""

_SHOWN = 300
_KEY = "algorithm.endpoint"


class TeacherEndpoint:
    """The methods of `Policy` that distillation calls of a teacher, answered by an endpoint.

    The first reply is compared with `tokenizer`: the texts of its ids must be those of the endpoint's tokenizer.
    """

    def __init__(self, config: TeacherEndpointConfig, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        """Raise a `ConfigError` without the package `openai`, without the key, or for another temperature than 1."""
        self._config, self._tokenizer, self._checked = config, tokenizer, False
        try:
            import openai  # noqa: F401 - whether it is installed
        except ImportError as error:
            raise ConfigError(f"{_KEY} needs openai: pip install 'rlframework-core[judge]'") from error
        if config.api_key_env is not None and not os.environ.get(config.api_key_env, "").strip():
            raise ConfigError(f"{_KEY}.api_key_env: the environment variable {config.api_key_env} is not set")
        if temperature != 1.0:
            raise ConfigError(
                f"{_KEY}: prompt_logprobs are those at temperature 1, but generation.temperature={temperature:g}; set "
                "it to 1, or give the section `teacher`"
            )

    def get_logprobs(self, data: Rows, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """See `PolicyWorker.get_logprobs`."""
        logprobs = torch.zeros(data["input_ids"].shape)
        for row, found in enumerate(self._score(data, 0)):
            for place, ids in enumerate(data["input_ids"][row, : len(found)].tolist()):
                if place:
                    logprobs[row, place] = found[place][ids][0]
        return BatchedDataDict({"logprobs": logprobs * _wanted(data, positions)})

    def get_topk_logits(self, data: Rows, k: int, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """See `PolicyWorker.get_topk_logits`: the logits are log-probabilities, whose normalizers are 0."""
        shape = (*data["input_ids"].shape, k)
        logits, tokens = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        for row, found in enumerate(self._score(data, k)):
            for place, by_id in enumerate(found[1:], 1):
                best = sorted(by_id.items(), key=lambda item: (-item[1][0], item[0]))[:k]
                if len(best) < k:
                    raise self._failed(
                        f"it returned {len(best)} of algorithm.top_k={k} tokens; raise its --max-logprobs"
                    )
                tokens[row, place] = torch.tensor([token for token, _ in best])
                logits[row, place] = torch.tensor([value for _, (value, _) in best])
        wanted = _wanted(data, positions)
        found_logits, ids = logits * wanted[..., None], tokens * wanted[..., None].long()
        return BatchedDataDict(
            {"topk_logits": found_logits, "topk_indices": ids, "topk_normalizers": torch.zeros(wanted.shape)}
        )

    def get_token_set_logprobs(self, data: Rows, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """Raise `NotSupported`: endpoints choose the tokens themselves."""
        raise NotSupported(f"{_KEY} returns log-probabilities of its most likely tokens, not of given ones")

    def rest(self) -> None:
        """Do nothing."""

    def _score(self, data: Rows, top: int) -> list[PromptLogprobs]:
        lengths, ids = data["input_lengths"].tolist(), data["input_ids"].tolist()
        found = run_in_loop(self._score_all([row[:length] for row, length in zip(ids, lengths, strict=True)], top))
        if not self._checked:
            self._check_tokens(found)
            self._checked = True
        return found

    async def _score_all(self, rows: Sequence[Sequence[int]], top: int) -> list[PromptLogprobs]:
        from openai import AsyncOpenAI

        config, limit = self._config, asyncio.Semaphore(self._config.concurrency)
        key = os.environ.get(config.api_key_env or "", "").strip() or "none"
        async with AsyncOpenAI(
            base_url=config.base_url, api_key=key, timeout=config.timeout, max_retries=config.max_retries
        ) as client:

            async def one(row: Sequence[int]) -> PromptLogprobs:
                async with limit:
                    return await self._ask(client, row, top)

            return await gather_or_cancel([one(row) for row in rows])

    async def _ask(self, client: AsyncOpenAI, row: Sequence[int], top: int) -> PromptLogprobs:
        from openai import OpenAIError

        try:
            reply = await client.completions.create(
                model=self._config.model, prompt=list(row), max_tokens=1, extra_body={"prompt_logprobs": top}
            )
        except (OpenAIError, ValueError) as error:
            raise self._failed(f"{type(error).__name__}: {error!s:.{_SHOWN}}") from error
        return self._read(reply, row)

    def _read(self, reply: Any, row: Sequence[int]) -> PromptLogprobs:
        """Return the log-probabilities of a reply; raise `UserError` unless they are those of the tokens of `row`."""
        found = getattr((getattr(reply, "choices", None) or [None])[0], "prompt_logprobs", None)
        if found is None:
            raise self._failed(
                "its completions have no `prompt_logprobs` by token id. vLLM's and `rlframework serve` have; with any "
                "other, store log-probabilities (algorithm.teacher_data) or give the section `teacher`"
            )
        try:
            read = [
                {int(token): (float(one["logprob"]), one.get("decoded_token")) for token, one in (each or {}).items()}
                for each in found
            ]
            whole = len(read) == len(row) and all(
                ids in by_id and all(math.isfinite(value) for value, _ in by_id.values())
                for ids, by_id in zip(row[1:], read[1:], strict=True)
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise self._failed("its prompt_logprobs are not finite numbers by token id for each token of the prompt")
        return read

    def _check_tokens(self, found: Sequence[PromptLogprobs]) -> None:
        texts = {ids: text for row in found for by_id in row for ids, (_, text) in by_id.items() if text}
        for ids, text in texts.items():
            ours = str(self._tokenizer.decode([ids]))
            if "\ufffd" not in ours + text and ours.strip() != text.strip():
                raise ConfigError(
                    f"{_KEY}: the token {ids} is {text!r} there, but {ours!r} in the policy's tokenizer; the teacher "
                    "needs the tokenizer of the policy"
                )

    def _failed(self, text: str) -> UserError:
        secret = os.environ.get(self._config.api_key_env or "", "").strip()
        where = f"{_KEY} ({self._config.model} at {self._config.base_url})"
        return UserError(hide_in_text(f"{where}: {text}", [secret] if secret else []))


def _wanted(data: Rows, positions: str) -> Tensor:
    """Return 1 at the positions that are scored, `[B, S]`; see `PolicyWorker.get_logprobs`."""
    return wanted_targets(data, real_tokens(data), positions).float()
