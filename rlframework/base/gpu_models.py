"""Memory and peak speed of known GPUs, by the name that `nvidia-smi` and torch report. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    """A GPU: `memory_gib` that torch can allocate from, and the peak of dense bf16 products in FLOP/s.

    `name`: the words of the reported name that identify it, separated by spaces.
    """

    name: str
    memory_gib: float
    bf16_flops: float


GPU_MODELS: tuple[GpuModel, ...] = (
    GpuModel("GB200", 184, 2.5e15),
    GpuModel("B200", 178, 2.25e15),
    GpuModel("GH200 480GB", 94, 989e12),
    GpuModel("GH200", 139, 989e12),
    GpuModel("H200 NVL", 139, 835e12),
    GpuModel("H200", 139, 989e12),
    GpuModel("H100 NVL", 93, 835e12),
    GpuModel("H100 PCIe", 79, 756e12),
    GpuModel("H100", 79, 989e12),
    GpuModel("H800", 79, 989e12),
    GpuModel("H20", 95, 148e12),
    GpuModel("A100 40GB", 39, 312e12),
    GpuModel("A100", 79, 312e12),
    GpuModel("A800", 79, 312e12),
    GpuModel("L40S", 44, 362e12),
    GpuModel("L40", 44, 181e12),
    GpuModel("L4", 22, 121e12),
    GpuModel("A40", 44, 149.7e12),
    GpuModel("A10", 22, 125e12),
    GpuModel("RTX 4090", 23.5, 165.2e12),
    GpuModel("RTX 3090", 23.5, 71e12),
)
"""Known GPUs, those with more words first.

Speeds: NVIDIA's data sheets, half of what they list "with sparsity"; of the RTX cards, with fp32 accumulation, from the
whitepapers of their architectures. Memory: what the driver leaves of the nominal size, rounded down.
"""


def gpu_model(name: str) -> GpuModel | None:
    """Return the model of the GPU called `name`, such as "NVIDIA H100 80GB HBM3" or "h100"; None if it is unknown."""
    words = set(name.lower().replace("-", " ").split())
    return next((model for model in GPU_MODELS if words.issuperset(model.name.lower().split())), None)
