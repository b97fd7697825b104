"""Checks of the files in a model directory, without torch or transformers: JSON objects, and complete safetensors.

`rlframework.models.loading` compares the weights with the model that `config.json` describes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from rlframework.base.errors import DataError

OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
"""Files of a model directory that are JSON objects; each may be absent."""

INDEX = "model.safetensors.index.json"
LARGEST_COUNT = 1_000_000
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def check_model_files(folder: str | Path) -> None:
    """Raise a `DataError` that names the first file of the model directory `folder` that cannot be used, and why.

    Files that are absent are not an error, except those that the index of the weights names. Reads no weights.
    """
    folder = Path(folder)
    values = {name: read_object(folder / name) for name in OBJECTS if (folder / name).exists()}
    tensors = _tensors(folder)
    for place, key, count in _counts(values.get("config.json", {}), ""):
        most = len(tensors) if key in _LAYERS and tensors else LARGEST_COUNT
        if count > most:
            why = f"the weights are only {most} tensors" if most == len(tensors) else f"at most {most:,} are possible"
            raise DataError(f"{folder / 'config.json'}: {place}{key} is {count}, but {why}")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`. Raises a `DataError` for anything else, and for NaN."""
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_constant)
        json.dumps(found, ensure_ascii=False).encode()  # a ValueError for half of a pair of surrogates
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise DataError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} must be a JSON object, but is of type {type(found).__name__}")
    return found


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a value")
    return float(name)


def _tensors(folder: Path) -> Mapping[str, Path]:
    """The file of each tensor in the safetensors files, checked against the index. Empty if there are no such files."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        for name in _names(path):
            if name in found:
                raise DataError(f"{path} and {found[name].name} both have the weight {name}; remove one of the files")
            found[name] = path
    if (folder / INDEX).exists():
        _check_index(folder / INDEX, found)
    return found


def _names(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise DataError(f"{path} is not a file")
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged or truncated ({shorten(str(error), 300)}); copy or download it again"
        ) from error


def _check_index(path: Path, found: Mapping[str, Path]) -> None:
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict):
        raise DataError(f"{path}: weight_map must be a JSON object of file names")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise DataError(f"{path}: weight_map.{name} must be the name of a file in this directory, not {file!r:.80}")
        if name not in found:
            where = "which has no such weight" if (path.parent / file).is_file() else "which is missing"
            raise DataError(f"{path}: weight_map.{name} is in {file}, {where}; copy or download it again")
        if found[name].name != file:
            raise DataError(f"{path}: weight_map.{name} is in {file}, but {found[name].name} has it")


def _counts(values: Mapping[str, Any], place: str) -> Iterator[tuple[str, str, int]]:
    """Yield the place, key and value of each number of layers, experts or heads in a model's configuration."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _counts(value, f"{place}{key}.")
        elif isinstance(value, int) and (key.startswith("num_") or key in _LAYERS):
            yield place, key, value
