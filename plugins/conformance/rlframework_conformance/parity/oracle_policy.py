"""The oracle with the framework's own losses, and in the place of a run's policy and generation.

`OraclePolicy` has the methods of `rlframework.policy.client.Policy` that algorithms call, computed by the oracle in one
process; `StoredGeneration` answers prompts with tokens that depend on their seeds alone. With them an algorithm's own
code makes its batches. `oracle_step_with` takes an optimizer step some rows of a batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.generation.batch import batch_of
from rlframework.interfaces.generation import GenerationResult, WeightSpan
from rlframework.interfaces.loss import TOKEN_SETS, LossInput, needs_groups
from rlframework_conformance import cases
from rlframework_conformance.oracle import Oracle

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.loss import LossFunction

ELEMENTS = 2**26
"""Number of logits that the oracle holds at a time."""

Batch = BatchedDataDict[Any]

OracleStepFunction = Callable[[Oracle, Batch], tuple[float, float]]
"""Takes one step of the oracle on a batch; returns the loss before it and the gradient norm before clipping."""


def oracle_outputs(oracle: Oracle, batch: Batch, head: str = "language") -> Tensor:
    """Return what a policy with this `head` returns for a batch of any size.

    That is `get_logprobs` (language) and `get_values` (value), `[B, S]`, or `score` (score), `[B]`.
    """
    reads = {"language": LossInput.LOGPROBS, "value": LossInput.VALUES, "score": LossInput.SCORES}[head]
    with torch.no_grad():
        return torch.cat([_values(oracle, rows, reads, oracle.temperature) for rows in _row_slices(oracle, batch)])


def oracle_step_with(loss: LossFunction) -> OracleStepFunction:
    """Return a step function that applies `loss` to the oracle's outputs, so only engines are compared.

    By the contract of losses, the sum over shards of a batch equals the loss of the batch, if groups stay whole. A
    batch without valid tokens and a non-finite gradient take no step.
    """

    def oracle_step(oracle: Oracle, batch: Batch) -> tuple[float, float]:
        mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].float()
        tokens, sequences = mask.sum(), batch["sample_mask"].float().sum()
        if not tokens:
            return 0.0, 0.0
        oracle.model.zero_grad()
        slices = [batch] if needs_groups(loss) else _row_slices(oracle, batch)
        total = 0.0
        for rows in slices:
            value, _ = oracle_loss(oracle, rows, loss, sequences, tokens)
            value.backward()
            total += float(value.detach())
        gradients = [parameter.grad for parameter in oracle.model.parameters() if parameter.grad is not None]
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        if torch.tensor(norm).isfinite():
            oracle.descend(total)
        return total, norm

    return oracle_step


def oracle_loss(
    oracle: Oracle, rows: Batch, loss: LossFunction, sequences: Tensor, tokens: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Return the share of `rows` in the loss, with gradient, and in its metrics.

    `sequences`, `tokens`: the valid ones of the global batch.
    """
    wanted = (rows["token_mask"] * rows["sample_mask"][:, None])[:, 1:] != 0
    temperature = oracle.temperature if loss.at_sampling_temperature else 1.0
    values = _values(oracle, rows, loss.input_type, temperature)
    if loss.input_type == LossInput.SCORES:
        values = values * (rows["sample_mask"] != 0)
    else:
        values = values[:, 1:].where(wanted if values.dim() == 2 else wanted[..., None], 0.0)
    if loss.wants_entropy:
        differentiable = getattr(loss, "entropy_gradient", False)
        entropy = (oracle.differentiable_entropy if differentiable else oracle.entropy)(rows, temperature)
        rows = BatchedDataDict({**rows, "entropy": entropy[:, 1:] * wanted})
    return loss(values, rows, sequences, tokens)


def _values(oracle: Oracle, rows: Batch, reads: LossInput, temperature: float) -> Tensor:
    """Return what a loss with this input reads of whole rows, with an entry for position 0, which is 0."""
    if reads == LossInput.SCORES:
        return oracle.last_values(rows)
    if reads == LossInput.VALUES:
        real = torch.arange(rows["input_ids"].shape[1]) < rows["input_lengths"][:, None]
        before: Tensor = torch.nn.functional.pad(oracle.values(rows)[:, :-1], (1, 0)) * real
        return before
    logprobs = oracle.differentiable_logprobs(rows, temperature)
    if reads == LossInput.LOGPROBS:
        return logprobs
    return torch.cat((logprobs[..., None], oracle.differentiable_set_logprobs(rows, temperature)), -1)


def _row_slices(oracle: Oracle, batch: Batch) -> Iterator[Batch]:
    head = oracle.model.get_output_embeddings()
    outputs = 1 if head is None else head.weight.shape[0]
    count = max(1, ELEMENTS // (batch["input_ids"].shape[1] * outputs))
    for start in range(0, batch.size, count):
        rows: Batch = batch.slice(start, min(start + count, batch.size))
        yield rows


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
