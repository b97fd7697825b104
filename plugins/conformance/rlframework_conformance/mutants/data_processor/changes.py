"""Helpers that break a data processor by changing its input or its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def broken_global_batch(change: Callable[..., dict[str, Any]]) -> Callable[[type], type]:
    """Break `process_global_batch`: it returns `change(sound, data, loss_fn, dp_group, **where)`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def process_global_batch(self, data: Any, loss_fn: Any, dp_group: Any, **where: Any) -> dict[str, Any]:
                return change(super().process_global_batch, data, loss_fn, dp_group, **where)

        return Broken

    return break_it


def broken_microbatches(change: Callable[..., Any]) -> Callable[[type], type]:
    """Break `microbatches`: it returns `change(sound, data, plan, rule, positions, device)`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def microbatches(self, data: Any, plan: Any, rule: Any, *, positions: str, device: Any) -> Any:
                sound = super().microbatches

                def make(data: Any, plan: Any, rule: Any, positions: str, device: Any) -> list[Any]:
                    return list(sound(data, plan, rule, positions=positions, device=device))

                return change(make, data, plan, rule, positions, device)

        return Broken

    return break_it


def broken_each(change: Callable[[Any, Any], Any]) -> Callable[[type], type]:
    """Break each microbatch: it becomes `change(microbatch, data)`."""
    return broken_microbatches(lambda make, data, *how: [change(each, data) for each in make(data, *how)])


def batch_with(data: Any, **values: Any) -> Any:
    """Return a copy of `data` with `values` replaced and the same microbatch plan."""
    changed = type(data)({**data, **values})
    changed.__dict__.update({name: value for name, value in data.__dict__.items() if name != "data"})
    return changed
