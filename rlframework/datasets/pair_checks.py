"""Checks of preference pairs: the answers of a pair differ, and the chosen one has the higher score."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rlframework.base.errors import DataError
from rlframework.datasets.preferences import PreferenceRow

_LOG = logging.getLogger(__name__)


def check_pairs(pairs: Sequence[PreferenceRow], where: Callable[[int], str]) -> None:
    """Log how many of `pairs` have equal answers or scores in the wrong order; `where` names a pair by its number.

    Published data sets have some of both, so these pairs stay. Raises a `DataError` if the answers of all are equal.
    """
    equal = [number for number, pair in enumerate(pairs) if pair.chosen == pair.rejected]
    if equal:
        what = f"{len(equal):,} of {len(pairs):,} pairs have the same text as chosen and as rejected answer"
        if len(equal) == len(pairs):
            raise DataError(f"{where(0)}: {what}, so there is nothing to learn; use the columns of different answers")
        _LOG.warning("%s, which teach nothing; the first: %s. Remove them", what, where(equal[0]))
    worse = [number for number, pair in enumerate(pairs) if pair.scores is not None and pair.scores[0] < pair.scores[1]]
    if worse:
        _LOG.warning(
            "%s of %s pairs have a chosen answer with a lower score than the rejected one; the first: %s. %s",
            f"{len(worse):,}",
            f"{len(pairs):,}",
            where(worse[0]),
            "Is a low score a good one? Otherwise exchange the columns (environment.columns)"
            if len(worse) == len(pairs)
            else "Exchange the answers of these pairs, or remove them",
        )
