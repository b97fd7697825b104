"""Names of models and data sets, paths or repositories of the Hugging Face hub, and checks of a model's files.

If the hub does not answer, its clients keep retrying for about a minute per file. So the hub is probed first, once and
for at most `PROBE_SECONDS`, and a run whose model cannot be fetched ends with an error before torch is imported.

Files are checked without torch or transformers: JSON objects, and complete safetensors. `rlframework.models.loading`
compares the weights with the model that `config.json` describes.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


_LOG = logging.getLogger(__name__)

PROBE_SECONDS = 4.0
"""Timeout for one request to the hub, name resolution included."""

_REMEMBERED_SECONDS = 60
_SERVER_ERROR = 500


def is_path(name: str) -> bool:
    """Whether `name` can only be a path, existing or not, so that the hub is not asked for it."""
    parent = os.path.dirname(name)
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.isdir(parent) or os.path.isdir(name)


def require_available(name: str, key: str = "policy.model_name") -> None:
    """Check that the model `name` can be looked up: a directory, a cached repository, or a hub that answers.

    The files in a directory are checked (`model_files`). Takes at most `PROBE_SECONDS` and imports neither torch nor
    transformers. Raises a `DataError` that begins with the configuration key `key`. Whether the hub has a model of this
    name is not checked.
    """
    if is_path(name):
        if not os.path.isdir(name):
            raise DataError(
                f"{key}={name!r}: there is no such directory (looked for {os.path.abspath(name)}). Give a model "
                "directory, or the name of a model on the Hugging Face hub"
            )
        try:
            check_model_files(name)
        except DataError as error:
            raise DataError(f"{key}={name!r} cannot be used: {error}") from error
    elif (problem := hub_problem()) is not None:
        from huggingface_hub import constants

        snapshots = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
        if not any(snapshots.glob("*/*")):
            raise DataError(
                f"{key}={name!r} is neither a directory nor in the hub's cache on this machine, and {problem}. Check "
                f"the name and the network (HF_ENDPOINT, proxies), or fetch it elsewhere (hf download {name}) and give "
                "the directory"
            )


def local_files_only(name: str) -> bool:
    """Whether to load the model `name` without asking the hub: it is a path, or the hub does not answer."""
    return is_path(name) or hub_problem() is not None


def hub_problem() -> str | None:
    """Return why the hub cannot be reached, as a clause with its address; None if it answers, or in offline mode.

    In offline mode (`HF_HUB_OFFLINE`) the hub's clients fail at once with their own messages.
    """
    from huggingface_hub import constants

    return None if constants.HF_HUB_OFFLINE else probe_hub()


def probe_hub() -> str | None:
    """`hub_problem`, regardless of offline mode. The result is valid for a minute: one command sends one request."""
    from huggingface_hub import constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    return _probe(endpoint.rstrip("/"), int(time.monotonic() // _REMEMBERED_SECONDS))


@functools.lru_cache(maxsize=1)
def _probe(endpoint: str, period: int) -> str | None:
    """The request runs in a daemon thread, because no client timeout covers name resolution."""
    from huggingface_hub import get_session

    answers: list[str | None] = [f"did not answer within {PROBE_SECONDS:g} s"]

    def request() -> None:
        try:
            status = get_session().head(endpoint, timeout=PROBE_SECONDS, follow_redirects=False).status_code
        except Exception as error:  # noqa: BLE001 - the client's errors depend on its release (requests, httpx)
            if "timeout" not in type(error).__name__.lower():
                answers.append(f"cannot be reached ({error or type(error).__name__})")
            return
        answers.append(f"answers with HTTP status {status}" if status >= _SERVER_ERROR else None)

    thread = threading.Thread(target=request, name="hub-probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return None if answers[-1] is None else f"the Hugging Face hub at {endpoint} {answers[-1]}"


def announce_hub_request(name: str) -> None:
    """Log a line if the hub is about to be asked for `name`, which may take a while."""
    from huggingface_hub import constants

    if is_path(name) or constants.HF_HUB_OFFLINE:
        return
    problem = hub_problem()
    action = "asking the Hugging Face hub for it" if problem is None else f"{problem}: using its cache"
    _LOG.info("there is no directory %r here: %s", name, action)


def first_line(error: Exception) -> str:
    """The first line of the message of `error`, to quote within another message."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the hub client's warnings about failed attempts; its final error is raised as usual."""
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(level)
