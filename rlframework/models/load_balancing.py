"""The load-balancing loss of mixtures of experts, over a full global batch.

It is the loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6) for top-k routing, as in Qwen3-MoE:

    loss = N * sum over the N experts e of load[e] * probability[e]

`load[e]` is the number of routing choices that went to expert e divided by the number of tokens, and `probability[e]`
the mean router probability of expert e, both over all layers and all tokens of all ranks but padding and dummy rows. It
equals the number of experts per token if the load is balanced, and is larger otherwise. A masked row that the model
computes for its group (`LossFunction.needs_groups`) counts too, so this also does not depend on the grouping.

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
from rlframework.policy.engine import Step, StepResult


@dataclass(frozen=True)
class ExpertLoad:
    """The routing of a global batch: `load [N]` of each expert, and `tokens []`, counted once per layer, at least 1.

    Both are fp32, on the device: nothing waits for them.
    """

    load: Tensor
    tokens: Tensor


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

    def add_to(
        self, step: Step, microbatches: Sequence[Microbatch], run: Callable[[Microbatch, Step], Any], coefficient: float
    ) -> Step:
        """Return `step`, plus `coefficient` times each microbatch's term of the loss. Collective.

        `run` runs the model over a microbatch without gradient, and a step on its output.
        """
        load = self.measure_load(microbatches, lambda microbatch: run(microbatch, lambda *_: StepResult()))

        def with_term(output: Any, microbatch: Microbatch) -> StepResult:
            result, term = step(output, microbatch), self.microbatch_loss(microbatch, load)
            assert result.loss is not None
            result.loss = result.loss + coefficient * term
            if not microbatch.is_dummy:
                result.outputs["router_aux_loss"] = term.detach()
            return result

        return with_term

    def measure_load(self, microbatches: Sequence[Microbatch], forward: Callable[[Microbatch], Any]) -> ExpertLoad:
        """Measure the loads of a global batch from this rank's `microbatches`; `forward` runs the model. Collective."""
        device = microbatches[0].processed_inputs.input_ids.device
        counts = torch.zeros(self._experts + 1, dtype=torch.float64, device=device)
        for microbatch in microbatches:
            # one head position is enough for the model to run
            positions, targets = microbatch.head_positions[:1], microbatch.targets[:1]
            few = replace(microbatch, head_positions=positions, targets=targets, host=None)
            forward(few)
            real = real_tokens(microbatch).double()
            for _, chosen in self._pop_routed():
                # integers, so the order of addition does not matter; `bincount` would make the host wait
                counts[:-1].index_add_(0, chosen.reshape(-1), real.repeat_interleave(chosen.shape[1]))
                counts[-1] += real.sum()
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        tokens = counts[-1].clamp(min=1.0)
        return ExpertLoad((counts[:-1] / tokens).float(), tokens.float())

    def microbatch_loss(self, microbatch: Microbatch, load: ExpertLoad) -> Tensor:
        """Return this microbatch's term of the loss, a scalar with gradient; the terms of a batch add up to the loss.

        `microbatch` must be the input of the last forward.
        """
        real = real_tokens(microbatch)

        def real_rows(values: Tensor) -> Tensor:
            # the number of rows that a mask selects is known to a GPU only
            return values[real] if real.device.type == "cpu" else values.where(real[:, None], 0.0)

        layers = [torch.softmax(logits.float(), -1) for logits, _ in self._pop_routed()]
        probabilities = torch.stack([real_rows(layer).sum(0) for layer in layers]).sum(0)
        return self._experts * (load.load * probabilities).sum() / load.tokens


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
