"""Speed of the embedded engine on a model, compared with another checkout of rlframework, or with vLLM.

    python benchmarks/decoding.py MODEL --against CHECKOUT [--precision bfloat16] [--pairs 3] [--tokens 64] [--json F]
    python benchmarks/decoding.py MODEL --vllm .venv-vllm/bin/python

Work, with one thread and random prompts: `equal`, 32 prompts of 32 tokens; `groups`, 4 prompts of 96 tokens x 8;
`uneven`, 96 prompts of 8 to 64 tokens, 32 decoded at a time, whose rows end anywhere up to the maximum. Temperature 1.

A process for each side; interleaved rounds, CPU time of the process, which includes packing the weights (vLLM does that
before, once); below 1 this checkout is faster. First, each side's log-probabilities of some rows are compared
with those of a forward of the whole row: the largest difference is printed, and in fp32 must be at most 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from interleave import Timings, interleave, machine, table, write_json

WORKS = ("equal", "groups", "uneven")
OURS, OTHER, VLLM = "this checkout", "the other", "vllm"
ROOT = Path(__file__).resolve().parents[1]
BATCH, CHECKED_ROWS = 32, 3


# -- a side: a process that serves works, one a line -------------------------------------------------------------------


def requests_of(work: str, tokens: int, seed: int, vocabulary: int) -> list[Any]:
    """Return the requests of a work, with tokens of a `vocabulary`; equal seeds give equal ones."""
    import torch

    from rlframework.interfaces.generation import GenerationRequest

    rng = random.Random(seed)
    sizes = {"equal": [32] * 32, "groups": [96] * 4, "uneven": [rng.randint(8, 64) for _ in range(96)]}[work]
    prompts = [torch.tensor([rng.randrange(vocabulary) for _ in range(size)]) for size in sizes]
    prompts = [prompt for prompt in prompts for _ in range(8 if work == "groups" else 1)]
    budgets = [rng.randint(1, tokens) if work == "uneven" else tokens for _ in prompts]
    return [
        GenerationRequest(str(row), prompt, 1000 * seed + row, budget)
        for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]


def start_vllm(model: Any, tokenizer: Any, place: dict[str, str]) -> Any:
    """Return vLLM's engine with the weights of `model`."""
    from vllm_engine import update

    from rlframework_vllm.config import VllmGenerationConfig
    from rlframework_vllm.engine import VllmEngine

    engine = VllmEngine(VllmGenerationConfig(name="vllm", batch_size=BATCH), tokenizer, **place)
    update(engine, dict(model.named_parameters()), 0)
    return engine


def serve(model_path: str, precision: str, tokens: int, name: str) -> None:
    """Read (work, seed) from stdin; print CPU seconds and tokens, for seed 0 the largest difference from a forward."""
    import time

    import torch
    import transformers

    from rlframework.config.sections import GenerationConfig
    from rlframework.generation.transformers_engine import TransformersEngine

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, precision)).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_path)
    place = {"model_name": model_path, "device": "cpu", "precision": precision}
    if name == VLLM:
        engine = start_vllm(model, tokenizer, place)
    else:
        engine = TransformersEngine(GenerationConfig(batch_size=BATCH), tokenizer, **place)
    print(flush=True)
    for version, line in enumerate(sys.stdin):
        work, seed = json.loads(line)
        requests = requests_of(work, tokens, seed, model.config.vocab_size)
        if name != VLLM:
            engine.attach(model, version)
        started = time.process_time()
        engine.submit(requests)
        results: dict[str, Any] = {}
        while len(results) < len(requests):
            results |= {result.request_id: result for result in engine.poll(None)}
        spent = time.process_time() - started
        checked = requests[:: len(requests) // CHECKED_ROWS] if seed == 0 else []
        differences = [difference(model, request, results[request.request_id]) for request in checked]
        done = sum(len(result.token_ids) for result in results.values())
        print(json.dumps({"seconds": spent, "tokens": done, "difference": max(differences, default=0.0)}), flush=True)


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
    differences = {name: side.run(work, 0)["difference"] for name, side in sides.items()}
    seeds, clock = {name: iter(range(1, 10**9)) for name in sides}, [0.0]

    def contender(name: str) -> float:
        found = sides[name].run(work, next(seeds[name]))
        clock[0] += found["seconds"]
        return found["tokens"]

    contenders = {name: lambda name=name: contender(name) for name in sides}
    return interleave(contenders, pairs, warmup=0, clock=lambda: clock[0]), differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--against", type=Path, metavar="CHECKOUT", help="root of the other checkout")
    other.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment with vLLM")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens of a row (default 64)")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as JSON")
    parser.add_argument("--serve", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(str(given.model), given.precision, given.tokens, given.serve)
        return
    if not (given.against or given.vllm) or min(given.pairs, given.tokens) < 1:
        parser.error("--against or --vllm is required; --pairs and --tokens must be 1 or more")
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
    for side in sides.values():
        side.close()
    if given.json:
        settings = {"precision": given.precision, "pairs": given.pairs, "tokens": given.tokens}
        write_json(given.json, {"machine": machine(), **settings, "results": results})


if __name__ == "__main__":
    main()
