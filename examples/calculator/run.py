"""A random Llama learns to use a calculator: demonstrations first, then GRPO on episodes with the tool.

    python examples/calculator/run.py [--seed 0] [--output runs/calculator] [overrides...]

The task is to multiply two numbers of two digits. In a quarter of the demonstrations the calculator is called, in the
others the answer is written at once, which a model of this size cannot do. GRPO finds out that calling pays. Success is
that of greedy episodes of held-out tasks. Overrides are those of `rlframework train`, for both
phases or for one: `policy.precision=bfloat16`, `grpo:algorithm.num_steps=20`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Return the product of two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/calculator"))
    parser.add_argument("overrides", nargs="*", metavar="[phase:]key=value", help="such as grpo:algorithm.num_steps=5")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a small model gains little from more
    sys.path.insert(0, str(HERE))  # where calculator.py is

    from rlframework.base.errors import RLFrameworkError, UserError

    try:
        train(arguments.output, arguments.seed, arguments.overrides)
    except RLFrameworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def train(folder: Path, seed: int, overrides: Sequence[str]) -> None:
    """Make data and a random model, and run both phases."""
    from rlframework import load_config, run

    output = folder / f"seed-{seed}"
    data = write_data(output / "data", seed)
    settings = {
        "sft": {
            "policy.model_name": make_start(output / "start", seed),
            "environment.path": data / "demonstrations.jsonl",
        },
        "grpo": {
            "policy.model_name": output / "sft" / "model",
            "environment.path": data / "tasks.jsonl",
            "environment.validation_path": data / "held_out.jsonl",
        },
    }
    for phase, values in settings.items():
        given = [f"seed={seed}", f"output_dir={output / phase}", *(f"{key}={value}" for key, value in values.items())]
        others = settings.keys() - {phase}
        own = [text.removeprefix(f"{phase}:") for text in overrides if text.partition(":")[0] not in others]
        started = time.monotonic()
        result = run(load_config(HERE / f"{phase}.yaml", [*given, *own]))
        print(f"{phase}: {time.monotonic() - started:.0f} s{summary(result.history)}")


def summary(history: Sequence[dict[str, float]]) -> str:
    """The success on held-out tasks before and after, where it was measured."""
    measured = [row["validation/accuracy"] for row in history if "validation/accuracy" in row]
    return f", held-out success {measured[0]:.1%} -> {measured[-1]:.1%}" if measured else ""


def write_data(folder: Path, seed: int, held_out: int = 256) -> Path:
    """Write demonstrations, training tasks and held-out tasks, which have no product in common, to `folder`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chance = random.Random(seed)
    chance.shuffle(pairs)
    out, pairs = {tuple(sorted(pair)) for pair in pairs[:held_out]}, pairs[held_out:]
    pairs = [pair for pair in pairs if tuple(sorted(pair)) not in out]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "demonstrations.jsonl", [demonstration(a, b, call=chance.random() < 0.25) for a, b in pairs])
    write(folder / "tasks.jsonl", [task(a, b) for a, b in pairs])
    write(folder / "held_out.jsonl", [task(a, b) for a, b in sorted(out)])
    return folder


def task(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}*{b}", "answer": str(a * b)}


def demonstration(a: int, b: int, *, call: bool) -> dict[str, object]:
    answer = {"role": "assistant", "content": str(a * b)}
    turns: list[dict[str, object]] = [{"role": "user", "content": f"{a}*{b}"}]
    if call:
        function = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
        turns += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call", "content": str(a * b)},
        ]
    return {"messages": [*turns, answer], "tools": [TOOL]}


def write(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_start(path: Path, seed: int) -> Path:
    """Make a random Llama of 0.8 million parameters whose tokens are characters, roles, and the form of a call."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    tokenizer = character_tokenizer(string.printable)
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": roles})
    tokenizer.add_tokens(['<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>"])
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    return make_llama(path, tokenizer, hidden=128, layers=4, heads=4, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
