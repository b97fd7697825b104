"""Score completions by the replies of a model behind an OpenAI-compatible endpoint: `{judge: {base_url: ..., ...}}`.

Requests, their retries and the waits between them are those of the package `openai`. They run in an event loop in a
thread, because the caller may run another event loop. Equal requests are made once: see `judge_replies`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections.abc import Collection, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.base.errors import ConfigError
from rlframework.base.loop_thread import LoopThread
from rlframework.base.secrets import HIDDEN, SHORTEST, hide_in_text
from rlframework.config.endpoint import JudgeConfig
from rlframework.config.environments import DatasetConfig
from rlframework.environments.counted_failures import CountedFailures
from rlframework.environments.reward_calls import FAILURES, Failure, Report, RewardResult
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.interfaces.messages import text_of
from rlframework.rollout.episode_thread import gather_or_cancel
from rlframework_serve.judge_replies import Replies

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_LOG = logging.getLogger(__name__)

_NO_KEY = "none"
"""Sent in place of a key, which the client demands."""

_FIRST_RETRIES = 2
"""Retries of the first request: a wrong address is an error within seconds."""

_SHOWN = 500
"""Characters of a reply that messages show."""

_UNREADABLE = (AttributeError, LookupError, TypeError, RecursionError)
"""The errors of reading JSON that is no chat completion, in the client or here."""

_T = TypeVar("_T")


class Judge:
    """Scores answers by the replies of the model that `judge` describes; the metric `reward_failures` counts failures.

    The first score of `judge.scale` is the reward 0 and the second the reward 1. `name` is the reward's, and `key` the
    dotted key of its section. Replies are kept in `judge/NAME.jsonl` in the folder of the run.
    """

    def __init__(self, config: DatasetConfig, judge: JudgeConfig, name: str, key: str) -> None:
        """Raise a `ConfigError` if the package `openai` is missing. Makes no request yet."""
        try:
            import openai  # noqa: F401 - whether it is installed
        except ImportError as error:
            raise ConfigError(f"{key} needs openai: pip install 'rlframework-core[judge]'") from error
        self._judge, self._name, self._key = judge, name, key
        self._counted = CountedFailures(config, f"{key} ({judge.model} at {hide_in_text(judge.base_url)})")
        self._replies = Replies(judge.model, judge.parameters, None)
        self._pattern = re.compile(judge.pattern)
        self._secret = ""
        self._loop: LoopThread[Any] | None = None
        self._asked = self._known = 0

    def check_columns(self, columns: Collection[str], source: str) -> None:
        """Do nothing: a judge gets no columns by name."""

    def asked_of(self, sample: Sample) -> dict[str, Any]:
        """See `Reward`: nothing."""
        return {}

    def start(self, folder: Path | None) -> None:
        """Make one request. Raises a `ConfigError` that names the address and the key's variable if it fails."""
        variable = self._judge.api_key_env
        if variable is not None and not os.environ.get(variable, "").strip():
            raise ConfigError(
                f"{self._key}.api_key_env: the environment variable {variable} is not set; export it with the key for "
                f"{hide_in_text(self._judge.base_url)}"
            )
        self._open()
        if folder is not None:
            path = folder / "judge" / f"{self._name}.jsonl"
            self._replies = Replies(self._judge.model, self._judge.parameters, path)
        prompt = self._judge.prompt.format(question="What is 1 + 1?", completion="2", answer="2")
        reply = self._in_loop(self._ask(prompt, retries=min(_FIRST_RETRIES, self._judge.max_retries)))
        if isinstance(reply, Failure):
            raise ConfigError(f"{self._key}: the first request failed: {reply.text}")
        if isinstance(found := self._read(reply), Failure):
            _LOG.warning("%s: in the first reply, to a trial completion, %s", self._key, found.text)

    def score(
        self, samples: Sequence[Sample], completions: Sequence[str], *, counted: bool = True
    ) -> list[StepOutcome]:
        """See `Reward`. The `UserError` has the first failure."""
        return self._counted.outcomes(samples, completions, self._score, counted=counted)

    def close(self) -> None:
        """Close the connections, the file of replies and the thread."""
        self._replies.close()
        if self._loop is not None:
            loop, self._loop = self._loop, None
            loop.run(self._client.close())
            loop.cancel()
            loop.join()
            _LOG.info("%s: %d replies, and %d from earlier requests", self._key, self._asked, self._known)

    def _open(self) -> None:
        """Start the thread and create the client, unless they are there."""
        if self._loop is None:
            from openai import AsyncOpenAI

            judge = self._judge
            self._secret = os.environ.get(judge.api_key_env or "", "").strip()
            self._loop = LoopThread(asyncio.Event().wait, f"judge {self._name}")
            self._client: AsyncOpenAI = AsyncOpenAI(
                base_url=judge.base_url,
                api_key=self._secret or _NO_KEY,
                timeout=judge.timeout,
                max_retries=judge.max_retries,
            )

    def _in_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        self._open()
        assert self._loop is not None
        return self._loop.run(work)

    def _score(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        self._in_loop(self._score_all(samples, completions, report))

    async def _score_all(self, samples: Sequence[Sample], completions: Sequence[str], report: Report) -> None:
        equal: dict[str, list[int]] = {}
        for number, (sample, completion) in enumerate(zip(samples, completions, strict=True)):
            equal.setdefault(self._prompt(sample, completion), []).append(number)
        limit = asyncio.Semaphore(self._judge.concurrency)

        async def score(prompt: str, numbers: list[int]) -> None:
            async with limit:
                reply = await self._reply(prompt)
            self._known += len(numbers) - 1
            report(numbers, [reply if isinstance(reply, Failure) else self._read(reply)] * len(numbers))

        await gather_or_cancel([score(prompt, numbers) for prompt, numbers in equal.items()])

    def _prompt(self, sample: Sample, completion: str) -> str:
        question = text_of(sample.messages[-1]) if sample.messages else ""
        return self._judge.prompt.format(question=question, completion=completion, answer=sample.answer)

    async def _reply(self, prompt: str) -> str | Failure:
        """The judge's reply to `prompt`, an earlier one if there is any."""
        known = self._replies.get(prompt)
        if known is not None:
            self._known += 1
            return known
        reply = await self._ask(prompt, retries=self._judge.max_retries)
        if not isinstance(reply, Failure):
            self._asked += 1
            self._replies.add(prompt, reply)
        return reply

    async def _ask(self, prompt: str, *, retries: int) -> str | Failure:
        """Make the request, with retries until the deadline."""
        from openai import OpenAIError

        judge = self._judge
        client = self._client.with_options(max_retries=retries)
        timeout = asyncio.timeout(judge.deadline)
        try:
            async with timeout:
                answer = await client.chat.completions.create(
                    model=judge.model,
                    messages=[{"role": "user", "content": prompt}],
                    extra_body=dict(judge.parameters),
                )
        except (OpenAIError, TimeoutError, ValueError, *_UNREADABLE) as error:  # ValueError: no JSON, or a prompt
            if timeout.expired():
                text = f"no reply within {self._key}.deadline, which is {judge.deadline:g} s, with all retries"
                return self._failure(text, "deadline")
            return self._failed(error)
        return self._text(answer)

    def _text(self, answer: Any) -> str | Failure:
        try:
            text = answer.choices[0].message.content
        except _UNREADABLE:
            return self._failure(f"the answer is not a chat completion: {_shown(answer)}", "no chat completion")
        if not isinstance(text, str):
            return self._failure("the reply has no text", "no text")
        return text.replace(self._secret, HIDDEN) if len(self._secret) >= SHORTEST else text

    def _read(self, reply: str) -> RewardResult:
        """The outcome of a reply by the last match of the pattern."""
        scores = self._pattern.findall(reply)
        if not scores:
            end = f"{'...' if len(reply) > _SHOWN else ''}{reply[-_SHOWN:]!r}"
            return self._failure(
                f"no score was found by {self._key}.pattern={self._judge.pattern!r} in the reply {end}", "no score"
            )
        try:
            value = float(scores[-1])
        except ValueError:
            value = math.nan
        first, last = self._judge.scale
        if not min(first, last) <= value <= max(first, last):
            text = f"the score {scores[-1]!r:.80} is not a number from {first:g} to {last:g} ({self._key}.scale)"
            return self._failure(text, "not on the scale")
        return StepOutcome((value - first) / (last - first), metrics={FAILURES: 0.0})

    def _failed(self, error: Exception) -> Failure:
        status = getattr(error, "status_code", None)
        name = type(error).__name__ if status is None else f"{type(error).__name__}, HTTP status {status}"
        variable = self._judge.api_key_env
        hint = ""
        if status in (401, 403):
            hint = (
                f"; set {self._key}.api_key_env to the name of the environment variable with a key"
                if variable is None
                else f"; the key is that of the environment variable {variable}"
            )
        elif status is None:
            hint = f"; is {self._key}.base_url right, and does its server run?"
        reason = f"{error}: {error.__cause__}" if error.__cause__ is not None and status is None else str(error)
        text = f"{name}: {reason:.{_SHOWN}}{hint}"
        return self._failure(text, name)

    def _failure(self, text: str, cause: str) -> Failure:
        where = f"{self._judge.model} at {self._judge.base_url}"
        also = [self._secret] if self._secret else []
        return Failure(hide_in_text(f"{where}: {text}", also), cause)


def _shown(answer: Any) -> str:
    try:
        return f"{answer!s:.{_SHOWN}}"
    except RecursionError:
        return "it is nested too deeply to be shown"
