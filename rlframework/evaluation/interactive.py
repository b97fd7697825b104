"""Answers on the screen: as they come from a list of prompts, or one line of a person after the other."""

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


def show(answerer: Answerer, prompts: Sequence[Prompt], *, as_json: bool = False) -> None:
    """Print the answers to `prompts`: alone where there is one, else each prompt after `>` and its answers below."""
    headed = len(prompts) > 1
    cut = 0
    for answer in answerer.answers(prompts):
        if not as_json and headed and answer.number == 0:
            print(f"> {answer.prompt.messages[-1]['content']}")
        _print(answer, answerer.samples, as_json)
        if not as_json and headed and answer.number == answerer.samples - 1:
            print()
        cut += answer.truncated
    _tell_of_cuts(cut, answerer.max_new_tokens)


def talk(answerer: Answerer, *, as_json: bool = False) -> None:
    """Answer each line that is typed, by itself, until the end of the input (Ctrl-D)."""
    print("A prompt a line; each is answered by itself. Ctrl-D ends.", file=sys.stderr)
    for line in _lines():
        try:
            cut = 0
            for answer in answerer.answers(prompts_of_texts([line], "line")):
                _print(answer, answerer.samples, as_json)
                cut += answer.truncated
            _tell_of_cuts(cut, answerer.max_new_tokens)
        except DataError as error:  # the next one may be better
            print(f"error: {error}", file=sys.stderr)


def _lines() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` then has keys for editing and a history
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


def _tell_of_cuts(cut: int, limit: int) -> None:
    if cut:
        what = "one answer was" if cut == 1 else f"{cut:,} answers were"
        print(f"({what} cut; --max-new-tokens is {limit})", file=sys.stderr, flush=True)
