"""Rollouts of episodes with a tiny model that writes a script; its engine records what it was asked and returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframework.base.files import replacing_directory
from rlframework.config.sections import EnvironmentConfig
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.interfaces.environment import Environment, Episode, Sample, StepOutcome
from rlframework.interfaces.generation import GenerationResult, WeightSpan
from rlframework.interfaces.messages import Message, text_of
from rlframework.rollout.episode_player import EpisodePlayer
from rlframework.rollout.result import PlayedEpisode, Rollout, rollout_of
from rlframework_conformance.cases import randomize
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.suites.episode_scripts import Course, Script

MOST_TURNS = 3
"""`environment.max_turns` of the rollouts."""
_MOST_TOKENS = 8192
_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """Return a tokenizer with one token per byte, and a chat template with tools."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<|im_end|>", "<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens: Any = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    special: dict[str, Any] = {"pad_token": names[0], "eos_token": names[1], "additional_special_tokens": names[2:3]}
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, clean_up_tokenization_spaces=False, **special)
    made.chat_template = _TEMPLATE
    return made


def byte_model(folder: Path, tokenizer: Any) -> Path:
    """Return the directory of a tiny model for `byte_tokenizer` under `folder`, created on first use."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / "bytes"
    if not path.exists():
        sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": _MOST_TOKENS}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads))
            randomize(made)
        with replacing_directory(path) as directory:
            made.save_pretrained(directory)
    return path


@dataclass
class RecordedEpisode(Episode):
    """Passes calls on to `inner`, and records them with their outcomes; the first step raises if `fails`.

    Adds 2**-n to the reward of turn n, so that each turn has one of its own.
    """

    inner: Episode
    fails: bool
    called: list[str] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    course: Course = field(default_factory=Course)

    async def reset(self) -> Sequence[Message]:
        """See `Episode`."""
        self.called.append("reset")
        start = await self.inner.reset()
        self.tools = self.inner.tools
        self.course = Course(list(start), list(self.tools))
        return start

    async def step(self, message: Message) -> StepOutcome:
        """See `Episode`."""
        self.called.append("step")
        if self.fails:
            raise RuntimeError("an episode fails, for the test")
        outcome = await self.inner.step(message)
        outcome = replace(outcome, reward=float(outcome.reward) + 2.0 ** -(len(self.outcomes) + 1))
        self.outcomes.append(outcome)
        self.course.turns.append((message, outcome))
        return outcome

    async def close(self) -> None:
        """See `Episode`."""
        self.called.append("close")
        await self.inner.close()


class _Recorded(Environment):
    """The episodes of `inner`, recorded."""

    def __init__(self, inner: Environment, fails: int | None) -> None:
        self.inner, self.fails = inner, fails
        self.episodes: list[RecordedEpisode] = []

    def samples(self, split: Any) -> Sequence[Sample]:
        return self.inner.samples(split)

    def episode(self, sample: Sample, seed: int) -> Episode:
        made = RecordedEpisode(self.inner.episode(sample, seed), len(self.episodes) == self.fails)
        self.episodes.append(made)
        return made


Session = list[tuple[Tensor, GenerationResult]]
"""The prompts of an episode, each with what the engine returned."""


class _RecordingEngine:
    """Stands in for a `Bridge`: each turn is the text of a script, scored by the model.

    Episodes begin in order, so that session `n` is that of episode `n`.
    """

    positions, max_new_tokens = _MOST_TOKENS, 1024
    timeline = None

    def __init__(self, oracle: Oracle, tokenizer: Any, environment: _Recorded, samples: Any, script: Script) -> None:
        self._oracle, self._tokenizer, self._environment = oracle, tokenizer, environment
        self._samples, self._script = samples, script
        self.sessions: list[Session] = []

    def begin(self) -> str:
        self.sessions.append([])
        return str(len(self.sessions) - 1)

    def end(self, session: str) -> None:
        pass

    async def complete(
        self, prompt: Tensor, seed: int, max_new_tokens: int, session: str, *, media: Mapping[str, Tensor]
    ) -> GenerationResult:
        number = int(session)
        if len(self.sessions[number]) > 2 * MOST_TURNS:
            raise RuntimeError(f"episode {number} has had {len(self.sessions[number])} turns of {MOST_TURNS}")
        await asyncio.sleep(0.001 * (len(self._samples) - number))  # so that the last episode is the first to end
        message = self._script(self._samples[number], self._environment.episodes[number].course)
        ids = [*self._tokenizer(written(message), add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        tokens = torch.tensor(ids[:max_new_tokens])
        row = torch.cat((prompt, tokens))
        logprobs = score(self._oracle, [row])[0, len(prompt) :]
        reason: Any = "stop" if len(ids) <= max_new_tokens else "length"
        spans = (WeightSpan(0, len(tokens), 1),)
        result = GenerationResult(f"{session}:{len(self.sessions[number])}", tokens, logprobs, reason, spans)
        self.sessions[number].append((prompt.clone(), result))
        return result


def written(message: Message) -> str:
    """Return the text in which a model writes `message`."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [
        f'<tool_call>{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}</tool_call>'
        for function in functions
    ]
    return text_of(message) + "".join(calls)


def score(oracle: Oracle, rows: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities of rows, `[R, T]` fp32, each in a forward of its own."""
    scored = [
        oracle.logprobs({"input_ids": row[None], "input_lengths": torch.tensor([len(row)])}, 1.0)[0] for row in rows
    ]
    return torch.nn.utils.rnn.pad_sequence(scored, batch_first=True)


@dataclass
class RecordedRollout:
    """A rollout with what the engine returned and what the environment was asked, by episode."""

    result: Rollout
    sessions: list[Session]
    episodes: list[RecordedEpisode]
    oracle: Oracle

    @classmethod
    def play(
        cls,
        environment: Environment,
        config: EnvironmentConfig,
        samples: Sequence[Sample],
        script: Script,
        models: Path,
        fails: int | None = None,
    ) -> RecordedRollout:
        """Play an episode of each sample with `script`. The first step of episode `fails` raises.

        The attribute `player` of the environment's class, if any, replaces `EpisodePlayer`: mutants of the
        rollout set it.
        """
        tokenizer = byte_tokenizer()
        oracle = Oracle(byte_model(models, tokenizer))
        recorded = _Recorded(environment, fails)
        engine: Any = _RecordingEngine(oracle, tokenizer, recorded, samples, script)
        player = getattr(environment, "player", EpisodePlayer)(recorded, config, ChatFormat(tokenizer), engine)

        async def play_all() -> list[PlayedEpisode]:
            return list(await asyncio.gather(*(player.play(s, k, k, engine.begin()) for k, s in enumerate(samples))))

        result = rollout_of(asyncio.run(play_all()), tokenizer.pad_token_id)
        return cls(result, engine.sessions, recorded.episodes, oracle)

    def rows_of(self, number: int) -> list[int]:
        """Return the numbers of the rows of an episode."""
        found: list[int] = (self.result.episode_of == number).nonzero()[:, 0].tolist()
        return found

    def trained_of(self, number: int) -> dict[str, Tensor]:
        """Return the fields of the trained tokens of an episode, joined over its rows."""
        rows, data = self.rows_of(number), self.result.data
        masks = [data["token_mask"][row] != 0 for row in rows]
        return {
            key: torch.cat([data[key][row][mask] for row, mask in zip(rows, masks, strict=True)])
            for key in ("input_ids", "generation_logprobs")
        }

    def row_texts(self, number: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens and the masks of an episode's rows, without padding."""
        data, rows = self.result.data, self.rows_of(number)
        lengths = [int(data["input_lengths"][row]) for row in rows]
        both = list(zip(rows, lengths, strict=True))
        ids = [data["input_ids"][row, :length].tolist() for row, length in both]
        return ids, [data["token_mask"][row, :length].int().tolist() for row, length in both]

    @staticmethod
    def expected_rows(session: Session) -> list[tuple[list[int], list[int]]]:
        """Return tokens and masks of the rows of an episode, from its prompts: a prompt that extends a row joins it."""
        rows: list[tuple[list[int], list[int]]] = []
        for prompt, result in session:
            ids, sampled = prompt.tolist(), result.token_ids.tolist()
            fits = [row for row in rows if ids[: len(row[0])] == row[0]]
            before = max(fits, key=lambda row: len(row[0]), default=([], []))
            mask = [*before[1], *[0] * (len(ids) - len(before[0])), *[1] * len(sampled)]
            rows = [row for row in rows if row is not before] + [([*ids, *sampled], mask)]
        return rows

    def score(self, data: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities of the rows of `data`, `[R, T]` fp32."""
        lengths = data["input_lengths"].tolist()
        return score(self.oracle, [row[:length] for row, length in zip(data["input_ids"], lengths, strict=True)])
