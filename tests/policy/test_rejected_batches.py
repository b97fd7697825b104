"""A rejected batch leaves the workers as if it had never been: the next good one has the same results, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlframework import create_manager, load_config
from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.base.errors import BatchError, NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.policy.client import Policy
from rlframework.runner.parts import start_generation
from rlframework_conformance.suites.policy_worker.losses import FailingLoss

LOSS = ClippedPGLoss(ClippedPGLossConfig(kl_coef=0.1))


@pytest.fixture
def make_policy(tiny_llama: Any, tmp_path: Any) -> Any:
    def make(group: str, workers: int = 1, head: str = "language", **options: bool) -> Policy:
        config = load_config(
            {
                "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 4, "head": head},
                "algorithm": {"name": "sft"},
                "environment": {"name": "addition"},
                "generation": {"max_new_tokens": 2},
                "worker_group": {"name": group, "num_workers": workers},
                "output_dir": str(tmp_path / "run"),
                "device": "cpu",
            }
        )
        tokenizer = load_tokenizer(str(tiny_llama))
        return Policy(config, tokenizer, create_manager(), **{"init_reference_model": True, **options})

    return make


def batch() -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 7, 12])
    real = torch.arange(12) < lengths[:, None]
    values = torch.randn(4, 12, generator=generator)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 40, (4, 12), generator=generator) * real,
            "input_lengths": lengths,
            "token_mask": real.float(),
            "sample_mask": torch.ones(4),
            "advantages": values,
            "prev_logprobs": values - 3,
            "reference_policy_logprobs": values - 4,
            "seeds": torch.arange(4),
        }
    )


def bad_batches() -> Iterator[BatchedDataDict[Any]]:
    """Batches that failed in the workers, or nowhere: missing, misshapen and NaN columns, masks, tokens."""
    for key, index, value in (
        ("advantages", (1, 2), torch.nan),
        ("prev_logprobs", (0, 11), torch.inf),
        ("token_mask", (2, 3), torch.nan),
        ("sample_mask", (3,), 2.0),
        ("input_ids", (0, 0), 10**6),
        ("input_lengths", (0,), 13),
    ):
        data = batch()
        data[key][index] = value
        yield data
    yield BatchedDataDict({**batch(), "advantages": batch()["advantages"][:, 0]})
    yield BatchedDataDict({key: value for key, value in batch().items() if key != "advantages"})
    yield BatchedDataDict({**batch(), "name": ["a", "b"]})


def results(policy: Policy) -> list[torch.Tensor]:
    """Two steps, then log-probabilities and completions of the trained weights."""
    steps = [policy.train(batch(), LOSS) for _ in range(2)]
    scored = [policy.get_logprobs(batch())["logprobs"]]
    scored += policy.get_topk_logits(batch(), k=2).values()
    tokenizer = load_tokenizer(policy.config.policy.model_name)
    generation = start_generation(policy.config, policy, tokenizer, create_manager(), device="cpu")
    completions = generation.generate(batch()).values()
    return [*(step[key] for step in steps for key in ("global_loss", "grad_norm")), *scored, *completions]


def refuse(policy: Policy) -> None:
    """Give every call what it must reject."""
    tokenizer = load_tokenizer(policy.config.policy.model_name)
    generation = start_generation(policy.config, policy, tokenizer, create_manager(), device="cpu")
    for data in bad_batches():
        with pytest.raises(BatchError):
            policy.train(data, LOSS)
    wrong_tokens = next(data for data in bad_batches() if int(data["input_ids"].max()) == 10**6)
    wrong_rows = BatchedDataDict({"name": ["a"], **batch()})  # the first key has another number of rows
    for data in (wrong_tokens, wrong_rows):
        for call in (policy.get_logprobs, policy.get_reference_policy_logprobs, generation.generate):
            with pytest.raises(BatchError):
                call(data)
    for k in (0, 10**6):
        with pytest.raises(BatchError, match="k must be"):
            policy.get_topk_logits(batch(), k=k)
    for sizes in ({"gbs": 3}, {"gbs": 0}, {"mbs": "2"}, {"gbs": True}):
        with pytest.raises(BatchError):
            policy.train(batch(), LOSS, **sizes)  # type: ignore[arg-type]
    with pytest.raises(NotSupported):
        policy.score(batch())


def check_group(make_policy: Any, group: str, workers: int) -> None:
    """Workers that saw no bad batch have the same results; a single one also in the driver's process."""
    with make_policy(group, workers) as policy:
        refuse(policy)
        got = results(policy)
    with make_policy("inline" if workers == 1 else group, workers) as policy:
        expected = results(policy)
    assert len(got) == len(expected) == 13
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "workers"), [("inline", 1), pytest.param("processes", 2, marks=pytest.mark.slow)])
def test_rejected_batches_leave_the_group_as_it_was(make_policy: Any, group: str, workers: int) -> None:
    check_group(make_policy, group, workers)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_session")
def test_rejected_batches_leave_a_group_on_ray_as_it_was(make_policy: Any) -> None:
    check_group(make_policy, "ray", 1)


@pytest.mark.slow
def test_a_loss_that_raises_leaves_the_inline_group_as_it_was(make_policy: Any) -> None:
    data = BatchedDataDict({**batch(), "row": torch.arange(4)})
    with make_policy("inline") as policy:
        for _ in range(2):
            with pytest.raises(FailingLoss.Failed):  # after gradients of other rows
                policy.train(data, FailingLoss(failing_row=3), mbs=1)
        got = results(policy)
    with make_policy("inline") as policy:
        assert all(map(torch.equal, got, results(policy)))


@pytest.mark.slow
def test_calls_that_the_policy_was_not_built_for(make_policy: Any) -> None:
    with make_policy("inline", init_reference_model=False, init_optimizer=False) as policy:
        with pytest.raises(NotSupported, match="without an optimizer"):
            policy.train(batch(), NLLLoss())
        with pytest.raises(NotSupported, match="keeps no reference weights"):
            policy.get_reference_policy_logprobs(batch())
        assert policy.train(batch(), NLLLoss(), eval_mode=True)["loss"] > 0


@pytest.mark.slow
def test_columns_with_gradients_and_from_inference_mode(make_policy: Any) -> None:
    """As from another process: they reach the loss without gradients, and it can use them in its own."""
    with make_policy("inline") as policy:
        expected = policy.train(batch(), LOSS, eval_mode=True)["loss"]
        data = batch()
        data["advantages"] = data["advantages"].requires_grad_() * 1.0
        with torch.inference_mode():
            data["prev_logprobs"] = data["prev_logprobs"] * 1.0
        for evaluates in (True, False):
            assert policy.train(data, LOSS, eval_mode=evaluates, mbs=1)["loss"] == pytest.approx(expected)
