"""Oracles of LoRA, of Muon, and of rows with images.

They import nothing of rlframework except `oracle` (enforced by import-linter), and no adapter library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from rlframework_conformance.oracle import Batch, Oracle, OracleStep

ENDS = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of matrices that Muon leaves to AdamW."""


class LoraOracle(Oracle):
    """The frozen model at `path` with adapters that AdamW trains: each forward is with W + scale * B A.

    `adapters`: `LAYER.lora_A.weight` `[rank, in]` and `LAYER.lora_B.weight` `[out, rank]` by layer path. `settings` are
    those of `Oracle`.
    """

    def __init__(self, path: Any, adapters: Mapping[str, Tensor], scale: float, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.model.requires_grad_(False)
        self.scale = scale
        self.adapters = {name: tensor.detach().clone().requires_grad_() for name, tensor in adapters.items()}
        given = self.optimizer.param_groups[0]
        kept = {key: given[key] for key in ("lr", "betas", "eps", "weight_decay")}
        self.optimizer = torch.optim.AdamW(list(self.adapters.values()), foreach=False, **kept)

    def merged(self) -> dict[str, Tensor]:
        """Return the weights of the adapted layers under the base's names, with gradient."""
        base = dict(self.model.named_parameters())
        layers = [name.removesuffix(".lora_A.weight") for name in self.adapters if name.endswith(".lora_A.weight")]
        return {
            f"{layer}.weight": base[f"{layer}.weight"]
            + self.scale * self.adapters[f"{layer}.lora_B.weight"] @ self.adapters[f"{layer}.lora_A.weight"]
            for layer in layers
        }

    def _forward(self, **inputs: Any) -> Any:
        return functional_call(self.model, self.merged(), args=(), kwargs={**inputs, "use_cache": False})

    def _trained(self) -> dict[str, Tensor]:
        return self.adapters

    def trained(self) -> dict[str, Tensor]:
        """Return copies of the adapters."""
        return {name: tensor.detach().clone() for name, tensor in self.adapters.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return copies of all weights under the names of `save_pretrained`, merged with the adapters."""
        return super().weights() | {name: weight.detach() for name, weight in self.merged().items()}


class MuonOracle(Oracle):
    """The model at `path` with Muon for the matrices of its layers, and AdamW for embedding, head and vectors.

    `momentum`: decay of Muon's average of gradients; `settings` are those of `Oracle`.
    """

    def __init__(self, path: Any, *, momentum: float, **settings: Any) -> None:
        super().__init__(path, **settings)
        given = self.optimizer.param_groups[0]
        named = list(self.model.named_parameters())
        matrices = [parameter for name, parameter in named if parameter.dim() == 2 and not name.endswith(ENDS)]
        self.muon = torch.optim.Muon(
            matrices,
            lr=given["lr"],
            weight_decay=given["weight_decay"],
            momentum=momentum,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
        taken = set(map(id, matrices))
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]

    def descend(self, loss: float, lr: float | None = None) -> OracleStep:
        """Take a step on the parameters' current gradients, which belong to `loss`."""
        step = super().descend(loss, lr)  # clips all gradients
        for group in self.muon.param_groups if lr is not None else ():
            group["lr"] = lr
        self.muon.step()
        return step


class VisionOracle(Oracle):
    """An `Oracle` of a vision-language model: each row by itself with its own images, unpadded.

    A batch has `pixel_values` and, for some models, `image_grid_thw`, with one tensor or None for each row in their
    `tensors`, and then `mm_token_type_ids [B, S]`.
    """

    auto_class = "AutoModelForImageTextToText"

    def _logits(self, batch: Batch) -> Tensor:
        rows = []
        longest = batch["input_ids"].shape[1]
        for row, length in enumerate(batch["input_lengths"].tolist()):
            inputs: dict[str, Any] = {}
            for name in ("pixel_values", "image_grid_thw"):
                if name in batch and batch[name].tensors[row] is not None:
                    inputs[name] = batch[name].tensors[row]
            if "mm_token_type_ids" in batch:
                inputs["mm_token_type_ids"] = batch["mm_token_type_ids"][row : row + 1, :length]
            logits = self.model(input_ids=batch["input_ids"][row : row + 1, :length], use_cache=False, **inputs).logits
            rows.append(torch.nn.functional.pad(logits[0], (0, 0, 0, longest - length)))
        return torch.stack(rows)
