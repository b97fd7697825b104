"""LoRA adapters on megatron-core's linear layers, also fused ones, under tensor and sequence parallelism.

Each layer of transformers has an adapter of its own, so that adapters mean the same for all backends. Those of one
fused layer are computed together. Transformer Engine's layers are not supported: they contain the norm before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.config.policy import LoraConfig
from rlframework.engine import A, B, Slices, initial_a, merge
from rlframework_megatron.adapter_weights import (
    MODULE,
    adapted_weights,
    kind_of,
    layer_of,
    linear_weights,
    parameter_name,
    require_adapters_on_each_stage,
)
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.model import Chunk
from rlframework_megatron.names import Weight, shards_of
from rlframework_megatron.upstream import (
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from rlframework_megatron.weight_layout import COLUMNS
from rlframework_megatron.weights import LocalModel

EXCHANGES: Mapping[tuple[bool, bool], Callable[[Tensor], Tensor]] = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}
"""The exchange of A's output between tensor ranks, by whether they split A's columns and the sequence.

Either they sum it, each with its columns of A, or they need all of it, each for its rows of B.
"""


class Adapter(nn.Module):
    """The adapters of one linear layer of megatron-core: returns what is added to the layer's output.

    A fused layer's output consists of groups, each a query group or everything, of one part per layer of transformers.
    """

    def __init__(
        self, fused: Sequence[Weight], adapted: Sequence[Weight], core_config: TransformerConfig, lora: LoraConfig
    ) -> None:
        """`fused`: the weights in the layer's matrix, in its order; `adapted`: those with an adapter."""
        super().__init__()
        tensor = core_config.tensor_model_parallel_size
        self.enabled = True
        self._rank, self._scale = lora.rank, lora.scale
        layout = fused[0].layout
        self._splits_columns, self._sequence = layout == COLUMNS, core_config.sequence_parallel
        self._groups = 1 if layout.groups is None or layout.joins_layers else layout.groups // tensor
        output = 1 if self._splits_columns else tensor
        self._widths = {kind_of(weight): weight.shape[0] // output // self._groups for weight in fused}
        self._adapted = [kind_of(weight) for weight in adapted]
        for weight in adapted:
            self._add_matrices(weight, tensor, core_config.params_dtype)

    def _add_matrices(self, weight: Weight, tensor: int, dtype: torch.dtype) -> None:
        (rows, columns), splits_columns = weight.shape, self._splits_columns
        a = nn.Parameter(torch.empty(self._rank, columns // tensor if splits_columns else columns, dtype=dtype))
        b = nn.Parameter(torch.empty(rows if splits_columns else rows // tensor, self._rank, dtype=dtype))
        split, whole = (a, b) if splits_columns else (b, a)
        set_tensor_model_parallel_attributes(split, True, 1 if splits_columns else 0, 1)
        # used with this rank's part of the tokens, so tensor ranks sum its gradient
        whole.sequence_parallel = self._sequence  # type: ignore[attr-defined]
        self.register_parameter(parameter_name(weight, A), a)
        self.register_parameter(parameter_name(weight, B), b)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the addition to the output of the layer for `hidden`, its input `[L, n, in]`, on this rank."""
        matrices: dict[str, Tensor] = dict(self.named_parameters(recurse=False))
        all_a, all_b = ([matrices[f"{kind}_lora_{which}"] for kind in self._adapted] for which in "AB")
        low = nn.functional.linear(hidden, torch.cat(all_a)) * self._scale
        low = EXCHANGES[self._splits_columns, self._sequence](low)
        parts = [nn.functional.linear(*pair) for pair in zip(low.split(self._rank, -1), all_b, strict=True)]
        return self._in_order(dict(zip(self._adapted, parts, strict=True)))

    def _in_order(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The parts in the order of the fused matrix, with zeros for layers without an adapter."""
        if len(self._widths) == 1:
            return next(iter(parts.values()))
        example = next(iter(parts.values()))
        grouped = [
            parts[kind].unflatten(-1, (self._groups, width))
            if kind in parts
            else example.new_zeros((*example.shape[:-1], self._groups, width))
            for kind, width in self._widths.items()
        ]
        return torch.cat(grouped, -1).flatten(-2)


def add_adapters(
    chunks: Sequence[Chunk], config: Any, lora: LoraConfig, coordinates: Coordinates, core_config: TransformerConfig
) -> None:
    """Freeze `chunks` and add the adapters that `lora` names, uninitialized. Raises `ConfigError` for unknown names."""
    require_adapters_on_each_stage(config, lora, coordinates)
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_require_gradient)
    adapted = {weight.name for weight in adapted_weights(config, lora)}
    fused: dict[tuple[int, str], list[Weight]] = {}
    for weight in linear_weights(config):
        for shard in shards_of(weight, config, coordinates):
            fused.setdefault((shard.chunk, shard.parameter), []).append(weight)
    for (chunk_number, parameter), weights in fused.items():
        if chosen := [weight for weight in weights if weight.name in adapted]:
            linear: Any = chunks[chunk_number].get_submodule(parameter.removesuffix(".weight"))
            linear.add_module(MODULE, Adapter(weights, chosen, core_config, lora).to(linear.weight.device))
            linear.register_forward_hook(_add)


def _add(linear: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    """Forward hook of a linear layer: add the output of its adapters."""
    adapter: Any = linear.get_submodule(MODULE)
    return (output[0] + adapter(inputs[0]), output[1]) if adapter.enabled else None


def _require_gradient(embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    """Forward hook of a frozen embedding: activation checkpointing and pipelines need an input with a gradient."""
    return output.requires_grad_() if torch.is_grad_enabled() else None


def enable_adapters(chunks: Sequence[nn.Module], enabled: bool) -> None:
    """Switch all adapters on or off."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Adapter):
                module.enabled = enabled


def initial(weights: Mapping[str, Weight], seed: int, name: str, where: Slices) -> Tensor:
    """The slice `where` of the initial value of a matrix: A is drawn from its name and `seed`, B is zero."""
    shape = weights[name].shape
    return (initial_a(name, shape, seed) if name.endswith(A) else torch.zeros(shape))[where]


def gather_merged(
    base: LocalModel, adapters: LocalModel, names: Iterable[str], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights `names` of `base`, merged with their adapters. Collective."""
    whole = base.gatherer(base.main_params())
    matrix = adapters.gatherer(adapters.main_params())
    for name in names:
        found, layer = whole(name), layer_of(base.weights[name])
        if layer + A in adapters.weights:
            found = merge(found, matrix(layer + A), matrix(layer + B), scale)
        yield name, found
        del found
