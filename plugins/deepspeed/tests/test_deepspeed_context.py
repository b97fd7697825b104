"""Context parallelism over two gloo ranks equals a plain forward of each row, by kind of attention and exchange.

The kinds have what a rank cannot compute from its part of a row: sinks of heads, soft caps, chunks, windows that only
the mask applies, and rotary embeddings that depend on the length of the whole row.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_kinds import KINDS, tiny_model
from kind_outcomes import LENGTHS, batch
from probe_forked import run_program
from selected_cases import selected_cases
from transformers import AutoModelForCausalLM

from rlframework.workers.machine import bind_free_port

EXCHANGES, LAYOUTS = ("gather", "ulysses"), ("packed", "padded")
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sinks": ("gpt_oss", {}),
    "soft caps": ("gemma2", {"attn_logit_softcapping": 5.0}),
    "chunks": ("llama4_text", {}),
    "windows of the mask": (
        "qwen2_moe",
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "longrope": ("phi3", {"rope_parameters": LONG}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
}
OWN_SIZES = {
    "dynamic": {"max_position_embeddings": 8},
    "longrope": {"max_position_embeddings": 32, "original_max_position_embeddings": 8},
}

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("context ranks")]


def save_models(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        kind, changes = CASES[name]
        model = tiny_model(KINDS[kind], **changes, **OWN_SIZES.get(name, {}))
        model.save_pretrained(folder / name)


def row_by_row(model: Any) -> torch.Tensor:
    """Log-probabilities of the rows' tokens after the first, one after the other."""
    found = []
    for row, length in zip(batch()["input_ids"], LENGTHS, strict=True):
        scores = model(input_ids=row[None, :length], use_cache=False).logits[0].float().log_softmax(-1)
        found.append(scores[:-1].gather(1, row[1:length, None])[:, 0])
    return torch.cat(found)


def weighted(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss that depends on each of them in another way."""
    return -(logprobs * torch.linspace(0.5, 1.5, len(logprobs))).mean()


def errors(folder: Path, exchange: str, layout: str) -> tuple[float, dict[str, float]]:
    """The largest error of a log-probability, and of each weight's gradient relative to all gradients."""
    import torch.distributed as dist

    from rlframework.models.forward import attending, forward
    from rlframework.models.rotary import rotate_by_sequence
    from rlframework.policy.head.patch import HeadPatch, HeadRequest
    from rlframework.policy.microbatches.data_processor import make_microbatch
    from rlframework.policy.microbatches.shapes import Padding
    from rlframework_deepspeed.config import DeepSpeedConfig
    from rlframework_deepspeed.ulysses import context_of

    plain, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    expected = row_by_row(plain)
    weighted(expected).backward()
    rotate_by_sequence(model)
    group = dist.group.WORLD
    assert group is not None
    context = context_of(DeepSpeedConfig(sequence_exchange=exchange), group)
    packed = layout == "packed"
    padding = Padding(context.pad_multiple)
    microbatch = make_microbatch(batch(), torch.arange(len(LENGTHS)), packed=packed, positions="all", padding=padding)
    with attending(model.config, microbatch, context):
        values = forward(model, HeadPatch(model), microbatch, HeadRequest(), context)[:, 0]
        weighted(values).backward()
    worst = float((values - expected).abs().max())
    whole = torch.stack([weight.grad.norm() for weight in plain.parameters() if weight.grad is not None]).norm()
    of_gradients = {}
    for (name, weight), own in zip(plain.named_parameters(), model.parameters(), strict=True):
        if weight.grad is None:
            continue
        gradient = torch.zeros_like(own) if own.grad is None else own.grad
        dist.all_reduce(gradient)
        of_gradients[name] = float((gradient - weight.grad).norm() / whole)
    return worst, of_gradients


def main(rank: int, folder: Path, port: int, cases: list[str]) -> None:
    """Write the errors of `cases`, "case/exchange/layout", to `folder/errors.json`, on rank 0."""
    import torch.distributed as dist

    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework.models import attention
    from rlframework_deepspeed import process_state

    attention.register()
    process_state.deepspeed_on(torch.device("cpu"))
    process_state.join(WorkerContext(rank, 2, rank, master_port=port), torch.device("cpu"))
    if rank == 0:
        save_models(folder, dict.fromkeys(case.split("/")[0] for case in cases))
    dist.barrier()
    found = {}
    for case in cases:
        name, exchange, layout = case.split("/")
        found[case] = errors(folder / name, exchange, layout)
    if rank == 0:
        (folder / "errors.json").write_text(json.dumps(found))
    dist.barrier()
    process_state.leave()


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[float, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("context")
    with bind_free_port("127.0.0.1") as free:  # none that another program gets unless it asks for it
        port = free.getsockname()[1]
    cases = selected_cases(request, "test_context_parallel_rows_equal_rows_one_by_one")
    done = run_program(Path(__file__), folder, port, *("{case}/{exchange}/{layout}".format(**case) for case in cases))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "errors.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("case", CASES)
def test_context_parallel_rows_equal_rows_one_by_one(found, case, exchange, layout):
    worst, of_gradients = found[f"{case}/{exchange}/{layout}"]
    assert worst < 1e-5
    assert max(of_gradients.values()) < 1e-5
    assert ("sinks" in "".join(of_gradients)) == (case == "sinks")


if __name__ == "__main__":
    main(1 if os.fork() == 0 else 0, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
