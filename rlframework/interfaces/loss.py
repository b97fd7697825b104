"""The loss interface: a loss sees outputs of the head and global counts, never an engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rlframework.batch.batched_data_dict import BatchedDataDict


GROUP_IDS = "group_ids"
"""The column `[B]` int64 of a batch that says which rows belong together: those with equal values."""

TOKEN_SETS = "token_sets"
"""The column `[B, S, K]` of a batch with K ids of tokens at each position, of the distribution of that position."""


class LossType(StrEnum):
    """The average a loss takes: over all valid tokens of the global batch, or over its valid sequences."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInput(StrEnum):
    """The values the engine's head computes for the loss: its first argument, see `LossFunction`.

    LOGPROBS and LOGITS need `policy.head=language`, SCORES `policy.head=score`, VALUES `policy.head=value`.
    """

    LOGPROBS = "logprobs"
    LOGITS = "logits"
    TOKEN_SETS = "token_sets"
    SCORES = "scores"
    VALUES = "values"


@dataclass(frozen=True)
class LossColumn:
    """A value of the batch that a loss reads: finite floating-point numbers, `[B, S]`, or `[B]` if not `per_token`.

    `required`: the batch must have it; otherwise the loss also works without it. `per_set`: it is `[B, S, K]`, with a
    number for each of the batch's `token_sets`.
    """

    per_token: bool = True
    required: bool = True
    per_set: bool = False


@runtime_checkable
class LossFunction(Protocol):
    """The loss of one microbatch, normalized by global counts. Must be picklable and must not keep mutable state.

    Arguments of the call:

    - `next_token_logprobs` `[B, S-1]` fp32, with gradient: entry `i` is log p(token i+1 | tokens 0..i), at the sampling
      temperature if `at_sampling_temperature` is true and at temperature 1 otherwise. Only entries where
      `token_mask[:, 1:] * sample_mask` is nonzero are computed; all others are 0. In its place is, with `input_type`
      - LOGITS: the logits, `[B, S-1, V]`;
      - TOKEN_SETS: `[B, S-1, 1 + K]`, the same, and then the log-probabilities, in the same distribution, of the tokens
        `data["token_sets"] [B, S, K]` at the position of token i+1. The head computes them in its chunks, so that
        `[B, S, V]` never exists, also where it is sharded over the vocabulary;
      - VALUES: `[B, S-1]` fp32, where entry `i` is the head's output for tokens 0..i, the value of the state before
        token i+1 is sampled, computed at the same entries as log-probabilities;
      - SCORES: `[B]` fp32, the head's output at each row's last token, for all tokens of the row; 0 where `sample_mask`
        is 0. `token_mask` has no effect on it.
      Rows are whole in every layout, so a sum over dim 1 is that of the row: packed rows are taken apart before the
      call, every context-parallel rank has the values of all of them, tensor-parallel ranks combine theirs in the head,
      and the last pipeline stage calls the loss. Only rows of other microbatches and data-parallel ranks are absent.
    - `data`: the microbatch's rows of everything passed to `train` (`input_ids`, `token_mask`, `sample_mask`, ...),
      plus `entropy` `[B, S-1]` if `wants_entropy` is true, in nats, of the distribution at the temperature of the
      log-probabilities.
    - `global_valid_seqs`, `global_valid_toks`: 0-dim fp32 tensors, the sums of `sample_mask` and of
      `token_mask[:, 1:] * sample_mask` over the global batch on all workers.

    Returns the scalar loss and a dictionary of metrics. Divide both by the global counts, so that their sum over
    microbatches and workers is the value for the global batch. A metric whose name ends in `_min` or `_max` is combined
    by minimum or maximum instead. Metrics are floats or 0-dim tensors without gradient.

    A loss may also have an attribute `reads: Mapping[str, LossColumn]`, which names what it reads of `data` besides
    tokens, lengths and masks. `Policy.train` checks these columns before a worker gets anything. Without it, a missing
    column fails in the workers, which ends them.

    A loss may also have an attribute `entropy_gradient: bool`, False if absent: whether the entropy has a gradient.

    A loss may also have an attribute `needs_groups: bool`, False if absent. If true, its value depends on rows that
    belong together, such as the chosen and the rejected row of a pair, and `Policy.train` requires the column
    `group_ids` `[B]` int64. Each call then gets whole groups: all rows with equal ids, next to each other, in their
    order in the batch, including those whose `sample_mask` is 0. Groups of which no row counts in the loss may be left
    out. All rows of a group must be in one global batch, and fit into one microbatch.
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
        """Return the loss and metrics of one microbatch."""
        ...


def head_of(loss_fn: Any) -> str:
    """Return the value of `policy.head` whose output `loss_fn` reads."""
    heads = {LossInput.SCORES.value: "score", LossInput.VALUES.value: "value"}
    return heads.get(getattr(loss_fn.input_type, "value", loss_fn.input_type), "language")


def loss_positions(loss_fn: Any) -> str:
    """Return the positions at which the head runs for `loss_fn`: see `DataProcessor.microbatches`."""
    return "loss_last" if head_of(loss_fn) == "score" else "loss"


def needs_groups(loss_fn: Any) -> bool:
    """Whether all rows of a group must be in the same call of `loss_fn`, see `LossFunction`."""
    return bool(getattr(loss_fn, "needs_groups", False))
