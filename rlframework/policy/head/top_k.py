"""The likeliest tokens of a head, chunk by chunk, as for distillation. Without gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from rlframework.errors import BatchError
from rlframework.policy.head.logprobs import chunk_rows, scaled_logits
from rlframework.policy.head.vocab_parallel import VocabularyShard, parallel_logits


@torch.no_grad()
def top_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard | None, k: int, temperature: float
) -> Tensor:
    """`[N, 2 k]` fp32: the k largest logits of `hidden [N, H]` at `temperature`, then the tokens that they are of.

    fp32 holds every id below 2**24. `weight`: this rank's rows, where `shard` says that there are others.
    """
    parts = []
    for rows in hidden.split(chunk_rows(weight.shape[0])):
        if shard is None:
            logits = scaled_logits(rows, weight, bias, temperature)
        else:
            logits = parallel_logits(rows, weight, bias, shard, temperature=temperature)
        if k > logits.shape[1]:
            raise BatchError(f"the {k} likeliest tokens were asked for, and the model has {logits.shape[1]}")
        values, tokens = logits.topk(k, -1)
        parts.append(torch.cat((values, tokens.to(values.dtype)), 1))
    return torch.cat(parts)
