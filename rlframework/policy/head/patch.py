"""Requests to a model's output head, and `HeadPatch`, which makes the model's forward return the results.

Models apply formulas to the logits after the head: a factor, a soft cap, or both. With a patched head the formula is
part of the chunked computation (`rlframework.policy.head.logprobs`), and the model's own is switched off while the head
returns log-probabilities instead of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.base.errors import NotSupported
from rlframework.policy.head.logprobs import chunked_logprobs, scaled_logits, top_logits, whole_logits
from rlframework.policy.head.vocabulary import VocabularyShard

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


SCORE_WEIGHT = "score.weight"
"""The name, in transformers, of the weight `[1, H]` of a head that gives one number."""


@dataclass(frozen=True)
class HeadRequest:
    """The values that the head computes in each forward.

    `wants`: "logprobs" and optionally "entropy"; or exactly one of "topk", "logits" and "scores" (the heads
    `score` and `value`). `top_k`: number of most likely tokens, for "topk". `token_sets`: the name of a value
    `[b, S', K]` int64 of the microbatch's rows, ids of K tokens at each position, whose log-probabilities are computed
    in addition. `entropy_gradient`: whether the entropy has a gradient, which takes another pass over each chunk of
    logits.
    """

    wants: frozenset[str] = frozenset({"logprobs"})
    temperature: float = 1.0
    top_k: int = 0
    token_sets: str | None = None
    entropy_gradient: bool = False

    @property
    def results(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of one token's value, by the names of `HeadOutput.results`."""
        if "topk" in self.wants:
            return {
                "topk_logits": ((self.top_k,), torch.float32),
                "topk_indices": ((self.top_k,), torch.int64),
                "topk_normalizers": ((), torch.float32),
            }
        if "scores" in self.wants:
            return {"scores": ((), torch.float32)}
        return {name: ((), torch.float32) for name in ("logprobs", "entropy") if name in self.wants}


@dataclass
class HeadOutput:
    """The head's results at the `N` head positions of a microbatch: `[N]` fp32 each, `logits [N, V]`.

    `topk_logits [N, k]` fp32 in descending order, `topk_indices [N, k]` int64, their token ids, and `topk_normalizers
    [N]` fp32, the logsumexp of all logits. `set_logprobs [N, K]` fp32: of the tokens of `HeadRequest.token_sets`.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    logits: Tensor | None = None
    topk_logits: Tensor | None = None
    topk_indices: Tensor | None = None
    topk_normalizers: Tensor | None = None
    set_logprobs: Tensor | None = None
    scores: Tensor | None = None

    def results(self) -> dict[str, Tensor]:
        """Return the results that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def read_head_output(values: Tensor, request: HeadRequest) -> HeadOutput:
    """Split the output of a patched model, returned as its logits `[N, ...]`, into named results."""
    if values.ndim != 2:
        raise RuntimeError(
            f"values of shape {list(values.shape)} are not head values, which have one row per position: the model "
            "ran outside HeadPatch.computing, or its head is not patched"
        )
    if "logits" in request.wants:
        return HeadOutput(logits=values)
    if "topk" in request.wants:
        logits, tokens, normalizers = values.split((request.top_k, request.top_k, 1), 1)
        return HeadOutput(topk_logits=logits, topk_indices=tokens.long(), topk_normalizers=normalizers[:, 0])
    if "scores" in request.wants:
        return HeadOutput(scores=values[:, 0])
    entropy = values[:, -1] if "entropy" in request.wants else None
    if entropy is not None and not request.entropy_gradient:
        entropy = entropy.detach()
    if request.token_sets is None:
        return HeadOutput(values[:, 0], entropy)
    return HeadOutput(values[:, 0], entropy, set_logprobs=values[:, 1 : values.shape[1] - (entropy is not None)])


def local_tensor(weight: Any) -> Any:
    """Return this rank's shard of a `DTensor`; any other tensor, and None, unchanged."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def output_head(model: Any) -> Any:
    """Return the final linear module of `model`, a language model's or a reward model's; else raise `NotSupported`."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    head = getattr(model, "score", None) if head is None else head
    if head is None or not hasattr(head, "weight"):
        raise NotSupported(
            f"{type(model).__name__} has no linear output head; use a causal language model or a reward model"
        )
    return head


class HeadPatch:
    """Makes a model return the head's values instead of logits inside `computing(...)`, and only there.

    The model's `LogitFormula` is part of the values.
    It replaces `lm_head.forward`, because under FSDP2 and ZeRO-3 the head's weight is whole only inside the forward.
    """

    def __init__(self, model: torch.nn.Module, shard: VocabularyShard | None = None) -> None:
        """Patch the head of `model`; see `output_head` and, for language models, `require_known_formula`.

        `shard`: this rank's rows of the head's weight, if a group of ranks shards it.
        """
        head = output_head(model)
        self._original_forward, self._head, self.shard = head.forward, head, shard
        self._model, self._formula = model, LogitFormula.of(model)
        self.wanted: tuple[HeadRequest, Tensor, Tensor] | None = None  # request, positions, targets
        head.forward = self._forward

    @contextmanager
    def computing(self, request: HeadRequest, positions: Tensor, targets: Tensor) -> Iterator[None]:
        """Context manager: forwards compute `request` at the flat input `positions [N]`, for `targets [N]`.

        With `request.token_sets` the targets are `[N, 1 + K]`, as `Microbatch.targets` are.
        """
        self.wanted = request, positions, targets
        try:
            with without_formula(self._model):
                yield
        finally:
            self.wanted = None

    def _forward(self, hidden: Tensor) -> Tensor:
        if self.wanted is None:
            logits: Tensor = self._original_forward(hidden)
            return logits
        request, positions, targets = self.wanted
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        weight, bias = local_tensor(self._head.weight), local_tensor(getattr(self._head, "bias", None))
        return self.values(request, rows, weight, bias, targets)

    def values(
        self, request: HeadRequest, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        """Return what `request` wants of the hidden states `rows [N, H]`, as `read_head_output` splits it."""
        if "scores" in request.wants:
            return scaled_logits(rows, weight, bias, 1.0)
        # softcap * tanh(factor * x / softcap) / temperature, as x divided by two other numbers
        factor, softcap = self._formula.factor, self._formula.softcap
        temperature, softcap = request.temperature / factor, None if softcap is None else softcap / factor
        if "topk" in request.wants:
            return top_logits(rows, weight, bias, self.shard, request.top_k, temperature, softcap)
        if "logits" in request.wants:
            return whole_logits(rows, weight, bias, self.shard, temperature=temperature, softcap=softcap)
        logprobs, entropy = chunked_logprobs(
            rows,
            weight,
            bias,
            targets,
            self.shard,
            temperature=temperature,
            softcap=softcap,
            wants_entropy="entropy" in request.wants,
            entropy_gradient=request.entropy_gradient,
        )
        # a new tensor, not a view: FSDP2 attaches its backward hook to the model's output
        columns = logprobs if logprobs.ndim == 2 else logprobs[:, None]
        return torch.cat((columns,) if entropy is None else (columns, entropy[:, None]), dim=1)
