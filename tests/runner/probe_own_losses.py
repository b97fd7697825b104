"""Losses that tests give by import path."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlframework.interfaces.loss import LossColumn, LossInput, LossType


class Weighted:
    """Minus log-probabilities times advantages, if present, times `weight`."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInput.LOGPROBS
    wants_entropy, at_sampling_temperature = False, False

    def __init__(self, weight=1.0, kl_coef=0.0):
        self.weight, self.kl_coef = weight, kl_coef

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        values = data["advantages"][:, 1:] if "advantages" in data else 1.0
        loss = -self.weight * (next_token_logprobs * values * mask).sum() / global_valid_toks
        return loss, {"weight_seen": self.weight * float(mask.sum() / global_valid_toks)}


class Ratio(Weighted):
    """The mean ratio of the log-probabilities now and at the rollout."""

    reads: ClassVar = {"prev_logprobs": LossColumn()}

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        ratio = (torch.exp(next_token_logprobs - data["prev_logprobs"][:, 1:]) * mask).sum() / global_valid_toks
        return -ratio, {"ratio": float(ratio.detach())}


made = Weighted(3.0)


def make(weight):
    return Weighted(weight)


def makes_nothing():
    return None


def raises():
    raise ValueError("not today")


number = 3


class Columns(Ratio):
    """Its metrics are the columns that it gets: `NAME_max` is the number of dimensions."""

    wants_entropy = True

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        loss, _ = super().__call__(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        return loss, {f"{name}_max": float(value.ndim) for name, value in data.items()}
