"""Completions of prompts that a person gives: from the command line, from a file, or one line after the other."""

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
    """A conversation to go on with, and what errors call it."""

    name: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Answer:
    """One completion of a prompt; `number` counts those of the prompt from 0. `truncated`: cut, not ended."""

    prompt: Prompt
    number: int
    text: str
    tokens: int
    truncated: bool

    def as_json(self) -> dict[str, Any]:
        """One line of `--json`."""
        return {
            "prompt": list(self.prompt.messages),
            "sample": self.number,
            "completion": self.text,
            "tokens": self.tokens,
            "truncated": self.truncated,
        }


def prompts_of_texts(texts: Iterable[str], name: str = "prompt") -> list[Prompt]:
    """A user's turn of each text that is not empty; `name` and the text's number are what errors call it."""
    given = enumerate((text.rstrip("\r\n") for text in texts), start=1)
    return [Prompt(f"{name} {n}", ({"role": "user", "content": text},)) for n, text in given if text.strip()]


def prompts_of_words(words: Sequence[str]) -> list[Prompt]:
    """A user's turn of each word of the command line; an empty one is a `UserError`."""
    if empty := [number for number, word in enumerate(words, start=1) if not word.strip()]:
        raise UserError(f"prompt {empty[0]} is empty; give it text")
    return [Prompt(f"prompt {n}", ({"role": "user", "content": word},)) for n, word in enumerate(words, start=1)]


def prompts_of_file(path: str) -> list[Prompt]:
    """The prompts in a file: rows of `prompt` or `messages` in JSONL or Parquet, else one a line; `-` is stdin.

    What a row has after the prompt, such as a last assistant turn, is left out.
    """
    if path == "-":
        return _some(prompts_of_texts(sys.stdin, "line"), "standard input")
    if Path(path).suffix.lower() in ROW_FILES:
        rows, columns = open_rows(Path(path)), ColumnsConfig()
        return _some([_prompt_of_row(rows[n], columns, rows.where(n)) for n in range(len(rows))], path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--file {path}: cannot be read ({error.strerror}); give a file with one prompt a line"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"--file {path}: is not UTF-8 text ({error.reason}); give text or JSONL") from error
    return _some(prompts_of_texts(text.split("\n"), f"{path}, line"), path)


def _some(prompts: list[Prompt], where: str) -> list[Prompt]:
    if not prompts:
        raise UserError(f"there is no prompt in {where}; give one a line")
    return prompts


def _prompt_of_row(row: dict[str, Any], columns: ColumnsConfig, where: str) -> Prompt:
    messages = conversation_of(row, columns, where).messages
    if not messages:
        raise DataError(f"{where}: there is no prompt in it; give `prompt` or `messages`")
    return Prompt(where, messages)


class Answerer:
    """Answers prompts with a model that lies in the workers of `generation`.

    `raw`: no chat template. An answer depends on the seed, its number and how many prompts were given before: the same
    calls give the same answers.
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
        self._asked = 0
        self._positions = model_positions(config.policy.model_name, config.policy.trust_remote_code)
        if raw:
            tokenizer.chat_template = None

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """`samples` answers to each of `prompts`, in order; a prompt that cannot be asked is told before any is."""
        rendered = [self._rendered(prompt) for prompt in prompts]
        together = max(1, self._config.generation.batch_size // self.samples)
        for start in range(0, len(prompts), together):
            yield from self._together(prompts[start : start + together], rendered[start : start + together])

    def _rendered(self, prompt: Prompt) -> list[int]:
        try:
            ids = render_prompt(self._tokenizer, prompt.messages)
        except DataError as error:
            raise DataError(f"{prompt.name}: {error}") from error
        if self._positions is not None and len(ids) >= self._positions:
            raise DataError(
                f"{prompt.name} has {len(ids)} tokens, which leaves no room for an answer: the model takes "
                f"{self._positions} in all. Shorten it"
            )
        return ids

    def _together(self, prompts: Sequence[Prompt], rendered: Sequence[list[int]]) -> list[Answer]:
        rows = [ids for ids in rendered for _ in range(self.samples)]
        numbers = range(self._asked, self._asked + len(prompts))
        self._asked += len(prompts)
        seeds = torch.cat([row_seeds(self._config.seed, number, self.samples) for number in numbers])
        input_ids, lengths = pad_rows(rows, self._tokenizer.pad_token_id)
        data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, "seeds": seeds})
        self._generation.prepare_for_generation()
        output = self._generation.generate(data)
        self._generation.finish_generation()
        ends = output["unpadded_sequence_lengths"].tolist()
        ids = [row[len(rows[n]) : ends[n]] for n, row in enumerate(output["output_ids"].tolist())]
        texts: list[str] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        cut = output["truncated"].tolist()
        return [
            Answer(prompts[n // self.samples], n % self.samples, text, len(ids[n]), cut[n])
            for n, text in enumerate(texts)
        ]
