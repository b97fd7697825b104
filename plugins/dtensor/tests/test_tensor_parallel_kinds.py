"""Tensor parallelism over two gloo ranks equals a plain forward of each row, or is rejected, by kind of model.

One pair of processes serves all selected kinds that have a plan: of this backend, or in transformers' configuration
with words that this backend knows. The others are rejected by the same sentence, which a test of one of them holds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_kinds import KINDS, tiny_model
from kind_outcomes import LENGTHS, TOKENIZER, TOLERANCE, batch, oracle, parameter_gradients
from probe_forked import run_program
from selected_cases import selected_cases
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlframework.workers.machine import bind_free_port

EQUAL = (
    *("cohere", "cohere2", "granite", "gemma2", "gemma2, sequence", "gemma3_text", "gemma3_text, sequence"),
    *("gpt_neox", "gptj", "codegen", "nemotron"),
)
REJECTED = {
    "apertus": "does not sum the gradients of model.layers.0.mlp.act_fn",
    "gpt_oss": "no tensor-parallel plan for 'gpt_oss'",
    "qwen3_moe": "packed_colwise",
}
"""Kinds that are rejected, each with a word of the sentence."""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tensor ranks")]


def errors(folder: Path, context: Any, sequence: bool) -> dict[str, float]:
    """The largest error of a log-probability, and of each weight's gradient relative to all gradients."""
    from rlframework.algorithms.losses import NLLLoss
    from rlframework_dtensor.worker import DTensorPolicyWorker

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected, weights = oracle(plain, batch())
    parallelism = {"tensor": 2, "sequence": sequence}
    config = {"model_name": str(folder), "parallelism": parallelism, "train_global_batch_size": len(LENGTHS)}
    worker = DTensorPolicyWorker(config, TOKENIZER, context=context)
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> tuple[float, bool]:
        gradients.update(parameter_gradients(worker))
        return 0.0, True

    worker.engine.clip_and_step = keep  # type: ignore[method-assign]
    worker.train(batch(), NLLLoss())
    found = {"log-probabilities": float((worker.get_logprobs(batch())["logprobs"] - expected).abs().max())}
    worker.shutdown()
    whole = torch.stack([gradient.norm() for gradient in weights.values()]).norm()
    missing = weights.keys() - gradients.keys()
    assert not missing, f"no gradient of {sorted(missing)}"
    return found | {name: float((gradients[name] - gradient).norm() / whole) for name, gradient in weights.items()}


def outcome(kind: str, folder: Path, context: Any, *, sequence: bool) -> dict[str, float] | str:
    """`errors`, or the sentence by which the kind is rejected."""
    from rlframework.base.errors import NotSupported

    try:
        return errors(folder / kind, context, sequence)
    except NotSupported as error:
        return str(error)


def main(rank: int, folder: Path, port: int, kinds: list[str]) -> None:
    """Write the outcomes of `kinds` to `folder/outcomes.json`, on rank 0."""
    import torch.distributed as dist

    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework.workers import process_groups
    from rlframework_dtensor.plans import NORMS

    context = WorkerContext(rank, 2, rank, master_port=port)
    process_groups.join(context, torch.device("cpu"))
    found = {}
    for kind in kinds:
        if rank == 0:
            tiny_model(KINDS[kind]).save_pretrained(folder / kind)
        dist.barrier()
        found[kind] = outcome(kind, folder, context, sequence=False)
        if kind in NORMS or kind == "gpt2":
            found[f"{kind}, sequence"] = outcome(kind, folder, context, sequence=True)
        dist.barrier()
        if rank == 0:
            (folder / "outcomes.json").write_text(json.dumps(found))
    process_groups.leave()


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, float] | str]:
    folder = tmp_path_factory.mktemp("tensor")
    with bind_free_port("127.0.0.1") as free:  # none that another program gets unless it asks for it
        port = free.getsockname()[1]
    cases = selected_cases(
        request,
        "test_a_kind_over_two_ranks_equals_its_rows_one_by_one",
        "test_a_kind_without_a_plan_is_rejected_by_name",
    )
    kinds = dict.fromkeys(each["case"].partition(",")[0] for each in cases)
    done = run_program(Path(__file__), folder, port, *kinds)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.parametrize("case", EQUAL)
def test_a_kind_over_two_ranks_equals_its_rows_one_by_one(found, case):
    assert isinstance(found[case], dict), found[case]
    assert max(found[case].values()) < TOLERANCE


@pytest.mark.parametrize("case", REJECTED)
def test_a_kind_without_a_plan_is_rejected_by_name(found, case):
    assert isinstance(found[case], str)
    assert REJECTED[case] in found[case]


if __name__ == "__main__":
    main(1 if os.fork() == 0 else 0, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
