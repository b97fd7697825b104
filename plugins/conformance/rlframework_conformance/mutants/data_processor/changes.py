"""Helpers of broken data processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframework.interfaces.data_processor import DataProcessor
from rlframework_conformance.mutants.mutant import around


def in_each_microbatch(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Decorate a change of each microbatch: it becomes `change(microbatch, data)`."""
    return around(DataProcessor.microbatches)(
        lambda sound, _, data, *args, **how: [change(each, data) for each in sound(data, *args, **how)]
    )


def batch_with(data: Any, *, planned: bool = True, **values: Any) -> Any:
    """Return a copy of `data` with `values` replaced, and the driver's plan of microbatches if `planned`."""
    changed = type(data)({**data, **values})
    changed.__dict__.update({name: value for name, value in data.__dict__.items() if name != "data"})
    if not planned:
        changed.micro_batch_indices = changed.micro_batch_lengths = None
    return changed
