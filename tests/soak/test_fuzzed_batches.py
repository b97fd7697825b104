"""Fuzzed batches: each call has the right result or raises a `BatchError` that no worker has seen, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from mutated_batches import DIFFERENT, HARMLESS, METHODS, POSITIONS, ROWS, WRONG, Case, Mutation, good_case
from torch import Tensor

from rlframework import create_manager, load_config
from rlframework.base.errors import BatchError
from rlframework.generation.driver import Generation
from rlframework.huggingface.tokenizer import character_tokenizer, load_tokenizer
from rlframework.interfaces.worker_group import WorkerGroup
from rlframework.policy.client import Policy
from rlframework.runner.parts import start_generation
from rlframework.workers.dispatch import InlineWorkerGroup

pytestmark = pytest.mark.slow

VARIANTS = 4
"""Good batches that mutations start from."""


class CountingGroup(InlineWorkerGroup):
    """Counts the calls that reach the worker."""

    calls = 0

    def _run(self, method_name: str, plan: Any) -> Any:
        self.calls += method_name != "get_info"
        return super()._run(method_name, plan)


class CountingPolicy(Policy):
    def _choose_group_class(self, chosen: type[WorkerGroup]) -> type[WorkerGroup]:
        return CountingGroup


class Target:
    """A language model and a reward model that never change, as the learning rate is 0, and plain copies of them."""

    def __init__(self, folder: Any, language: Policy, reward: Policy, generation: Generation) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        self.policies, self.generation = {"score": reward}, generation
        self.language = language
        self.plain = AutoModelForCausalLM.from_pretrained(folder / "language").eval()
        self.plain_reward = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
        self.plain_reward.config.pad_token_id = None  # the score is that of the last token, whatever it is
        self.vocabulary = self.plain.config.vocab_size
        self.unchanged: dict[tuple[str, str, int], list[Tensor]] = {}

    @property
    def calls(self) -> int:
        groups: list[Any] = [self.language.worker_group, self.policies["score"].worker_group]
        return sum(group.calls for group in groups)

    def call(self, case: Case) -> list[Tensor]:
        """The tensors that the call returns."""
        if case.method == "generate":
            result = self.generation.generate(case.data, greedy=True)
            return [result["output_ids"], result["logprobs"], result["generation_lengths"]]
        policy = self.policies.get(case.method, self.language)
        result = getattr(policy, case.method)(case.data, **case.options)
        if case.method == "train":
            return [result["global_loss"], result["grad_norm"]]
        return [result[key] for key in result if key != "topk_indices"]

    @torch.no_grad()
    def expected(self, case: Case) -> list[Tensor]:
        """The same, row by row and without any part of what is tested; of training the loss, of generation nothing."""
        data, lengths = case.data, case.data["input_lengths"].tolist()
        if case.method == "generate":
            return []
        rows = [data["input_ids"][row : row + 1, :length].long() for row, length in enumerate(lengths)]
        if case.method == "score":
            return [torch.stack([self.plain_reward(ids).logits[0, 0] if ids.numel() else ZERO for ids in rows])]
        scores = torch.zeros(len(rows), data["input_ids"].shape[1])
        values = torch.zeros(*scores.shape, 2)
        for row, ids in enumerate(rows):
            if ids.shape[1] > 1:
                logits = self.plain(ids).logits[0, :-1]
                scores[row, 1 : ids.shape[1]] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                values[row, 1 : ids.shape[1]] = logits.topk(2).values
        if case.method == "get_topk_logits":
            return [values]
        return [_loss(case, scores)] if case.method == "train" else [scores]


ZERO = torch.tensor(0.0)


def _loss(case: Case, logprobs: Tensor) -> Tensor:
    """The mean over the mask of -log p, or of the clipped surrogate plus half of the KL term."""
    data = {key: case.data[key].double() for key in [*case.masks, *case.reads]}
    mask = data["token_mask"] * data["sample_mask"][:, None]
    mask[:, 0] = 0
    loss = -logprobs.double()
    if case.reads:
        previous = data.get("prev_logprobs", logprobs.double())
        ratio = (logprobs.double() - previous).exp()
        advantages = data["advantages"]
        loss = -torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
        loss = loss + 0.5 * 0.5 * (data["reference_policy_logprobs"] - logprobs.double()) ** 2
    return (loss * mask).sum()[None] / mask.sum().clamp(min=1.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzzed")
    _save_models(folder)
    policies = []
    for name, head in (("language", "language"), ("reward", "score")):
        config = load_config(
            {
                "policy": {
                    "model_name": str(folder / name),
                    "head": head,
                    "train_global_batch_size": ROWS,
                    "optimizer": {"lr": 0.0},
                    "non_finite_gradients": {"stop_after": 10**6},
                },
                "algorithm": {"name": "sft"},
                "environment": {"name": "addition"},
                "generation": {"max_new_tokens": 2},
                "worker_group": {"name": "inline"},
                "output_dir": str(folder / "run"),
                "device": "cpu",
            }
        )
        tokenizer = load_tokenizer(str(folder / name))
        policies.append(CountingPolicy(config, tokenizer, create_manager(), init_reference_model=head == "language"))
    language, reward = policies
    with language, reward:
        generation = start_generation(language.config, language, tokenizer, create_manager(), device="cpu")
        yield Target(folder, language, reward, generation)


def _save_models(folder: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    tokenizer = character_tokenizer("0123456789+=")
    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": POSITIONS, "vocab_size": len(tokenizer), "num_labels": 1}
    config = LlamaConfig(**sizes, pad_token_id=tokenizer.pad_token_id, initializer_range=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, kind in (("language", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
            kind(config).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)


SHARES = {"rejected": 0.8, "right": 0.1, "unchanged": 0.1}
"""Of the inputs, the share that must have each outcome."""


@st.composite
def attacks(draw: Any, outcome: str) -> tuple[str, str, int, list[Mutation], int]:
    """A method, a loss, a good batch, mutations of it that have `outcome`, and the seed of their random numbers."""
    method, loss = draw(st.sampled_from(("train", *METHODS))), draw(st.sampled_from(("nll", "pg")))
    mutations = draw(st.lists(st.sampled_from(HARMLESS), max_size=3 if outcome == "unchanged" else 1))
    if outcome == "right":
        mutations = draw(st.lists(st.sampled_from(DIFFERENT), min_size=1, max_size=2, unique=True))
    if outcome == "rejected":
        different = draw(st.lists(st.sampled_from(DIFFERENT), max_size=1))
        mutations = [*different, *mutations, draw(st.sampled_from(WRONG))]
    return method, loss, draw(st.integers(0, VARIANTS - 1)), mutations, draw(st.integers(0, 2**32))


def attack(
    target: Target, outcome: str, method: str, loss: str, variant: int, mutations: Sequence[Mutation], seed: int
) -> None:
    """Run one case and check that it has the outcome."""
    case, pick = good_case(method, loss, variant, target.vocabulary), random.Random(seed)
    for mutation in mutations:
        mutation(case, pick)
    before = target.calls
    if outcome == "rejected":
        with pytest.raises(BatchError) as raised:
            target.call(case)
        assert str(raised.value)
        assert target.calls == before, "a worker was called"
        return
    got = target.call(case)
    if outcome == "right":
        for one, other in zip(got, target.expected(case), strict=False):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)
    else:
        for one, other in zip(got, target.unchanged[method, loss, variant], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.timeout(600)
def test_batches(soak: Any, target: Target) -> None:
    count = soak.times(short=60, full=10_000)
    good = [(method, loss, variant) for method in METHODS for loss in ("nll", "pg") for variant in range(VARIANTS)]
    for key in good:
        case = good_case(*key, target.vocabulary)
        target.unchanged[key] = target.call(copy(case))
        for one, other in zip(target.unchanged[key], target.expected(case), strict=False):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)
    for outcome, share in SHARES.items():
        run_attacks(soak, target, outcome, round(share * count))
    for key in good:  # bit by bit as at the beginning
        for one, other in zip(target.call(good_case(*key, target.vocabulary)), target.unchanged[key], strict=True):
            assert torch.equal(one, other)


def run_attacks(soak: Any, target: Target, outcome: str, count: int) -> None:
    """Check `count` inputs that must have the outcome."""
    tried = 0

    @hypothesis.seed(soak.seed)
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(attacks(outcome))
    def run(found: Any) -> None:
        nonlocal tried
        tried += 1
        attack(target, outcome, *found)

    run()
    soak.figures |= {"inputs": soak.figures.get("inputs", 0) + tried, outcome: tried}
    assert tried == count
