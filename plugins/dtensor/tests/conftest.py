"""A batch, and an oracle that shares no code with the framework: plain torch and transformers, padded, one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.distributed.batched_data_dict import BatchedDataDict

WORD_COUNT = 40


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model_path(request, tmp_path_factory):
    """A random Llama with grouped heads, its head tied or not."""
    from rlframework.data.models import make_llama
    from rlframework.data.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz+=?")
    return make_llama(path, tokenizer, hidden=32, layers=2, heads=4, kv_heads=2, tied=request.param, init_std=0.2)


@pytest.fixture
def tokenizer(model_path):
    from rlframework.data.tokenizer import load_tokenizer

    return load_tokenizer(str(model_path))


def make_batch(rows: int, width: int = 14, seed: int = 0) -> BatchedDataDict[Any]:
    """Ragged rows of random tokens with everything that a policy-gradient loss reads."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    real = torch.arange(width) < lengths[:, None]
    asked = torch.rand(rows, width, generator=generator) > 0.4
    sample_mask = torch.ones(rows)
    sample_mask[1] = 0.0
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, WORD_COUNT, (rows, width), generator=generator) * real,
            "input_lengths": lengths,
            "token_mask": (real & asked).float(),
            "sample_mask": sample_mask,
            "advantages": torch.randn(rows, width, generator=generator),
        }
    )


@pytest.fixture
def batch() -> BatchedDataDict[Any]:
    return make_batch(8)


class Oracle:
    """The same model and the same mathematics, written the plain way."""

    def __init__(self, path: Any, lr: float, weight_decay: float, max_grad_norm: float | None) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8)
        self.max_grad_norm = max_grad_norm

    def logprobs(self, batch: BatchedDataDict[Any], temperature: float = 1.0) -> torch.Tensor:
        ids, lengths = batch["input_ids"], batch["input_lengths"]
        attention_mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        logits = self.model(input_ids=ids, attention_mask=attention_mask).logits / temperature
        chosen = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
        return torch.nn.functional.pad(chosen, (1, 0)) * attention_mask

    def loss(self, batch: BatchedDataDict[Any], kind: str, temperature: float = 1.0) -> torch.Tensor:
        mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
        weights = batch["advantages"][:, 1:] if kind == "pg" else torch.ones_like(mask)
        return -(self.logprobs(batch, temperature)[:, 1:] * weights * mask).sum() / mask.sum()

    def step(self, batch: BatchedDataDict[Any], kind: str, temperature: float = 1.0) -> tuple[float, float]:
        self.optimizer.zero_grad()
        loss = self.loss(batch, kind, temperature)
        loss.backward()
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        return loss.item(), norm.item()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


@pytest.fixture
def oracle(model_path):
    """`oracle(lr=..., weight_decay=..., max_grad_norm=...)` on the weights at `model_path`."""

    def make(lr: float = 1e-4, weight_decay: float = 0.01, max_grad_norm: float | None = 1.0) -> Oracle:
        return Oracle(model_path, lr, weight_decay, max_grad_norm)

    return make


def assert_weights_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Contract 2 after 20 steps: 1e-5 (L2) for the model as a whole, 2e-4 for each tensor."""
    assert got.keys() == wanted.keys()
    squares = sum(float((got[name] - wanted[name]).square().sum()) for name in wanted)
    total = sum(float(weight.square().sum()) for weight in wanted.values())
    assert (squares / total) ** 0.5 < 1e-5
    for name, weight in wanted.items():
        assert (got[name] - weight).norm() / weight.norm() < 2e-4, name


@pytest.fixture
def weights_close():
    return assert_weights_close


@pytest.fixture
def batches():
    """`batches(count, rows)`: different batches."""
    return lambda count, rows=8: [make_batch(rows, seed=100 + number) for number in range(count)]
