"""Results of microbatches: errors for engines that break the contract, and metrics computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlframework.base.errors import UserError
from rlframework.interfaces.loss import LossInput
from rlframework.policy.engine import StepResult
from rlframework.policy.head.patch import HeadOutput
from rlframework.policy.microbatching import average_metrics, loss_step, reduce_metrics, require_results, values_step

ONE = torch.tensor(1.0)


class SumLoss:
    input_type = LossInput.LOGPROBS

    def __call__(self, values, data, seqs, tokens):
        return values.sum(), {}


LEARN = loss_step(SumLoss(), ONE, ONE)


def microbatch(**changes):
    """Two rows of three tokens, and the values of three of their targets."""
    data = {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}
    given = {"data_dict": data, "scatter": torch.tensor([1, 2, 4]), "is_dummy": False}
    return SimpleNamespace(**given | changes)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda values: values.sum(), "a tensor of shape []"),
        (lambda values: (values, {}), "a tuple of a tensor of shape [2, 2], a dict"),
        (lambda values: (values.sum(), {}, {}), "a tuple of a tensor of shape [], a dict, a dict"),
        (lambda values: (values.sum().item(), {}), "a tuple of a float, a dict"),
        (lambda values: (values.sum(), [1.0]), "a tuple of a tensor of shape [], a list"),
        (lambda values: (values.sum().detach(), {}), "the loss has no gradient"),
        (lambda values: (values.sum(), {"a": values.sum(1)}), "the metric 'a' is a tensor of shape [2]"),
        (lambda values: (values.sum(), {"a": 1, "b": "x"}), "the metric 'b' is a str"),
        (lambda values: (values.sum(), {"loss": 1.0}), "the metric 'loss' has the name of the loss itself; rename it"),
        (lambda values: None, "a NoneType"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_a_loss_returns(returned, told):
    class Own(SumLoss):
        def __call__(self, values, data, seqs, tokens):
            return returned(values)

    output = HeadOutput(logprobs=torch.zeros(3, requires_grad=True))
    with pytest.raises(UserError, match=r"^a loss returns two values.*Own returned something else: ") as error:
        loss_step(Own(), ONE, ONE)(output, microbatch())
    assert str(error.value).endswith(f": {told}")


def test_an_evaluated_loss_needs_no_gradient_and_metrics_may_be_numbers_of_any_kind():
    class Own(SumLoss):
        def __call__(self, values, data, seqs, tokens):
            return values.sum(), {"a": True, "b": np.float32(2), "c": ONE}

    result = loss_step(Own(), ONE, ONE)(HeadOutput(logprobs=torch.ones(3)), microbatch())
    assert result.outputs == {"a": True, "b": 2.0, "c": 1.0, "loss": 3.0}


@pytest.mark.parametrize("step", [values_step, LEARN])
def test_a_tensor_is_no_head_output(step):
    with pytest.raises(TypeError, match=r"got a Tensor.*read_head_output"):
        step(torch.zeros(3, 1), microbatch())


@pytest.mark.parametrize("step", [values_step, LEARN])
@pytest.mark.parametrize("rows", [1, 2, 6])  # one row would be spread over all positions without an error
def test_values_must_be_as_many_as_positions(step, rows):
    with pytest.raises(RuntimeError, match=rf"{rows} rows of values.*3 positions"):
        step(HeadOutput(logprobs=torch.zeros(rows)), microbatch())


def test_values_are_scattered_to_their_targets():
    found = values_step(HeadOutput(logprobs=torch.tensor([-1.0, -2.0, -3.0])), microbatch()).outputs["logprobs"]
    assert found.tolist() == [[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]]
    assert float(LEARN(HeadOutput(logprobs=torch.tensor([-1.0, -2.0, -3.0])), microbatch()).loss) == -6.0


def test_a_loss_without_values_says_what_is_missing():
    with pytest.raises(RuntimeError, match="neither logprobs, logits nor scores"):
        LEARN(HeadOutput(entropy=torch.zeros(3)), microbatch())


@pytest.mark.parametrize("results", [[], [StepResult()], [StepResult()] * 3, None])
def test_results_must_be_as_many_as_microbatches(results):
    given = "NoneType" if results is None else f"{len(results)} results"
    with pytest.raises(RuntimeError, match=rf"forward_backward returned {given} for 2 microbatches"):
        require_results(results, [microbatch(), microbatch()])


def test_the_right_number_of_results_is_accepted():
    require_results([StepResult(), StepResult()], [microbatch(), microbatch()])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            [
                {"loss": torch.tensor(1.5), "kl": 0.25, "ratio_min": 0.5, "ratio_max": torch.tensor(2.0)},
                {"loss": torch.tensor(0.5), "kl": 0.5, "ratio_min": 0.75, "ratio_max": torch.tensor(3.0)},
            ],
            {"loss": 2.0, "kl": 0.75, "ratio_min": 0.5, "ratio_max": 3.0},
        ),
        ([{}, {"loss": 1.0, "kl": 0.5}], {"loss": 1.0, "kl": 0.5}),  # a dummy contributes nothing
        ([{}], {"loss": 0.0}),
    ],
)
def test_metrics_of_microbatches(parts, expected):
    assert reduce_metrics(parts, None, torch.device("cpu")).read() == pytest.approx(expected)


def test_batches_are_averaged_over_those_that_have_a_metric():
    first = {"kl": 1.0, "ratio_max": 3.0, "ratio_min": 0.5}
    batches = [first, {"kl": 2.0, "ratio_max": 2.0, "ratio_min": 0.25}, {"kl": 6.0}]
    assert average_metrics(batches) == {"kl": 3.0, "ratio_max": 3.0, "ratio_min": 0.25}
    assert average_metrics([]) == {}
