"""The bound on the difference between the log-probabilities of sampled tokens of engine and policy, and its error.

A generation engine returns the log-probability of each token that it samples, and the policy scores the same tokens. If
the engine has the policy's weights and computes the policy's function, both agree up to rounding: 3e-7 nats in the mean
in fp32, 0.03 to 0.07 in bfloat16. An engine that decodes with weights of an earlier version, drops the temperature
after the first token, or returns the log-probabilities of another request is off by 0.1 nats and more, and the run
would learn from tokens that its policy did not choose. No other check sees that: the weights have arrived, and the
results have their form.

The bound is in nats, on the mean over the tokens of a global batch: the limit of the less exact dtype of both sides,
tightened by what the run itself has measured so far (`NoiseBound`). In fp32 each token is bounded too, by `LARGEST`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import SamplingMismatch
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import RunConfig
from rlframework.huggingface.model_directories import first_size, text_config
from rlframework.interfaces.policy_worker import SAMPLED_NOW, SampledDifference, SamplingBound, TrainResult
from rlframework.weight_sync.proof import NoiseBound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.rollout.parts import Parts

_LOG = logging.getLogger(__name__)

HEADROOM = {"float32": 20.0, "tf32": 4.0, "float16": 4.0, "bfloat16": 4.0}
"""How many times the noise so far a step may have, by dtype."""
LARGEST = {"float32": 0.05}
"""The largest difference of a single token by dtype, in nats; other dtypes have long tails, and no bound."""
_ENOUGH = 200
"""Tokens whose mean difference tells the noise of a run; that of fewer varies too much to tighten the bound."""
_SHOWN = 3
"""Tokens that the error shows, and warnings that are logged."""


class SamplingCheck:
    """Bounds the difference in each call of `train` of a run, by `generation.logprob_check`."""

    def __init__(self, config: RunConfig, declared: Callable[[], Mapping[str, float]]) -> None:
        """`declared()` returns the engine's `probe_bounds`."""
        self._config, self._check, self._declared = config, config.generation.logprob_check, declared
        self._warned = 0

    @cached_property
    def mean(self) -> NoiseBound:
        """The bound on the mean."""
        policy, generation = self._config.policy, self._config.generation
        apart = generation.workers is not None and generation.refit.dtype != "auto"
        dtypes = {policy.precision, generation.refit.dtype if apart else policy.precision}
        return NoiseBound.of(self._check.mean, self._declared(), dtypes=dtypes, tf32=policy.tf32, headroom=HEADROOM)

    @property
    def bound(self) -> SamplingBound:
        """The bound of the next step."""
        largest = self._check.largest
        if largest is None:
            largest = math.inf if self._has_experts else LARGEST.get(self.mean.dtype, math.inf)
        return SamplingBound(self.mean.value, largest)

    def of_workers(self, data: BatchedDataDict[Any]) -> SamplingBound | None:
        """Return the bound for workers to withhold a step by; infinite if it only warns, None if there is no check."""
        if self._check.action == "off" or "generation_logprobs" not in data:
            return None
        return self.bound if self._check.action == "stop" else SamplingBound(math.inf, math.inf)

    def after(self, step: int, data: BatchedDataDict[Any], result: TrainResult, parts: Parts) -> None:
        """Compare what `train` has measured with the bound. Raises `SamplingMismatch`, or warns, as configured."""
        sampled = result.get("sampled")
        if sampled is None or not sampled.tokens or math.isnan(sampled.mean):  # NaN is what the gradient norm reports
            return
        bound = self.bound
        if sampled.mean <= bound.mean and sampled.largest <= bound.largest:
            if sampled.tokens >= _ENOUGH:
                self.mean.accepted(sampled.mean)
        elif sampled.withheld:
            raise SamplingMismatch(
                f"{self._described(step, sampled, bound)}{_most_different(data, parts)}{self._advice}"
            )
        elif self._warned < _SHOWN:
            self._warned += 1
            _LOG.warning("%s%s", self._described(step, sampled, bound), self._advice)

    @cached_property
    def _has_experts(self) -> bool:
        """Whether the model routes tokens to experts: where two are nearly equal, rounding chooses between them."""
        model = text_config(self._config.policy.model_name, self._config.policy.trust_remote_code)
        return bool(first_size(model, "num_experts", "num_local_experts", "n_routed_experts"))

    def _described(self, step: int, sampled: SampledDifference, bound: SamplingBound) -> str:
        largest = f", {bound.largest:g} at most" if math.isfinite(bound.largest) else ""
        withheld = " No optimizer step was taken with them." if sampled.withheld else ""
        return (
            f"step {step}: the log-probabilities that generation engine {self._config.generation.name!r} returned are "
            f"not the policy's: over {sampled.tokens:g} tokens they differ by {sampled.mean:.2g} nats in the mean and "
            f"{sampled.largest:.2g} at most, where {bound.mean:.2g} in the mean{largest} is what rounding explains in "
            f"{self.mean.dtype}.{withheld}"
        )

    @property
    def _advice(self) -> str:
        return (
            " The engine samples with other weights, at another temperature, or computes another function than the "
            f"policy: `rlframework conformance {self._config.generation.name}` looks for what is wrong. If it is sound "
            "and only less exact, raise generation.logprob_check.mean (largest); action=warn goes on"
        )


def _most_different(data: BatchedDataDict[Any], parts: Parts) -> str:
    """Return where the log-probabilities differ, as text: in first tokens, in rows, and the tokens that differ most."""
    if "prev_logprobs" in data:
        scored = data["prev_logprobs"]
    else:
        parts.policy.prepare_for_lp_inference()
        scored = parts.policy.get_logprobs(data, positions="loss")["logprobs"]
    sampled = data["token_mask"] != 0
    counted = sampled & (data["sample_mask"][:, None] != 0)
    if SAMPLED_NOW in data:
        counted &= data[SAMPLED_NOW] != 0
    size = torch.where(counted, (scored - data["generation_logprobs"]).abs(), 0.0)
    first = counted & (sampled.cumsum(1) == 1)
    rows = counted.any(1)
    means = (size.sum(1) / counted.sum(1).clamp(min=1))[rows]
    summary = (
        f" The first tokens of rows differ by {_mean(size, first)} in the mean, later ones by "
        f"{_mean(size, counted & ~first)}; {int((means > means.max() / 4).sum())} of {len(means)} rows are within a "
        "factor of four of the worst. The largest:"
    )
    lines = [summary]
    for position in size.flatten().topk(min(_SHOWN, int(counted.sum()))).indices.tolist():
        row, column = divmod(position, size.shape[1])
        lines.append(_token(data, scored, row, column, parts.tokenizer))
    return "\n".join(lines) + "\n"


def _mean(size: Tensor, where: Tensor) -> str:
    return f"{float(size[where].mean()):.2g}" if bool(where.any()) else "nothing (there are none)"


def _token(
    data: BatchedDataDict[Any], scored: Tensor, row: int, column: int, tokenizer: PreTrainedTokenizerBase
) -> str:
    ids, first = data["input_ids"][row].tolist(), int(data["token_mask"][row].argmax())
    engine, policy = float(data["generation_logprobs"][row, column]), float(scored[row, column])
    return (
        f"  row {row}, token {column - first} after its prompt, {tokenizer.decode([ids[column]])!r} ({ids[column]}): "
        f"engine {engine:.4g}, policy {policy:.4g}; its prompt ends with {tokenizer.decode(ids[:first])[-60:]!r}"
    )
