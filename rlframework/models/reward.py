"""Reward models: a transformers model for sequence classification with one label, whose head gives each token a score.

The head runs inside the model's forward, where FSDP has its weight whole, and `HeadPatch` picks the last token of each
sequence there. transformers' own forward would look for it by the padding's id, which may be the end token, and knows
nothing of packed rows. Left out: training, tensor-parallel heads (one row has nothing to split), several labels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlframework.errors import DataError
from rlframework.policy.head.patch import output_head


def score_every_token(model: Any) -> Any:
    """`model` itself, which now returns as `logits` the score of each token `[n, L, 1]`.

    A `DataError` where its head has more than one label.
    """
    head = output_head(model)
    if head.weight.shape[0] != 1:
        raise DataError(
            f"policy.head=score takes a model whose head has one label, and that of {type(model).__name__} has "
            f"{head.weight.shape[0]}: num_labels in its config.json must be 1"
        )

    def forward(**inputs: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        hidden: Tensor = model.base_model(**inputs).last_hidden_state
        return SequenceClassifierOutput(logits=model.score(hidden))

    model.forward = forward
    return model
