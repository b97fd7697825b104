"""Print answers on the terminal: to a list of prompts, or to each line that the user types."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from rlframework.errors import DataError
from rlframework.evaluation.completions import prompts_of_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlframework.evaluation.completions import Answer, Answerer, Prompt


def print_answers(answerer: Answerer, prompts: Sequence[Prompt], *, as_json: bool = False) -> None:
    """Print the answers to `prompts`; with several prompts, each one after `>` and above its answers."""
    with_prompts = len(prompts) > 1
    truncated = 0
    for answer in answerer.answers(prompts):
        if not as_json and with_prompts and answer.number == 0:
            print(f"> {answer.prompt.messages[-1]['content']}")
        _print(answer, answerer.samples, as_json)
        if not as_json and with_prompts and answer.number == answerer.samples - 1:
            print()
        truncated += answer.truncated
    _report_truncated(truncated, answerer.max_new_tokens)


def chat(answerer: Answerer, *, as_json: bool = False) -> None:
    """Answer each typed line, without the previous ones, until the end of the input (Ctrl-D)."""
    print("Type a prompt per line; earlier ones are not remembered. Ctrl-D ends.", file=sys.stderr)
    for line in _lines():
        try:
            truncated = 0
            for answer in answerer.answers(prompts_of_texts([line], "line")):
                _print(answer, answerer.samples, as_json)
                truncated += answer.truncated
            _report_truncated(truncated, answerer.max_new_tokens)
        except DataError as error:  # and continue with the next line
            print(f"error: {error}", file=sys.stderr)


def _lines() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing keys and a history
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


def _print(answer: Answer, samples: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer.as_json(), ensure_ascii=False), flush=True)
    else:
        print(f"[{answer.number + 1}] {answer.text}" if samples > 1 else answer.text, flush=True)


def _report_truncated(truncated: int, limit: int) -> None:
    if truncated:
        answers = "1 answer was" if truncated == 1 else f"{truncated:,} answers were"
        print(f"({answers} cut; --max-new-tokens is {limit})", file=sys.stderr, flush=True)
