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

import torch

from rlframework.base.errors import DataError

_FORCE, _FORCE_OTHER = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_NAMED = re.compile(r"GLOBAL ([\w.]+)")  # in the messages of torch 2.13


@contextmanager
def without_code(where: str | Path, allowed: Sequence[str] = ()) -> Iterator[None]:
    """Within the context, `torch.load` of any caller in this process runs no code, whatever the caller asks for.

    `allowed`: the classes that files may contain, besides tensors and plain values. A file with another one raises a
    `DataError` that names it and `where`, the file, folder or model that is read.
    """
    parts = [path.rpartition(".") for path in allowed]
    classes = [(getattr(import_module(module), name), f"{module}.{name}") for module, _, name in parts]
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_OTHER)}
    os.environ[_FORCE] = "1"  # torch reads it on each call; it outranks the argument `weights_only=False`
    try:
        with torch.serialization.safe_globals([*classes]):
            yield
    except pickle.UnpicklingError as error:
        found = _NAMED.search(str(error))
        raise DataError(
            f"{where} is damaged, or was made to run code: it contains {found[1] if found else 'objects'}, which no "
            "file of this format needs; it was not loaded"
        ) from error
    finally:
        os.environ.pop(_FORCE, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
