"""Ways to break a data processor: change what goes into the sound one, or what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def broken_global_batch(change: Callable[..., dict[str, Any]]) -> Callable[[type], type]:
    """A class whose `process_global_batch` is `change(sound, data, loss_fn, dp_group, **where)`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def process_global_batch(self, data: Any, loss_fn: Any, dp_group: Any, **where: Any) -> dict[str, Any]:
                return change(super().process_global_batch, data, loss_fn, dp_group, **where)

        return Broken

    return break_it


def broken_microbatches(change: Callable[..., Any]) -> Callable[[type], type]:
    """A class whose `microbatches` is `change(sound, data, plan, rule, positions, device)`."""

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
    """A class each of whose microbatches is `change(microbatch, data)`."""
    return broken_microbatches(lambda make, data, *how: [change(each, data) for each in make(data, *how)])


def batch_with(data: Any, **values: Any) -> Any:
    """A batch like `data` with other `values` and the same plan."""
    changed = type(data)({**data, **values})
    changed.__dict__.update({name: value for name, value in data.__dict__.items() if name != "data"})
    return changed
