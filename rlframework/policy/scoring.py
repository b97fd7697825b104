"""What a worker computes of rows without learning from them: log-probabilities, entropies, the likeliest tokens.

`PolicyWorkerBase` derives from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import PolicyConfig
from rlframework.errors import BatchError, NotSupported
from rlframework.interfaces.data_processor import Microbatch
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.microbatches.row_checks import check_rows
from rlframework.policy.engine import Engine
from rlframework.policy.head.request import HeadRequest
from rlframework.policy.step_functions import require_results, values_step

Rows = BatchedDataDict[Any]


class Scoring(Engine, PolicyWorker, ABC):
    """The calls that look at rows, on the primitives of an engine."""

    config: PolicyConfig
    _reference: dict[str, Tensor] | None

    @abstractmethod
    def _microbatches(self, data: Rows, positions: str, rows: int, tokens: int | None) -> list[Microbatch]:
        """This rank's microbatches of `data`, and dummies."""

    @abstractmethod
    def _bring(self, *parts: str) -> dict[str, int]:
        """What of the model and the optimizer is away comes to the device."""

    @abstractmethod
    def _temperature(self) -> float:
        """At which samples are drawn."""

    def get_logprobs(
        self,
        data: Rows,
        micro_batch_size: int | None = None,
        positions: str = "all",
        entropy: bool = False,
    ) -> Rows:
        """See `PolicyWorker.get_logprobs`."""
        self._require_head("language", "get_logprobs")
        wants = {"logprobs", "entropy"} if entropy else {"logprobs"}
        return self._looked_at(data, HeadRequest(frozenset(wants), self._temperature()), micro_batch_size, positions)

    def get_topk_logits(self, data: Rows, k: int, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """See `PolicyWorker.get_topk_logits`."""
        if k < 1:
            raise BatchError(f"the {k} likeliest tokens were asked for; the least is 1")
        self._require_head("language", "get_topk_logits")
        head = HeadRequest(frozenset({"topk"}), self._temperature(), k)
        return self._looked_at(data, head, micro_batch_size, positions)

    def score(self, data: Rows, micro_batch_size: int | None = None) -> Rows:
        """See `PolicyWorker.score`."""
        self._require_head("score", "score")
        found = self._looked_at(data, HeadRequest(frozenset({"scores"})), micro_batch_size, "last")
        return BatchedDataDict({"scores": found["scores"].sum(1)})  # each row has one at most

    def _require_head(self, head: str, method: str) -> None:
        if self.config.head != head:
            raise NotSupported(
                f"{method} needs a model with policy.head={head}, and policy.model_name={self.config.model_name!r} was "
                f"loaded with policy.head={self.config.head}"
            )

    def get_reference_policy_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Rows:
        """See `PolicyWorker.get_reference_policy_logprobs`."""
        with self.use_reference_model():
            logprobs = self.get_logprobs(data, micro_batch_size, positions)
        return BatchedDataDict({"reference_logprobs": logprobs["logprobs"]})

    def _looked_at(self, data: Rows, head: HeadRequest, micro_batch_size: int | None, positions: str) -> Rows:
        """What the head computes of each token, at its place in `[B, S, ...]` on the CPU; 0 where it does not."""
        check_rows(data)
        self._bring("model")
        batching = self.config.batching
        tokens = batching.logprob_tokens or batching.tokens
        microbatches = self._microbatches(data, positions, micro_batch_size or self.config.logprob_batch_size, tokens)
        found = {
            name: torch.zeros((*data["input_ids"].shape, *shape), dtype=dtype)
            for name, (shape, dtype) in head.results.items()
        }
        if not microbatches:
            return BatchedDataDict(found)
        results = self.forward_backward(microbatches, head, values_step, forward_only=True)
        require_results(results, microbatches)
        for result, microbatch in zip(results, microbatches, strict=True):
            for name, values in result.outputs.items() if not microbatch.is_dummy else ():
                found[name][microbatch.rows, : values.shape[1]] = values.cpu()
        return BatchedDataDict(found)

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """See `PolicyWorker.use_reference_model`."""
        if self._reference is None:
            raise NotSupported("this worker keeps no reference weights; build it with init_reference_model=True")
        current = self.snapshot()
        self.restore(self._reference)
        try:
            yield
        finally:
            self.restore(current)
