"""A tiny random Llama over characters, and an independent way to generate with it: whole forwards, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from batched_engine import Batches

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer

ALPHABET = "0123456789+= "


@dataclass
class Tiny:
    """A model directory with what is in it."""

    path: str
    model: Any
    tokenizer: Any

    def engine(self, tokenizer: Any = None, model: Any = None, attach: bool = True, **config: Any) -> Batches:
        """An engine on the model itself, or on `model`, or without weights."""
        batches = Batches.of(self.path, tokenizer or self.tokenizer, **config)
        if attach:
            batches.engine.attach(model or self.model, 0)
        return batches


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """2 layers of 32; weights large enough that distributions are far from even."""
    from transformers import AutoModelForCausalLM

    tokenizer = character_tokenizer(ALPHABET)
    path: Path = make_llama(
        tmp_path_factory.mktemp("tiny") / "llama", tokenizer, hidden=32, layers=2, heads=4, kv_heads=2, init_std=0.4
    )
    return Tiny(str(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer)


@pytest.fixture
def batch() -> Callable[..., BatchedDataDict[Any]]:
    """Lists of ids as a batch with right padding, with seeds 0, 1, 2, ... where none are given."""

    def make(
        prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None = None, pad: int = 0
    ) -> BatchedDataDict[Any]:
        width = max(map(len, prompts))
        rows = [list(prompt) + [pad] * (width - len(prompt)) for prompt in prompts]
        return BatchedDataDict(
            {
                "input_ids": torch.tensor(rows),
                "input_lengths": torch.tensor([len(prompt) for prompt in prompts]),
                "seeds": torch.tensor(list(seeds) if seeds is not None else list(range(len(prompts)))),
            }
        )

    return make


@pytest.fixture
def completions() -> Callable[[Any], list[list[int]]]:
    """The completion of each row of an output, as a list of ids."""

    def read(output: Any) -> list[list[int]]:
        ends, lengths = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
        return [row[e - n : e] for row, e, n in zip(output["output_ids"].tolist(), ends, lengths, strict=True)]

    return read


@pytest.fixture
def plain_greedy() -> Callable[..., list[int]]:
    """Greedy decoding of one prompt by a whole forward for each token."""

    def decode(model: Any, prompt: Sequence[int], ends: set[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in ends:
                break
        return ids[len(prompt) :]

    return decode
