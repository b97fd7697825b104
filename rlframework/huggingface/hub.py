"""What is asked of the Hugging Face hub, and what is not: names that can only be directories."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def is_path(name: str) -> bool:
    """Whether a model's `name` means a directory here, there or not, and the hub need not be asked for it."""
    parent = os.path.dirname(name)
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.isdir(parent) or os.path.isdir(name)


def tell_of_hub(name: str) -> None:
    """A line on stderr when the hub is going to be asked for `name`: it may take a while."""
    from huggingface_hub import constants

    if not is_path(name) and not constants.HF_HUB_OFFLINE:
        print(f"there is no directory {name!r} here: asking the Hugging Face hub for it", file=sys.stderr, flush=True)


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Inside, the hub's client does not tell of each attempt; the error at the end does."""
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(level)
