"""The baseline of the measurements: a hand-written loop with torch and transformers alone.

Right-padded microbatches of a fixed number of rows, in the order given (`padded`) or sorted by length first
(`sorted`); the model's own logits at all positions; fused AdamW. Imports nothing from rlframework.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Rows:
    """Right-padded rows: `input_ids [B, S]`, `lengths [B]`, `mask [B, S]` with 1 where a token counts in the loss."""

    input_ids: Tensor
    lengths: Tensor
    mask: Tensor


class PlainLoop:
    """A model with its optimizer; `order` is "padded" or "sorted"."""

    def __init__(
        self,
        model_path: Path,
        order: str,
        rows: int,
        *,
        lr: float,
        weight_decay: float,
        clip: float,
        device: str = "cpu",
        precision: str = "float32",
    ) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device)
        self.device, self.dtype = device, getattr(torch, precision)
        self.order, self.rows, self.clip = order, rows, clip
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def train(self, batch: Rows) -> tuple[float, float]:
        """Do one optimizer step on `batch`; return the loss (mean over masked tokens) and the norm before clipping."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        valid = batch.mask[:, 1:].sum()
        total = 0.0
        for index in self._microbatches(batch.lengths):
            mask = self._cut(batch.mask, batch, index)[:, 1:].to(self.device)
            loss = -(self._logprobs(batch, index) * mask).sum() / valid
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return total, float(norm)

    @torch.no_grad()
    def get_logprobs(self, batch: Rows) -> Tensor:
        """`[B, S]`: entry i is log p(token i | tokens before i); 0 at position 0 and at padding."""
        self.model.eval()
        result = torch.zeros(batch.input_ids.shape, device=self.device)
        for index in self._microbatches(batch.lengths):
            values = self._logprobs(batch, index)
            result[index, 1 : values.shape[1] + 1] = values
        return result * (torch.arange(result.shape[1]) < batch.lengths[:, None]).to(self.device)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], samples: int, tokens: int, ends: Sequence[int], pad: int
    ) -> int:
        """Generate `samples` completions per prompt in one batch with `model.generate`; return the number of tokens."""
        self.model.eval()
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=samples,
            max_new_tokens=tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=pad,
        )
        made = output[:, width:]
        if not ends:
            return made.numel()
        ended = torch.isin(made, torch.tensor(list(ends)))
        first = torch.where(ended.any(1), ended.int().argmax(1) + 1, made.shape[1])
        return int(first.sum())

    def _microbatches(self, lengths: Tensor) -> Iterator[Tensor]:
        order = lengths.argsort() if self.order == "sorted" else torch.arange(len(lengths))
        yield from order.split(self.rows)

    def _logprobs(self, batch: Rows, index: Tensor) -> Tensor:
        ids = self._cut(batch.input_ids, batch, index).to(self.device)
        attention = (torch.arange(ids.shape[1]) < batch.lengths[index, None]).long().to(self.device)
        logits, targets = self._logits(ids, attention)[:, :-1].float(), ids[:, 1:]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return -nll.view(targets.shape)

    def _logits(self, ids: Tensor, attention: Tensor) -> Tensor:
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            logits: Tensor = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        return logits

    def close(self) -> None:
        """Nothing to release."""

    @staticmethod
    def _cut(values: Tensor, batch: Rows, index: Tensor) -> Tensor:
        return values[index, : int(batch.lengths[index].max())]
