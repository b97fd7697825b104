"""Scoring rows without training: log-probabilities, entropies, top-k tokens, reward-model scores; of the reference too.

The reference policy of a worker is a copy of the weights that it was built with, or the base model of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlframework.base.errors import BatchError, NotSupported
from rlframework.batch.batch_rows import copy_to_cpu
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import Microbatch
from rlframework.interfaces.loss import TOKEN_SETS
from rlframework.interfaces.policy_worker import Rows
from rlframework.policy.engine import Engine, Step, require_head
from rlframework.policy.head.patch import HeadRequest
from rlframework.policy.host_buffers import HostBuffers
from rlframework.policy.microbatches.model_inputs import with_token_sets
from rlframework.policy.microbatches.on_demand import on_host
from rlframework.policy.microbatching import Microbatching, require_results, values_step
from rlframework.policy.shared_state import Residency


class SnapshotReference:
    """A copy of weights in CPU memory: those that the worker was built with, until `mix` or `take`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.weights = engine.snapshot()
        self._host = HostBuffers()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Context manager: swap in the reference; restore the policy on exit, also after an exception."""
        current = self._engine.swap(self.weights, self._host)
        try:
            yield
        finally:
            self._engine.restore(current)

    def mix(self, alpha: float) -> None:
        """Become `alpha` times the policy plus `1 - alpha` times this. Collective."""
        engine = self._engine
        current = engine.swap(self.weights, self._host)  # into the buffers of `use`, in place of a second copy
        engine.restore(current)
        if engine.device.type != "cpu":
            torch.get_device_module(engine.device).synchronize()  # both copies read memory of the CPU
        engine.mix(self.weights, current, alpha)

    def take(self) -> None:
        """Become the weights that the model has now."""
        self.weights = self._engine.snapshot()


class BaseReference:
    """The base model of adapters as the reference: the adapters are disabled, and no copy is kept."""

    def __init__(self, engine: Engine) -> None:
        self.use = engine.without_adapters


def require_copy(reference: SnapshotReference | BaseReference | None, purpose: str) -> SnapshotReference:
    """Return `reference` if it is a copy of weights; raise `NotSupported` otherwise."""
    if isinstance(reference, SnapshotReference):
        return reference
    why = (
        "it was built without one (init_reference_model=False)"
        if reference is None
        else "with policy.lora the reference is the base model without the adapters, which does not change"
    )
    raise NotSupported(f"{purpose} needs a reference policy with weights of its own, but this worker has none: {why}")


@dataclass
class Scoring:
    """Scores rows with the weights of an engine, or with its reference, at the sampling temperature."""

    engine: Engine
    microbatching: Microbatching
    residency: Residency
    temperature: float
    reference: SnapshotReference | BaseReference | None

    def get_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all", entropy: bool = False
    ) -> Rows:
        """See `PolicyWorker.get_logprobs`."""
        require_head(self.engine.config, "language", "get_logprobs")
        wants = {"logprobs", "entropy"} if entropy else {"logprobs"}
        return self.score_rows(data, HeadRequest(frozenset(wants), self.temperature), micro_batch_size, positions)

    def get_topk_logits(self, data: Rows, k: int, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """See `PolicyWorker.get_topk_logits`."""
        require_head(self.engine.config, "language", "get_topk_logits")
        if k < 1:
            raise BatchError(f"k is {k}; it must be at least 1")
        head = HeadRequest(frozenset({"topk"}), self.temperature, k)
        return self.score_rows(data, head, micro_batch_size, positions)

    def get_token_set_logprobs(self, data: Rows, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """See `PolicyWorker.get_token_set_logprobs`."""
        require_head(self.engine.config, "language", "get_token_set_logprobs")
        head = HeadRequest(temperature=self.temperature, token_sets=TOKEN_SETS)
        scored = self.score_rows(data, head, micro_batch_size, positions)
        return BatchedDataDict({"set_logprobs": scored["set_logprobs"]})

    def score(self, data: Rows, micro_batch_size: int | None = None) -> Rows:
        """See `PolicyWorker.score`."""
        require_head(self.engine.config, "score", "score")
        scored = self.score_rows(data, HeadRequest(frozenset({"scores"})), micro_batch_size, "last")
        return BatchedDataDict({"scores": scored["scores"].sum(1)})  # at most one per row

    def get_values(self, data: Rows, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """See `PolicyWorker.get_values`."""
        require_head(self.engine.config, "value", "get_values")
        scored = self.score_rows(data, HeadRequest(frozenset({"scores"})), micro_batch_size, positions)
        return BatchedDataDict({"values": scored["scores"]})

    def use_reference_model(self) -> AbstractContextManager[None]:
        """See `PolicyWorker.use_reference_model`."""
        if self.reference is None:
            raise NotSupported("this worker keeps no reference weights; build it with init_reference_model=True")
        return self.residency.holding_reference(self.reference.use())

    def sync_reference(self, alpha: float) -> None:
        """See `PolicyWorker.sync_reference`."""
        self.residency.require_policy("sync_reference")
        reference = require_copy(self.reference, "sync_reference")
        self.residency.onload("model")
        reference.mix(alpha)

    def score_rows(self, data: Rows, head: HeadRequest, micro_batch_size: int | None, positions: str) -> Rows:
        """Return the head's results at each token, `[B, S, ...]` on the CPU; 0 at positions that were not requested."""
        scored = {
            name: torch.zeros((*data["input_ids"].shape, *shape), dtype=dtype)
            for name, (shape, dtype) in head.results.items()
        }
        if head.token_sets is not None:
            scored["set_logprobs"] = torch.zeros(data[head.token_sets].shape)
        with self.residency.memory.during("scoring"):
            outputs_of = self._outputs(data, head, values_step, micro_batch_size, positions)
        for microbatch, outputs in outputs_of:
            for name, part in outputs.items():
                scored[name][microbatch.rows, : part.shape[1]] = part
        return BatchedDataDict(scored)

    def _outputs(
        self, data: Rows, head: HeadRequest, step: Step, micro_batch_size: int | None, positions: str
    ) -> list[tuple[Microbatch, dict[str, Tensor]]]:
        """Run `step` on the rows of `data` without gradients; return each microbatch with its outputs, on the CPU."""
        self.residency.onload("model")
        config = self.engine.config
        tokens = config.batching.logprob_tokens or config.batching.tokens
        microbatches = self.microbatching.split(data, positions, micro_batch_size or config.logprob_batch_size, tokens)
        if not microbatches:
            return []
        if head.token_sets is not None:
            microbatches = with_token_sets(microbatches, head.token_sets, self.engine.device)
        results = self.engine.forward_backward(microbatches, head, step, forward_only=True)
        require_results(results, microbatches)
        real = [
            (batch, result) for batch, result in zip(on_host(microbatches), results, strict=True) if not batch.is_dummy
        ]
        names = list(real[0][1].outputs) if real else []
        values = iter(copy_to_cpu([result.outputs[name] for _, result in real for name in names]))
        return [(batch, {name: next(values) for name in names}) for batch, _ in real]
