"""Values inside a row by dotted names, as `reward_model.ground_truth`, and the place of verl's reference answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rlframework.base.errors import DataError

VERL_COLUMN, VERL_KEY = "reward_model", "ground_truth"
"""The column of verl's rows with the reference answer, and its key in there."""


def is_column(name: str, columns: Collection[str]) -> bool:
    """Whether `name` is one of `columns`, or a dotted name that begins with one."""
    return name in columns or name.partition(".")[0] in columns


def nested_values(row: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """Return the values in `row` of those of `names` that are dotted and no columns themselves.

    A value on the way that is null is null. Raises a `DataError` that begins with `where` for a key that is missing.
    """
    dotted = [name for name in names if name not in row and name.partition(".")[0] in row]
    return {name: _value(row, name, where) for name in dotted}


def value_of(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of the column `name` or at the dotted name `name`; `default` if there is none."""
    try:
        return row[name] if name in row else _value(row, name, "")
    except DataError:
        return default


def verl_answer(row: Mapping[str, Any]) -> Any:
    """Return the reference answer in a row of verl's, of any type; None if there is none."""
    return value_of(row, f"{VERL_COLUMN}.{VERL_KEY}")


def _value(row: Mapping[str, Any], name: str, where: str) -> Any:
    found: Any = row
    path = name.split(".")
    for number, key in enumerate(path):
        if found is None:
            return None
        if not isinstance(found, Mapping) or key not in found:
            parent = ".".join(path[:number])
            keys = f"its keys are {sorted(found)}" if isinstance(found, Mapping) else f"it is {type(found).__name__}"
            raise DataError(
                f"{where}: the column {parent!r} has no {key!r}; {keys}. Set environment.columns to what the rows have"
            )
        found = found[key]
    return found
