"""A hand-written DeepSpeed loop for one worker: `deepspeed.initialize`, `backward`, `step`.

Imports nothing from rlframework, but runs next to one of its policies: that policy must have joined the process group
and set DeepSpeed's device, of which a process has only one each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from plain import PlainLoop, Rows
from torch import Tensor


class DeepSpeedLoop(PlainLoop):
    """The work of `PlainLoop` in DeepSpeed's engine. `section`: DeepSpeed keys; `count`: rows per training step."""

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
        """Do one optimizer step on `batch`; return loss and gradient norm before clipping (NaN with stage 0)."""
        self.engine.train()
        valid = batch.mask[:, 1:].sum()
        total = 0.0
        for index in self._microbatches(batch.lengths):
            mask = self._cut(batch.mask, batch, index)[:, 1:].to(self.device)
            loss = -(self._logprobs(batch, index) * mask).sum() / valid
            self.engine.backward(loss * self.accumulation)  # DeepSpeed averages over the microbatches
            self.engine.step()
            total += loss.item()
        norm = self.engine.get_global_grad_norm()
        return total, math.nan if norm is None else float(norm)

    def close(self) -> None:
        """Release DeepSpeed's buffers and hooks."""
        self.engine.destroy()

    def _logits(self, ids: Tensor, attention: Tensor) -> Tensor:
        logits: Tensor = self.engine(input_ids=ids, attention_mask=attention, use_cache=False).logits
        return logits
