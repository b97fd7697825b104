"""Torch's global state, which the library of an engine may change when it starts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_restored() -> Iterator[None]:
    """Restore the random state, the number of threads, and `torch.set_num_threads`; hide warnings of future changes."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own names
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
