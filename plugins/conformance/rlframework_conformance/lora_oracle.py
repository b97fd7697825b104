"""The oracle of LoRA: computes W + scale * B A in each forward, and the gradient by autograd through it.

Like `oracle`, it imports nothing of rlframework except that module (enforced by import-linter), and no adapter library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from rlframework_conformance.oracle import Batch, Oracle, OracleStep


class LoraOracle(Oracle):
    """The frozen model at `path` with adapters that AdamW trains; `settings` are those of `Oracle`.

    `adapters`: `LAYER.lora_A.weight` `[rank, in]` and `LAYER.lora_B.weight` `[out, rank]` by layer path.
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

    def _distributions(self, batch: Batch, temperature: float) -> Tensor:
        ids = batch["input_ids"]
        real = (torch.arange(ids.shape[1]) < batch["input_lengths"][:, None]).long()
        given = {"input_ids": ids, "attention_mask": real, "use_cache": False}
        logits = functional_call(self.model, self.merged(), args=(), kwargs=given).logits
        return torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)

    def gradients(self, batch: Batch, kind: str) -> dict[str, Tensor]:
        """Return the gradient of each adapter matrix without changing any."""
        found = torch.autograd.grad(self.loss(batch, kind), list(self.adapters.values()))
        return dict(zip(self.adapters, found, strict=True))

    def step(self, batch: Batch, kind: str, lr: float | None = None) -> OracleStep:
        """Take one AdamW step of the adapters, at `lr` if given."""
        loss = float(self.loss(batch, kind).detach())
        gradients = self.gradients(batch, kind)
        norm = torch.sqrt(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum())
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        for name, gradient in gradients.items():
            self.adapters[name].grad = gradient * (limit / norm) if norm > limit else gradient.clone()
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        self.optimizer.step()
        return OracleStep(loss, norm.item(), gradients)

    def trained(self) -> dict[str, Tensor]:
        """Return copies of the adapters."""
        return {name: tensor.detach().clone() for name, tensor in self.adapters.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return copies of all weights under the names of `save_pretrained`, merged with the adapters."""
        return super().weights() | {name: weight.detach() for name, weight in self.merged().items()}
