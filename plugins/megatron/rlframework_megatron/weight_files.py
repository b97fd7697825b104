"""A model's weights in the safetensors files of a directory, found by the names that such files have.

Files may leave the prefix of the base model out, have a tied head under the head's name, and experts one by one or
stacked (`experts.gate_up_proj [E, 2 I, H]`). Files that are quantised, or not safetensors, are refused: reading them
takes a whole model in each process.
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
from rlframework_megatron.weight_layout import Where

_PREFIX = "model."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Found:
    """Where a weight is in the files: all of the tensor `name`, or the rows from `start` of its expert `expert`."""

    name: str
    expert: int | None = None
    start: int = 0


class FolderWeights:
    """The weights of the model of `config` in `folder`, of which no more is read than is asked for.

    A `DataError` on entering names what is missing or of another shape. Use as a context manager.
    """

    def __init__(self, folder: str | Path, config: Any) -> None:
        if getattr(config, "quantization_config", None):
            raise DataError(f"the weights in {folder} are quantised; the megatron backend reads those that are not")
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

    def part(self, name: str, where: Where) -> Tensor:
        """The box `where` of the weight `name`."""
        found = self._found[name]
        if found.expert is None:
            return self._saved.part(found.name, where)
        rows = slice(where[0].start + found.start, where[0].stop + found.start)
        return self._saved.part(found.name, (slice(found.expert, found.expert + 1), rows, *where[1:]))[0]


def find(weight: Weight, config: Any, saved: SavedTensors) -> Found:
    """Where `weight` is in the files; a `DataError` where it is not, or has another shape than `config` says."""
    for candidate, wanted in _candidates(weight, config).items():
        if candidate.name not in saved:
            continue
        require_shape(saved, candidate.name, wanted)
        return candidate
    raise DataError(
        f"{saved.folder} has no {weight.name}: its files are of another model than its config.json describes, or name "
        "weights in another way. Load it with transformers, save it with save_pretrained, and take what that writes"
    )


def _candidates(weight: Weight, config: Any) -> dict[Found, tuple[int, ...]]:
    """The names that files may have it under, and the shape of what they name so."""
    names = [weight.name]
    if weight.name == EMBEDDING and is_tied(config):
        names.append(HEAD)
    found = {Found(each): weight.shape for name in names for each in (name, name.removeprefix(_PREFIX))}
    if (match := _EXPERT.fullmatch(weight.name)) is not None:
        stack, expert, kind = match[1], int(match[2]), match[3]
        rows, columns = weight.shape
        fused = kind != "down"
        stacked = Found(f"{stack}.{'gate_up' if fused else 'down'}_proj", expert, rows if kind == "up" else 0)
        found[stacked] = (config.num_experts, 2 * rows if fused else rows, columns)
    return found
