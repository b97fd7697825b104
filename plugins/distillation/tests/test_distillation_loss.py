"""The distillation loss against the divergences written out in loops, in float64, and their limits."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_distillation.config import DistillationConfig, DistillationLossConfig
from rlframework_distillation.loss import DistillationLoss, kl

ROWS, WIDTH, VOCABULARY, TOP = 3, 5, 7, 3
DIVERGENCES = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9), ("mixed", 0.3)]


def problem(k=TOP, seed=0):
    """Logits of teacher and student, and a batch with the teacher's k most likely tokens: the last row is masked."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator, dtype=torch.float64) * 2
    student = torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
    logprobs, sets = teacher.log_softmax(-1).topk(k)
    data = BatchedDataDict(
        {
            "input_ids": torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator),
            "token_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).double(),
            "sample_mask": torch.tensor([1.0, 1.0, 0.0]).double(),
            "token_sets": sets,
            "teacher_logprobs": logprobs,
        }
    )
    return teacher, student, data


def head(student, data):
    """Return the input of the loss: log-probabilities of the target and of the sets, 0 where nothing is computed."""
    logs = student[:, 1:].log_softmax(-1)
    chosen = torch.cat((data["input_ids"][:, 1:, None], data["token_sets"][:, 1:]), -1)
    counted = data["token_mask"][:, 1:, None] * data["sample_mask"][:, None, None]
    return torch.where(counted > 0, logs.gather(-1, chosen), 0.0)


def counts(data):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return data["sample_mask"].sum(), mask.sum()


def outcomes(p, q, rest):
    """Probabilities of the compared outcomes, as lists, of those of the tokens of a set."""
    if rest == "outcome":
        return [*p, 1 - sum(p)], [*q, 1 - sum(q)]
    if rest == "renormalize":
        return [x / sum(p) for x in p], [x / sum(q) for x in q]
    return p, q


def written_out(kind, beta, p, q):
    forward = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    reverse = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    if kind == "forward_kl":
        return forward
    if kind == "reverse_kl":
        return reverse
    if kind == "mixed":
        return (1 - beta) * forward + beta * reverse
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    of_teacher = sum(a * math.log(a / m) for a, m in zip(p, mixture, strict=True))
    of_student = sum(b * math.log(b / m) for b, m in zip(q, mixture, strict=True))
    return beta * of_teacher + (1 - beta) * of_student


def reference(kind, beta, rest, student, data):
    """The loss in loops over tokens."""
    total = count = 0.0
    probabilities = student.detach().softmax(-1)
    for row in range(ROWS):
        for position in range(1, WIDTH):
            if not data["token_mask"][row, position] * data["sample_mask"][row]:
                continue
            count += 1
            p = [math.exp(float(value)) for value in data["teacher_logprobs"][row, position]]
            q = [float(probabilities[row, position, token]) for token in data["token_sets"][row, position].tolist()]
            total += written_out(kind, beta, *outcomes(p, q, rest))
    return total / count


def run(student, data, **settings):
    loss, metrics = DistillationLoss(DistillationLossConfig(**settings))(head(student, data), data, *counts(data))
    return loss, metrics


@pytest.mark.parametrize(("kind", "beta"), DIVERGENCES)
@pytest.mark.parametrize("rest", ["outcome", "renormalize", "omit"])
def test_value_and_gradient_are_those_of_the_formula(kind, beta, rest):
    if rest == "omit" and kind != "forward_kl":
        with pytest.raises(ValidationError, match="rest=omit with divergence"):
            DistillationLossConfig(divergence=kind, rest=rest)
        return
    _, student, data = problem()
    loss, metrics = run(student, data, divergence=kind, beta=beta, rest=rest)
    assert float(loss.detach()) == pytest.approx(reference(kind, beta, rest, student, data), abs=1e-9)
    assert float(metrics["divergence"]) == float(loss.detach())
    (gradient,) = torch.autograd.grad(loss, student)
    step = 1e-3
    for place in [(0, 2, 0), (0, 4, 3), (1, 1, 6), (1, 2, 2), (0, 1, 1), (2, 2, 2)]:  # the last two do not count
        at = {}
        for steps in (-2, -1, 1, 2):
            moved = student.detach().clone()
            moved[place] += steps * step
            at[steps] = reference(kind, beta, rest, moved, data)
        slope = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)  # of fourth order
        assert float(gradient[place]) == pytest.approx(slope, abs=1e-9)
    assert not gradient[0, 1].any()
    assert not gradient[2].any()


@pytest.mark.parametrize("kind", ["jsd", "mixed"])
@pytest.mark.parametrize("rest", ["outcome", "renormalize"])
def test_the_ends_of_beta_are_the_divergences(kind, rest):
    """Beta 0 is the forward KL and beta 1 the reverse KL; and JSD / beta tends to the forward KL."""
    _, student, data = problem()
    for beta, same in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        got, _ = run(student, data, divergence=kind, beta=beta, rest=rest)
        expected, _ = run(student, data, divergence=same, rest=rest)
        assert got.item() == expected.item()
    if kind == "jsd":
        near, _ = run(student, data, divergence="jsd", beta=1e-6, rest=rest)
        forward, _ = run(student, data, divergence="forward_kl", rest=rest)
        assert near.item() / 1e-6 == pytest.approx(forward.item(), rel=1e-4)


@pytest.mark.parametrize(("kind", "beta"), DIVERGENCES)
def test_all_tokens_are_the_whole_vocabulary(kind, beta):
    """With K = V, `outcome` and `renormalize` are the divergence of the softmaxes."""
    teacher, student, data = problem(VOCABULARY)
    p, q = teacher.log_softmax(-1), student.detach().log_softmax(-1)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
    plain = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": beta * kl(p, mixture) + (1 - beta) * kl(q, mixture),
        "mixed": (1 - beta) * kl(p, q) + beta * kl(q, p),
    }[kind]
    expected = float((plain[:, 1:] * mask).sum() / mask.sum())
    for rest in ("outcome", "renormalize"):
        loss, metrics = run(student, data, divergence=kind, beta=beta, rest=rest)
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-9)
        assert float(metrics["teacher_mass"]) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("kind", "beta"), DIVERGENCES)
@pytest.mark.parametrize("rest", ["outcome", "renormalize"])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(kind, beta, rest):
    teacher, _, data = problem()
    student = teacher.clone().requires_grad_()
    loss, _ = run(student, data, divergence=kind, beta=beta, rest=rest)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, student)
    assert float(gradient.abs().max()) < 1e-12


def test_the_rest_as_an_outcome_is_a_lower_bound_and_renormalizing_is_blind_to_it():
    """Two distributions that agree among the top tokens and differ in their mass: 0.9 and 0.6."""
    p, q = (torch.tensor(each, dtype=torch.float64) for each in ([0.6, 0.3, 0.08, 0.02], [0.4, 0.2, 0.1, 0.3]))
    data = BatchedDataDict(
        {
            "token_mask": torch.ones(1, 2).double(),
            "sample_mask": torch.ones(1).double(),
            "teacher_logprobs": p[:2].log().expand(1, 2, 2),
        }
    )
    given = torch.cat((torch.zeros(1).double(), q[:2].log())).expand(1, 1, 3)
    found = {
        rest: float(
            DistillationLoss(DistillationLossConfig(divergence="forward_kl", rest=rest))(
                given, data, torch.tensor(1.0), torch.tensor(1.0)
            )[0]
        )
        for rest in ("outcome", "renormalize", "omit")
    }
    assert found["outcome"] == pytest.approx(0.9 * math.log(1.5) + 0.1 * math.log(0.1 / 0.4), abs=1e-9)
    assert found["outcome"] < float(kl(p.log(), q.log()))
    assert found["renormalize"] == pytest.approx(0.0, abs=1e-12)
    assert found["omit"] == pytest.approx(0.9 * math.log(1.5), abs=1e-9)


def test_microbatches_add_up_to_the_batch():
    _, student, data = problem()
    settings = DistillationLossConfig(divergence="jsd", sft_weight=0.5)
    data["sft_weights"] = data["token_mask"] / 5
    whole, metrics = DistillationLoss(settings)(head(student, data), data, *counts(data))
    parts = [
        DistillationLoss(settings)(head(student[row : row + 1], one), one, *counts(data))
        for row in range(ROWS)
        for one in [data.slice(row, row + 1)]
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), abs=1e-12)
    for name in metrics:
        assert float(sum(each[name] for _, each in parts)) == pytest.approx(float(metrics[name]), abs=1e-12)


def test_the_sft_term_is_the_mean_over_the_tokens_that_have_a_weight():
    _, student, data = problem()
    data["sft_weights"] = torch.zeros(ROWS, WIDTH).double()
    data["sft_weights"][1] = data["token_mask"][1] / 2  # the two tokens of row 1
    loss, metrics = run(student, data, sft_weight=0.25)
    plain, _ = run(student, data)
    logs = student.detach().log_softmax(-1)
    ids = data["input_ids"]
    expected = -(logs[1, 1, ids[1, 1]] + logs[1, 2, ids[1, 2]]) / 2
    assert float(metrics["sft_loss"]) == pytest.approx(float(expected), abs=1e-12)
    assert float(loss.detach()) == pytest.approx(plain.item() + 0.25 * float(expected), abs=1e-12)


def test_fp32_stays_finite_where_the_sets_have_all_probability():
    """A teacher and a student that are certain: their rest is 0 in fp32."""
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        student = torch.tensor([[[0.0, 0.0, -50.0]]], requires_grad=True)
        data = BatchedDataDict(
            {
                "token_mask": torch.ones(1, 2),
                "sample_mask": torch.ones(1),
                "teacher_logprobs": torch.tensor([[[0.0, -60.0], [0.0, -60.0]]]),
            }
        )
        loss, _ = DistillationLoss(DistillationLossConfig(divergence=divergence))(
            student, data, torch.tensor(1.0), torch.tensor(1.0)
        )
        (gradient,) = torch.autograd.grad(loss, student)
        assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokens": "sampled", "student_fraction": 0.5}, "tokens=sampled estimates the reverse KL"),
        ({"tokens": "sampled", "loss": {"divergence": "jsd"}}, "tokens=sampled estimates the reverse KL"),
        ({"loss": {"sft_weight": 0.1}}, "sft_weight is for completions of the data"),
        ({"teacher_data": "folder"}, "set student_fraction=0"),
        ({"endpoint": {"base_url": "http://a/v1", "model": "m"}, "tokens": "all"}, "tokens=all needs log-prob"),
    ],
)
def test_settings_that_exclude_each_other(keys, message):
    with pytest.raises(ValidationError, match=message):
        DistillationConfig(**keys)


def test_presets_are_defaults():
    trl = DistillationConfig(preset="trl")
    assert (trl.tokens, trl.student_fraction, trl.mixing) == ("all", 0.5, "batches")
    assert (trl.loss.divergence, trl.loss.beta) == ("jsd", 0.5)
    nemo = DistillationConfig(preset="nemo_rl", loss={"beta": 0.2})
    assert (nemo.loss.divergence, nemo.loss.rest, nemo.loss.beta, nemo.top_k) == ("mixed", "renormalize", 0.2, 64)
    verl = DistillationConfig(preset="verl", estimator="k1")
    assert (verl.tokens, verl.estimator, verl.reward_max) == ("sampled", "k1", 10.0)
