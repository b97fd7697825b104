"""The divergence between the distributions of a teacher and a student over the next token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlframework.algorithms.losses.terms import loss_mask, token_mean
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.distillation_algorithms import DistillationLossConfig
from rlframework.interfaces.loss import LossColumn, LossInput, LossType

TEACHER_LOGPROBS = "teacher_logprobs"
"""The column of the teacher's log-probabilities: of the tokens of each set, or of the sampled token."""
SFT_WEIGHTS = "sft_weights"
"""The column of the weights of tokens in the SFT term."""


class DistillationLoss:
    """The divergence of `DistillationLossConfig`, the mean over the valid tokens of the global batch, in nats.

    Reads `token_sets [B, S, K]`, K different tokens at each position, `teacher_logprobs [B, S, K]`, and, if there is an
    SFT term, `sft_weights [B, S]`, which add up to 1 over the global batch: the weights of its mean over tokens.

    Metrics: `divergence`; `teacher_mass` and `student_mass`, the probabilities of the sets; `sft_loss`.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.TOKEN_SETS
    wants_entropy = False
    at_sampling_temperature = True  # as the teacher's log-probabilities

    def __init__(self, config: DistillationLossConfig) -> None:
        self.config = config

    @property
    def reads(self) -> dict[str, LossColumn]:
        """See `LossFunction`."""
        weights = {SFT_WEIGHTS: LossColumn()} if self.config.sft_weight else {}
        return {TEACHER_LOGPROBS: LossColumn(per_set=True), **weights}

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `LossFunction`."""
        config, mask = self.config, loss_mask(data, next_token_logprobs.dtype)
        # elsewhere all log-probabilities are 0, those of no distribution: any other has finite gradients to be masked
        counted, uniform = (mask != 0)[..., None], -math.log(next_token_logprobs.shape[-1])
        student, teacher = (
            torch.where(counted, logprobs, uniform)
            for logprobs in (next_token_logprobs[..., 1:], data[TEACHER_LOGPROBS][:, 1:].to(next_token_logprobs.dtype))
        )
        outcomes = with_rest(teacher, config.rest), with_rest(student, config.rest)
        loss = divergence = token_mean(_divergence(*outcomes, config), mask, global_valid_toks)
        metrics = {
            "divergence": divergence.detach(),
            "teacher_mass": token_mean(teacher.exp().sum(-1), mask, global_valid_toks),
            "student_mass": token_mean(student.detach().exp().sum(-1), mask, global_valid_toks),
            "num_valid_samples": data["sample_mask"].sum(),
        }
        if config.sft_weight:
            sft = -(next_token_logprobs[..., 0] * data[SFT_WEIGHTS][:, 1:]).sum()
            metrics["sft_loss"] = sft.detach()
            loss = loss + config.sft_weight * sft
        return loss, metrics


def with_rest(logprobs: Tensor, rest: str) -> Tensor:
    """Return the log-probabilities `[..., K']` of the outcomes that are compared, of those of K tokens `[..., K]`.

    "outcome": K' = K + 1, the last is 1 minus the others, at least the precision of the dtype. "renormalize": the
    conditional distribution among the tokens. "omit": as they are.
    """
    if rest == "renormalize":
        return logprobs.log_softmax(-1)
    if rest == "omit":
        return logprobs
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(logprobs.dtype).eps)
    return torch.cat((logprobs, torch.log(-torch.expm1(total))), -1)


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) of log-probabilities `[..., K]`, over the last dimension."""
    return (first.exp() * (first - second)).sum(-1)


def _divergence(teacher: Tensor, student: Tensor, config: DistillationLossConfig) -> Tensor:
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(config.divergence, config.beta)
    if beta == 0.0:
        return kl(teacher, student)
    if beta == 1.0:
        return kl(student, teacher)
    if config.divergence == "mixed":
        return (1.0 - beta) * kl(teacher, student) + beta * kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1.0 - beta) * kl(student, mixture)
