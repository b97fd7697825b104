"""Save GSM8K's graded solutions as memory-mapped preference pairs, for reward models and DPO.

    python examples/preference_pairs.py example_model_solutions.jsonl --output pairs [--tokenizer MODEL_DIRECTORY]

The file is `example_model_solutions.jsonl` of https://github.com/openai/grade-school-math (MIT): four solutions by
models to each of the 1,319 test questions of GSM8K, each marked right or wrong. Each right solution is paired with each
wrong one of the same question (`--pairs one`: one pair per question). Both are tokenized after the question, with the
tokenizer's chat template if it has one; the default tokenizer has one token per character. A right solution has the end
score 1, a wrong one 0. The pairs are saved in a folder and loaded twice: on the meta device, which reads only the
sizes, and memory-mapped, which reads data on access.

It trains nothing and downloads nothing. Solutions keep their calculator annotations. Questions whose solutions are all
right or all wrong give no pair. The questions are test data, so do not report accuracy on them after training on these
pairs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import UserError

if TYPE_CHECKING:
    from rlframework_preferences.gsm8k_preferences import GradedQuestion
    from rlframework_preferences.pairs import PreferencePairs, PreferenceRow


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solutions", type=Path, help="example_model_solutions.jsonl, or a file of the same format")
    parser.add_argument("--output", type=Path, default=Path("runs/preference_pairs"), help="folder for the pairs")
    parser.add_argument("--tokenizer", help="a model directory; default: one token per character")
    parser.add_argument("--pairs", choices=["all", "one"], default="all", help="pairs per question")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--max-length", type=int, help="drop pairs with more tokens; default: keep all")
    try:
        make_pairs(parser.parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_pairs(arguments: argparse.Namespace) -> None:
    from rlframework_preferences.gsm8k_preferences import pair_solutions, read_graded_solutions
    from rlframework_preferences.pairs import PreferencePairs

    questions = read_graded_solutions(arguments.solutions)
    rows = pair_solutions(questions, pairs=arguments.pairs, seed=arguments.seed)
    tokenizer = make_tokenizer(arguments.tokenizer, rows)
    pairs = PreferencePairs.from_rows(rows, tokenizer, max_length=arguments.max_length, too_long="drop")
    pairs.save(arguments.output)
    print_counts(questions, rows, len(pairs))

    shell = PreferencePairs.load(arguments.output, device="meta")
    size = sum(tensor.nbytes for tensor in shell.values(include_nested=True, leaves_only=True))
    print(f"{arguments.output}: {size / 1e6:.1f} MB, chosen and rejected of {list(shell.chosen.input_ids.shape)}")
    print_lengths(PreferencePairs.load(arguments.output).check())


def make_tokenizer(directory: str | None, rows: Sequence[PreferenceRow]) -> Any:
    from rlframework.huggingface.tokenizer import character_tokenizer, load_tokenizer

    if directory:
        return load_tokenizer(directory)
    texts = [text for row in rows for text in (row.messages[0]["content"], row.chosen, row.rejected)]
    return character_tokenizer(sorted({character for text in texts for character in text}))


def print_counts(questions: Sequence[GradedQuestion], rows: Sequence[PreferenceRow], kept: int) -> None:
    right, wrong = (sum(len(getattr(question, side)) for question in questions) for side in ("right", "wrong"))
    both = sum(bool(question.right and question.wrong) for question in questions)
    print(f"{len(questions):,} questions with {right:,} right and {wrong:,} wrong solutions, without duplicates")
    print(f"{both:,} of them ({both / len(questions):.1%}) have both kinds")
    print(f"{kept:,} pairs, {len(rows) - kept:,} dropped as too long")


def print_lengths(pairs: PreferencePairs) -> None:
    """Print percentiles of the tokens of prompts and of answers with their end-of-sequence token."""
    prompts = pairs.prompt_lengths
    lengths = {
        "prompt": prompts,
        "chosen": pairs.chosen.input_lengths - prompts,
        "rejected": pairs.rejected.input_lengths - prompts,
    }
    shares = (0, 10, 50, 90, 100)
    print("tokens    " + "".join(f"{f'{share}%':>8}" for share in shares))
    for name, values in lengths.items():
        ordered = values.sort().values
        places = [round(share / 100 * (len(ordered) - 1)) for share in shares]
        print(f"{name:10}" + "".join(f"{int(ordered[place]):8,}" for place in places))


if __name__ == "__main__":
    sys.exit(main())
