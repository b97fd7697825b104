"""The embedded engine on a GPU: its rows are those of a CPU, and its memory stays within what it plans with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from batched_engine import Batches
from transformers import AutoModelForCausalLM, LlamaConfig

from rlframework.generation.sampling import SAMPLED_ELEMENTS
from rlframework_transformers.cache import _SAMPLING_BYTES, row_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[random.Random(row).randrange(2, 15) for _ in range(1 + row % 40)] for row in range(64)]


def test_greedy_rows_are_those_of_a_cpu(tiny: Any, batch: Any) -> None:
    """In fp32; prompts of different lengths, so with padding, and rows that end between two checks."""
    data = batch(PROMPTS)
    expected = tiny.engine(max_new_tokens=40).generate(data, greedy=True)
    engine = Batches.of(tiny.path, tiny.tokenizer, device="cuda", max_new_tokens=40)
    engine.load({name: weight for name, weight in tiny.model.state_dict().items() if name != "lm_head.weight"})
    found = engine.generate(data, greedy=True)
    assert torch.equal(found["output_ids"], expected["output_ids"])
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_memory_stays_within_the_plan(tiny: Any, batch: Any, tmp_path: Path, top_p: float) -> None:
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=100_000,
        max_position_embeddings=2048,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    config.save_pretrained(tmp_path)
    engine = Batches.of(str(tmp_path), tiny.tokenizer, "bfloat16", "cuda", max_new_tokens=400, top_p=top_p)
    engine.engine.attach(model, 0)
    prompts = [prompt * 8 for prompt in PROMPTS]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.generate(batch(prompts))
    longest = max(map(len, prompts))
    rows = len(prompts) * row_bytes(config, prompt=longest, total=longest + 400, width=2)
    planned = rows + SAMPLED_ELEMENTS * _SAMPLING_BYTES[top_p < 1.0]
    used = torch.cuda.max_memory_allocated() - before
    assert planned / 3 < used < planned
