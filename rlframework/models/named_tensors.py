"""What a model of transformers holds, by name: each tensor that is saved, a tied one once.

For engines whose model is a module with all its parameters, whole or in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlframework.models.adapters import outside
from rlframework.models.file_names import file_weights


def held_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters, adapters among them, and saved buffers, by the names outside; a tied head stands as the embedding.

    They are the live tensors, without gradients: writing to one changes the model.
    """
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {outside(name): tensor.detach() for name, tensor in named if name in saved}


def by_file_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole `tensors` of `model` under the names that `save_pretrained` writes; they share memory.

    Most names are the same. Of a mixture of experts each expert is a tensor of its own, a view.
    """
    return {name: weight.of(tensors[weight.source]) for name, weight in file_weights(model, tensors).items()}
