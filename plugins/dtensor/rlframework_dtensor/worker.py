"""The reference training engine: any Hugging Face causal language model, on CPU (gloo) and GPU (NCCL).

Split by FSDP2 or HSDP, tensor and sequence parallelism, and context parallelism, over one mesh (`mesh`).

Vision-language models too, in padded and dynamic microbatches.

Supplies the primitives of `rlframework.policy.engine.Engine`. Left out so far: refit to other processes, LoRA, offload,
scores of reward models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlframework.interfaces.data_processor import Microbatch, MicrobatchRule
from rlframework.policy.checkpoint import Moments
from rlframework.policy.engine import Step, StepResult, WeightSpec
from rlframework.policy.head import HeadRequest, read_head_output
from rlframework.policy.optimizer import parameter_groups
from rlframework.policy.worker_base import PolicyWorkerBase
from rlframework_dtensor import attention, context_parallel, gradients, groups, media
from rlframework_dtensor.building import build_model
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.mesh import Sizes
from rlframework_dtensor.parallelize import is_multimodal
from rlframework_dtensor.pieces import like, local, put, whole


class DTensorPolicyWorker(context_parallel.TorchContextParallel, PolicyWorkerBase):
    """One rank of a model under FSDP2 and the other axes of its mesh. Constructor arguments: see `PolicyWorkerBase`."""

    backend_config: DTensorConfig
    backend_config_model = DTensorConfig

    def build(self, *, init_optimizer: bool) -> None:
        """See `Engine.build`."""
        self._sizes = Sizes.of(self.context.world_size, self.config.parallelism, self.backend_config.replicate)
        built = build_model(self.config, self.backend_config, self.context, self._sizes, self.tokenizer, self.device)
        self.model, self._head, self._mesh, self._packs = built.model, built.head, built.mesh, built.packs
        self._multimodal = is_multimodal(self.model)
        group = self._mesh.context_group() if self._mesh is not None else None
        self._context = context_parallel.ContextParallel(group) if group is not None else None
        self._optimizer = self._make_optimizer() if init_optimizer else None

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self.config.optimizer
        groups = parameter_groups(self.model.named_parameters(), config)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward_backward(
        self, microbatches: Sequence[Microbatch], head: HeadRequest, step: Step, *, forward_only: bool
    ) -> list[StepResult]:
        """See `Engine.forward_backward`."""
        self.model.train(not forward_only)
        if not forward_only:
            self.model.zero_grad(set_to_none=True)
            if self._multimodal:
                microbatches = media.evened(microbatches, self.data_parallel_group())
        return [self._run_microbatch(microbatch, head, step, forward_only) for microbatch in microbatches]

    def _run_microbatch(self, microbatch: Microbatch, head: HeadRequest, step: Step, forward_only: bool) -> StepResult:
        own = attention.SEGMENTS if microbatch.cu_seqlens is not None else None
        own = own if self._context is None else context_parallel.CONTEXT
        # around the backward too: activation checkpointing runs the attention again there
        with attention.attention(self.model.config, own) if own is not None else nullcontext():
            with torch.no_grad() if forward_only else nullcontext():
                result = step(read_head_output(self._forward(microbatch, head), head), microbatch)
            if not forward_only:
                assert result.loss is not None
                # FSDP2 takes the mean over ranks, the contract is the sum
                (result.loss * self._sizes.gradient_ranks).backward()
                result.loss = None
        return result

    def _forward(self, microbatch: Microbatch, head: HeadRequest) -> Tensor:
        if self._context is not None:
            return self._context.forward(self.model, self._head, microbatch, head)
        processed = microbatch.processed_inputs
        inputs: dict[str, Any] = {"input_ids": processed.input_ids, "use_cache": False, **processed.vlm_kwargs}
        if microbatch.cu_seqlens is not None:
            segments = attention.Segments(microbatch.cu_seqlens.tolist())
            inputs |= {"position_ids": processed.position_ids, "segments": segments}
        with self._head.computing(head, microbatch.head_positions, microbatch.targets):
            values: Tensor = self.model(**inputs).logits
        return values

    def clip_and_step(self, max_grad_norm: float | None, lr: float) -> tuple[float, bool]:
        """See `Engine.clip_and_step`."""
        assert self._optimizer is not None
        found = gradients.gradients_of(self.model.parameters())
        norm = float(gradients.total_norm(found, self._mesh))
        skipped = not math.isfinite(norm)
        if not skipped:
            if max_grad_norm is not None and norm > max_grad_norm:
                gradients.clip(found, max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return norm, skipped

    def microbatch_rule(self) -> MicrobatchRule:
        """See `Engine.microbatch_rule`."""
        multiple = 1 if self._context is None else self._context.pad_multiple
        # with sequence parallelism each rank has as many tokens
        return MicrobatchRule(pad_multiple=multiple * (self._sizes.tensor if self.config.parallelism.sequence else 1))

    def preferred_batching(self) -> str:
        """See `Engine.preferred_batching`: segments on a CPU; a GPU would start a kernel for each segment."""
        return "packed" if self._packs else "dynamic"

    def preferred_tokens(self) -> int:
        """See `Engine.preferred_tokens`: on a CPU what stays in its caches is faster than what is large."""
        return 1024 if self.device.type == "cpu" else super().preferred_tokens()

    # -- weights ------------------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, Tensor]:
        """The tensors that `save_pretrained` writes, by name; a tied head stands once, under the embedding's name.

        Mixtures of experts keep the names that they have in memory, which transformers reads as well as its own.

        Gathered parameters are let go first: what FSDP leaves whole after a forward without gradients is a copy, and
        writing to the shards behind it would leave it stale without an error.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        saved = self.model.state_dict().keys()
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named if name in saved}

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        return {name: WeightSpec(tuple(weight.shape), weight.dtype) for name, weight in self._weights().items()}

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        weights = self._weights()
        for name in names:
            weight = weights[name]
            yield name, whole(weight)

    def snapshot(self) -> dict[str, Tensor]:
        """See `Engine.snapshot`."""
        return {name: local(weight).to("cpu", copy=True) for name, weight in self._weights().items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """See `Engine.restore`."""
        for name, weight in self._weights().items():
            local(weight).copy_(snapshot[name])

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`."""
        for name, weight in self._weights().items():
            put(weight, weights[name])

    def _trained(self) -> dict[str, Tensor]:
        """The parameters that the optimizer has, by the names of `weight_specs`."""
        assert self._optimizer is not None
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        assert self._optimizer is not None
        for name, parameter in self._trained().items():
            state = self._optimizer.state.get(parameter)
            if state:
                yield name, Moments(int(state["step"]), whole(state["exp_avg"]), whole(state["exp_avg_sq"]))
            else:
                yield name, Moments(0, torch.zeros(parameter.shape), torch.zeros(parameter.shape))

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        assert self._optimizer is not None
        for name, parameter in self._trained().items():
            saved = moments[name]
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(saved.steps), device=self.device),
                "exp_avg": like(parameter, saved.exp_avg),
                "exp_avg_sq": like(parameter, saved.exp_avg_sq),
            }

    # -- generation and the rest --------------------------------------------------------------------------------------

    def whole_model(self) -> nn.Module | None:
        """See `Engine.whole_model`."""
        return None if self._mesh is not None else self.model

    @contextmanager
    def generating(self) -> Iterator[None]:
        """See `Engine.generating`: activation checkpointing would switch the cache off."""
        self.model.eval()
        yield

    def data_parallel_group(self) -> Any:
        """See `Engine.data_parallel_group`."""
        return self._mesh.data_group() if self._mesh is not None else None

    def data_parallel_size(self) -> int:
        """See `Engine.data_parallel_size`."""
        return self._sizes.data

    def close(self) -> None:
        """See `Engine.close`."""
        self._optimizer = None
        del self.model
        if self._mesh is not None:
            self._mesh = None
            groups.leave()
