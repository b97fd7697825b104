"""The oracle in the place of a run's policy and generation, so that an algorithm's own code makes its batches.

`OraclePolicy` has the methods of `rlframework.policy.client.Policy` that algorithms call, computed by the oracle in one
process; `StoredGeneration` answers prompts with tokens that depend on their seeds alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance import cases
from rlframework.conformance.parity.scenario import oracle_step_with, scores
from rlframework.errors import NotSupported
from rlframework.generation.batch import batch_of
from rlframework.interfaces.generation import GenerationResult, WeightSpan
from rlframework.interfaces.loss import LossInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rlframework.config.sections import RunConfig
    from rlframework.conformance.oracle import Oracle
    from rlframework.interfaces.loss import LossFunction

Batch = BatchedDataDict[Any]


class OraclePolicy:
    """A policy of one worker that the oracle computes; it keeps the batch of each optimizer step, and the loss.

    `new_oracle` creates the oracle, and once more the reference policy.
    """

    data_parallel_size = 1

    def __init__(self, config: RunConfig, new_oracle: Callable[[], Oracle]) -> None:
        self.config, self.capabilities = config, frozenset[str]()
        self._oracle, self._reference = new_oracle(), new_oracle()
        self.batches: list[Batch] = []
        """The batches of the optimizer steps so far."""
        self.loss: LossFunction | None = None
        """The loss of all of them; None before the first."""

    def prepare_for_training(self) -> None:
        """Do nothing: the oracle is always ready."""

    def prepare_for_lp_inference(self) -> None:
        """Do nothing: the oracle is always ready."""

    def get_logprobs(self, data: Batch, micro_batch_size: int | None = None, positions: str = "all") -> Batch:
        """See `PolicyWorker.get_logprobs`."""
        return BatchedDataDict({"logprobs": _scored(self._oracle, data, positions)})

    def get_reference_policy_logprobs(
        self, data: Batch, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Batch:
        """See `PolicyWorker.get_reference_policy_logprobs`."""
        return BatchedDataDict({"reference_logprobs": _scored(self._reference, data, positions)})

    def train(self, data: Batch, loss_fn: LossFunction, gbs: int | None = None) -> dict[str, Any]:
        """Take the optimizer steps of `Policy.train`, and keep their batches."""
        if self.loss is not None and self.loss is not loss_fn:
            raise NotSupported("it trains one policy with several losses, and parity compares the steps of one")
        if loss_fn.input_type != LossInput.LOGPROBS:
            raise NotSupported(f"its loss reads {loss_fn.input_type}, not log-probabilities")
        self.loss = loss_fn
        rows = gbs or self.config.policy.train_global_batch_size
        batches = [_copy(data.slice(start, start + rows)) for start in range(0, data.size, rows)]
        results = [self._step(batch, loss_fn) for batch in batches]
        self.batches += batches
        losses, norms, tokens, metrics = zip(*results, strict=True)
        return {
            "loss": sum(losses) / len(losses),
            "global_loss": torch.tensor(losses),
            "grad_norm": torch.tensor(norms),
            "lr": self.config.policy.optimizer.lr,
            "skipped": 0,
            "global_valid_toks": float(sum(tokens)),
            "metrics": {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]},
            "times": {},
        }

    def _step(self, batch: Batch, loss: LossFunction) -> tuple[float, float, float, dict[str, float]]:
        """Take one step; return its loss, gradient norm, number of tokens, and the loss's metrics before it."""
        mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
        rows: Batch = BatchedDataDict({**batch, "entropy": self._oracle.entropy(batch)[:, 1:] * mask})
        values = _scored(self._oracle, batch, "loss")[:, 1:]
        _, metrics = loss(values, rows, batch["sample_mask"].sum(), mask.sum())
        total, norm = oracle_step_with(loss)(self._oracle, batch)
        return total, norm, float(mask.sum()), {name: float(value) for name, value in metrics.items()}


class StoredGeneration:
    """Answers of up to `max_new_tokens` random tokens, which depend on each row's seed alone.

    Their log-probabilities are near those of the policy, as those of another engine are.
    """

    def __init__(self, policy: OraclePolicy, vocabulary: int, end: int, pad: int) -> None:
        """`vocabulary`: the number of token ids; answers that stop end with the token `end`, and `pad` pads rows."""
        self._policy, self._vocabulary, self._end, self._pad = policy, vocabulary, end, pad
        self._longest = policy.config.generation.max_new_tokens

    def prepare_for_generation(self) -> bool:
        """Return True: there are no weights to wait for."""
        return True

    def finish_generation(self) -> bool:
        """Return True: there is nothing to free."""
        return True

    def generate(self, data: Batch, greedy: bool = False) -> Batch:
        """See `Generation.generate`."""
        prompts = [row[:size] for row, size in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)]
        results = [self._answer(seed) for seed in data["seeds"].tolist()]
        output = batch_of(results, prompts, self._pad)
        rows: Batch = BatchedDataDict(
            {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]}
        )
        answered = torch.arange(rows["input_ids"].shape[1]) >= data["input_lengths"][:, None]
        scored = self._policy.get_logprobs(rows)["logprobs"] * answered
        output["logprobs"] = cases.with_prev_logprobs(rows, scored, int(data["seeds"][0]) % 2**31)["prev_logprobs"]
        return output

    def _answer(self, seed: int) -> GenerationResult:
        generator = torch.Generator().manual_seed(seed % 2**31)
        length = int(torch.randint(2, self._longest + 1, (), generator=generator))
        ids = torch.randint(3, self._vocabulary, (length,), generator=generator)
        stops = length < self._longest
        if stops:
            ids[-1] = self._end
        return GenerationResult(
            "", ids, torch.zeros(length), "stop" if stops else "length", (WeightSpan(0, length, 0),)
        )


def _scored(oracle: Oracle, data: Batch, positions: str) -> Tensor:
    found = scores(oracle, data)
    if positions != "all":
        found = found * data["token_mask"]
    return found * data["sample_mask"][:, None] if positions == "loss" else found


def _copy(batch: Batch) -> Batch:
    """Copy the tensors of a batch, which the algorithm may change later."""
    return BatchedDataDict({key: value.clone() if torch.is_tensor(value) else value for key, value in batch.items()})
