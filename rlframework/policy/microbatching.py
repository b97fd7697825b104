"""A worker's rows as microbatches, and the results of these: `step` functions and the reduction of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import BatchTypeError
from rlframework.batch.batch_rows import copy_to
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.collectives import max_over_ranks, sum_over_ranks
from rlframework.interfaces.data_processor import Batching, DataProcessor, GlobalBatch, Microbatch, RowsToPlan
from rlframework.interfaces.loss import LossFunction, LossInput, head_of
from rlframework.interfaces.policy_worker import SAMPLED_NOW, Rows, SampledDifference, SamplingBound
from rlframework.policy.engine import Engine, Step, StepResult
from rlframework.policy.head.patch import HeadOutput
from rlframework.policy.microbatches.data_processor import make_dummy
from rlframework.policy.microbatches.global_batch import read_group_ids
from rlframework.policy.microbatches.on_demand import Made, on_device
from rlframework.policy.profiling import LOSS, trace_span


@dataclass
class Microbatching:
    """Groups rows into microbatches as `policy.batching` says, within the constraints of an engine."""

    engine: Engine
    processor: DataProcessor

    def batching(self, data: Rows | None = None) -> Batching:
        """Return the mode in which rows are grouped; with `data`, `auto` chooses one that they fit."""
        name, engine = self.engine.config.batching.chosen, self.engine
        if name is not None:
            return self.processor.batching(name)
        preferred = self.processor.batching(engine.preferred_batching())
        return preferred if data is None else preferred.for_rows(data, engine.microbatch_rule())

    def global_batch(self, data: Rows, loss_fn: LossFunction, index: int, rows: int | None) -> GlobalBatch:
        """Return this rank's rows of global batch `index`, and its counts: `DataProcessor.process_global_batch`."""
        group = self.engine.data_parallel_group()
        return self.processor.process_global_batch(data, loss_fn, group, batch_idx=index, batch_size=rows)

    def split(
        self, data: Rows, positions: str, rows: int, tokens: int | None, groups: bool = False
    ) -> Sequence[Microbatch]:
        """Return this rank's microbatches, plus dummies up to the count that all ranks and the engine require.

        `rows`: rows of a padded microbatch; `tokens`: maximum of a dynamic or packed one (None: the engine's default).
        `groups`: rows with equal `group_ids` share a microbatch. They are made in CPU memory and copied to the device
        when the engine asks for them.
        """
        engine, batching = self.engine, self.batching(data)
        rule, ids = engine.microbatch_rule(), read_group_ids(data) if groups else None
        all_rows = RowsToPlan(data, torch.ones(data.size, dtype=torch.bool), ids)
        preferred = engine.preferred_tokens()
        limits = batching.limits(all_rows, rule, most_rows=rows, tokens=tokens, preferred=preferred)
        found = self.processor.microbatches(data, limits, rule, positions=positions, device=torch.device("cpu"))
        most = int(max_over_ranks(torch.tensor(len(found)), engine.data_parallel_group()))
        count = max(most, rule.count_minimum)
        count += -count % rule.count_multiple
        if count > len(found):
            dummy = make_dummy(data, lambda data, row: batching.make(data, row, limits, rule, "all"))
            real = found
            found = Made(count, lambda index: real[index] if index < len(real) else dummy)
        return on_device(found, engine.device)


def _dense(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Scatter head values `[N, ...]` to their targets in `[b, S', ...]`, 0 elsewhere; differentiable."""
    if len(values) != len(microbatch.scatter):
        raise RuntimeError(
            f"the head returned {len(values)} rows of values for a microbatch with {len(microbatch.scatter)} positions"
            "; it must run at exactly Microbatch.head_positions, as inside HeadPatch.computing"
        )
    rows, width = microbatch.data_dict["input_ids"].shape
    flat = values.new_zeros((rows * width, *values.shape[1:])).index_put((microbatch.scatter,), values)
    return flat.view(rows, width, *values.shape[1:])


def _require_output(output: HeadOutput) -> None:
    if not isinstance(output, HeadOutput):
        raise TypeError(
            f"`step` takes a HeadOutput, but got a {type(output).__name__}; convert the patched model's output with "
            "read_head_output(values, head)"
        )


def require_results(results: Sequence[StepResult], microbatches: Sequence[Microbatch]) -> None:
    """Raise a RuntimeError unless `forward_backward` returned one result per microbatch."""
    if isinstance(results, Sequence) and len(results) == len(microbatches):
        return
    given = f"{len(results)} results" if isinstance(results, Sequence) else type(results).__name__
    raise RuntimeError(
        f"the engine's forward_backward returned {given} for {len(microbatches)} microbatches; it must return a list "
        "with the StepResult of each, in order, on every rank"
    )


def values_step(output: HeadOutput, microbatch: Microbatch) -> StepResult:
    """Scatter all of the head's results to `[b, S', ...]` each, by the names of `HeadRequest.results`."""
    _require_output(output)
    return StepResult(outputs={name: _dense(values, microbatch) for name, values in output.results().items()})


def checked_result(loss_fn: LossFunction, result: Any, *, needs_gradient: bool) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the loss and metrics that `loss_fn` returned; raise `BatchTypeError` unless they are as it must return."""
    match result:
        case (Tensor(ndim=0) as loss, Mapping() as metrics):
            wrong = [
                f"the metric {name!r} is {_kind(value)}" for name, value in metrics.items() if not _is_number(value)
            ]
            if "loss" in metrics:
                wrong.append("the metric 'loss' has the name of the loss itself; rename it")
            if needs_gradient and not loss.requires_grad:
                wrong.append("the loss has no gradient")
            if not wrong:
                return loss, metrics
        case tuple() | list():
            wrong = [f"a {type(result).__name__} of {', '.join(map(_kind, result)) or 'nothing'}"]
        case _:
            wrong = [_kind(result)]
    raise BatchTypeError(
        f"a loss returns two values, a 0-dim tensor with a gradient and a dictionary of metrics, which are numbers or "
        f"0-dim tensors; {type(loss_fn).__name__} returned something else: {wrong[0]}"
    )


def _is_number(value: Any) -> bool:
    return value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, Real)


def _kind(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def loss_step(
    loss_fn: LossFunction,
    global_valid_seqs: Tensor,
    global_valid_toks: Tensor,
    check: SampledTokensCheck | None = None,
) -> Step:
    """Return the step that computes the loss of a microbatch. A dummy has a loss of 0 and no metrics.

    `check`: adds its metrics to those of the loss.
    """
    scores_rows = head_of(loss_fn) == "score"

    def step(output: HeadOutput, microbatch: Microbatch) -> StepResult:
        _require_output(output)
        values = next((one for one in (output.logprobs, output.logits, output.scores) if one is not None), None)
        if values is None:
            raise RuntimeError(
                "the HeadOutput has neither logprobs, logits nor scores; compute what HeadRequest.wants names"
            )
        if output.set_logprobs is not None:
            values = torch.cat((values[:, None], output.set_logprobs), 1)
        if microbatch.is_dummy:
            return StepResult(loss=values.sum() * 0.0)
        data = microbatch.data_dict
        if output.entropy is not None:
            data = BatchedDataDict({**data, "entropy": _dense(output.entropy, microbatch)[:, 1:]})
        with trace_span(LOSS):
            dense = _dense(values, microbatch)
            read = dense.sum(1) if scores_rows else dense[:, 1:]  # of a row, one position has a score
            result = loss_fn(read, data, global_valid_seqs, global_valid_toks)
            loss, metrics = checked_result(loss_fn, result, needs_gradient=read.requires_grad)
            if check is not None:
                metrics = {**metrics, **check.metrics(read, data)}
        return StepResult(loss=loss, outputs={**metrics, "loss": loss.detach()})

    return step


@dataclass(frozen=True)
class PendingMetrics:
    """Metrics on their way from the device; `values` is in CPU memory."""

    names: Sequence[str]
    values: Tensor
    arrived: torch.cuda.Event | None = None

    def read(self) -> dict[str, float]:
        """Return the metrics; wait until they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return dict(zip(self.names, self.values.tolist(), strict=True))


def reduce_metrics(parts: Sequence[Mapping[str, Any]], group: Any, device: torch.device) -> PendingMetrics:
    """Reduce the metrics of microbatches to those of a global batch: a sum, or the extreme for `_min` and `_max`.

    A rank without real microbatches contributes nothing; names may differ between ranks. Does not wait for the device.
    """
    names = _all_names(sorted({name for part in parts for name in part} | {"loss"}), group)
    sums = [name for name in names if not name.endswith(("_min", "_max"))]
    extremes = [name for name in names if name.endswith(("_min", "_max"))]
    reduced = sum_over_ranks(_table(parts, sums, [0.0] * len(sums), device).sum(0), group)
    if extremes:
        signs = [1.0 if name.endswith("_max") else -1.0 for name in extremes]
        sign = copy_to(torch.tensor(signs, dtype=torch.float64), device)
        table = _table(parts, extremes, [-math.inf * one for one in signs], device) * sign
        reduced = torch.cat((reduced, max_over_ranks(table.amax(0), group) * sign))
    if device.type == "cpu":
        return PendingMetrics([*sums, *extremes], reduced)
    on_cuda = device.type == "cuda"
    here = torch.empty(reduced.shape, dtype=reduced.dtype, pin_memory=on_cuda).copy_(reduced, non_blocking=True)
    arrived = torch.cuda.Event() if on_cuda else None
    if arrived is not None:
        arrived.record()
    return PendingMetrics([*sums, *extremes], here, arrived)


def average_metrics(batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of several batches, each over those that have it; take the extreme for `_min` and `_max`."""
    names = sorted({name for batch in batches for name in batch})
    values = {name: [batch[name] for batch in batches if name in batch] for name in names}
    kinds: dict[str, Callable[[list[float]], float]] = {"_min": min, "_max": max}
    return {name: kinds.get(name[-4:], _mean)(present) for name, present in values.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _all_names(names: list[str], group: Any) -> list[str]:
    if group is None:
        return names
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, names, group=group)
    return sorted({name for names in gathered for name in names})


def _table(
    parts: Sequence[Mapping[str, Any]], names: Sequence[str], absent: Sequence[float], device: torch.device
) -> Tensor:
    """`[parts + 1, names]` float64 on `device`; `absent` where a part lacks a name, and in the last row.

    Tensors on the device stay there: they are stacked, and take the places of the numbers in one operation.
    """
    numbers = torch.tensor([absent] * (len(parts) + 1), dtype=torch.float64)
    places, scalars = [], []
    for row, part in enumerate(parts):
        for column, name in enumerate(names):
            value = part.get(name, absent[column])
            if isinstance(value, Tensor) and value.device.type != "cpu":
                places.append(row * len(names) + column)
                scalars.append(value)
            else:
                numbers[row, column] = value
    if not scalars:
        return copy_to(numbers, device)
    table = copy_to(numbers, device).flatten()
    table[copy_to(torch.tensor(places), device)] = torch.stack(scalars).to(torch.float64)
    return table.view(numbers.shape)


_SUM, _COUNT, _LARGEST = "sampled_difference", "sampled_tokens", "sampled_difference_max"


@dataclass(frozen=True)
class SampledTokensCheck:
    """Compares the log-probabilities of sampled tokens in a global batch with those of the engine.

    The loss has the policy's anyway, so this costs three operations on `[B, S]` for each microbatch, and that the host
    waits for the backward pass before it asks for the optimizer step.
    """

    bound: SamplingBound

    @classmethod
    def of(
        cls, bound: SamplingBound | None, data: Rows, loss: LossFunction, *, same_temperature: bool
    ) -> SampledTokensCheck | None:
        """Return the check with `bound`, or None where the loss gets no log-probabilities to compare."""
        comparable = same_temperature and loss.input_type in (LossInput.LOGPROBS, LossInput.TOKEN_SETS)
        return cls(bound) if bound is not None and comparable and "generation_logprobs" in data else None

    @staticmethod
    def metrics(logprobs: Tensor, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the sums of a microbatch. `logprobs`: `[b, S-1]`, or `[b, S-1, 1 + K]` with those of token sets."""
        current = logprobs.detach() if logprobs.ndim == 2 else logprobs.detach()[..., 0]
        before = data["prev_logprobs"][:, 1:] if "prev_logprobs" in data else current  # of the weights that sampled
        counted = (data["token_mask"][:, 1:] != 0) & (data["sample_mask"][:, None] != 0)
        if SAMPLED_NOW in data:
            counted = counted & (data[SAMPLED_NOW][:, 1:] != 0)
        size = torch.where(counted, (before - data["generation_logprobs"][:, 1:]).abs(), 0.0)
        return {_SUM: size.sum(), _COUNT: counted.sum(), _LARGEST: size.max()}

    def of_batch(self, metrics: dict[str, float]) -> SampledDifference:
        """Take the sums over all microbatches out of `metrics`, and compare them with the bound."""
        total, count, largest = (metrics.pop(name, 0.0) for name in (_SUM, _COUNT, _LARGEST))
        mean = total / max(count, 1.0)
        return SampledDifference(mean, largest, count, mean > self.bound.mean or largest > self.bound.largest)
