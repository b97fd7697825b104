"""Locate and read a model's weights in the safetensors files of a directory.

Files may omit the base model's prefix, store a tied head under the head's name, and store experts one by one or
stacked (`experts.gate_up_proj [E, 2 I, H]`). Quantised files and other formats are rejected, because reading them
requires a whole model in each process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframework.errors import DataError
from rlframework.models.files import require_shape
from rlframework.policy.checkpoint.reader import SavedTensors
from rlframework_megatron.names import EMBEDDING, HEAD, Weight, is_tied, model_weights
from rlframework_megatron.weight_layout import Slices

_PREFIX = "model."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Location:
    """The location of a weight: the whole tensor `name`, or the rows from `start` on of its expert `expert`."""

    name: str
    expert: int | None = None
    start: int = 0


class FolderWeights:
    """The weights of the model of `config` in `folder`, read slice by slice. Use as a context manager.

    Entering raises `DataError` for a weight that is missing or has another shape.
    """

    def __init__(self, folder: str | Path, config: Any) -> None:
        if getattr(config, "quantization_config", None):
            raise DataError(
                f"the weights in {folder} are quantised; the megatron backend reads unquantised weights only"
            )
        self._saved = SavedTensors(folder)
        self._config = config

    def __enter__(self) -> FolderWeights:
        saved = self._saved.__enter__()
        try:
            self._found = {weight.name: find(weight, self._config, saved) for weight in model_weights(self._config)}
        except BaseException:
            saved.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._saved.__exit__(None, None, None)

    def read_slice(self, name: str, where: Slices) -> Tensor:
        """Read the slice `where` of the weight `name`."""
        found = self._found[name]
        if found.expert is None:
            return self._saved.read_slice(found.name, where)
        rows = slice(where[0].start + found.start, where[0].stop + found.start)
        return self._saved.read_slice(found.name, (slice(found.expert, found.expert + 1), rows, *where[1:]))[0]


def find(weight: Weight, config: Any, saved: SavedTensors) -> Location:
    """Locate `weight` in the files; raise `DataError` if it is missing or its shape differs from `config`."""
    for candidate, wanted in _candidates(weight, config).items():
        if candidate.name not in saved:
            continue
        require_shape(saved, candidate.name, wanted)
        return candidate
    raise DataError(
        f"{saved.folder} has no {weight.name}: its files do not belong to the model in its config.json, or use other "
        "weight names. Load it with transformers, save it with save_pretrained, and use the result"
    )


def _candidates(weight: Weight, config: Any) -> dict[Location, tuple[int, ...]]:
    """Possible locations of a weight, with the expected shape of the tensor."""
    names = [weight.name]
    if weight.name == EMBEDDING and is_tied(config):
        names.append(HEAD)
    found = {Location(each): weight.shape for name in names for each in (name, name.removeprefix(_PREFIX))}
    if (match := _EXPERT.fullmatch(weight.name)) is not None:
        stack, expert, kind = match[1], int(match[2]), match[3]
        rows, columns = weight.shape
        fused = kind != "down"
        stacked = Location(f"{stack}.{'gate_up' if fused else 'down'}_proj", expert, rows if kind == "up" else 0)
        found[stacked] = (config.num_experts, 2 * rows if fused else rows, columns)
    return found
