"""Run as a program: gloo ranks that train tiny models of kinds and settings, and say what a plain forward contradicts.

    megatron_kind_ranks.py WORLD FOLDER CASE...    a case: MODEL:LAYOUT:MODE, such as mistral:tensor=2:packed

FOLDER has the models. Prints the complaints of each case as JSON, by rank. What is right is computed by
transformers: the log-probabilities of each row by itself, and the gradients of their mean.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kind_outcomes
import torch
import torch.distributed as dist
from forked_ranks import tell
from kind_outcomes import LENGTHS, TOKENIZER, TOLERANCE, batch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import NotSupported
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance.layouts import Layout
from rlframework_megatron.worker import MegatronPolicyWorker

BETA = 0.9


def oracle(folder: Path, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities `[B, S]` of each row by itself, and the gradients of their mean by the names in files."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs, _ = kind_outcomes.oracle(model, data)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    model.save_pretrained(folder / "gradients")
    return logprobs, load_file(folder / "gradients" / "model.safetensors")


def make_worker(folder: Path, layout: str, mode: str, rank: int) -> MegatronPolicyWorker:
    split = Layout.parse(layout)
    config = {
        "model_name": str(folder),
        "batching": {"mode": mode, "tokens": 40},
        "train_global_batch_size": len(LENGTHS),
        "max_grad_norm": None,
        "optimizer": {"lr": 1e-9, "betas": (BETA, 0.999), "weight_decay": 0.0},
        "parallelism": split.parallelism,
    }
    context = WorkerContext(rank, split.workers)
    return MegatronPolicyWorker(config, TOKENIZER, init_reference_model=False, context=context)


def check(folder: Path, layout: str, mode: str, rank: int) -> list[str]:
    data = batch()
    logprobs, gradients = oracle(folder, data) if rank == 0 else (None, {})
    worker = make_worker(folder, layout, mode, rank)
    complaints = []
    try:
        found = worker.get_logprobs(data)["logprobs"]
        worker.train(data, NLLLoss())
        moments = {name: moment.exp_avg.clone() for name, moment in worker.engine.gather_moments()}
        if logprobs is not None:
            error = float((found - logprobs).abs().max())
            complaints += [] if error < TOLERANCE * 3 else [f"log-probabilities differ by {error:.1e}"]
            complaints += differences({name: moment / (1 - BETA) for name, moment in moments.items()}, gradients)
        complaints += [] if mode != "packed" else native(worker, folder / f"native-{layout}")
        worker.save_pretrained(str(folder / "exported"))
        if logprobs is not None and not complaints:
            again = oracle(folder / "exported", data)[0]
            error = float((again - logprobs).abs().max())
            complaints += [] if error < TOLERANCE * 3 else [f"what was exported differs by {error:.1e}"]
    finally:
        worker.shutdown()
    return complaints


def native(worker: MegatronPolicyWorker, folder: Path) -> list[str]:
    """A checkpoint of megatron-core's own format brings every weight back."""
    engine = worker.engine
    kept = {name: weight.clone() for name, weight in engine.gather_weights(engine.weight_specs())}
    folder.mkdir(exist_ok=True)
    dist.barrier()
    engine.save_native(folder, optimizer=True)
    engine.load_weights({name: torch.zeros_like(weight) for name, weight in kept.items()})
    engine.load_native(folder, optimizer=True)
    again = engine.gather_weights(engine.weight_specs())
    return [f"a native checkpoint changed {name}" for name, weight in again if not torch.equal(weight, kept[name])]


def differences(found: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> list[str]:
    if found.keys() != gradients.keys():
        return [f"other names: {sorted(found.keys() ^ gradients.keys())[:4]}"]
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    worst = {name: float((found[name] - gradient).norm() / norm) for name, gradient in gradients.items()}
    return [f"gradient of {name} differs by {error:.1e}" for name, error in worst.items() if error > TOLERANCE]


def run(folder: Path, word: str, rank: int) -> list[str]:
    model, layout, mode = word.split(":")
    try:
        return check(folder / model, layout, mode, rank)
    except NotSupported as error:
        return [f"{type(error).__name__}: {str(error)[:300]}"]


if __name__ == "__main__":
    WORLD, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
    tell(WORLD, FOLDER, sys.argv[3:], lambda word, rank: run(FOLDER, word, rank))
