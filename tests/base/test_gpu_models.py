"""GPUs are recognised by the names that nvidia-smi and torch report."""

from __future__ import annotations

import pytest

from rlframework.base.gpu_models import gpu_model


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200 480GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("h100", "H100"),
        ("NVIDIA GeForce GTX 1080", None),
        ("A1000", None),
        ("", None),
    ],
)
def test_a_gpu_is_found_by_the_words_of_its_name(reported, name):
    found = gpu_model(reported)
    assert name == (found and found.name)
