"""Torch's global state after a library has changed it."""

from __future__ import annotations

import warnings

import pytest
import torch

from rlframework.generation.serving import torch_restored


def start_badly() -> None:
    with torch_restored():
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_num_threads = print  # type: ignore[assignment]
        torch.manual_seed(3)
        warnings.warn("torch will change", FutureWarning, stacklevel=1)  # tests fail on warnings that are shown
        raise RuntimeError("it does not start")


def test_threads_their_setter_and_random_numbers_are_restored_after_an_error():
    threads, set_threads, state = torch.get_num_threads(), torch.set_num_threads, torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="it does not start"):
        start_badly()
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_threads)
    assert torch.equal(torch.random.get_rng_state(), state)
