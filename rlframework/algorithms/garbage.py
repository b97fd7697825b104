"""Garbage collection in the driver, whose heap is mostly modules and what a run is built of."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_what_is_new() -> Iterator[None]:
    """Context in which Python's garbage collector does not look at the objects that exist at its beginning.

    These are some 400,000 once torch and transformers are imported, and a full collection takes 0.3 s. The many objects
    of a step with hundreds of engines would cause one in every few steps. Changes nothing in a program that has frozen
    objects itself.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
