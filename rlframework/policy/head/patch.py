"""`HeadPatch`: a model's forward returns head values at selected positions instead of logits.

It replaces `lm_head.forward`, because under FSDP2 and ZeRO-3 the head's weight is whole only inside the model's
forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlframework.errors import NotSupported
from rlframework.policy.head.logprobs import chunked_logprobs, scaled_logits, top_logits, whole_logits
from rlframework.policy.head.request import HeadRequest
from rlframework.policy.head.vocab_parallel import VocabularyShard


def local_tensor(weight: Any) -> Any:
    """Return this rank's shard of a `DTensor`; any other tensor, and None, unchanged."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def output_head(model: Any) -> Any:
    """Return the final linear module of `model`: a language model's head, or `score` of a reward model.

    Raises `NotSupported` if there is none.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    head = getattr(model, "score", None) if head is None else head
    if head is None or not hasattr(head, "weight"):
        raise NotSupported(
            f"{type(model).__name__} has no linear output head; use a causal language model or a reward model"
        )
    return head


class HeadPatch:
    """Replaces `lm_head.forward`: inside `computing(...)` the model returns the head's values instead of logits.

    Outside that context the head is unchanged, so that generation and other code can use the model as usual.
    """

    def __init__(self, model: torch.nn.Module, shard: VocabularyShard | None = None) -> None:
        """Patch the head of `model`; see `output_head` and, for language models, `require_plain_head`.

        `shard`: this rank's rows of the head's weight, if a group of ranks shards it.
        """
        head = output_head(model)
        self._original_forward, self._head, self._shard = head.forward, head, shard
        self._wanted: tuple[HeadRequest, Tensor, Tensor] | None = None
        head.forward = self._forward

    @contextmanager
    def computing(self, request: HeadRequest, positions: Tensor, targets: Tensor) -> Iterator[None]:
        """Context manager: forwards compute `request` at the flat input `positions [N]`, for `targets [N]`."""
        self._wanted = request, positions, targets
        try:
            yield
        finally:
            self._wanted = None

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._wanted is None:
            logits: Tensor = self._original_forward(hidden)
            return logits
        request, positions, targets = self._wanted
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        weight, bias = local_tensor(self._head.weight), local_tensor(getattr(self._head, "bias", None))
        return self._values(request, rows, weight, bias, targets)

    def _values(
        self, request: HeadRequest, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        if "scores" in request.wants:
            return scaled_logits(rows, weight, bias, 1.0)
        if "topk" in request.wants:
            return top_logits(rows, weight, bias, self._shard, request.top_k, request.temperature)
        if "logits" in request.wants:
            return whole_logits(rows, weight, bias, self._shard, temperature=request.temperature)
        logprobs, entropy = chunked_logprobs(
            rows,
            weight,
            bias,
            targets,
            self._shard,
            temperature=request.temperature,
            wants_entropy="entropy" in request.wants,
        )
        # a new tensor, not a view: FSDP2 attaches its backward hook to the model's output
        return torch.stack((logprobs,) if entropy is None else (logprobs, entropy), dim=1)


@torch.no_grad()
def require_plain_head(model: Any) -> None:
    """Raise `NotSupported` if `model` changes its logits after the head (soft-capping, a scale).

    Patching the head would then give wrong log-probabilities without an error. Checked by running a few tokens, because
    the settings' names differ between models. `model` must be whole and on one device.
    """
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        logits = model(input_ids=probe_ids(model)[None], use_cache=False).logits
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].shape != logits.shape or not torch.equal(seen[0], logits):
        raise NotSupported(
            f"{type(model).__name__} changes its logits after the output head, which is not supported yet; "
            "use a model that returns the head's output as logits"
        )


def probe_ids(model: Any) -> Tensor:
    """Return a few different token ids `[6]` from the vocabulary of `model`, on its device."""
    embedding = model.get_input_embeddings().weight
    return torch.linspace(0, embedding.shape[0] - 1, 6, device=embedding.device).long()
