"""Run as a program: two gloo ranks take native checkpoints up under other layouts, and say what is not right.

    native_ranks.py FOLDER MODEL CASE...    a case: FROM:LAYOUT:OPTIMIZER, such as start-plain:tensor=2:plain

FOLDER has FROM, a native checkpoint, and FROM.pt, what it must hold. Each case loads it, trains a step, saves that as
CASE and what it must hold as CASE.pt, and takes it up again under the same layout. Prints the complaints of each case
as JSON, by rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import tell

from rlframework.algorithms.losses import NLLLoss
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout
from rlframework_megatron.worker import MegatronPolicyWorker

WORLD = 2
Told = dict[str, dict[str, Any]]


def make_worker(model: str, layout: str, optimizer: str, rank: int = 0) -> MegatronPolicyWorker:
    """One rank's worker; `optimizer`: plain or distributed, with -bf16 for bfloat16."""
    split = Layout.parse(layout)
    return MegatronPolicyWorker(
        {
            "model_name": model,
            "train_global_batch_size": 8,
            "optimizer": {"lr": 1e-3},
            "parallelism": split.parallelism,
            "precision": "bfloat16" if optimizer.endswith("bf16") else "float32",
        },
        load_tokenizer(model),
        init_reference_model=False,
        context=WorkerContext(rank, split.workers),
        backend_config={"distributed_optimizer": optimizer.startswith("distributed")},
    )


def train(worker: MegatronPolicyWorker, layout: str, seed: int, rank: int = 0) -> None:
    """A step on this rank's rows."""
    data = Layout.parse(layout).data
    rows = 8 // data
    first = rank * rows if data > 1 else 0
    worker.train(cases.batch(seed=seed).slice(first, first + rows), NLLLoss())


def told(worker: MegatronPolicyWorker) -> Told:
    """Weights and moments by name, and steps. Collective."""
    weights = {name: weight.clone() for name, weight in worker.engine.gather_weights(worker.engine.weight_specs())}
    moments = {name: (m.exp_avg.clone(), m.exp_avg_sq.clone(), m.steps) for name, m in worker.engine.gather_moments()}
    return {
        "weights": weights,
        "first": {name: one for name, (one, _, _) in moments.items()},
        "second": {name: one for name, (_, one, _) in moments.items()},
        "steps": {name: torch.tensor(count) for name, (_, _, count) in moments.items()},
    }


def differences(found: Told, wanted: Told) -> list[str]:
    """Return the names of tensors that are not bit-equal."""
    return [
        f"{kind} of {name}"
        for kind, tensors in wanted.items()
        for name, right in tensors.items()
        if not torch.equal(found[kind][name], right)
    ]


def check(folder: Path, model: str, word: str, rank: int) -> list[str]:
    """The complaints of this rank."""
    source, layout, optimizer = word.split(":")
    worker = make_worker(model, layout, optimizer, rank)
    worker.engine.load_native(folder / source, optimizer=True)
    complaints = [f"loaded: {what}" for what in differences(told(worker), torch.load(folder / f"{source}.pt"))]
    train(worker, layout, 2, rank)
    saved = told(worker)
    if rank == 0:
        (folder / word).mkdir()
        torch.save(saved, folder / f"{word}.pt")
    dist.barrier()
    worker.engine.save_native(folder / word, optimizer=True)
    train(worker, layout, 3, rank)
    wanted = told(worker)
    worker.shutdown()
    again = make_worker(model, layout, optimizer, rank)
    again.engine.load_native(folder / word, optimizer=True)
    train(again, layout, 3, rank)
    complaints += [f"gone on: {what}" for what in differences(told(again), wanted)]
    again.shutdown()
    return complaints


if __name__ == "__main__":
    FOLDER, MODEL = Path(sys.argv[1]), sys.argv[2]
    tell(WORLD, FOLDER, sys.argv[3:], lambda word, rank: check(FOLDER, MODEL, word, rank))
