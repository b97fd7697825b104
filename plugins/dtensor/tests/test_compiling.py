"""`policy.dtensor.compile`: the results of eager execution, for rows of any length."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from shutil import which

import pytest
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.huggingface.model_directories import make_llama
from rlframework.plugins.manager import create_manager
from rlframework_conformance import PolicyWorkerSuite, cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.oracle import Oracle
from rlframework_dtensor import model_builder
from rlframework_dtensor.config import COMPILERS
from rlframework_dtensor.model_builder import compile_blocks
from rlframework_dtensor.worker import DTensorPolicyWorker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(which, COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU"),
    # raised by torch's compiler itself
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def llama(path, layers, *, tied):
    """Write a random Llama with grouped heads to `path` and return the path and its tokenizer."""
    tokenizer = cases.tokenizer()
    sizes = {"hidden": 32, "intermediate": 64, "layers": layers, "heads": 4, "kv_heads": 2}
    return make_llama(path, tokenizer, **sizes, tied=tied, init_std=0.2), tokenizer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layers", "mode", "compiler"),
    [(1, "padded", "inductor"), (1, "packed", "inductor"), (2, "padded", "eager")],
)
def test_compiled_step_matches_the_oracle(tmp_path, batches, monkeypatch, layers, mode, compiler):
    """Two blocks are compiled only up to their graphs, to save the time of C++."""
    monkeypatch.setattr(model_builder, "compile_blocks", partial(compile_blocks, compiler=compiler))
    model, tokenizer = llama(tmp_path / "model", layers, tied=True)
    worker = DTensorPolicyWorker(
        {
            "model_name": str(model),
            "train_global_batch_size": 8,
            "batching": {"mode": mode, "tokens": 40},
            "optimizer": {"lr": 1e-4},
        },
        tokenizer,
        backend_config={"compile": True},
    )
    plain = Oracle(model, lr=1e-4)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for batch in batches(3):
        torch.testing.assert_close(worker.get_logprobs(batch)["logprobs"], plain.logprobs(batch), rtol=1e-5, atol=1e-5)
        result, right = worker.train(batch, NLLLoss()), plain.step(batch, "nll")
        assert float(result["global_loss"][0]) == pytest.approx(right.loss, rel=1e-5)
        assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=1e-5)
    worker.shutdown()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > compiled


@pytest.mark.thorough
def test_compiled_context_parallel_step_matches_the_oracle(tmp_path, monkeypatch):
    """Two workers with half of each sequence and FSDP around the compiled block; each compiles up to its graphs.

    Compilation to C++ is covered above and would take most of a minute in each worker.
    """
    manager = create_manager()
    found = manager.select("policy_worker", "dtensor")
    record = replace(found.record, target="probe_graphs:GraphsAlone")
    found = replace(found, record=record)
    select = manager.select
    monkeypatch.setattr(manager, "select", lambda kind, name: found if kind == "policy_worker" else select(kind, name))
    where = {"manager": manager, "device": "cpu", "folder": tmp_path / "run", "models": tmp_path / "models"}
    (tmp_path / "run").mkdir()
    harness = PolicyWorkerSuite.open_harness(record, Layout(context=2), **where)
    harness.contract, harness.section = 2, {"compile": True}
    model, _ = llama(tmp_path / "models" / "untied", 1, tied=False)
    assert harness.model("untied") == model  # the harness takes what is there
    made, make = [], harness.policy
    monkeypatch.setattr(harness, "policy", lambda *args, **keys: made.append(make(*args, **keys)) or made[-1])
    try:
        deadlines = {"start": 120.0, "call": 300.0, "shutdown": 20.0}
        batching = {"mode": "packed", "tokens": 30}
        harness.first_step(harness.batch(), "compiled", batching=batching, deadlines=deadlines)
        assert all(made[0].inspect("probe_graphs:graphs"))
    finally:
        harness.close()
