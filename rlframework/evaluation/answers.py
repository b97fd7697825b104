"""Answer prompts of the command line, a file or stdin with a model, and print the answers on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.config.environments import ColumnsConfig
from rlframework.datasets.conversations import conversation_of
from rlframework.datasets.rendering import render_prompt
from rlframework.datasets.sources.opening import open_rows
from rlframework.errors import DataError, UserError
from rlframework.huggingface.model_directories import model_positions
from rlframework.rollout import complete, prompt_seeds

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


def prompts_of_texts(texts: Iterable[str], name: str = "prompt") -> list[Prompt]:
    """One user turn for each non-empty text. Errors identify it as `name` and its number, from 1."""
    given = enumerate((text.rstrip("\r\n") for text in texts), start=1)
    return [Prompt(f"{name} {n}", ({"role": "user", "content": text},)) for n, text in given if text.strip()]


def read_prompts(words: Sequence[str], path: str) -> list[Prompt]:
    """The prompts given as `words`; without any, those of a file: rows with `prompt` or `messages`, else lines.

    Rows are read from JSONL and Parquet files; anything after the prompt in a row, for example a final assistant turn,
    is ignored. The path `-` is stdin.
    """
    if words:
        prompts = [Prompt(f"prompt {n}", ({"role": "user", "content": word},)) for n, word in enumerate(words, start=1)]
        if empty := [number for number, word in enumerate(words, start=1) if not word.strip()]:
            raise UserError(f"prompt {empty[0]} is empty; give it some text")
    elif path == "-":
        prompts = prompts_of_texts(sys.stdin, "line")
    elif Path(path).suffix.lower() in ROW_FILES:
        rows = open_rows(Path(path))
        prompts = [_prompt_of_row(rows[n], rows.where(n)) for n in range(len(rows))]
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--file {path}: cannot be read ({error.strerror}); give a file with one prompt per line"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"--file {path}: not UTF-8 text ({error.reason}); give text or JSONL") from error
        prompts = prompts_of_texts(text.split("\n"), f"{path}, line")
    if not prompts:
        raise UserError(f"{'standard input' if path == '-' else path} has no prompts; give one per line")
    return prompts


def _prompt_of_row(row: dict[str, Any], where: str) -> Prompt:
    messages = conversation_of(row, ColumnsConfig(), where).messages
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
        seeds = prompt_seeds(self._config.seed, self._prompts_seen, len(prompts), self.samples)
        self._prompts_seen += len(prompts)
        completed = complete(self._tokenizer, self._generation, rows, seeds)
        lengths, truncated = (completed.output[name].tolist() for name in ("generation_lengths", "truncated"))
        return [
            Answer(prompts[n // self.samples], n % self.samples, text, lengths[n], truncated[n])
            for n, text in enumerate(completed.texts)
        ]


def print_answers(answerer: Answerer, prompts: Sequence[Prompt], *, as_json: bool = False) -> None:
    """Print the answers to `prompts`; with several prompts, each one after `>` and above its answers."""
    with_prompts = len(prompts) > 1 and not as_json
    truncated = 0
    for answer in answerer.answers(prompts):
        if with_prompts and answer.number == 0:
            print(f"> {answer.prompt.messages[-1]['content']}")
        number = f"[{answer.number + 1}] " if answerer.samples > 1 else ""
        print(_as_json(answer) if as_json else number + answer.text, flush=True)
        if with_prompts and answer.number == answerer.samples - 1:
            print()
        truncated += answer.truncated
    if truncated:
        answers = "1 answer was" if truncated == 1 else f"{truncated:,} answers were"
        print(f"({answers} cut; --max-new-tokens is {answerer.max_new_tokens})", file=sys.stderr, flush=True)


def chat(answerer: Answerer, *, as_json: bool = False) -> None:
    """Answer each typed line, without the previous ones, until the end of the input (Ctrl-D)."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing keys and a history
    print("Type a prompt per line; earlier ones are not remembered. Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            print_answers(answerer, prompts_of_texts([input("> ")], "line"), as_json=as_json)
        except EOFError:
            print(file=sys.stderr)
            return
        except DataError as error:  # and continue with the next line
            print(f"error: {error}", file=sys.stderr)


def _as_json(answer: Answer) -> str:
    values = {
        "prompt": list(answer.prompt.messages),
        "sample": answer.number,
        "completion": answer.text,
        "tokens": answer.tokens,
        "truncated": answer.truncated,
    }
    return json.dumps(values, ensure_ascii=False)
