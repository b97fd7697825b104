"""Formulas that models apply to the logits after the output head: a factor, a soft cap, or both.

With a patched head the formula is part of the chunked computation (`rlframework.policy.head.logprobs`), and the model's
own is switched off while the head returns log-probabilities instead of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.base.errors import NotSupported

SOFTCAPS = ("final_logit_softcapping",)
FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
"""Names of the settings in transformers, of a model or of its configuration."""


@dataclass(frozen=True)
class LogitFormula:
    """The logits of a model are `softcap * tanh(factor * x / softcap)`, where x is the output of its head.

    `softcap` None: they are `factor * x`.
    """

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the logits for `outputs` of the head."""
        logits = outputs * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @classmethod
    def of(cls, model: Any) -> LogitFormula:
        """Return the formula that the settings of `model` say."""
        factor, softcap = 1.0, None
        for _, name, value in _settings(model):
            if name in SOFTCAPS:
                softcap = float(value)
            elif name in FACTORS:
                factor *= float(value)
            else:
                factor /= float(value)
        return cls(factor, softcap)


def _settings(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """The settings of `model`, each as the object that has it, its name, and its value; each name once."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    for name in (*SOFTCAPS, *FACTORS, *DIVISORS):
        for owner in (model, getattr(model, "base_model", None), config, text):
            value = getattr(owner, name, None)
            if value is not None and not isinstance(value, Tensor):
                yield owner, name, value
                break


@contextmanager
def without_formula(model: Any) -> Iterator[None]:
    """Switch off the formula of `model`: its logits are the outputs of its head."""
    settings = list(_settings(model))
    try:
        for owner, name, _ in settings:
            vars(owner)[name] = None if name in SOFTCAPS else 1.0  # some configurations would reject None
        yield
    finally:
        for owner, name, value in settings:
            vars(owner)[name] = value


@torch.no_grad()
def require_known_formula(model: Any) -> None:
    """Raise `NotSupported` if `model` changes its logits after the head otherwise than `LogitFormula.of(model)` says.

    Patching the head would then give wrong log-probabilities without an error. Checked by running a few tokens, because
    the settings' names differ between models. A head with a `forward` of its own is rejected by its class: what it adds
    may be 1 or 0 in the weights that are there now. `model` must be whole and on one device.
    """
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and type(head).forward is not nn.Linear.forward:
        raise NotSupported(
            f"the output head of {type(model).__name__}, a {type(head).__name__}, does more than multiply by its "
            "weights; use a model whose head is a torch.nn.Linear"
        )
    formula, ids = LogitFormula.of(model), probe_ids(model)[None]
    outputs, logits = _head_and_logits(model, ids)
    with without_formula(model):
        plain_outputs, plain_logits = _head_and_logits(model, ids)
    if (
        outputs is None
        or plain_outputs is None
        or outputs.shape != logits.shape
        or not torch.allclose(formula(outputs), logits, rtol=1e-5, atol=1e-5)
        or not torch.equal(plain_outputs, plain_logits)
    ):
        raise NotSupported(
            f"{type(model).__name__} changes its logits after the output head by a formula that is not known; use a "
            "model that returns the head's output as logits, scaled or soft-capped"
        )


def _head_and_logits(model: Any, ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """The output of the head, None unless it ran once, and the logits of the model."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return (seen[0].clone() if len(seen) == 1 else None), logits


def probe_ids(model: Any) -> Tensor:
    """Return a few different token ids `[6]` from the vocabulary of `model`, on its device."""
    embedding = model.get_input_embeddings().weight
    return torch.linspace(0, embedding.shape[0] - 1, 6, device=embedding.device).long()
