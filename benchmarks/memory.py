"""Measure the peak memory of a function, beyond the memory in use before it.

On a CPU under Linux: the high-water mark of the process, which it can reset. On a GPU: the allocator's own count. As a
program, print the peak of one way to compute log-probabilities; see `head_memory`.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

TOKENS, HIDDEN = 1024, 256
WAYS = ("whole logits", "in chunks")


def peak_bytes(work: Callable[[], Any], device: str = "cpu") -> int:
    """The peak of bytes in use during `work`, less those in use before it."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """The entry `name` of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def head_memory(vocabulary: int, device: str = "cpu") -> dict[str, int]:
    """Peak bytes of log-probabilities of 1,024 tokens and their backward, by method; each runs in its own process."""
    command = [sys.executable, __file__, str(vocabulary), device]
    return {way: int(subprocess.check_output([*command, way], text=True).split()[-1]) for way in WAYS}


def _head(vocabulary: int, device: str, way: str) -> int:
    import torch

    from rlframework.policy.head.logprobs import chunked_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device=device).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, HIDDEN, device=device)).requires_grad_()
    targets = torch.randint(vocabulary, (TOKENS,), device=device)

    def work() -> None:
        if way == "in chunks":
            logprobs, _ = chunked_logprobs(hidden, weight, None, targets)
        else:
            logits = torch.nn.functional.linear(hidden, weight)
            logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])
        logprobs.sum().backward()

    return peak_bytes(work, device)


if __name__ == "__main__":
    print(_head(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
