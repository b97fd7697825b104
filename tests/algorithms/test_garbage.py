"""Which objects the garbage collector scans during a run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from rlframework.algorithms.performance import collecting_what_is_new


class Node:
    """An object in a cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """No object is frozen, as in a program: a test session freezes its imports."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_older_objects_are_left_out_until_the_end_and_new_ones_are_collected() -> None:
    older = Node()
    gone = weakref.ref(older)
    with collecting_what_is_new():
        newer = weakref.ref(Node())
        del older
        gc.collect()
        assert newer() is None
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_a_program_has_frozen_stays_frozen() -> None:
    kept = Node()
    gc.freeze()
    with collecting_what_is_new():
        Node()
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())  # which leaves out what is frozen
