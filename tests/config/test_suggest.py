"""The nearest right key."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field

from rlframework.config.base import Section
from rlframework.config.sections import RunConfig
from rlframework.config.suggest import key_paths, models_in, nearest_key


class Inner(Section):
    depth: int = 1


class Outer(Section):
    plain: int = 1
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: list[Inner] = Field(default_factory=list)


def test_all_keys_are_found_through_optional_and_listed_models() -> None:
    assert set(key_paths(Outer)) == {
        ("plain",),
        ("inner",),
        ("inner", "depth"),
        ("maybe",),
        ("maybe", "depth"),
        ("many",),
        ("many", "depth"),
    }
    assert models_in(Inner | None) == [Inner]
    assert models_in(dict[str, int]) == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("policy.lr", "policy.optimizer.lr"),
        ("policy.optimizer.lrr", "policy.optimizer.lr"),
        ("policy.optimizr", "policy.optimizer"),
        ("polcy", "policy"),
        ("modle_name", "policy.model_name"),
        ("policy.micro_batch_size", "policy.train_micro_batch_size"),
        ("policy.optimizer.max_grad_norm", "policy.max_grad_norm"),
        ("tensor", "policy.parallelism.tensor"),
        ("worker_group.num_worker", "worker_group.num_workers"),
        ("num_workers", "worker_group.num_workers"),
        ("generation.max_tokens", "generation.max_new_tokens"),
        ("generation.Temperature", "generation.temperature"),
        ("algorithm.validation.evry", "algorithm.validation.every"),
        ("worker_group.deadline.start", "worker_group.deadlines.start"),
        ("output-dir", "output_dir"),
        ("sead", "seed"),
    ],
)
def test_the_key_that_was_meant(written: str, meant: str) -> None:
    assert nearest_key(tuple(written.split(".")), RunConfig) == tuple(meant.split("."))


@pytest.mark.parametrize("written", ["zzz", "policy.qqqqqq", "x"])
def test_nothing_is_suggested_when_nothing_is_near(written: str) -> None:
    assert nearest_key(tuple(written.split(".")), RunConfig) is None


def test_a_model_without_keys_suggests_nothing() -> None:
    class Empty(BaseModel):
        pass

    assert nearest_key(("a",), Empty) is None
