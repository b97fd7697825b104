"""The columns that losses read of a teacher, worked out by hand from its probabilities, and the mixture of rows."""

from __future__ import annotations

import math

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_distillation.config import DistillationConfig
from rlframework_distillation.teacher_targets import add_rewards, add_sft_weights, add_token_sets
from rlframework_distillation.training import student_rows

LENGTHS = [4, 3]


class Model:
    """Scores rows with one distribution over three tokens, at every position."""

    def __init__(self, *probabilities):
        self.logprobs = torch.tensor(probabilities).log()

    def get_logprobs(self, data, micro_batch_size=None, positions="all"):
        assert positions == "loss"
        return BatchedDataDict({"logprobs": self.logprobs[data["input_ids"]]})

    def get_topk_logits(self, data, k, micro_batch_size=None, positions="all"):
        assert positions == "loss"
        shape, found = data["input_ids"].shape, (self.logprobs + 2.0).topk(k)
        return BatchedDataDict(
            {
                "topk_logits": found.values.expand(*shape, k),
                "topk_indices": found.indices.expand(*shape, k),
                "topk_normalizers": torch.full(shape, 2.0),
            }
        )

    def get_token_set_logprobs(self, data, micro_batch_size=None, positions="all"):
        return BatchedDataDict({"set_logprobs": self.logprobs[data["token_sets"].long()]})


TEACHER, STUDENT = Model(0.5, 0.3, 0.2), Model(0.1, 0.3, 0.6)


def batch():
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([[0, 1, 2, 0], [2, 0, 1, 0]]),
            "input_lengths": torch.tensor(LENGTHS),
            "token_mask": torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]]),
            "sample_mask": torch.ones(2),
        }
    )


@pytest.mark.parametrize(("chooser", "ids"), [(TEACHER, [0, 1]), (STUDENT, [2, 1])])
def test_sets_are_those_of_the_chooser_with_the_log_probabilities_of_the_teacher(chooser, ids):
    data = batch()
    add_token_sets(data, chooser, TEACHER, 2)
    assert data["token_sets"][1, 2].tolist() == ids
    expected = [math.log([0.5, 0.3, 0.2][token]) for token in ids]
    assert data["teacher_logprobs"][1, 2].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bound", [None, 1.0])
def test_the_reward_of_a_token_is_minus_the_estimate_of_the_divergence(bound):
    """Tokens 2, 0 of row 0 and 0, 1 of row 1 count; their log-ratios are log 3, -log 5, -log 5 and 0."""
    data, config = batch(), DistillationConfig(tokens="sampled", reward_max=bound)
    metrics = add_rewards(data, STUDENT, TEACHER, config)
    ratios = [math.log(3.0), -math.log(5.0), -math.log(5.0), 0.0]
    assert metrics["train/divergence"] == pytest.approx(sum(ratios) / 4, abs=1e-6)
    rewards = [-ratio if bound is None else max(-bound, min(bound, -ratio)) for ratio in ratios]
    counted = data["advantages"][data["token_mask"] != 0].tolist()
    assert counted == pytest.approx(rewards, abs=1e-6)


def test_the_policy_gradient_of_sampled_tokens_is_that_of_the_reverse_divergence():
    """In expectation over the student's tokens: sum of q grad(log q) reward = -grad KL(q || p)."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    student = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    rewards = (teacher - student).detach()
    (sampled,) = torch.autograd.grad((student.exp().detach() * student * rewards).sum(), logits)
    torch.testing.assert_close(-sampled, exact, rtol=0, atol=1e-12)


def test_weights_of_the_sft_term_are_a_mean_over_the_tokens_of_the_data():
    data = batch()
    add_sft_weights(data, torch.tensor([False, True]))
    assert data["sft_weights"].tolist() == [[0, 0, 0, 0], [0, 0.5, 0.5, 0]]


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0])
def test_rows_have_the_fraction_at_every_step(fraction):
    config = DistillationConfig(student_fraction=fraction, tokens="teacher_top_k")
    total = 0
    for step in range(1, 101):
        total += student_rows(config, 10, 0, step)
        assert -1e-4 < fraction * 10 * step - total < 1


def test_batches_are_whole_and_drawn_anew_for_each_step():
    config = DistillationConfig(student_fraction=0.25, mixing="batches")
    found = [student_rows(config, 8, 5, step) for step in range(1, 2001)]
    assert set(found) == {0, 8}
    assert abs(sum(found) / 8 / 2000 - 0.25) < 0.04  # four standard deviations
    assert found == [student_rows(config, 8, 5, step) for step in range(1, 2001)]
