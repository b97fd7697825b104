"""The bound on sampled tokens: by dtype, by the run's own steps, and what happens beyond it."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from short_runs import short_run

from rlframework.algorithms.sampling_check import SamplingCheck
from rlframework.base.errors import SamplingMismatch
from rlframework.interfaces.policy_worker import SAMPLED_NOW, SampledDifference, SamplingBound

DATA: Any = {"generation_logprobs": torch.zeros(2, 4)}


def result_of(mean: float, largest: float = 0.0, *, withheld: bool = False, tokens: float = 900.0) -> Any:
    return {"sampled": SampledDifference(mean, largest, tokens, withheld)}


@pytest.fixture
def check(tiny_llama: Path, tmp_path: Path) -> Any:
    def make(*overrides: str, limits: Any = None) -> SamplingCheck:
        return SamplingCheck(short_run(tiny_llama, tmp_path, "grpo", *overrides), lambda: limits or {})

    return make


def test_the_bound_follows_the_noise_of_the_run_between_a_floor_and_the_limit(check: Any) -> None:
    """In fp32 the limit is 1e-3: then 20 times the largest mean, and at least 1e-4."""
    sampling: SamplingCheck = check()
    bounds = [sampling.bound.mean]
    for mean in (3e-7, 8e-6, 1e-6, 9e-5):
        sampling.after(1, DATA, result_of(mean), SimpleNamespace())  # type: ignore[arg-type]
        bounds.append(sampling.bound.mean)
    assert bounds == pytest.approx([1e-3, 1e-4, 1.6e-4, 1.6e-4, 1e-3])


@pytest.mark.parametrize(
    ("overrides", "limits", "bound"),
    [
        ((), {}, (1e-3, 0.05)),
        (("policy.precision=bfloat16",), {}, (0.3, math.inf)),
        (("policy.precision=bfloat16",), {"bfloat16": 0.5}, (0.5, math.inf)),
        (("generation.workers.group=processes", "generation.refit.dtype=bfloat16"), {}, (0.3, math.inf)),
        (("generation.logprob_check={mean: 0.7, largest: 2.0}",), {}, (0.7, 2.0)),
    ],
)
def test_the_bound_is_that_of_engine_and_trainer(check: Any, overrides: Any, limits: Any, bound: Any) -> None:
    assert check(*overrides, limits=limits).bound == SamplingBound(*bound)


def test_what_workers_get_depends_on_the_action_and_on_the_rows(check: Any) -> None:
    assert check().of_workers(DATA) == SamplingBound(1e-3, 0.05)
    assert check("generation.logprob_check.action=warn").of_workers(DATA) == SamplingBound(math.inf, math.inf)
    assert check("generation.logprob_check.action=off").of_workers(DATA) is None
    assert check().of_workers({"input_ids": torch.zeros(2, 4)}) is None  # type: ignore[arg-type]


def test_the_error_says_where_the_tokens_differ(check: Any) -> None:
    """Two rows after a prompt of two tokens: the second differs from its second token on; one token is not counted."""
    data: Any = {
        "input_ids": torch.arange(10).view(2, 5),
        "token_mask": torch.tensor([[0, 0, 1, 1, 1]]).repeat(2, 1),
        "sample_mask": torch.ones(2),
        "prev_logprobs": torch.full((2, 5), -1.0),
        "generation_logprobs": torch.tensor([[0, 0, -1.0, -1, -9], [0, 0, -1.0, -3, -4]]),
        SAMPLED_NOW: torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]).bool(),
    }
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(f"<{each}>" for each in ids))
    with pytest.raises(SamplingMismatch) as raised:
        check().after(4, data, result_of(1.0, 3.0, withheld=True), SimpleNamespace(tokenizer=tokenizer))
    message = str(raised.value)
    for part in (
        "step 4: the log-probabilities that generation engine 'transformers' returned are not the policy's",
        "over 900 tokens they differ by 1 nats in the mean and 3 at most",
        "0.001 in the mean, 0.05 at most is what rounding explains in float32. No optimizer step was taken",
        "The first tokens of rows differ by 0 in the mean, later ones by 1.7; 1 of 2 rows are",  # (0 + 2 + 3) / 3
        "row 1, token 2 after its prompt, '<9>' (9): engine -4, policy -1; its prompt ends with '<5><6>'",
        "row 1, token 1 after its prompt, '<8>' (8): engine -3, policy -1",
        "`rlframework conformance transformers`",
        "generation.logprob_check.mean",
    ):
        assert part in message


def test_warnings_are_few_and_go_on(check: Any, caplog: pytest.LogCaptureFixture) -> None:
    sampling: SamplingCheck = check("generation.logprob_check.action=warn")
    with caplog.at_level(logging.WARNING):
        for step in range(1, 8):
            sampling.after(step, DATA, result_of(0.5), SimpleNamespace())  # type: ignore[arg-type]
    assert [record.args is not None and "not the policy's" in record.getMessage() for record in caplog.records] == [
        True
    ] * 3
    assert sampling.bound.mean == 1e-3  # a difference beyond the bound is no noise


@pytest.mark.parametrize("result", [{}, result_of(0.0, tokens=0.0), result_of(math.nan), result_of(1e-7, tokens=199.0)])
def test_nothing_or_little_to_compare_does_not_tell_the_noise(check: Any, result: Any) -> None:
    sampling: SamplingCheck = check()
    sampling.after(1, DATA, result, SimpleNamespace())  # type: ignore[arg-type]
    assert sampling.bound.mean == 1e-3
