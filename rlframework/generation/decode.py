"""Prefill and the decoding loop for a batch of rows, on a transformers causal language model with a cache.

Prompts are left-padded, each distinct prompt is prefilled once, and finished rows leave the batch and the cache.
Everything stays on the model's device; the only loop is over time steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlframework.generation.sampling import SamplingRule, choose

_COMPACTION_RATIO = 4
"""Finished rows are removed once they are 1 / `_COMPACTION_RATIO` of the batch: moving the cache costs about a step."""


@dataclass
class DecodingBatch:
    """Rows to complete: `prompt_of` indexes the distinct `prompts`, `budgets` are the maximum new tokens of each row.

    `prompts`: 1-D int64 tensors on the CPU. `prompt_of [n]` int64; `uniforms [n, T]` float64 random numbers (`[n, 0]`
    for greedy); `budgets [n]` int64, at least 1.
    """

    prompts: Sequence[Tensor]
    prompt_of: Tensor
    uniforms: Tensor
    budgets: Tensor


@dataclass
class Completions:
    """Results on the CPU: `tokens` and `logprobs` `[n, t]`, valid up to `lengths [n]`.

    `truncated [n]`: the row ended without an end-of-sequence or stop token.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    truncated: Tensor


@torch.no_grad()
def complete(
    model: nn.Module, batch: DecodingBatch, stop_tokens: Tensor, rule: SamplingRule, pad_id: int
) -> Completions:
    """Sample up to `batch.budgets` tokens per row, until one of `stop_tokens [e]`, which is part of the completion.

    `model` must be in evaluation mode. Computes no gradients, but does not use inference mode: a buffer that the model
    creates in it could not be used in training afterwards.
    """
    device = next(model.parameters()).device
    longest = int(batch.budgets.max())
    uniforms = batch.uniforms.to(device=device)
    forward = _Forward(model, batch, pad_id, longest, device)
    logits = forward.prefill()
    count = len(batch.prompt_of)
    tokens = torch.full((count, longest), pad_id, dtype=torch.int64, device=device)
    logprobs = torch.zeros((count, longest), dtype=torch.float32, device=device)
    rows, budgets = torch.arange(count, device=device), batch.budgets.to(device)
    finished = torch.zeros(count, dtype=torch.bool, device=device)
    # rows that have used up their budget must stop: the model may have no further positions
    expiring = set(batch.budgets.tolist())
    for step in range(longest):
        draws = None if rule.greedy else uniforms[rows, step]
        chosen, chosen_logprobs = choose(logits, draws, rule)
        tokens[rows, step], logprobs[rows, step] = chosen, chosen_logprobs
        finished |= torch.isin(chosen, stop_tokens) | (budgets <= step + 1)
        done = int(finished.sum())
        if done == len(rows):
            break
        if done * _COMPACTION_RATIO >= len(rows) or step + 1 in expiring:
            keep = (~finished).nonzero().squeeze(-1)
            forward.keep(keep)
            rows, budgets, finished, chosen = rows[keep], budgets[keep], finished[keep], chosen[keep]
        logits = forward.advance(chosen)
    return _trim(tokens, logprobs, stop_tokens, batch.budgets.to(device))


def _trim(tokens: Tensor, logprobs: Tensor, stop_tokens: Tensor, budgets: Tensor) -> Completions:
    """Drop the tokens after the first stop token or the budget of each row."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    is_end = torch.isin(tokens, stop_tokens) & (positions < budgets[:, None])
    ended = is_end.any(-1)
    lengths = torch.where(ended, is_end.int().argmax(-1) + 1, budgets)
    valid = positions < lengths[:, None]
    width = int(lengths.max())
    kept = torch.where(valid, logprobs, 0.0)[:, :width]
    return Completions(tokens[:, :width].cpu(), kept.cpu(), lengths.cpu(), ~ended.cpu())


class _Forward:
    """The model with its cache, attention mask and positions."""

    def __init__(self, model: Any, batch: DecodingBatch, pad_id: int, longest: int, device: torch.device) -> None:
        self._model, self._device = model, device
        self._accepted = set(inspect.signature(model.forward).parameters)
        self._prompt_of = batch.prompt_of.to(device)
        padding: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
        self._ids = pad_sequence(list(batch.prompts), padding_value=pad_id, **padding)
        prompt_mask = pad_sequence([torch.ones_like(prompt) for prompt in batch.prompts], **padding)
        self._width = self._ids.shape[1]
        self._padded = not bool(prompt_mask.all())
        self._mask = torch.ones((len(batch.prompts), self._width + longest), dtype=torch.int64)
        self._mask[:, : self._width] = prompt_mask
        self._mask, self._ids = self._mask.to(device), self._ids.to(device)
        self._lengths = self._mask[:, : self._width].sum(-1)
        self._cache: Any = None

    def prefill(self) -> Tensor:
        """Return the logits `[n, V]` after the prompts, computing each distinct prompt once."""
        from rlframework.generation.cache import decoding_cache  # importing transformers is slow

        self._cache = decoding_cache(self._model.config)
        positions = (self._mask[:, : self._width].cumsum(-1) - 1).clamp_(min=0)
        logits = self._call(self._ids, positions)
        one_row_per_prompt = torch.arange(len(self._ids), device=self._device)
        if not torch.equal(self._prompt_of, one_row_per_prompt):
            logits = logits[self._prompt_of]
            self.keep(self._prompt_of)
        return logits

    def advance(self, tokens: Tensor) -> Tensor:
        """Append a token to each row, `[n]`; return the next logits `[n, V]`."""
        positions = self._lengths[:, None]
        self._lengths, self._width = self._lengths + 1, self._width + 1
        return self._call(tokens[:, None], positions)

    def keep(self, rows: Tensor) -> None:
        """Continue with `rows [m]` only; a row may be repeated."""
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
