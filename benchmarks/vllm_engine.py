"""The engine `vllm` on a CPU: weights into it against a copy of the same bytes, and its speed against the embedded one.

    .venv-vllm/bin/python benchmarks/vllm_engine.py [--rows 16] [--tokens 64] [--rounds 5]

In the environment of vLLM, one thread, a random Llama of the size of SmolLM2-135M (30 layers of 576, 49,152 tokens).
Figures are of CPU time, because other processes work; rounds alternate, and medians are shown. An update is whole: a
sender packs the weights into the engine's shared memory, with checksums, and the engine verifies them, loads them into
vLLM and reports the checksums of what it holds. Its parts are the sender's, until the bytes are in the engine's memory,
the engine's verification there, and what vLLM does with them. The copy is numpy's, into memory whose pages are there.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import GenerationRequest, SamplingParams
from rlframework.weight_sync.ipc import IpcSender, device_id
from rlframework_transformers.engine import TransformersEngine
from rlframework_vllm.config import VllmGenerationConfig
from rlframework_vllm.engine import VllmEngine

CPU = torch.device("cpu")
PARTS = "sender", "verification", "vLLM"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
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
            measure(folder, precision, model, arguments)


def measure(folder: str, precision: str, model: Any, arguments: argparse.Namespace) -> None:
    weights = {name: one.detach() for name, one in model.state_dict().items() if name != "lm_head.weight"}
    tokenizer = character_tokenizer("0123456789")
    place = {"model_name": folder, "device": "cpu", "precision": precision}
    section = VllmGenerationConfig(name="vllm", batch_size=64)
    vllm, embedded = VllmEngine(section, tokenizer, **place), TransformersEngine(section, tokenizer, **place)
    embedded.attach(model.eval(), 0)
    size = sum(one.nbytes for one in weights.values())
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    sender = IpcSender(CPU)
    update(vllm, sender, weights, 0)
    copies, updates = [], []
    for version in range(1, arguments.rounds + 1):
        copies.append(timed(lambda: np.copyto(target, source)))
        updates.append(update(vllm, sender, weights, version))
    whole, copy = median(map(sum, updates)), median(copies)
    parts = ", ".join(f"{name} {median(one[part] for one in updates):.3f} s" for part, name in enumerate(PARTS))
    print(f"{precision}: {size / 2**20:.0f} MiB, update {whole:.3f} s ({parts}), copy {copy:.3f} s: {copy / whole:.2f}")
    rates = {}
    for name, engine in (("vllm", vllm), ("embedded", embedded)):
        serve(engine, 2, 4)
        rates[name] = (
            arguments.rows * arguments.tokens / timed(lambda e=engine: serve(e, arguments.rows, arguments.tokens))
        )
    shown = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    print(
        f"{precision}: {arguments.rows} rows of 16 + {arguments.tokens} tokens, tokens per CPU second: {shown}",
        flush=True,
    )
    vllm.close()


def update(engine: Any, sender: IpcSender, weights: dict[str, Any], version: int) -> list[float]:
    """A whole update through shared memory, by a sender in this process; return the seconds of each of `PARTS`."""
    info, device = {name: (tuple(one.shape), one.dtype) for name, one in weights.items()}, device_id(CPU)
    times = [time.process_time()]
    engine.begin_weight_update(version, info)
    sender.begin(info, engine.offer_refit_memory()[device], [device])
    handles = {device: sender.pack(list(info), iter(weights.items()))}
    times.append(time.process_time())
    engine.update_weights_from_ipc_handles(handles)
    times.append(time.process_time())
    assert engine.finish_weight_update().checksums
    times.append(time.process_time())
    return [end - start for start, end in pairwise(times)]


def serve(engine: Any, rows: int, tokens: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    prompts = torch.randint(10, 49000, (rows, 16), generator=draw)
    engine.submit([GenerationRequest(f"{row}", prompts[row], row, tokens, SamplingParams()) for row in range(rows)])
    missing = rows
    while missing:
        missing -= len(engine.poll(None))


def timed(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
