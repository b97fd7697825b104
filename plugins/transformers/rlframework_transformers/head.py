"""The head of a half-precision model on a GPU, with its logits in fp32, as the trainer computes them.

Rounded to bfloat16, a logit of 20 is off by up to 0.06, and so are log-probabilities: the trainer would see a policy
other than the one that sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.generation.sdk import scaled_logits


@contextmanager
def logits_in_fp32(model: Any, device: torch.device) -> Iterator[None]:
    """Have the linear head of `model` return the fp32 products of its factors; leaves a model on a CPU as it is."""
    head = model.get_output_embeddings()
    if device.type == "cpu" or type(head) is not nn.Linear or head.weight.dtype == torch.float32:
        yield
        return
    handle = head.register_forward_hook(_product)
    try:
        yield
    finally:
        handle.remove()


def _product(head: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The hook: the product once more; a token's is small, because the head sees a row's last position only."""
    rows = inputs[0].reshape(-1, inputs[0].shape[-1])
    return scaled_logits(rows, head.weight, head.bias, 1.0).view(output.shape)
