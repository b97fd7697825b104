"""Whether weights fit a model: the names and shapes that `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from rlframework.base.errors import UserError
from rlframework.models.file_weights import FileLayout
from rlframework.models.loading import auto_class
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.receiver import listed


def require_fit(info: WeightInfo, config: Any, model_name: str) -> None:
    """Raise `UserError` unless `info` has the names and shapes of a model of `config`, and floating-point weights.

    For an engine whose loader skips missing names silently.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    expected = {name: weight.shape for name, weight in FileLayout.of(model).weights.items()}
    require_none(
        model_name,
        {
            "missing": expected.keys() - info.keys(),
            "unknown": info.keys() - expected.keys(),
            "with another shape": {name for name in info if tuple(info[name][0]) != expected.get(name, info[name][0])},
            "not floating-point": {name for name, (_, dtype) in info.items() if not dtype.is_floating_point},
        },
    )


def require_none(model_name: str, mistakes: dict[str, Collection[str]]) -> None:
    """Raise `UserError` if there are `mistakes`: the names of weights, by how they are wrong."""
    if any(mistakes.values()):
        described = "; ".join(f"{what}: {listed(sorted(names))}" for what, names in mistakes.items() if names)
        raise UserError(
            f"the weights do not fit the model {model_name!r} ({described}); give all weights under the names that "
            "save_pretrained writes, tied heads once"
        )
