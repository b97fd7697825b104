"""The engine `ddp`: a full copy of the model per rank, gradients summed with torch's DistributedDataParallel.

Any causal language model of transformers, on CPU (gloo) and GPU (NCCL). Not supported: multimodal models, adapters,
offload, sharded checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from rlframework.engine import (
    Engine,
    FileLayout,
    HeadPatch,
    HeadRequest,
    Microbatch,
    Moments,
    Step,
    StepResult,
    WeightSpec,
    attending,
    checkpoint_activations,
    forward,
    load_config,
    load_model,
    named_tensors,
    parameter_groups,
    probe_packing,
    process_groups,
    read_head_output,
    require_vocabulary,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rlframework_ddp.config import DdpConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class DdpEngine(Engine):
    """One rank of the model; see `Engine` for the methods."""

    backend_config: DdpConfig
    backend_config_model = DdpConfig

    # -- the model ----------------------------------------------------------------------------------------------------

    def build(self, *, init_optimizer: bool) -> None:
        """See `Engine.build`."""
        self._packs = probe_packing(self.config, load_config(self.config), self.device, "auto")
        self.model: nn.Module = load_model(self.config, None)
        require_vocabulary(self.model, self.tokenizer)
        if self.config.activation_checkpointing:
            checkpoint_activations(self.model, self.config.activation_checkpointing)
        self.model.to(self.device)
        self._head = HeadPatch(self.model)
        self._layout = FileLayout.of(self.model)
        tensors = named_tensors(self.model)
        self._weights = {name: part.of(tensors[part.source]) for name, part in self._layout.weights.items()}
        self._optimizer = self._make_optimizer() if init_optimizer else None
        self._replica: nn.Module = self.model
        if self.context.world_size > 1:
            process_groups.join(self.context, self.device)
            megabytes = self.backend_config.bucket_megabytes
            self._replica = DistributedDataParallel(self.model, bucket_cap_mb=megabytes)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self.config.optimizer
        groups = parameter_groups(self.model.named_parameters(), config)
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        for one in self.model.parameters():  # AdamW creates its state at the first step: too late for loading
            zeros = {kind: torch.zeros_like(one) for kind in MOMENTS}
            optimizer.state[one] = {"step": torch.tensor(0.0), **zeros}
        return optimizer

    def close(self) -> None:
        """See `Engine.close`."""
        self._weights.clear()
        self._optimizer = None
        del self.model, self._replica
        if self.context.world_size > 1:
            process_groups.leave()

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """See `Engine.forward_backward`."""
        self.model.train(not forward_only)
        if forward_only:
            return [self._evaluate(microbatch, head, step) for microbatch in microbatches]
        self.model.zero_grad(set_to_none=True)
        *before, last = microbatches
        with self._replica.no_sync() if isinstance(self._replica, DistributedDataParallel) else nullcontext():
            results = [self._learn(microbatch, head, step) for microbatch in before]
        return [*results, self._learn(last, head, step)]

    @torch.no_grad()
    def _evaluate(self, microbatch: Microbatch, head: HeadRequest, step: Step) -> StepResult:
        with attending(self.model.config, microbatch, None):
            return self._run(self.model, microbatch, head, step)

    def _learn(self, microbatch: Microbatch, head: HeadRequest, step: Step) -> StepResult:
        with attending(self.model.config, microbatch, None):
            result = self._run(self._replica, microbatch, head, step)
            assert result.loss is not None
            # DistributedDataParallel averages over ranks; the contract is the sum
            (result.loss * self.context.world_size).backward()
        result.loss = None
        return result

    def _run(self, model: nn.Module, microbatch: Microbatch, head: HeadRequest, step: Step) -> StepResult:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            values = forward(model, self._head, microbatch, head, None)
        return step(read_head_output(values, head), microbatch)

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`."""
        assert self._optimizer is not None
        norm = nn.utils.get_total_norm(one.grad for one in self.model.parameters() if one.grad is not None)
        skipped = not math.isfinite(norm)
        if not skipped:
            if max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(self.model.parameters(), max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        return float(norm), skipped

    def preferred_batching(self) -> str:
        """See `Engine.preferred_batching`."""
        return "packed" if self._packs else "dynamic"

    # -- weights ------------------------------------------------------------------------------------------------------

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        return {name: WeightSpec(tuple(weight.shape), weight.dtype) for name, weight in self._weights.items()}

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        for name in names:
            yield name, self._weights[name]

    def snapshot(self) -> dict[str, Tensor]:
        """See `Engine.snapshot`."""
        return {name: weight.to("cpu", copy=True) for name, weight in self._weights.items()}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """See `Engine.restore`."""
        self.load_weights(snapshot)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`."""
        for name, weight in self._weights.items():
            weight.copy_(weights[name])

    def _moments(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """AdamW's state of each weight by its name in files; tensors or views of them, not copies."""
        assert self._optimizer is not None
        for name, parameter in self.model.named_parameters():
            state = self._optimizer.state[parameter]
            for part in self._layout.by_source[name]:
                yield part.name, {"step": state["step"], **{kind: part.of(state[kind]) for kind in MOMENTS}}

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        for name, state in self._moments():
            yield name, Moments(int(state["step"]), state["exp_avg"], state["exp_avg_sq"])

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        for name, state in self._moments():
            saved = moments[name]
            state["step"].fill_(saved.steps)
            state["exp_avg"].copy_(saved.exp_avg)
            state["exp_avg_sq"].copy_(saved.exp_avg_sq)

    # -- generation ---------------------------------------------------------------------------------------------------

    def whole_model(self) -> nn.Module | None:
        """See `Engine.whole_model`."""
        return self.model
