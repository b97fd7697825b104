"""The k most likely tokens and their logits, computed chunk by chunk without gradients, for distillation."""

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
    """Return `[N, 2 k]` fp32: the k largest logits of `hidden [N, H]` at `temperature`, then their token ids.

    fp32 represents every id below 2**24 exactly. `weight`: this rank's rows, if `shard` is given. Raises a `BatchError`
    if k exceeds the vocabulary.
    """
    chunks = []
    for rows in hidden.split(chunk_rows(weight.shape[0])):
        if shard is None:
            logits = scaled_logits(rows, weight, bias, temperature)
        else:
            logits = parallel_logits(rows, weight, bias, shard, temperature=temperature)
        if k > logits.shape[1]:
            raise BatchError(f"k is {k}, but the model has {logits.shape[1]} tokens")
        values, tokens = logits.topk(k, -1)
        chunks.append(torch.cat((values, tokens.to(values.dtype)), 1))
    return torch.cat(chunks)
