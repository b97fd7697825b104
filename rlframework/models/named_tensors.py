"""The named tensors of a transformers model: every saved tensor, a tied one once.

For engines whose module has all parameters, sharded or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlframework.models.adapters import external_name
from rlframework.models.file_names import file_weights


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Return parameters, adapters included, and saved buffers by external name; a tied head only as the embedding.

    They are the live tensors, detached: writing to one changes the model.
    """
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {external_name(name): tensor.detach() for name, tensor in named if name in saved}


def by_file_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full `tensors` of `model` under the names `save_pretrained` writes, sharing memory.

    Most names do not change. Each expert of a mixture is a separate view.
    """
    return {name: weight.of(tensors[weight.source]) for name, weight in file_weights(model, tensors).items()}
