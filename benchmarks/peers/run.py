"""How long do steps take in rlframework, TRL, verl and a plain transformers loop, on the same CPU work?

    benchmarks/peers/setup.sh
    python benchmarks/peers/run.py [--works logprobs train ...] [--pairs 7] [--lengths even] [--json FILE]

Each side runs in a process of its own, in its own environment (`.venv-trl`, `.venv-verl`; rlframework and the plain
loop in this one), on one thread. Sides do their steps in turn, never at the same time, in an order that rotates; the
time is the CPU time of the process that does the step. Model: a random Llama of 4 layers x 256, vocabulary 2,048, in
fp32.

- logprobs: of the completions of 32 rows, about 3,000 tokens, a quarter of each the prompt.
- train: an optimizer step on their mean negative log-likelihood. rlframework and TRL: a step of a whole run, with its
  data loading and logs. The plain loop and verl's engine are given a batch of tensors.
- dpo: a step on 16 pairs, with the log-probabilities of a reference model, likewise.
- pack: 4,096 rows, with the lengths of `benchmarks/packing.py`, as dense bins of at most 8,192 tokens; in TRL by
  `pack_dataset` with its `bfd`.
- partition: the bins of 512 of them by their lengths alone; verl's `get_seqlen_balanced_partitions`, with as many
  bins as its dynamic batches have, which may be larger.
- grpo: a step of a run, with its rollouts of 8 completions for each of 4 prompts, by transformers' `generate` in TRL.

Before anything is printed, the values of every step (log-probabilities; loss and gradient norm before clipping) are
compared with rlframework's, and a difference beyond TOLERANCES ends the program. For grpo, where random numbers differ,
rlframework's update on the rollouts of TRL's first step is compared with TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from interleave import Timings, machine, table, write_json  # noqa: E402
from packing import lognormal  # noqa: E402
from work import CLIP, LR, MICRO_ROWS, VOCABULARY, make_rows  # noqa: E402

OURS = "rlframework"
SIDES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    work: {
        OURS: ("ours", work),
        **(
            {} if work == "grpo" else {f"plain loop, {way}": ("plain", f"{work} {way}") for way in ("padded", "sorted")}
        ),
        "TRL": ("trl", work),
        **({"TRL, batch_rebalance": ("trl", "train_rebalanced")} if work == "train" else {}),
        **{f"verl, {way}": ("verl", f"{work} {way}") for way in ("packed", "padded") if work in {"logprobs", "train"}},
    }
    for work in ("logprobs", "train", "dpo", "grpo")
} | {
    "pack": {OURS: ("ours", "pack"), "TRL": ("trl", "pack")},
    "partition": {OURS: ("ours", "partition"), "verl": ("verl", "partition")},
}
"""For each work the sides by name: the module `X_side.py` and environment `.venv-X`, and its own name of the work."""
TOLERANCES = {"logprobs": 1e-4, "loss": 1e-4, "grad_norm": 1e-3}
"""Largest difference: absolute, and relative for the norm."""
PACKING, CAPACITY = ("pack", "partition"), 8192


class Worker:
    """A process that does the steps of one side."""

    def __init__(self, side: str, work: str, task: Path, log: Path) -> None:
        python = sys.executable if side in {"ours", "plain"} else str(HERE.parents[1] / f".venv-{side}/bin/python")
        if not Path(python).exists():
            sys.exit(f"{python} is missing: run benchmarks/peers/setup.sh {side}, or name other sides with --sides")
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, HERE / "worker.py", f"{side}_side", work, task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=HERE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self.versions = self.read()["versions"]
        self.step()  # prepares the work

    def step(self) -> dict[str, Any]:
        """Let the worker do its next step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            sys.exit(f"{self.process.args} ended early:\n{self.log.read_text()[-4000:]}")  # type: ignore[str-bytes-safe]
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def worker(side: str, work: str, task: Path) -> Iterator[Worker]:
    """A worker that ends with the block."""
    started = Worker(side, work, task, task.parent / f"{side} {work}.log")
    try:
        yield started
    finally:
        started.process.communicate()


def make_model(folder: Path) -> Path:
    """Make a Llama with random weights, in whose texts each character is a token."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    tokenizer = character_tokenizer([chr(0x4E00 + index) for index in range(VOCABULARY - 2)])
    return make_llama(folder / "model", tokenizer, hidden=256, layers=4, heads=4, init_std=0.08)


def make_task(folder: Path, model: Path | None, lengths: str, count: int, longest: int) -> dict[str, Any]:
    """Return the data and settings that all sides use."""
    drawn, rng = make_rows(lengths, count, longest), random.Random(1)
    whole = [ids[:size].tolist() for ids, size in zip(drawn.input_ids, drawn.lengths.tolist(), strict=True)]
    rows = [_parts(prompt=ids[: len(ids) // 4], completion=ids[len(ids) // 4 :]) for ids in whole]
    rejected = [[rng.randrange(2, VOCABULARY) for _ in rows[-1 - place]["completion"][:-1]] for place in range(count)]
    pairs = [
        _parts(prompt=row["prompt"], chosen=row["completion"][:-1], rejected=other)
        for row, other in zip(rows[: count // 2], rejected, strict=False)
    ]
    return {
        "folder": str(folder),
        "model": str(model or make_model(folder)),
        "rows": rows,
        "pairs": pairs,
        "prompts": [row["prompt_text"] for row in rows],
        "samples": 8,
        "new_tokens": 64,
        "micro_rows": MICRO_ROWS,
        "lr": LR,
        "weight_decay": 0.0,  # verl's is of all parameters
        "clip": CLIP,
        "beta": 0.1,
        "documents": lognormal(4096),
        "partitioned": 512,
        "capacity": CAPACITY,
    }


def _parts(prompt: list[int], **answers: list[int]) -> dict[str, Any]:
    """Return each part as token ids, answers with the end token that all sides add to texts, and as text."""
    texts = {"prompt": prompt, **answers}
    return {
        "prompt": prompt,
        **{name: [*ids, 1] for name, ids in answers.items()},
        **{f"{name}_text": "".join(chr(0x4E00 + token - 2) for token in ids) for name, ids in texts.items()},
    }


def compare(work: str, name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest difference of each value of a step; exits if one is beyond its tolerance."""
    found = {}
    if work in PACKING:
        if ours["tokens"] != theirs["tokens"]:
            sys.exit(f"{work}: bins of {ours['tokens']} and, of {name}, {theirs['tokens']} tokens")
        return {key: theirs[key] - ours[key] for key in ("bins", "largest")}
    for key in (key for key in TOLERANCES if key in ours and key in theirs):
        mine, other = (value[key] if key == "logprobs" else [value[key]] for value in (ours, theirs))
        scale = abs(mine[0]) if key == "grad_norm" else 1.0
        found[key] = max(abs(a - b) for a, b in zip(mine, other, strict=True)) / scale
        if not found[key] <= TOLERANCES[key]:
            sys.exit(f"{work}: {key} of {OURS} and of {name} differ by {found[key]:.1e}: {mine[:3]}, {other[:3]}")
    if not found:
        sys.exit(f"{work}: nothing to compare {name} by")
    return found


def measure(work: str, sides: Mapping[str, tuple[str, str]], task: Path, rounds: int) -> dict[str, Any]:
    """Let all sides do `rounds` steps in turn after one that is not timed."""
    names = list(sides)
    timings = Timings({name: [] for name in names}, {name: [] for name in names})
    differences: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(*sides[name], task)) for name in names}
        for index in range(-1, rounds):
            turn = index % len(names)
            answers = {name: workers[name].step() for name in names[turn:] + names[:turn]}
            for name in names[1:]:
                theirs, ours = answers[name], answers[OURS]
                if "rollouts" in theirs:
                    if index >= 0:
                        continue
                    ours = update_on(theirs["rollouts"], task)
                for key, value in compare(work, name, ours, theirs).items():
                    known = differences.setdefault(name, {})
                    known[key] = max(known.get(key, 0.0), value)
            for name in names if index >= 0 else ():
                timings.seconds[name].append(answers[name]["seconds"])
                timings.units[name].append(answers[name].get("tokens", 1.0) if work == "grpo" else 1.0)
        versions = {name: each.versions for name, each in workers.items()}
    return {
        "machine": machine(),
        "ratios": {name: asdict(timings.ratio(OURS, name)) for name in names[1:]},
        "differences": differences,
        "seconds": timings.seconds,
        "units": timings.units,
        "versions": versions,
    }


def update_on(rollouts: Sequence[Mapping[str, Any]], task: Path) -> dict[str, Any]:
    """Return loss and gradient norm of rlframework's GRPO on `rollouts`, from the weights that all sides start from."""
    other = task.with_name("rollouts.json")
    other.write_text(json.dumps({**json.loads(task.read_text()), "rollouts": rollouts}), encoding="utf-8")
    with worker("ours", "grpo_update", other) as ours:
        return ours.step()


def report(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each work and other side."""
    rows = [["work", "other side", "its CPU seconds", "ours / its (quartiles)", "largest differences"]]
    for work, found in results.items():
        for name, ratio in found["ratios"].items():
            seconds = sorted(found["seconds"][name])[len(found["seconds"][name]) // 2]
            spread = f"{ratio['median']:.2g} ({ratio['low']:.2g} to {ratio['high']:.2g})"
            apart = ", ".join(f"{key} {value:.1e}" for key, value in found["differences"][name].items())
            rows.append([work, name, f"{seconds:.3f}", spread, apart])
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--sides", nargs="+", choices=("plain", "trl", "verl"), default=("plain", "trl", "verl"))
    parser.add_argument("--pairs", type=int, default=7, help="steps of each side that are timed (default 7)")
    parser.add_argument("--lengths", choices=("even", "tailed"), default="even", help="see benchmarks/policy.py")
    parser.add_argument("--longest", type=int, default=175, help="tokens of the longest row if lengths are even")
    parser.add_argument(
        "--rows", type=int, default=32, help=f"rows of a batch, a multiple of {MICRO_ROWS} (default 32)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="another model, for logprobs only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE; keeps other works there")
    arguments = parser.parse_args()
    if arguments.pairs < 1 or arguments.rows % MICRO_ROWS:
        parser.error(f"--pairs must be 1 or more, and --rows a multiple of {MICRO_ROWS}")
    if arguments.model and arguments.works != ["logprobs"]:
        parser.error("--model is for --works logprobs: other works need a tokenizer of single characters")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"lengths": arguments.lengths, "count": arguments.rows, "longest": arguments.longest}
        task = Path(folder) / "task.json"
        made = make_task(Path(folder), arguments.model, **settings)
        task.write_text(json.dumps(made), encoding="utf-8")
        for work in arguments.works:
            sides = {name: side for name, side in SIDES[work].items() if side[0] in {"ours", *arguments.sides}}
            key = f"{work}, {arguments.lengths} lengths" + (f", {arguments.model.name}" if arguments.model else "")
            results[key] = {"settings": settings, **measure(work, sides, task, arguments.pairs)}
            print(report({key: results[key]}), flush=True)
    if arguments.json:
        known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        write_json(arguments.json, {"results": {**known.get("results", {}), **results}})


if __name__ == "__main__":
    main()
