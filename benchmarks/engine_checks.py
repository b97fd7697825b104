"""Cost of the checks of sampled tokens: of each result in the driver, and of log-probabilities before each step.

    python benchmarks/engine_checks.py [--rounds 25] [--rows 32] [--json FILE]

A training step of a policy-gradient loss (a random Llama of 4 layers x 256, packed rows, fp32) with the bound of
`generation.logprob_check` and without it; both are checked to have the same loss first. The check of the same rows as
results of an engine is timed alone: in one exchange, as of a batch, and each in an exchange of its own. Interleaved
rounds, CPU time of the process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from interleave import interleave, machine, table, write_json
from work import as_batch, make_model, make_policy, make_rows

from rlframework.algorithms.losses import ClippedPGLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.generation.result_contract import Answer, ResultContract
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, WeightSpan
from rlframework.interfaces.policy_worker import SamplingBound

WITH, WITHOUT = "step with the bound", "step without"
BATCH, ALONE = "results, one exchange", "results, an exchange each"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        tokenizer = make_model(model)
        rows = make_rows("even", arguments.rows)
        policy = stack.enter_context(make_policy(model, tokenizer, "packed", rows=arguments.rows))
        data = as_batch(rows)
        scored = policy.get_logprobs(data)["logprobs"]
        data |= {"prev_logprobs": scored, "generation_logprobs": scored, "advantages": torch.randn(scored.shape)}
        loss, bound = ClippedPGLoss(ClippedPGLossConfig()), SamplingBound(1e-3, 0.05)
        answers = answers_of(data)
        contract = ResultContract(vocabulary=len(tokenizer), version=lambda: 1)
        first = policy.train(data, loss, eval_mode=True), policy.train(data, loss, eval_mode=True, sampling_bound=bound)
        assert first[0]["loss"] == first[1]["loss"], first
        timings = interleave(
            {
                WITHOUT: lambda: float(bool(policy.train(data, loss))),
                WITH: lambda: float(bool(policy.train(data, loss, sampling_bound=SamplingBound(1e9, 1e9)))),
                BATCH: lambda: repeated(lambda: contract.check(answers)),
                ALONE: lambda: repeated(lambda: [contract.check([answer]) for answer in answers]),
            },
            arguments.rounds,
        )
    ratio, step = timings.ratio(WITH, WITHOUT), 1 / timings.rate(WITHOUT)
    shares = {name: 1 / timings.rate(name) / step for name in (BATCH, ALONE)}
    lines = [["", "of a step without checks"], [WITH, f"{ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"]]
    print(table(lines + [[name, f"{share:.3%}"] for name, share in shares.items()]))
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "step": step, "ratio": ratio.__dict__, "shares": shares})


def repeated(work: Callable[[], object], times: int = 20) -> float:
    """Run `work` some times, as once is too short to be timed; return how often."""
    for _ in range(times):
        work()
    return times


def answers_of(data: BatchedDataDict[Any]) -> list[Answer]:
    """The completions of a batch as results of an engine."""
    answers = []
    for row in range(data.size):
        sampled = data["token_mask"][row] != 0
        ids, logprobs = data["input_ids"][row][sampled].long(), data["generation_logprobs"][row][sampled]
        request = GenerationRequest(f"r{row}", data["input_ids"][row][:1].long(), row, max(len(ids), 1))
        spans = (WeightSpan(0, len(ids), 1),)
        answers.append(Answer(request, GenerationResult(f"r{row}", ids, logprobs, "length", spans), aborted=False))
    return answers


if __name__ == "__main__":
    main()
