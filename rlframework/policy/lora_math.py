"""The arithmetic of LoRA and its matrices' names, for trainers and for engines that merge adapters themselves."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

A = ".lora_A.weight"
"""Suffix of the name of an adapter's matrix A `[rank, in]`, after the layer's path."""
B = ".lora_B.weight"
"""Suffix of the name of an adapter's matrix B `[out, rank]`, after the layer's path."""


def merge(base: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Return the merged weight `[out, in]` of a layer, base + scale * B A: a new tensor in the base's dtype.

    Computed in fp32, on the base's device. `lora_a [rank, in]`, `lora_b [out, rank]`.
    """
    product = (lora_b.to(base.device).float() * scale) @ lora_a.to(base.device).float()
    return product.add_(base).to(base.dtype)


def is_adapter(name: str) -> bool:
    """Return True if `name` is the name of an adapter's matrix."""
    return name.endswith((A, B))


def initial_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial value of the matrix A called `name`, fp32 `[rank, in]` on the CPU.

    Uniform within 1 / sqrt(in), as in the LoRA paper's reference implementation. The value depends on the arguments
    only, so all ranks of all layouts start from the same model; the process's random state is unchanged.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
