"""GSM8K's judged solutions as preference pairs, saved memory-mapped, for reward models and DPO.

    python examples/preference_pairs.py example_model_solutions.jsonl --output pairs [--tokenizer MODEL_DIRECTORY]

The file is `example_model_solutions.jsonl` of https://github.com/openai/grade-school-math (MIT): to each of the 1,319
test questions of GSM8K, four solutions by models, each marked right or wrong. Each right solution is paired with each
wrong one to the same question (`--pairs one`: one pair a question). Both are tokenised behind the question, with the
chat template of the tokenizer where it has one, or by default with a tokenizer of the single characters that occur; the
end score of a right solution is 1, of a wrong one 0. The pairs are saved in a folder, and loaded back twice: on the
meta device, which reads no data and tells how large it is, and mapped, where a byte is read when it is used.

What it leaves out: it trains nothing; it leaves the solutions as they are, with calculator annotations; questions of
which all solutions are right, or all wrong, give no pair; and the questions are those of the test data, so do not
report accuracy on them after training on these pairs. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import UserError

if TYPE_CHECKING:
    from rlframework.datasets.gsm8k_preferences import JudgedQuestion
    from rlframework.datasets.preferences import PreferencePairs, PreferenceRow


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solutions", type=Path, help="example_model_solutions.jsonl, or a file of its form")
    parser.add_argument("--output", type=Path, default=Path("runs/preference_pairs"), help="folder for the pairs")
    parser.add_argument("--tokenizer", help="a model directory; default: single characters")
    parser.add_argument("--pairs", choices=["all", "one"], default="all", help="all of a question, or one drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--max-length", type=int, help="leave out pairs with more tokens; default: keep all")
    try:
        make_pairs(parser.parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_pairs(arguments: argparse.Namespace) -> None:
    from rlframework.datasets.gsm8k_preferences import pair_solutions, read_judged_solutions
    from rlframework.datasets.preferences import PreferencePairs

    questions = read_judged_solutions(arguments.solutions)
    rows = pair_solutions(questions, pairs=arguments.pairs, seed=arguments.seed)
    tokenizer = make_tokenizer(arguments.tokenizer, rows)
    pairs = PreferencePairs.from_rows(rows, tokenizer, max_length=arguments.max_length, too_long="drop")
    pairs.save(arguments.output)
    print_counts(questions, rows, len(pairs))

    shell = PreferencePairs.load_memmap(arguments.output, device="meta")
    size = sum(tensor.nbytes for tensor in shell.values(include_nested=True, leaves_only=True))
    print(f"{arguments.output}: {size / 1e6:.1f} MB, chosen and rejected of {list(shell.chosen.input_ids.shape)}")
    print_lengths(PreferencePairs.load_memmap(arguments.output).check())


def make_tokenizer(directory: str | None, rows: Sequence[PreferenceRow]) -> Any:
    from rlframework.huggingface.tokenizer import character_tokenizer, load_tokenizer

    if directory:
        return load_tokenizer(directory)
    texts = [text for row in rows for text in (row.messages[0]["content"], row.chosen, row.rejected)]
    return character_tokenizer(sorted({character for text in texts for character in text}))


def print_counts(questions: Sequence[JudgedQuestion], rows: Sequence[PreferenceRow], kept: int) -> None:
    right, wrong = (sum(len(getattr(question, side)) for question in questions) for side in ("right", "wrong"))
    both = sum(bool(question.right and question.wrong) for question in questions)
    print(f"{len(questions):,} questions with {right:,} right and {wrong:,} wrong solutions, duplicates apart")
    print(f"{both:,} of them ({both / len(questions):.1%}) have both kinds")
    print(f"{kept:,} pairs, {len(rows) - kept:,} left out as too long")


def print_lengths(pairs: PreferencePairs) -> None:
    """Percentiles of the tokens of prompts and of answers with their end token."""
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
