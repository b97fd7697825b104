"""The FLOPs that a model's training needs, from its weights and the lengths of the rows.

A matrix product takes 2 FLOPs per weight and token forward, and twice that backward. Counted is what the result needs
(model FLOPs, as in arXiv:2204.02311, appendix B): each token once, without padding and recomputation; of experts, those
that a token is sent to; attention within a sequence and before the token; the head where the loss needs it. Frozen
weights have no gradient. Embeddings, norms and activation functions are not counted, nor are vision and audio towers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from rlframework.huggingface.model_directories import first_size
from rlframework.policy.head.patch import SCORE_WEIGHT

_IN_A_LAYER, _EXPERT = re.compile(r"\.\d+\."), re.compile(r"\.experts\.")
_TOWER = re.compile(r"(^|\.)(visual|vision|audio)")


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of a language model that its FLOPs depend on.

    `layers`: weights of matrix products that a token passes in all layers; `head`: those of the head; `adapters`: those
    of LoRA, which are trained instead (None: all weights are trained). `attention`: FLOPs of the forward per two tokens
    that a layer compares, over 2: heads times the widths of a key and a value. `windows`: the number of attention
    layers by window (None: unlimited).
    """

    layers: float
    head: int
    attention: int
    windows: Mapping[int | None, int]
    adapters: int | None = None

    @classmethod
    def of(
        cls, weights: Mapping[str, Sequence[int]], config: Any, adapters: Iterable[Sequence[int]] | None = None
    ) -> ModelFlops | None:
        """Return the sizes of the model with these `weights`: shapes by the names that `save_pretrained` writes.

        `config`: the text configuration of transformers; `adapters`: shapes of LoRA's matrices. None if the
        configuration lacks a size.
        """
        count = first_size(config, "num_experts", "num_local_experts", "n_routed_experts")
        chosen = first_size(config, "num_experts_per_tok", "moe_topk")
        inside = {
            name: shape
            for name, shape in weights.items()
            if len(shape) > 1 and _IN_A_LAYER.search(name) and not _TOWER.search(name) and not name.endswith("bias")
        }
        experts = sum(
            prod(shape)
            for name, shape in inside.items()
            if _EXPERT.search(name) or (len(shape) == 3 and shape[0] == count)  # of all experts in one tensor
        )
        hidden, vocabulary = first_size(config, "hidden_size", "n_embd"), first_size(config, "vocab_size")
        heads = first_size(config, "num_attention_heads", "n_head")
        if hidden is None or vocabulary is None or heads is None or (experts and not (count and chosen)):
            return None
        key = first_size(config, "qk_head_dim", "head_dim") or hidden // heads
        value = first_size(config, "v_head_dim") or key
        return cls(
            layers=sum(map(prod, inside.values())) - experts + (experts * chosen / count if chosen and count else 0),
            head=hidden * (1 if SCORE_WEIGHT in weights else vocabulary),
            attention=heads * (key + value),
            windows=_windows(config),
            adapters=None if adapters is None else sum(map(prod, adapters)),
        )

    def forward(self, lengths: Tensor, head_positions: float) -> float:
        """FLOPs of the forward of sequences of `lengths [B]`, with the head at `head_positions` of their tokens."""
        return 2.0 * (self._frozen(lengths, head_positions) + self._adapted(lengths) + self._compared(lengths))

    def training(self, lengths: Tensor, head_positions: float) -> float:
        """FLOPs of forward and backward; see `forward`."""
        if self.adapters is None:
            return 3.0 * self.forward(lengths, head_positions)
        frozen = 4.0 * self._frozen(lengths, head_positions)
        return frozen + 6.0 * (self._adapted(lengths) + self._compared(lengths))

    def _frozen(self, lengths: Tensor, head_positions: float) -> float:
        return self.layers * float(lengths.sum()) + self.head * head_positions

    def _adapted(self, lengths: Tensor) -> float:
        return (self.adapters or 0) * float(lengths.sum())

    def _compared(self, lengths: Tensor) -> float:
        """Multiplications of the attention: of a sequence half of the square, less what is beyond the window."""
        squares: dict[int | None, Tensor] = {None: lengths.double().square().sum()}
        for window in self.windows:
            if window is not None:
                beyond = (lengths.double() - window).clamp(min=0)
                squares[window] = squares[None] - beyond.square().sum()
        return self.attention * sum(count * float(squares[window]) / 2 for window, count in self.windows.items())


def _windows(config: Any) -> dict[int | None, int]:
    """Attention layers by window. Layers of other types, such as linear attention, compare no tokens."""
    window = first_size(config, "sliding_window")
    types = getattr(config, "layer_types", None)
    if types is None:
        return {window: first_size(config, "num_hidden_layers", "n_layer") or 0}
    by_type = {"full_attention": None, "sliding_attention": window}
    return dict(Counter(by_type[kind] for kind in types if kind in by_type))
