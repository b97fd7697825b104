"""The load-balancing loss of mixtures of experts, over a full global batch.

It is the loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6) for top-k routing, as in Qwen3-MoE:

    loss = N * sum over the N experts e of load[e] * probability[e]

`load[e]` is the number of routing choices that went to expert e divided by the number of tokens, and `probability[e]`
the mean router probability of expert e, both over all layers and all tokens of all ranks but padding and dummy rows. It
equals the number of experts per token if the load is balanced, and is larger otherwise.

`load` has no gradient. So once all loads are known, the loss of a global batch is a sum over microbatches and does not
depend on how rows are grouped. To measure the loads, the model runs one forward pass over the batch without gradient
before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from rlframework.interfaces.data_processor import Microbatch


@dataclass(frozen=True)
class ExpertLoad:
    """The routing of a global batch: `load [N]` fp32 of each expert, and `tokens`, counted once per layer."""

    load: Tensor
    tokens: float


class LoadBalancingLoss:
    """The load-balancing loss of `model`; `group`: the data-parallel ranks, None if there is only one."""

    def __init__(self, model: Any, group: dist.ProcessGroup | None) -> None:
        text = model.config.get_text_config()
        self._experts, self._group = int(text.num_experts), group
        self._recording = False
        self._routed: list[tuple[Tensor, Tensor]] = []
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)
        for name, module in model.named_modules():
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(self._keep)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._recording, self._routed = True, []

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._recording = False

    def _keep(self, router: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        if self._recording:  # not when activation checkpointing recomputes a layer in the backward
            logits, _, chosen = output
            self._routed.append((logits, chosen))

    def _pop_routed(self) -> list[tuple[Tensor, Tensor]]:
        """Return, and clear, each layer's logits `[T, N]` and chosen experts `[T, k]` in the last forward."""
        found, self._routed = self._routed, []
        return found

    def measure_load(self, microbatches: Sequence[Microbatch], forward: Callable[[Microbatch], Any]) -> ExpertLoad:
        """Measure the loads of a global batch from this rank's `microbatches`; `forward` runs the model. Collective."""
        device = microbatches[0].processed_inputs.input_ids.device
        counts = torch.zeros(self._experts + 1, dtype=torch.float64, device=device)
        for microbatch in microbatches:
            # one head position is enough for the model to run
            positions, targets = microbatch.head_positions[:1], microbatch.targets[:1]
            few = replace(microbatch, head_positions=positions, targets=targets, host=None)
            forward(few)
            for _, chosen in self._pop_routed():
                counted = chosen[real_tokens(microbatch)]
                counts[:-1] += torch.bincount(counted.reshape(-1), minlength=self._experts)
                counts[-1] += len(counted)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        tokens = float(counts[-1])
        return ExpertLoad((counts[:-1] / max(tokens, 1.0)).float(), tokens)

    def microbatch_loss(self, microbatch: Microbatch, load: ExpertLoad) -> Tensor:
        """Return this microbatch's term of the loss, a scalar with gradient; the terms of a batch add up to the loss.

        `microbatch` must be the input of the last forward.
        """
        real = real_tokens(microbatch)
        probabilities = torch.stack(
            [torch.softmax(logits.float(), -1)[real].sum(0) for logits, _ in self._pop_routed()]
        ).sum(0)
        return self._experts * (load.load * probabilities).sum() / max(load.tokens, 1.0)


def real_tokens(microbatch: Microbatch) -> Tensor:
    """Return `[T]` bool over the model's input tokens, flattened: False for padding and for dummy rows."""
    ids = microbatch.processed_inputs.input_ids
    positions = torch.arange(ids.shape[1], device=ids.device)
    lengths = microbatch.data_dict["input_lengths"].to(ids.device)
    if microbatch.cu_seqlens is not None:
        lengths = lengths.sum()[None]  # the tail of a packed row is padding
    lengths = pad(lengths, (0, len(ids) - len(lengths)))  # so are rows added to those of the batch
    real: Tensor = (positions < lengths[:, None]).reshape(-1)
    return real & (not microbatch.is_dummy)
