"""Reads files that are pickles, such as those of engines' own formats, without running code that they name.

A pickle can name any function and have it called. torch's restricted reader (`weights_only`) creates tensors and plain
values only; here it also creates the classes that a format needs, each given by its import path `module.name`.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rlframework.errors import DataError

_FORCE, _FORCE_OTHER = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_NAMED = re.compile(r"(?:Unsupported global: GLOBAL|Unsupported class|Trying to (?:call|load|instantiate)\D*?) ?`?([\w.]+)")


@contextmanager
def without_code(where: Path, allowed: Sequence[str] = ()) -> Iterator[None]:
    """Within the context, `torch.load` of any caller in this process runs no code, whatever the caller asks for.

    `allowed`: the classes that files may contain, besides tensors and plain values. A file with another one raises a
    `DataError` that names it and `where`, the file or folder that is read.
    """
    classes = [(getattr(import_module(path.rpartition(".")[0]), path.rpartition(".")[2]), path) for path in allowed]
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_OTHER)}
    os.environ[_FORCE] = "1"  # torch reads it on each call; it outranks the argument `weights_only=False`
    try:
        with torch.serialization.safe_globals(list(classes)):
            yield
    except pickle.UnpicklingError as error:
        found = _NAMED.search(str(error))
        if found is None:
            raise
        raise DataError(
            f"{where} contains {found[1]}, which no checkpoint of this format needs and which could run code; it was "
            "not loaded. Do not use this checkpoint unless you know why it is there"
        ) from error
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})
