"""The plain loop on DeepSpeed, as one would write it by hand: `deepspeed.initialize`, `backward`, `step`.

On one worker. Imports nothing of rlframework, but is made beside a policy of it, which has joined the process group and
told DeepSpeed its device: DeepSpeed has one of each a process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from plain import PlainLoop, Rows
from torch import Tensor


class DeepSpeedLoop(PlainLoop):
    """The same work through DeepSpeed's engine. `section`: DeepSpeed's own keys; `count`: rows of a training step."""

    def __init__(self, *args: Any, count: int, section: Mapping[str, Any], **kwargs: Any) -> None:
        import deepspeed

        super().__init__(*args, **kwargs)
        config = {
            "zero_optimization": {"stage": 2},
            **section,
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": math.ceil(count / self.rows),
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine: Any = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
        )[0]
        self.accumulation = self.engine.gradient_accumulation_steps()

    def train(self, batch: Rows) -> tuple[float, float]:
        """One optimizer step on `batch`: the loss, and the gradient norm before clipping (NaN under stage 0)."""
        self.engine.train()
        valid = batch.mask[:, 1:].sum()
        total = 0.0
        for index in self._microbatches(batch.lengths):
            mask = self._cut(batch.mask, batch, index)[:, 1:].to(self.device)
            loss = -(self._logprobs(batch, index) * mask).sum() / valid
            self.engine.backward(loss * self.accumulation)  # DeepSpeed takes the mean over the microbatches
            self.engine.step()
            total += loss.item()
        norm = self.engine.get_global_grad_norm()
        return total, math.nan if norm is None else float(norm)

    def close(self) -> None:
        """Give DeepSpeed's buffers and hooks back."""
        self.engine.destroy()

    def _logits(self, ids: Tensor, attention: Tensor) -> Tensor:
        logits: Tensor = self.engine(input_ids=ids, attention_mask=attention, use_cache=False).logits
        return logits
