"""Read prompts from the command line, a file or stdin, and complete them with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.environments import ColumnsConfig
from rlframework.datasets.collate import pad_rows
from rlframework.datasets.conversations import conversation_of
from rlframework.datasets.rendering import render_prompt
from rlframework.datasets.sources.opening import open_rows
from rlframework.errors import DataError, UserError
from rlframework.huggingface.model_directories import model_positions
from rlframework.rollout.rollout import row_seeds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.generation.client import Generation
    from rlframework.interfaces.environment import Message

ROW_FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq")


@dataclass(frozen=True)
class Prompt:
    """A conversation to complete. `name` identifies it in errors."""

    name: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Answer:
    """Completion `number` (from 0) of a prompt. `truncated`: it reached `max_new_tokens` before it ended."""

    prompt: Prompt
    number: int
    text: str
    tokens: int
    truncated: bool

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "prompt": list(self.prompt.messages),
            "sample": self.number,
            "completion": self.text,
            "tokens": self.tokens,
            "truncated": self.truncated,
        }


def prompts_of_texts(texts: Iterable[str], name: str = "prompt") -> list[Prompt]:
    """One user turn for each non-empty text. Errors identify it as `name` and its number, from 1."""
    given = enumerate((text.rstrip("\r\n") for text in texts), start=1)
    return [Prompt(f"{name} {n}", ({"role": "user", "content": text},)) for n, text in given if text.strip()]


def prompts_of_words(words: Sequence[str]) -> list[Prompt]:
    """One user turn for each argument of the command line; an empty one raises `UserError`."""
    if empty := [number for number, word in enumerate(words, start=1) if not word.strip()]:
        raise UserError(f"prompt {empty[0]} is empty; give it some text")
    return [Prompt(f"prompt {n}", ({"role": "user", "content": word},)) for n, word in enumerate(words, start=1)]


def prompts_of_file(path: str) -> list[Prompt]:
    """Read prompts from a file: rows with `prompt` or `messages` (JSONL or Parquet), else one per line; `-` is stdin.

    Anything after the prompt in a row, for example a final assistant turn, is ignored.
    """
    if path == "-":
        return _require_prompts(prompts_of_texts(sys.stdin, "line"), "standard input")
    if Path(path).suffix.lower() in ROW_FILES:
        rows, columns = open_rows(Path(path)), ColumnsConfig()
        return _require_prompts([_prompt_of_row(rows[n], columns, rows.where(n)) for n in range(len(rows))], path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--file {path}: cannot be read ({error.strerror}); give a file with one prompt per line"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"--file {path}: not UTF-8 text ({error.reason}); give text or JSONL") from error
    return _require_prompts(prompts_of_texts(text.split("\n"), f"{path}, line"), path)


def _require_prompts(prompts: list[Prompt], where: str) -> list[Prompt]:
    if not prompts:
        raise UserError(f"{where} has no prompts; give one per line")
    return prompts


def _prompt_of_row(row: dict[str, Any], columns: ColumnsConfig, where: str) -> Prompt:
    messages = conversation_of(row, columns, where).messages
    if not messages:
        raise DataError(f"{where}: no prompt; give `prompt` or `messages`")
    return Prompt(where, messages)


class Answerer:
    """Answers prompts with the model of `generation`, without the chat template if `raw`.

    An answer depends on the seed, its number and the number of earlier prompts, so the same calls give the same
    answers.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        generation: Generation,
        *,
        samples: int = 1,
        raw: bool = False,
    ) -> None:
        self._config, self._tokenizer, self._generation = config, tokenizer, generation
        self.samples = samples
        self.max_new_tokens = config.generation.max_new_tokens
        self._prompts_seen = 0
        self._positions = model_positions(config.policy.model_name, config.policy.trust_remote_code)
        if raw:
            tokenizer.chat_template = None

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield `samples` answers to each of `prompts`, in order. Invalid prompts raise before any generation."""
        rendered = [self._rendered(prompt) for prompt in prompts]
        batch_size = max(1, self._config.generation.batch_size // self.samples)
        for start in range(0, len(prompts), batch_size):
            yield from self._batch(prompts[start : start + batch_size], rendered[start : start + batch_size])

    def _rendered(self, prompt: Prompt) -> list[int]:
        try:
            ids = render_prompt(self._tokenizer, prompt.messages)
        except DataError as error:
            raise DataError(f"{prompt.name}: {error}") from error
        if self._positions is not None and len(ids) >= self._positions:
            raise DataError(
                f"{prompt.name} has {len(ids)} tokens, which leaves no room for an answer in the model's context of "
                f"{self._positions}. Shorten it"
            )
        return ids

    def _batch(self, prompts: Sequence[Prompt], rendered: Sequence[list[int]]) -> list[Answer]:
        rows = [ids for ids in rendered for _ in range(self.samples)]
        numbers = range(self._prompts_seen, self._prompts_seen + len(prompts))
        self._prompts_seen += len(prompts)
        seeds = torch.cat([row_seeds(self._config.seed, number, self.samples) for number in numbers])
        input_ids, lengths = pad_rows(rows, self._tokenizer.pad_token_id)
        data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, "seeds": seeds})
        self._generation.prepare_for_generation()
        output = self._generation.generate(data)
        self._generation.finish_generation()
        ends = output["unpadded_sequence_lengths"].tolist()
        ids = [row[len(rows[n]) : ends[n]] for n, row in enumerate(output["output_ids"].tolist())]
        texts: list[str] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        truncated = output["truncated"].tolist()
        return [
            Answer(prompts[n // self.samples], n % self.samples, text, len(ids[n]), truncated[n])
            for n, text in enumerate(texts)
        ]
