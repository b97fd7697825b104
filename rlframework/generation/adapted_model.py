"""The engine's own module for refits that transfer only LoRA adapters: read the base model and merge them into it.

Not supported: sampling with several adapters at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.errors import DataError, UserError
from rlframework.huggingface.model_directories import quiet_transformers
from rlframework.policy.lora_math import A, B, merge


class AdaptedModel:
    """The base model from `model_name` merged with the latest adapters; keeps fp32 CPU copies of adapted weights."""

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None:
        self._model_name, self._device, self._dtype = model_name, device, dtype
        self._module: nn.Module | None = None
        self._base: dict[str, Tensor] = {}

    @torch.no_grad()
    def load(self, adapters: Iterable[tuple[str, Tensor]]) -> nn.Module:
        """Merge `adapters`, named as in `Adapters.adapter_specs` with the scale included in B, and return the module.

        Raises `UserError` if the base model has no such layers. Each weight is merged in fp32 and then rounded, as in
        the trainer, so the engine's weights equal those after a refit of merged weights.
        """
        given = dict(adapters)
        layers = {name.removesuffix(A) for name in given if name.endswith(A)}
        module = self._module if self._module is not None and layers == set(self._base) else self._read(layers)
        targets = module.state_dict()
        for layer in sorted(layers):
            merged = merge(self._base[layer].to(self._device), given[layer + A], given[layer + B], 1.0)
            targets[f"{layer}.weight"].copy_(merged)
        self._module = module
        return module

    def _read(self, layers: set[str]) -> nn.Module:
        from transformers import AutoModelForCausalLM

        self._module = None
        try:
            with quiet_transformers():
                module: Any = AutoModelForCausalLM.from_pretrained(self._model_name, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise DataError(
                f"policy.model_name={self._model_name!r} cannot be read by the generation engine, as "
                f"policy.lora.refit=adapters requires; set policy.lora.refit to merged ({error})"
            ) from error
        weights = module.state_dict()
        if unknown := sorted(layer for layer in layers if f"{layer}.weight" not in weights):
            raise UserError(
                f"received adapters for layers {unknown[:3]}, which the model {self._model_name!r} does not have"
            )
        self._base = {layer: weights[f"{layer}.weight"].clone() for layer in layers}
        placed: nn.Module = module.to(self._device, self._dtype).eval()
        return placed
