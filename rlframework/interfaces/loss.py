"""The loss interface: losses see log-probabilities and global counts, never an engine."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rlframework.batch.batched_data_dict import BatchedDataDict


class LossType(StrEnum):
    """What the loss averages over: all valid tokens of the global batch, or its valid sequences."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInput(StrEnum):
    """What the engine's head computes for the loss."""

    LOGPROBS = "logprobs"
    LOGITS = "logits"


@runtime_checkable
class LossFunction(Protocol):
    """A loss of one microbatch, normalised by global counts; picklable, without state that changes.

    Called with

    - `next_token_logprobs` `[B, S-1]` fp32: entry `i` is log p(token i+1 | tokens up to i), with gradient, at the
      sampling temperature if `at_sampling_temperature` is true and at 1 otherwise. Only entries with
      `token_mask[:, 1:] * sample_mask` are computed, the rest is 0. With `input_type` LOGITS: `[B, S-1, V]`.
    - `data`: the microbatch's rows of everything that went into `train` (`input_ids`, `token_mask`, `sample_mask`,
      ...), and `entropy` `[B, S-1]` without gradient where `wants_entropy` is true.
    - `global_valid_seqs`, `global_valid_toks`: 0-dim fp32 tensors, sums of `sample_mask` and of `token_mask[:, 1:] *
      sample_mask` over the global batch, all workers.

    It returns the scalar loss and metrics. Both divide by the global counts, so that the sum over microbatches and
    workers is the value of the global batch. A metric whose name ends in `_min` or `_max` is combined by minimum or
    maximum. Metrics are floats or 0-dim tensors without gradient.
    """

    loss_type: LossType
    input_type: LossInput
    wants_entropy: bool
    at_sampling_temperature: bool

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss and metrics of a microbatch."""
        ...
