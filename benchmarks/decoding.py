"""Speed of the embedded engine on a model, compared with another checkout of rlframework, or with vLLM.

    python benchmarks/decoding.py MODEL --against CHECKOUT [--precision bfloat16] [--pairs 3] [--tokens 64] [--json F]
    python benchmarks/decoding.py MODEL --vllm .venv-vllm/bin/python

Work, with one thread and random prompts: `equal`, 32 prompts of 32 tokens; `groups`, 4 prompts of 96 tokens x 8;
`uneven`, 96 prompts of 8 to 64 tokens, 32 decoded at a time, whose rows end anywhere up to the maximum; `short`, for
tiny models, 96 prompts of 4 to 7 tokens x 8, 768 decoded at a time, which end anywhere too. Temperature 1.

A process for each side; interleaved rounds, CPU time of the process, which includes packing the weights (vLLM has them
packed before the first round, and keeps them); below 1 this checkout is faster. In each round, each side's
log-probabilities of some rows are compared with those of a forward of the whole row, outside the measured time: the
largest difference is printed, and in fp32 must be at most 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from interleave import Timings, interleave, machine, table, write_json

WORKS = ("equal", "groups", "uneven", "short")
SAMPLES = {"groups": 8, "short": 8}
BATCH, BATCH_SIZES = 32, {"short": 768}
OURS, OTHER, VLLM = "this checkout", "the other", "vllm"
ROOT = Path(__file__).resolve().parents[1]
CHECKED_ROWS = 3


# -- a side: a process that serves works, one a line -------------------------------------------------------------------


def requests_of(work: str, tokens: int, seed: int, vocabulary: int) -> list[Any]:
    """Return the requests of a work, with tokens of a `vocabulary`; equal seeds give equal ones."""
    import torch

    from rlframework.interfaces.generation import GenerationRequest

    rng = random.Random(seed)
    uneven, short = ([rng.randint(*sizes) for _ in range(96)] for sizes in ((8, 64), (4, 7)))
    sizes = {"equal": [32] * 32, "groups": [96] * 4, "uneven": uneven, "short": short}[work]
    prompts = [torch.tensor([rng.randrange(vocabulary) for _ in range(size)]) for size in sizes]
    prompts = [prompt for prompt in prompts for _ in range(SAMPLES.get(work, 1))]
    budgets = [rng.randint(1, tokens) if work in ("uneven", "short") else tokens for _ in prompts]
    return [
        GenerationRequest(str(row), prompt, 1000 * seed + row, budget)
        for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]


def engines_of(name: str, model: Any, tokenizer: Any, places: dict[str, str]) -> dict[str, Any]:
    """Return the engine of each work; vLLM is one for all, as it starts once in a process, and has its weights."""
    from rlframework.config.sections import GenerationConfig
    from rlframework_transformers.engine import TransformersEngine

    if name != VLLM:
        settings = {work: GenerationConfig(batch_size=BATCH_SIZES.get(work, BATCH)) for work in WORKS}
        return {work: TransformersEngine(settings[work], tokenizer, **places) for work in WORKS}
    from vllm_engine import CPU, IpcSender, VllmEngine, VllmGenerationConfig, update

    engine = VllmEngine(VllmGenerationConfig(name="vllm", batch_size=BATCH), tokenizer, **places)
    update(engine, IpcSender(CPU), dict(model.named_parameters()), 0)
    return dict.fromkeys(WORKS, engine)


def serve(model_path: str, precision: str, tokens: int, name: str) -> None:
    """Read (work, seed) from stdin; print CPU seconds, tokens, and the largest difference from a forward."""
    import time

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, precision)).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_path)
    places = {"model_name": model_path, "device": "cpu", "precision": precision}
    engines = engines_of(name, model, tokenizer, places)
    print(flush=True)
    for version, line in enumerate(sys.stdin):
        work, seed = json.loads(line)
        engine = engines[work]
        requests = requests_of(work, tokens, seed, model.config.vocab_size)
        if name != VLLM:
            engine.attach(model, version)
        started = time.process_time()
        engine.submit(requests)
        results: dict[str, Any] = {}
        while len(results) < len(requests):
            results |= {result.request_id: result for result in engine.poll(None)}
        spent = time.process_time() - started
        checked = requests[:: len(requests) // CHECKED_ROWS]
        largest = max(difference(model, request, results[request.request_id]) for request in checked)
        done = sum(len(result.token_ids) for result in results.values())
        print(json.dumps({"seconds": spent, "tokens": done, "difference": largest}), flush=True)


def difference(model: Any, request: Any, result: Any) -> float:
    """Return the largest difference of the log-probabilities from those of a forward of the whole row."""
    import torch

    first, ids = len(request.prompt_ids), torch.cat((request.prompt_ids, result.token_ids))
    with torch.no_grad():
        logprobs = model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)[first - 1 : -1]
    return float((logprobs.gather(1, result.token_ids[:, None])[:, 0] - result.logprobs).abs().max())


class Side:
    """The process of one checkout, or of vLLM."""

    def __init__(self, name: str, checkout: Path, python: str, given: argparse.Namespace) -> None:
        command = [python, __file__, str(given.model), "--serve", name, "--precision", given.precision]
        command += ["--tokens", str(given.tokens)]
        path = os.pathsep.join(map(str, (checkout, checkout / "plugins" / "vllm")))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def run(self, work: str, seed: int) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps([work, seed]), file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._read())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with exit code {self._process.wait()}; its messages are above")
        return line


# -- the comparison ----------------------------------------------------------------------------------------------------


def measure(sides: dict[str, Side], work: str, pairs: int) -> tuple[Timings, dict[str, float]]:
    """Return the timings, and each side's largest difference from a forward."""
    differences, seeds, clock = dict.fromkeys(sides, 0.0), {name: count() for name in sides}, [0.0]

    def contender(name: str) -> float:
        found = sides[name].run(work, next(seeds[name]))
        clock[0] += found["seconds"]
        differences[name] = max(differences[name], found["difference"])
        return found["tokens"]

    contenders = {name: lambda name=name: contender(name) for name in sides}
    return interleave(contenders, pairs, warmup=0, clock=lambda: clock[0]), differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--against", type=Path, metavar="CHECKOUT", help="root of the other checkout")
    other.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment with vLLM, which has no `short`")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens of a row (default 64)")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS[:3]))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as JSON")
    parser.add_argument("--serve", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(str(given.model), given.precision, given.tokens, given.serve)
        return
    if not (given.against or given.vllm) or min(given.pairs, given.tokens) < 1:
        parser.error("--against or --vllm is required; --pairs and --tokens must be 1 or more")
    if given.vllm and "short" in given.works:
        parser.error(
            "`short` decodes more rows at a time than the other works, and vLLM starts with one number of them"
        )
    second = VLLM if given.vllm else OTHER
    checkout = ROOT if given.vllm else given.against.resolve()
    sides = {
        OURS: Side(OURS, ROOT, sys.executable, given),
        second: Side(second, checkout, given.vllm or sys.executable, given),
    }
    rows, results = [["work", "tok/s", f"{second} tok/s", "time ratio (quartiles)", "largest difference"]], {}
    for work in given.works:
        timings, differences = measure(sides, work, given.pairs)
        speeds = [f"{timings.rate(name):,.0f}" for name in sides]
        apart = " / ".join(f"{value:.1e}" for value in differences.values())
        rows.append([work, *speeds, str(timings.ratio(OURS, second)), apart])
        rates = {name: timings.rate(name) for name in sides}
        results[work] = {"tokens_per_second": rates, "time_ratio": asdict(timings.ratio(OURS, second))}
        results[work] |= {"differences": differences, "cpu_seconds": timings.seconds}
        print(table(rows), flush=True)
        if given.precision == "float32" and max(differences.values()) > 1e-4:
            raise SystemExit("log-probabilities are not those of a forward of the whole row")
        if given.json:
            settings = {"precision": given.precision, "pairs": given.pairs, "tokens": given.tokens}
            write_json(given.json, {"machine": machine(), **settings, "results": results})
    for side in sides.values():
        side.close()


if __name__ == "__main__":
    main()
