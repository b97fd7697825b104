"""A compiled function without a working compiler."""

from __future__ import annotations

from subprocess import CalledProcessError
from typing import Any

import pytest
import torch

from rlframework.policy.head.logprobs import Compiled


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), CalledProcessError(1, "gcc")])
def test_without_a_compiler_it_computes_and_warns_once(error, monkeypatch, caplog):
    def failing(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: failing)
    compiled = Compiled(max)
    assert [compiled(1, 2), compiled(3, 1)] == [2, 3]
    assert [str(error) in record.getMessage() for record in caplog.records] == [True]


def test_the_functions_own_error_is_raised(monkeypatch):
    def failing(*_: Any) -> Any:
        raise RuntimeError("its own")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    with pytest.raises(RuntimeError, match="its own"):
        Compiled(failing)()


def test_memory_that_runs_out_is_not_taken_for_a_missing_compiler(monkeypatch):
    def failing(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: failing)
    with pytest.raises(torch.OutOfMemoryError):
        Compiled(max)(1, 2)
