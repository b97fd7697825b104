"""Scoring rows without training: log-probabilities, entropies, top-k tokens, reward-model scores.

`PolicyWorkerBase` derives from `Scoring`.
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
    """Calls that score rows, on the primitives of an engine."""

    config: PolicyConfig
    _reference: dict[str, Tensor] | None

    @abstractmethod
    def _microbatches(self, data: Rows, positions: str, rows: int, tokens: int | None) -> list[Microbatch]:
        """This rank's microbatches of `data`, followed by dummies."""

    @abstractmethod
    def _onload(self, *parts: str) -> dict[str, int]:
        """Onload those of `parts` ("model", "optimizer") that are offloaded."""

    @abstractmethod
    def _temperature(self) -> float:
        """The sampling temperature."""

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
        return self._score_rows(data, HeadRequest(frozenset(wants), self._temperature()), micro_batch_size, positions)

    def get_topk_logits(self, data: Rows, k: int, micro_batch_size: int | None = None, positions: str = "all") -> Rows:
        """See `PolicyWorker.get_topk_logits`."""
        if k < 1:
            raise BatchError(f"k is {k}; it must be at least 1")
        self._require_head("language", "get_topk_logits")
        head = HeadRequest(frozenset({"topk"}), self._temperature(), k)
        return self._score_rows(data, head, micro_batch_size, positions)

    def score(self, data: Rows, micro_batch_size: int | None = None) -> Rows:
        """See `PolicyWorker.score`."""
        self._require_head("score", "score")
        scored = self._score_rows(data, HeadRequest(frozenset({"scores"})), micro_batch_size, "last")
        return BatchedDataDict({"scores": scored["scores"].sum(1)})  # at most one per row

    def _require_head(self, head: str, method: str) -> None:
        if self.config.head != head:
            raise NotSupported(
                f"{method} needs policy.head={head}, but policy.model_name={self.config.model_name!r} was loaded "
                f"with policy.head={self.config.head}"
            )

    def get_reference_policy_logprobs(
        self, data: Rows, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Rows:
        """See `PolicyWorker.get_reference_policy_logprobs`."""
        with self.use_reference_model():
            logprobs = self.get_logprobs(data, micro_batch_size, positions)
        return BatchedDataDict({"reference_logprobs": logprobs["logprobs"]})

    def _score_rows(self, data: Rows, head: HeadRequest, micro_batch_size: int | None, positions: str) -> Rows:
        """The head's results at each token, `[B, S, ...]` on the CPU; 0 at positions that were not requested."""
        check_rows(data)
        self._onload("model")
        batching = self.config.batching
        tokens = batching.logprob_tokens or batching.tokens
        microbatches = self._microbatches(data, positions, micro_batch_size or self.config.logprob_batch_size, tokens)
        scored = {
            name: torch.zeros((*data["input_ids"].shape, *shape), dtype=dtype)
            for name, (shape, dtype) in head.results.items()
        }
        if not microbatches:
            return BatchedDataDict(scored)
        results = self.forward_backward(microbatches, head, values_step, forward_only=True)
        require_results(results, microbatches)
        for result, microbatch in zip(results, microbatches, strict=True):
            for name, values in result.outputs.items() if not microbatch.is_dummy else ():
                scored[name][microbatch.rows, : values.shape[1]] = values.cpu()
        return BatchedDataDict(scored)

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
