"""A ten-line decoder to compare generation engines with: one whole forward per token and row, no cache, no padding.

It uses torch and transformers only, and nothing of rlframework.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Z_ONE_IN_A_MILLION = 4.7534
"""The standard normal distribution exceeds this value with probability 1e-6."""
_ROUNDING = 1e-9


class PlainDecoder:
    """A causal language model in fp32 on the CPU, loaded from a directory, optionally with other `weights` by name."""

    def __init__(self, path: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if weights is not None:
            self.model.load_state_dict(dict(weights), strict=False)
        self.model.tie_weights()

    @torch.no_grad()
    def next(self, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Return the log-probabilities of the token after `ids`, `[V]` float64."""
        logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]
        return torch.log_softmax(logits.double() / temperature, dim=-1)

    def greedy(self, prompt: Sequence[int], ends: Collection[int], count: int) -> list[int]:
        """Return up to `count` most likely tokens, ending at the first token of `ends`."""
        ids = list(prompt)
        while len(ids) < len(prompt) + count and (len(ids) == len(prompt) or ids[-1] not in ends):
            ids.append(int(self.next(ids).argmax()))
        return ids[len(prompt) :]

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], start: int, temperature: float = 1.0) -> Tensor:
        """Return log p(token i | tokens before i) from position `start` on and 0 before it, `[len(ids)]` float64."""
        logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
        every = torch.log_softmax(logits / temperature, dim=-1)
        found = torch.zeros(len(ids), dtype=torch.float64)
        for place in range(start, len(ids)):
            found[place] = every[place - 1, ids[place]]
        return found

    def two_tokens(self, prompt: Sequence[int], end: int, temperature: float) -> dict[tuple[int, ...], float]:
        """Return the probability of each completion of two tokens, or of one token if that is `end`."""
        first = self.next(prompt, temperature).exp().tolist()
        found: dict[tuple[int, ...], float] = {(end,): first[end]}
        for token in (token for token in range(len(first)) if token != end):
            second = self.next([*prompt, token], temperature).exp().tolist()
            found |= {(token, other): first[token] * share for other, share in enumerate(second)}
        return found


def pearson(counts: Mapping[tuple[int, ...], int], shares: Mapping[tuple[int, ...], float]) -> tuple[float, float]:
    """Return Pearson's statistic of `counts` under `shares` and the bound that it exceeds with probability 1e-6.

    Outcomes expected fewer than 5 times are pooled into one class. The bound is Wilson and Hilferty's (1931)
    approximation of chi-squared with one degree of freedom less than the number of classes.
    """
    total = sum(counts.values())
    common = [outcome for outcome, share in shares.items() if share * total >= 5]
    expected = [shares[outcome] * total for outcome in common]
    observed = [float(counts.get(outcome, 0)) for outcome in common]
    rest = total - sum(expected)
    freedom = len(common) - (rest < _ROUNDING)
    expected.append(max(rest, _ROUNDING))  # an impossible outcome that occurs exceeds every bound
    observed.append(total - sum(observed))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in zip(observed, expected, strict=True))
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + Z_ONE_IN_A_MILLION * spread**0.5) ** 3
