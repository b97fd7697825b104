"""Weights into the engine `vllm` on a CPU, against a copy of the same bytes.

    .venv-vllm/bin/python benchmarks/vllm_engine.py [--rounds 5]

In the environment of vLLM, one thread, a random Llama of the size of SmolLM2-135M (30 layers of 576, 49,152 tokens).
Figures are of CPU time, because other processes work; rounds alternate, and medians are shown. An update is whole: a
sender packs the weights into the engine's shared memory, with checksums, and the engine verifies them, loads them into
vLLM and reports the checksums of what it holds. The copy is numpy's, into memory whose pages are there.
`decoding.py --vllm` compares the speed of generation with the embedded engine's.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.weight_sync.ipc import IpcSender, device_id
from rlframework_vllm.config import VllmGenerationConfig
from rlframework_vllm.engine import VllmEngine

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            eos_token_id=2,
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
        for precision in ("float32", "bfloat16"):
            model = model.to(getattr(torch, precision))
            measure(folder, precision, model, rounds)


def measure(folder: str, precision: str, model: Any, rounds: int) -> None:
    weights = {name: one.detach() for name, one in model.state_dict().items() if name != "lm_head.weight"}
    tokenizer = character_tokenizer("0123456789")
    place = {"model_name": folder, "device": "cpu", "precision": precision}
    vllm = VllmEngine(VllmGenerationConfig(name="vllm", batch_size=64), tokenizer, **place)
    size = sum(one.nbytes for one in weights.values())
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    update(vllm, weights, 0)
    copies, updates = [], []
    for version in range(1, rounds + 1):
        copies.append(timed(lambda: np.copyto(target, source)))
        updates.append(timed(lambda version=version: update(vllm, weights, version)))
    share = median(copies) / median(updates)
    megabytes, taken = size / 2**20, f"update {median(updates):.3f} s, copy {median(copies):.3f} s"
    print(f"{precision}: {megabytes:.0f} MiB, {taken}: {share:.2f}", flush=True)
    vllm.close()


def update(engine: Any, weights: dict[str, Any], version: int) -> None:
    """A whole update through shared memory, by a sender in this process."""
    info = {name: (tuple(one.shape), one.dtype) for name, one in weights.items()}
    engine.begin_weight_update(version, info)
    device, sender = device_id(CPU), IpcSender(CPU)
    sender.begin(info, engine.offer_refit_memory()[device], [device])
    engine.update_weights_from_ipc_handles({device: sender.pack(list(info), iter(weights.items()))})
    sender.close()
    assert engine.finish_weight_update().checksums


def timed(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
