"""Read answers whose steps are labelled: `prompt`, `completions` (the steps, a list of texts), and `labels`.

`prompt` is a text or a list of messages. A label is true or false, or a number from 0 to 1: the probability that the
step is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlframework.base.errors import DataError
from rlframework.datasets.conversations import read_turns
from rlframework.interfaces.environment import Sample

FIELDS = ("prompt", "completions", "labels")


def has_steps(row: Mapping[str, Any]) -> bool:
    """Whether `row` has labelled steps."""
    return row.keys() >= {"completions", "labels"}


def steps_of(row: Mapping[str, Any], where: str, label: str) -> Sample:
    """Return the answer in `row` with the id `label`; its steps and their labels are in the sample's metadata.

    Raises a `DataError` that begins with `where` if something is missing or malformed.
    """
    if missing := [name for name in FIELDS if row.get(name) is None]:
        raise DataError(f"{where}: there is no {missing[0]!r}; labelled steps need the columns {', '.join(FIELDS)}")
    messages = tuple(read_turns(row["prompt"], "user", f"{where}, column 'prompt'"))
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, (list, tuple)) or not steps:
        given = "and is empty" if isinstance(steps, (list, tuple)) else f"not {type(steps).__name__}"
        raise DataError(f"{where}, column 'completions': must be a list of texts, one for each step, {given}")
    for number, step in enumerate(steps, 1):
        if not isinstance(step, str) or not step:
            raise DataError(
                f"{where}, column 'completions': step {number} is {step!r:.200}; each must be a text, and not empty"
            )
    if not isinstance(labels, (list, tuple)) or len(labels) != len(steps) or not all(map(_is_label, labels)):
        raise DataError(
            f"{where}, column 'labels': must have a label for each of the {len(steps)} steps, true or false, or a "
            f"number from 0 to 1; it is {labels!s:.200}"
        )
    metadata = {"steps": tuple(steps), "labels": tuple(float(one) for one in labels)}
    return Sample(label, messages, "", "\n".join(steps), metadata)


def _is_label(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and 0 <= value <= 1
