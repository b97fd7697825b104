"""Core attention: rotary embeddings, windows, soft caps and sinks, for padded, packed and context-parallel rows.

Megatron-core's own attention without Transformer Engine supports padded rows only and materialises the scores. What a
forward's layers share is passed as `attention_bias`, an argument that megatron-core forwards from the model to each
layer and passes again when it recomputes activations; the supported models have no attention bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.engine import RowLayout, Scores, length_dependent, rotate_by_sequence
from rlframework_megatron.architectures import architecture, score_scale, window_of
from rlframework_megatron.upstream import (
    MegatronModule,
    TransformerConfig,
    make_sharded_tensors_for_checkpoint,
    set_tensor_model_parallel_attributes,
)

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine `[L, n or 1, ...]`."""


class Rotary:
    """The rotary embeddings of the model of a transformers `config`, by transformers' own module and function."""

    def __init__(self, config: Any) -> None:
        module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        made = next(value for name, value in vars(module).items() if name.endswith("RotaryEmbedding"))
        self.rotate: Callable[..., tuple[Tensor, Tensor]] = module.apply_rotary_pos_emb
        self.by_length = bool(length_dependent(config))
        self._module: Any = nn.ModuleList([made(config)])
        rotate_by_sequence(self._module)
        per_type = isinstance(getattr(self._module[0], "rope_type", None), dict)
        self.kinds: tuple[str | None, ...] = tuple(sorted(set(config.layer_types))) if per_type else (None,)

    def rotations(self, position_ids: Tensor, dtype: torch.dtype) -> dict[str | None, Rotation]:
        """Cosine and sine for `position_ids [n, L]`, by layer type (None if all are rotated alike).

        The rows are equal unless the embeddings depend on their lengths.
        """
        module = self._module.to(position_ids.device)[0]
        positions = position_ids if self.by_length else position_ids[:1]
        like = torch.empty(0, dtype=dtype, device=position_ids.device)
        found: dict[str | None, Rotation] = {}
        for kind in self.kinds:
            cosine, sine = module(like, positions) if kind is None else module(like, positions, layer_type=kind)
            found[kind] = cosine.transpose(0, 1), sine.transpose(0, 1)
        return found


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """State that the layers of a forward share: the layout of the rows, and rotations as of `Rotary.rotations`."""

    layout: RowLayout
    rotations: dict[str | None, Rotation]


class CoreAttention(MegatronModule):  # type: ignore[misc]  # megatron-core carries no types
    """Causal attention of one layer of the model of `model_config`. Other arguments: those of megatron-core's layer.

    Its only parameters are `sinks`, of architectures that have them: one for each local head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        model_config: Any,
        rotary: Rotary,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        found, layer = architecture(model_config), layer_number - 1
        rotated = found.unrotated is None or bool(getattr(model_config, found.unrotated)[layer])
        self._rotate = rotary.rotate if rotated else None
        self._kind = None if rotary.kinds == (None,) else model_config.layer_types[layer]
        softcap = None if found.softcap is None else getattr(model_config, found.softcap)
        self._scores = Scores(scaling=score_scale(model_config), window=window_of(model_config, layer), softcap=softcap)
        self.sinks: nn.Parameter | None = None
        if found.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

    @classmethod
    def of(cls, model_config: Any, rotary: Rotary) -> Callable[..., CoreAttention]:
        """Return a function that creates the attention of megatron-core's layer."""
        return partial(cls, model_config=model_config, rotary=rotary)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: LayerInputs,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend with `query [L, n, heads, D]`, `key` and `value [L, n, kv_heads, D]`; return `[L, n, heads * D]`."""
        if self._rotate is not None:
            query, key = self._rotate(query, key, *attention_bias.rotations[self._kind], unsqueeze_dim=2)
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))  # [n, heads, L, D]
        scores = self._scores if self.sinks is None else self._scores._replace(sinks=self.sinks)
        found = attention_bias.layout.attend(q, k, v, scores)  # [n, L, heads, D]
        return found.transpose(0, 1).flatten(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Megatron-core's state for its checkpoints: sinks are split over tensor ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"sinks": 0}, sharded_offsets)
