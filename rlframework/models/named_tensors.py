"""The named tensors of a transformers model, with adapters or without; `file_weights` has their names in files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = "default"
"""The name of the only adapter in peft."""


def external_name(name: str) -> str:
    """Return the external name of a parameter or buffer of a model that may have adapters."""
    return re.sub(rf"\.(lora_[AB])\.{ADAPTER}\.", r".\1.", name).replace(".base_layer.", ".")


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Return parameters, adapters included, and saved buffers by external name; a tied head only as the embedding.

    `model` has all parameters, sharded or not. The tensors are the live ones, detached: writing to one changes the
    model.
    """
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {external_name(name): tensor.detach() for name, tensor in named if name in saved}
