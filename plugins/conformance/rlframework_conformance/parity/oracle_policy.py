"""The oracle in the place of a run's policy and generation, so that an algorithm's own code makes its batches.

`OraclePolicy` has the methods of `rlframework.policy.client.Policy` that algorithms call, computed by the oracle in one
process; `StoredGeneration` answers prompts with tokens that depend on their seeds alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rlframework.base.errors import NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.generation.batch import batch_of
from rlframework.interfaces.generation import GenerationResult, WeightSpan
from rlframework.interfaces.loss import TOKEN_SETS, LossInput
from rlframework_conformance import cases
from rlframework_conformance.parity.oracle_steps import oracle_loss, oracle_outputs, oracle_step_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.loss import LossFunction
    from rlframework_conformance.oracle import Oracle

Batch = BatchedDataDict[Any]


class OraclePolicy:
    """A policy of one worker that the oracle computes; it keeps the batch of each optimizer step, and the loss.

    `new_oracle` creates the oracle, and once more the reference policy, when it is needed.
    """

    data_parallel_size = 1

    def __init__(self, config: RunConfig, new_oracle: Callable[[], Oracle]) -> None:
        self.config, self.capabilities = config, frozenset[str]()
        self._oracle, self._new_oracle = new_oracle(), new_oracle
        self.batches: list[Batch] = []
        """The batches of the optimizer steps so far."""
        self.loss: LossFunction | None = None
        """The loss of all of them; None before the first."""

    def disturb(self, noise: float) -> None:
        """Add random numbers to the weights, with `noise` times the standard deviation of each tensor."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self._oracle.model.parameters():
                weight += noise * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)

    def prepare_for_training(self) -> None:
        """Do nothing: the oracle is always ready."""

    def prepare_for_lp_inference(self) -> None:
        """Do nothing: the oracle is always ready."""

    @cached_property
    def _reference(self) -> Oracle:
        return self._new_oracle()

    def rest(self) -> None:
        """Do nothing: there is nothing to free."""

    def get_logprobs(self, data: Batch, micro_batch_size: int | None = None, positions: str = "all") -> Batch:
        """See `PolicyWorker.get_logprobs`."""
        return BatchedDataDict({"logprobs": _scored(self._oracle, data, positions)})

    def get_reference_policy_logprobs(
        self, data: Batch, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Batch:
        """See `PolicyWorker.get_reference_policy_logprobs`."""
        return BatchedDataDict({"reference_logprobs": _scored(self._reference, data, positions)})

    def get_values(self, data: Batch, micro_batch_size: int | None = None, positions: str = "all") -> Batch:
        """See `PolicyWorker.get_values`."""
        return BatchedDataDict({"values": _counted(oracle_outputs(self._oracle, data, "value"), data, positions)})

    def score(self, data: Batch, micro_batch_size: int | None = None) -> Batch:
        """See `PolicyWorker.score`."""
        return BatchedDataDict({"scores": oracle_outputs(self._oracle, data, "score")})

    def get_topk_logits(
        self, data: Batch, k: int, micro_batch_size: int | None = None, positions: str = "all"
    ) -> Batch:
        """See `PolicyWorker.get_topk_logits`."""
        logits, indices = self._oracle.top_logits(data, k)
        first = self._oracle.set_logprobs({**data, TOKEN_SETS: indices[..., :1]})[..., 0]
        found = {"topk_logits": logits, "topk_indices": indices, "topk_normalizers": logits[..., 0] - first}
        return BatchedDataDict({name: _counted(values, data, positions) for name, values in found.items()})

    def get_token_set_logprobs(self, data: Batch, micro_batch_size: int | None = None, positions: str = "all") -> Batch:
        """See `PolicyWorker.get_token_set_logprobs`."""
        return BatchedDataDict({"set_logprobs": _counted(self._oracle.set_logprobs(data), data, positions)})

    def train(self, data: Batch, loss_fn: LossFunction, gbs: int | None = None) -> dict[str, Any]:
        """Take the optimizer steps of `Policy.train`, and keep their batches."""
        if self.loss is not None and self.loss is not loss_fn:
            raise NotSupported("it trains one policy with several losses, and parity compares the steps of one")
        if loss_fn.input_type == LossInput.LOGITS:
            raise NotSupported("its loss reads whole rows of logits, which are not compared")
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
        tokens = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].sum()
        with torch.no_grad():
            _, metrics = oracle_loss(self._oracle, batch, loss, batch["sample_mask"].sum(), tokens)
        total, norm = oracle_step_with(loss)(self._oracle, batch)
        return total, norm, float(tokens), {name: float(value) for name, value in metrics.items()}


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

    def generate(self, data: Batch, greedy: bool = False, *, temperature: float | None = None) -> Batch:
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
    return _counted(oracle_outputs(oracle, data), data, positions)


def _counted(found: Tensor, data: Batch, positions: str) -> Tensor:
    """Return `found [B, S, ...]` with zeros in place of what is not asked for."""
    mask = torch.ones(found.shape[:2])
    if positions != "all":
        mask = data["token_mask"] * (data["sample_mask"][:, None] if positions == "loss" else 1.0)
    return found.where(mask.reshape(*mask.shape, *[1] * (found.dim() - 2)) != 0, 0)


def _copy(batch: Batch) -> Batch:
    """Copy the tensors of a batch, which the algorithm may change later."""
    return BatchedDataDict({key: value.clone() if torch.is_tensor(value) else value for key, value in batch.items()})
