"""Marks of tests whose trainer runs in this environment and whose vLLM runs in that of `VLLM_PYTHON`."""

from __future__ import annotations

import os

import pytest

PYTHON = os.environ.get("VLLM_PYTHON", "")
BESIDE_VLLM = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON does not name a Python with vLLM: make vllm"),
]
