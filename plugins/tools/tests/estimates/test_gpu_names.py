"""GPUs are recognised by the names that people give them."""

from __future__ import annotations

import pytest

from rlframework_tools.estimates.plan import named_gpu


@pytest.mark.parametrize(
    ("text", "name", "gibibytes"),
    [
        ("A100-40", "A100 40GB", 39),
        ("A100_40GiB", "A100 40GB", 39),
        ("A100-PCIE-40GB", "A100 40GB", 39),
        ("A100-SXM4-80GB", "A100", 79),
        ("H100-80", "H100", 79),
        ("H100 96GB", "H100 96GB", 96),
        ("NVIDIA H100 80GB HBM3", "H100", 79),
        ("H100-PCIe", "H100 PCIe", 79),
        ("H200-NVL", "H200 NVL", 139),
        ("RTX4090", "RTX 4090", 23.5),
        ("GeForce RTX 4090-24GB", "RTX 4090", 23.5),
        ("L40s", "L40S", 44),
        ("gh200 480gb", "GH200 480GB", 94),
        ("A800-40GB", "A800 40GB", 40),
    ],
)
def test_a_gpu_is_found_by_what_a_person_calls_it(text, name, gibibytes):
    found = named_gpu(text)
    assert found is not None
    assert (found.name, found.memory_gib) == (name, gibibytes)


@pytest.mark.parametrize(
    "text", ["A100-40-PG", "H100-TURBO", "H100 NVL 40 GB x", "RTX", "V100", "A1000", "H100-0GB", ""]
)
def test_a_word_that_is_not_understood_is_no_gpu(text):
    assert named_gpu(text) is None
