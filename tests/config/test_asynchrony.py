"""The section `algorithm.async`: its key, and the importance correction that it turns on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlframework import load_config
from rlframework.config.algorithms import GRPOConfig
from rlframework.config.asynchrony import AsyncConfig


def correction(**keys: Any) -> str:
    config = GRPOConfig(**keys)
    assert GRPOConfig(**config.model_dump()) == config
    return str(config.loss.importance_correction)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "corrected"),
    [
        ({}, "none"),
        ({"async": {}}, "truncated"),
        ({"async": {"max_staleness": 2}}, "truncated"),
        ({"asynchronous": AsyncConfig()}, "truncated"),
        ({"async": {"max_staleness": 0}}, "none"),
        ({"async": {}, "loss": {"kl_coef": 0.1}}, "truncated"),
        ({"async": {}, "loss": {"importance_correction": "none"}}, "none"),
        ({"async": {}, "loss": {"importance_mask": "token"}}, "none"),
    ],
)
def test_tokens_that_may_be_stale_are_corrected(given: dict[str, Any], corrected: str) -> None:
    assert correction(**given) == corrected


@pytest.mark.parametrize("name", ["gspo", "rloo", "reinforce_plus_plus"])
def test_settings_of_other_algorithms_stay(name: str) -> None:
    usual, changed = GRPOConfig(name=name), GRPOConfig(name=name, **{"async": {}})
    assert changed.loss.importance_correction == "truncated"  # type: ignore[union-attr]
    assert changed.loss.model_copy(update={"importance_correction": "none"}) == usual.loss


def test_the_key_is_async() -> None:
    config = GRPOConfig(**{"async": {"max_staleness": 3}})
    assert config.asynchronous == AsyncConfig(max_staleness=3)
    assert config.model_dump()["async"]["max_staleness"] == 3
    assert "asynchronous" not in config.model_dump()


def test_an_own_loss_is_left_as_it_is() -> None:
    config = GRPOConfig(**{"async": {}, "loss": "my_losses:MyLoss"})
    assert config.loss.keys == {}  # type: ignore[union-attr]


def test_the_page_has_every_key_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    config = load_config(yaml.safe_load(example) | {"policy": {"model_name": "m"}, "environment": {"name": "addition"}})
    assert config.algorithm.asynchronous == AsyncConfig()  # type: ignore[attr-defined]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE))
    defaults = AsyncConfig().model_dump()
    assert {name: rows[name].strip("`") for name in defaults} == {
        name: "null" if value is None else str(value) for name, value in defaults.items()
    }
