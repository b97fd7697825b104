"""Prefill and the token-by-token loop for some rows at once, on a transformers causal language model with a cache.

Prompts are padded on the left, each different prompt is prefilled once, and rows that are finished leave the batch and
the cache. Everything stays on the model's device; the loop runs over time only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.generation.sampling import SamplingRule, choose

_COMPACT_SHARE = 4
"""Finished rows leave the batch when they are one in so many: moving the cache costs about as much as a step."""


@dataclass
class Work:
    """Rows to complete: which of the different `prompts` each has, its random numbers and how many tokens it may have.

    `prompts`: 1-D int64 tensors on the CPU. `prompt_of [n]` int64; `uniforms [n, T]` float64 (`[n, 0]` for greedy);
    `budgets [n]` int64 of at least 1.
    """

    prompts: Sequence[Tensor]
    prompt_of: Tensor
    uniforms: Tensor
    budgets: Tensor


@dataclass
class Completions:
    """On the CPU: `tokens` and `logprobs` `[n, t]`, valid up to `lengths [n]`; `truncated [n]`: no end token came."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    truncated: Tensor


@torch.no_grad()
def complete(model: nn.Module, work: Work, ends: Tensor, rule: SamplingRule, pad_id: int) -> Completions:
    """Sample up to `work.budgets` tokens a row, until one of `ends [e]` (a token of the completion itself) comes.

    `model` must be in evaluation mode. No gradients are kept; inference mode is not used, because a buffer that the
    model makes on the way would be of no use to training afterwards.
    """
    device = next(model.parameters()).device
    longest = int(work.budgets.max())
    uniforms = work.uniforms.to(device=device)
    forward = _Forward(model, work, pad_id, longest, device)
    logits = forward.prefill()
    count = len(work.prompt_of)
    tokens = torch.full((count, longest), pad_id, dtype=torch.int64, device=device)
    logprobs = torch.zeros((count, longest), dtype=torch.float32, device=device)
    rows, budgets = torch.arange(count, device=device), work.budgets.to(device)
    finished = torch.zeros(count, dtype=torch.bool, device=device)
    expiring = set(work.budgets.tolist())  # rows without budget must not go on: the model may have no position for them
    for step in range(longest):
        draws = None if rule.greedy else uniforms[rows, step]
        chosen, chosen_logprobs = choose(logits, draws, rule)
        tokens[rows, step], logprobs[rows, step] = chosen, chosen_logprobs
        finished |= torch.isin(chosen, ends) | (budgets <= step + 1)
        done = int(finished.sum())
        if done == len(rows):
            break
        if done * _COMPACT_SHARE >= len(rows) or step + 1 in expiring:
            keep = (~finished).nonzero().squeeze(-1)
            forward.keep(keep)
            rows, budgets, finished, chosen = rows[keep], budgets[keep], finished[keep], chosen[keep]
        logits = forward.advance(chosen)
    return _cut(tokens, logprobs, ends, work.budgets.to(device))


def _cut(tokens: Tensor, logprobs: Tensor, ends: Tensor, budgets: Tensor) -> Completions:
    """What was sampled up to the first end token or the budget of each row; what came after it is dropped."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    is_end = torch.isin(tokens, ends) & (positions < budgets[:, None])
    ended = is_end.any(-1)
    lengths = torch.where(ended, is_end.int().argmax(-1) + 1, budgets)
    valid = positions < lengths[:, None]
    width = int(lengths.max())
    kept = torch.where(valid, logprobs, 0.0)[:, :width]
    return Completions(tokens[:, :width].cpu(), kept.cpu(), lengths.cpu(), ~ended.cpu())


class _Forward:
    """The model, its cache, and the mask and positions that go with it."""

    def __init__(self, model: Any, work: Work, pad_id: int, longest: int, device: torch.device) -> None:
        self._model, self._device = model, device
        self._accepted = set(inspect.signature(model.forward).parameters)
        self._prompt_of = work.prompt_of.to(device)
        self._ids, prompt_mask = _left_pad(work.prompts, pad_id)
        self._width = self._ids.shape[1]
        self._padded = not bool(prompt_mask.all())
        self._mask = torch.ones((len(work.prompts), self._width + longest), dtype=torch.int64)
        self._mask[:, : self._width] = prompt_mask
        self._mask, self._ids = self._mask.to(device), self._ids.to(device)
        self._lengths = self._mask[:, : self._width].sum(-1)
        self._cache: Any = None

    def prefill(self) -> Tensor:
        """Logits `[n, V]` after the prompts, each different prompt computed once."""
        from rlframework.generation.cache import decoding_cache  # transformers is heavy

        self._cache = decoding_cache(self._model.config)
        positions = (self._mask[:, : self._width].cumsum(-1) - 1).clamp_(min=0)
        logits = self._call(self._ids, positions)
        every_prompt_once = torch.arange(len(self._ids), device=self._device)
        if not torch.equal(self._prompt_of, every_prompt_once):
            logits = logits[self._prompt_of]
            self.keep(self._prompt_of)
        return logits

    def advance(self, tokens: Tensor) -> Tensor:
        """Logits `[n, V]` after one more token `[n]` a row."""
        positions = self._lengths[:, None]
        self._lengths, self._width = self._lengths + 1, self._width + 1
        return self._call(tokens[:, None], positions)

    def keep(self, rows: Tensor) -> None:
        """Go on with `rows [m]` only; a row may come several times."""
        self._cache.reorder_cache(rows)
        self._mask, self._lengths = self._mask[rows], self._lengths[rows]

    def _call(self, ids: Tensor, positions: Tensor) -> Tensor:
        options = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self._accepted}
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask[:, : self._width] if self._padded else None,
            past_key_values=self._cache,
            use_cache=True,
            **options,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _left_pad(prompts: Sequence[Tensor], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask
