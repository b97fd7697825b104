"""Kinds of models: the tiny ones bind within the suite's rows, and rejections count only if they name their kind."""

from __future__ import annotations

import pytest
import torch

from rlframework.base.errors import ConfigError, DataError, NotSupported, UnsupportedConfig
from rlframework.plugins.types import PolicyWorkerRecord
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import ConformanceFailure
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness

RECORD = PolicyWorkerRecord("engine", "module:Class", "", 1, frozenset())


@pytest.fixture
def rejecting(tmp_path):
    """A harness whose backend raises the given error for each model."""

    class Rejecting(PolicyHarness):
        def policy(self, *args, **keys):
            raise self.error

    def make(error):
        harness = Rejecting(RECORD, Layout(), None, "cpu", tmp_path, tmp_path)
        harness.error = error
        return harness

    return make


@pytest.mark.parametrize("error", [NotSupported, ConfigError, UnsupportedConfig])
def test_a_rejection_that_names_the_kind_is_noted(rejecting, error):
    harness = rejecting(error("the engine does not support Sliding windows; set policy.backend to dtensor"))
    assert harness.policy_unless_rejected("windows", "sliding windows", "window|sliding") is None
    assert harness.rejected == ["sliding windows"]


def test_a_rejection_must_name_the_kind(rejecting):
    harness = rejecting(NotSupported("this model cannot be trained"))
    with pytest.raises(ConformanceFailure, match=r"(?s)rejection of sliding windows must name it.*cannot be trained"):
        harness.policy_unless_rejected("windows", "sliding windows", "window|sliding")
    assert harness.rejected == []


def test_other_errors_are_no_rejections(rejecting):
    with pytest.raises(DataError):
        rejecting(DataError("window")).policy_unless_rejected("windows", "sliding windows", "window|sliding")


@pytest.mark.parametrize(
    ("model", "without"),
    [
        ("windows", {"sliding_window": 64}),
        ("windows_of_the_mask", {"sliding_window": 64}),
        ("caps", {"attn_logit_softcapping": 50.0}),
        ("caps", {"final_logit_softcapping": None}),
        ("sinks", {"sliding_window": 64}),
    ],
)
def test_what_makes_a_kind_shows_in_the_suites_rows(model, without, tmp_path):
    """Otherwise a backend that ignores it would pass."""
    oracle, batch = Oracle(cases.model(model, tmp_path)), cases.batch()
    right = oracle.logprobs(batch)
    for name, value in without.items():
        setattr(oracle.model.config, name, value)
        for module in oracle.model.modules():
            if getattr(module, name, None) is not None:
                setattr(module, name, value)
    assert (oracle.logprobs(batch) - right).abs().max() > 0.01


def test_sinks_show_in_the_suites_rows(tmp_path):
    oracle, batch = Oracle(cases.model("sinks", tmp_path)), cases.batch()
    right = oracle.logprobs(batch)
    for block in oracle.model.model.layers:
        block.self_attn.sinks.data.fill_(-1e4)
    assert (oracle.logprobs(batch) - right).abs().max() > 0.01


@pytest.mark.slow
def test_frequencies_of_the_suites_rows_differ_by_length(tmp_path):
    """The oracle computes each row alone; together, transformers takes those of the longest row for all."""
    oracle, batch = Oracle(cases.model("lengths", tmp_path)), cases.batch()
    assert {int(length) > cases.SHORT for length in batch["input_lengths"]} == {True, False}
    right = oracle.logprobs(batch)
    for row in range(batch.size):
        alone = oracle.logprobs(batch.slice(row, row + 1))
        torch.testing.assert_close(alone, right[row : row + 1], rtol=1e-5, atol=1e-5)
    mask = (torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]).long()
    with torch.no_grad():
        logits = oracle.model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0] * mask[:, 1:]
    together = (chosen - right[:, 1:]).abs().amax(1)
    assert (together > 0.01).tolist() == [int(length) <= cases.SHORT for length in batch["input_lengths"]]


@pytest.mark.slow
def test_routers_are_noisy_in_training_only(tmp_path):
    oracle, batch = Oracle(cases.model("router_noise", tmp_path)), cases.batch()
    right = oracle.logprobs(batch)
    assert torch.equal(oracle.logprobs(batch), right)
    oracle.model.train()
    assert (oracle.logprobs(batch) - right).abs().max() > 0.01
