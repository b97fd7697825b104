"""The arithmetic of LoRA and the names of its matrices, for trainers and for engines that merge adapters themselves."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two matrices, after the path of the layer: A `[rank, in]`, B `[out, rank]`."""


def merge(base: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """The weight `[out, in]` of a layer with its adapter: base + scale * B A, a new tensor in the base's dtype.

    Computed in fp32, on the base's device. `lora_a [rank, in]`, `lora_b [out, rank]`.
    """
    product = (lora_b.to(base.device).float() * scale) @ lora_a.to(base.device).float()
    return product.add_(base).to(base.dtype)


def is_adapter(name: str) -> bool:
    """Whether a name outside is an adapter's."""
    return name.endswith((A, B))


def initial_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """What A of the name `name` starts with, fp32 `[rank, in]` on the CPU: uniform within 1 / sqrt(in).

    That is the distribution of the LoRA paper's own program. It depends on the arguments alone, so that all ranks of
    all layouts start from one model; the process's random state is left as it was.
    """
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
