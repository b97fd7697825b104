"""Answer prompts of the command line, a file or stdin with a model, and print the answers on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import DataError, UserError
from rlframework.base.logs import printable
from rlframework.config.environments import ColumnsConfig
from rlframework.datasets.chat.rendering import render_prompt
from rlframework.datasets.conversations import conversation_of, with_texts
from rlframework.datasets.sources.opening import open_rows
from rlframework.huggingface.model_directories import model_positions
from rlframework.rollout.result import with_special_tokens
from rlframework.rollout.seeds import prompt_seeds
from rlframework.rollout.single_turn import complete

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.generation.driver import Generation
    from rlframework.interfaces.messages import Message

ROW_FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq")


@dataclass(frozen=True)
class Prompt:
    """A conversation to complete. `name` identifies it in errors."""

    name: str
    messages: tuple[Message, ...]


def prompts_of_texts(texts: Iterable[str], name: str = "prompt") -> list[Prompt]:
    """One user turn for each non-empty text. Errors identify it as `name` and its number, from 1."""
    numbered = enumerate(texts, start=1)
    return [Prompt(f"{name} {n}", ({"role": "user", "content": text},)) for n, text in numbered if text.strip()]


def read_prompts(words: Sequence[str], path: str) -> list[Prompt]:
    """The prompts given as `words`; without any, those of a file: rows with `prompt` or `messages`, else lines.

    Rows are read from JSONL and Parquet files; anything after the prompt in a row, for example a final assistant turn,
    is ignored. The path `-` is stdin.
    """
    if words:
        prompts = prompts_of_texts(words)
        if empty := [number for number, word in enumerate(words, start=1) if not word.strip()]:
            raise UserError(f"prompt {empty[0]} is empty; give it some text")
    elif path == "-":
        prompts = prompts_of_texts((line.rstrip("\r\n") for line in sys.stdin), "line")
    elif Path(path).suffix.lower() in ROW_FILES:
        rows = open_rows(Path(path))
        prompts = [_prompt_of_row(rows[n], rows.where(n)) for n in range(len(rows))]
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text: {error.reason}"
            raise UserError(
                f"--file {path}: cannot be read ({reason}); give a text file with one prompt per line, or JSONL"
            ) from error
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
    """Prints answers of `generation`'s model, `samples` for each prompt.

    Prompts get the system prompt and the instruction of the run's environment, as its own prompts do. With `raw` they
    get neither, nor the chat template.

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
        as_json: bool = False,
    ) -> None:
        self._config, self._tokenizer, self._generation = config, tokenizer, generation
        self._samples, self._as_json = samples, as_json
        self._prompts_seen = 0
        self._positions = model_positions(config.policy.model_name, config.policy.trust_remote_code)
        self._system, self._instruction = None, ""
        if raw:
            tokenizer.chat_template = None
        else:
            self._system = config.environment.system_prompt
            self._instruction = getattr(config.environment, "instruction", "")  # not every environment has one

    def answer(self, prompts: Sequence[Prompt]) -> None:
        """Print the answers; with several prompts, each one after `>` and above its answers.

        Invalid prompts raise a `DataError` before any generation.
        """
        prompts = [
            replace(prompt, messages=with_texts(prompt.messages, self._system, self._instruction)) for prompt in prompts
        ]
        rendered = [self._rendered(prompt) for prompt in prompts]
        batch_size = max(1, self._config.generation.batch_size // self._samples)
        cut = 0
        for start in range(0, len(prompts), batch_size):
            batch = range(start, min(start + batch_size, len(prompts)))
            seeds = prompt_seeds(self._config.seed, self._prompts_seen, len(batch), self._samples)
            self._prompts_seen += len(batch)
            rows = [rendered[n] for n in batch for _ in range(self._samples)]
            output, texts = complete(self._tokenizer, self._generation, rows, seeds)
            lengths, truncated = output["generation_lengths"].tolist(), output["truncated"].tolist()
            ends = output["unpadded_sequence_lengths"].tolist()
            for row, text in enumerate(texts):
                number, prompt = row % self._samples, prompts[start + row // self._samples]
                facts = {"sample": number, "completion": text, "tokens": lengths[row], "truncated": truncated[row]}
                ids = output["output_ids"][row, ends[row] - lengths[row] : ends[row]].tolist()
                if hidden := with_special_tokens(self._tokenizer, ids, ended=not truncated[row]):
                    facts["model_output"] = hidden
                self._print(prompt, facts, alone=len(prompts) == 1)
            cut += sum(truncated)
        if cut:
            answers = "1 answer was" if cut == 1 else f"{cut:,} answers were"
            limit = self._config.generation.max_new_tokens
            print(f"({answers} cut; --max-new-tokens is {limit})", file=sys.stderr, flush=True)

    def chat(self) -> None:
        """Answer each typed line, without the previous ones, until the end of the input (Ctrl-D)."""
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` editing keys and a history
        print("Type a prompt per line; earlier ones are not remembered. Ctrl-D ends.", file=sys.stderr)
        while True:
            try:
                self.answer(prompts_of_texts([input("> ")], "line"))
            except EOFError:
                print(file=sys.stderr)
                return
            except DataError as error:  # and continue with the next line
                print(printable(f"error: {error}"), file=sys.stderr)

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

    def _print(self, prompt: Prompt, facts: dict[str, Any], *, alone: bool) -> None:
        if self._as_json:
            print(printable(json.dumps({"prompt": list(prompt.messages), **facts}, ensure_ascii=False)), flush=True)
            return
        if not alone and facts["sample"] == 0:
            print(printable(f"> {prompt.messages[-1]['content']}"))
        number = f"[{facts['sample'] + 1}] " if self._samples > 1 else ""
        ending = "\n" if not alone and facts["sample"] == self._samples - 1 else ""
        print(printable(f"{number}{facts['completion']}{ending}"), flush=True)
        if hidden := facts.get("model_output"):
            print(printable(f"(with special tokens: {hidden})"), file=sys.stderr, flush=True)
