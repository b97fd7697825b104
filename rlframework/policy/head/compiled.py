"""`Compiled`: a function compiled by torch that still computes where there is no working compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from subprocess import SubprocessError
from typing import Any

import torch

_LOG = logging.getLogger(__name__)


class Compiled:
    """`function`, compiled at its first call; uncompiled, with a warning, where the compiler fails.

    On a GPU Inductor needs Triton, a C compiler and Python's headers, which a machine for inference may lack.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._current = function, torch.compile(function, dynamic=True)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. Raises what it raises itself, and `torch.OutOfMemoryError`."""
        try:
            return self._current(*arguments)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError, SubprocessError) as error:
            if self._current is self._function:
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _LOG.warning(
                "The head's log-probabilities are computed without compiled kernels, which is slower: install a C "
                "compiler and the headers of Python (gcc, python3-dev), or check Triton. torch.compile said: %s",
                reason,
            )
            self._current = self._function
            return self._function(*arguments)  # the compiled functions leave their arguments alone
