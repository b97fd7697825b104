"""The figures of a GPU: the count of kernels in a trace, by hand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow  # it imports the script
def test_kernels_are_counted_without_the_ranges_of_annotations_around_them(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    kernel_rows = runpy.run_path(str(SCRIPT))["kernel_rows"]
    kernels = [  # milliseconds; the copy runs beside the product
        ("ampere_bf16_gemm", 0, 30), ("Memcpy DtoD", 10, 20), ("flash_fwd", 40, 60), ("silu_kernel", 60, 70)
    ]  # fmt: skip
    ranges = [("forward", 0, 70), ("attention", 40, 60)]
    events = [_event(name, start, stop) for name, start, stop in kernels]
    events += [_event(name, start, stop, is_user_annotation=True) for name, start, stop in ranges]
    events += [_event("aten::mm", 0, 90, device_type=DeviceType.CPU)]
    top, *rows = kernel_rows(events, 0.1)
    assert top == ["kind", "ms", "share"]
    assert {kind: (ms, share) for kind, ms, share in rows} == {
        "attention": ("20.0", "20%"),
        "matrix products": ("30.0", "30%"),
        "communication": ("0.0", "0%"),
        "optimizer": ("0.0", "0%"),
        "copies": ("10.0", "10%"),
        "elementwise": ("10.0", "10%"),
        "idle": ("40.0", "40%"),  # from 30 to 40 and from 70 on
    }


def _event(name, start, stop, **kind):
    times = {"start_us": 1000 * start, "end_us": 1000 * stop, "id": 1, "thread": 0}
    return FunctionEvent(name=name, **times, **{"device_type": DeviceType.CUDA, **kind})
