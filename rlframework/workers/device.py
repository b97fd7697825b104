"""Settings of torch for a worker's GPU, made before its model is built.

Expandable segments of torch's CUDA allocator are memory that grows in place, so that changing sizes do not fragment it.
They are set while the program runs rather than by an environment variable, which child processes would inherit; a
generation engine in another process decides for itself. `PYTORCH_ALLOC_CONF`, if given, is left as it is.

Another process opens memory of an expandable segment through a file descriptor. That needs a permission that containers
often lack (pidfd_getfd), and torch 2.13 may give one segment several handles (pytorch/pytorch#198305). So what is
shared is allocated without them; torch's allocator then takes none of its expandable memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SETTING = re.compile(r"expandable_segments:(\w+)", re.IGNORECASE)


def use_expandable_segments() -> None:
    """Enable expandable segments, unless the user configures the allocator or torch cannot change it in a process."""
    if _functions() is not None and not any(os.environ.get(name) for name in VARIABLES):
        _set(True)


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Context manager: allocate memory that other processes can open. Not for several threads."""
    enabled = expandable_segments()
    if enabled:
        _set(False)
    try:
        yield
    finally:
        if enabled:
            _set(True)


def expandable_segments() -> bool:
    """Return whether they are enabled, by this module or by the user."""
    functions = _functions()
    found = _SETTING.search(functions[0]()) if functions is not None else None
    return found is not None and found[1].lower() == "true"


def _set(enabled: bool) -> None:
    """Change this setting and give the others again: those that are not given may return to their defaults."""
    functions = _functions()
    assert functions is not None
    read, write = functions
    settings = [part for part in [_SETTING.sub("", read()).strip(",").replace(",,", ",")] if part]
    write(",".join([*settings, f"expandable_segments:{enabled}"]))


def _functions() -> tuple[Any, Any] | None:
    """torch's functions that read and write the allocator's settings; None if this version lacks them."""
    import torch

    names = ("_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings")
    read, write = (getattr(torch._C, name, None) for name in names)
    if read is None and hasattr(torch._C, "_cuda_memorySnapshot"):
        read = _settings_in_snapshot
    return (read, write) if read is not None and write is not None else None


def _settings_in_snapshot() -> str:
    """The settings as torch 2.11 reports them, which cannot read them by themselves."""
    import torch

    return str(torch._C._cuda_memorySnapshot(None)["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])


def prepare_device(device: str, *, tf32: bool, cudnn_attention: bool, expandable_segments: bool = False) -> None:
    """Set up torch for `device`, such as "cuda:0"; does nothing on a CPU. The arguments are keys of `policy`.

    From torch 2.11 on, cuDNN is the first choice for attention on recent GPUs. It builds a plan for each new shape,
    reported as 0.44 s forward and 0.55 s backward (modelscope/FunASR#3704), and decoding has a new shape for each
    token; with fewer than 8 heads of keys and values it is reported to decode wrongly on B200 (pytorch/pytorch#193893).
    For training in few shapes on H100 it is reported to be 1.7 to 2.3 times as fast (huggingface/transformers#48163).
    """
    if not device.startswith("cuda"):
        return
    import torch

    if expandable_segments:
        use_expandable_segments()
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
