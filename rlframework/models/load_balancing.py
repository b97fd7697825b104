"""The loss that evens out the work of experts, over a whole global batch.

It is that of Switch Transformers (arXiv:2101.03961, equations 4 to 6) for several choices a token, as in Qwen3-MoE.

With N experts, `share[e]` the number of tokens and choices that went to expert e, over the number of tokens, and
`chance[e]` the mean probability that routers gave to it, both over all blocks and all tokens of all ranks:

    loss = N * sum over e of share[e] * chance[e]

It is the number of choices of a token where the work is even, and more where it is not. A token counts where it is of a
row that the loss of the step is about; padding does not, nor do rows that repeat others as dummies.

`share` has no gradient, and `chance` is a sum over tokens divided by their number. So the loss of a global batch is a
sum over microbatches once all shares are known, and does not depend on how rows are grouped. To know them the model
runs forward over the batch once before the step, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.interfaces.data_processor import Microbatch


@dataclass(frozen=True)
class Balance:
    """What the tokens of a global batch chose: `share [N]` fp32, and how many `tokens` there are, times blocks."""

    share: Tensor
    tokens: float


class RouterLoss:
    """The loss of the routers of `model`; `group`: the ranks with other rows, None where there are none."""

    def __init__(self, model: Any, group: dist.ProcessGroup | None) -> None:
        text = model.config.get_text_config()
        self._experts, self._group = int(text.num_experts), group
        self._watching = False
        self._seen: list[tuple[Tensor, Tensor]] = []
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)
        for router in _routers(model):
            router.register_forward_hook(self._keep)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._watching, self._seen = True, []

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._watching = False

    def _keep(self, router: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        if self._watching:  # not when activation checkpointing runs a block again, in the backward
            logits, _, chosen = output
            self._seen.append((logits, chosen))

    def _last(self) -> list[tuple[Tensor, Tensor]]:
        """Of each block in the last forward: logits `[T, N]`, and the experts chosen, `[T, choices]`. Told once."""
        found, self._seen = self._seen, []
        return found

    def balance(self, microbatches: Sequence[Microbatch], forward: Callable[[Microbatch], Any]) -> Balance:
        """Of the global batch of which this rank has `microbatches`; `forward` runs the model. Collective."""
        device = microbatches[0].processed_inputs.input_ids.device
        counts = torch.zeros(self._experts + 1, dtype=torch.float64, device=device)
        for microbatch in microbatches:
            # of the head no more than it takes to run
            few = replace(microbatch, head_positions=microbatch.head_positions[:1], targets=microbatch.targets[:1])
            forward(few)
            for _, chosen in self._last():
                counted = chosen[real_tokens(microbatch)]
                counts[:-1] += torch.bincount(counted.reshape(-1), minlength=self._experts)
                counts[-1] += len(counted)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        tokens = float(counts[-1])
        return Balance((counts[:-1] / max(tokens, 1.0)).float(), tokens)

    def part(self, microbatch: Microbatch, balance: Balance) -> Tensor:
        """The part of `microbatch`, with which the last forward was, a scalar with gradient; all parts add up to it."""
        real = real_tokens(microbatch)
        chances = torch.stack([torch.softmax(logits.float(), -1)[real].sum(0) for logits, _ in self._last()]).sum(0)
        return self._experts * (balance.share * chances).sum() / max(balance.tokens, 1.0)


def _routers(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]


def real_tokens(microbatch: Microbatch) -> Tensor:
    """`[T]` bool of the tokens that the model was given, rows one after the other: no padding, and none of a dummy."""
    ids = microbatch.processed_inputs.input_ids
    places = torch.arange(ids.shape[1], device=ids.device)
    lengths = microbatch.data_dict["input_lengths"].to(ids.device)
    if microbatch.cu_seqlens is not None:
        lengths = lengths.sum()[None]  # the tail of a packed row is padding
    real: Tensor = (places < lengths[:, None]).reshape(-1)
    return real & (not microbatch.is_dummy)
