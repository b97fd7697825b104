"""Reward models: transformers sequence classification models with one label, whose head scores each token.

The head runs inside the model's forward, where FSDP has gathered its weight, and `HeadPatch` selects the last token of
each sequence. transformers' own forward would find it by the padding id, which may be the end-of-sequence token, and
does not support packed rows. Not supported: training, tensor-parallel heads (a one-row weight cannot be sharded),
several labels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlframework.errors import DataError
from rlframework.policy.head.patch import output_head


def score_every_token(model: Any) -> Any:
    """Make `model` return the score of each token as `logits` `[n, L, 1]`; return `model` itself.

    Raises `DataError` if its head has more than one label.
    """
    head = output_head(model)
    if head.weight.shape[0] != 1:
        raise DataError(
            f"policy.head=score needs a model whose head has one label, but the head of {type(model).__name__} has "
            f"{head.weight.shape[0]}: num_labels in its config.json must be 1"
        )

    def forward(**inputs: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        hidden: Tensor = model.base_model(**inputs).last_hidden_state
        return SequenceClassifierOutput(logits=model.score(hidden))

    model.forward = forward
    return model
