"""Hints that translate the vocabulary of other libraries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlframework.config.algorithms import GRPOConfig, SFTConfig
from rlframework.config.environments import DatasetConfig
from rlframework.config.narrow import narrow
from rlframework.config.peers import PEER_KEYS, WITHOUT_COUNTERPART, peer_hint
from rlframework.config.sections import RayGroupConfig
from rlframework.config.suggest import key_paths
from rlframework.configure import load_config
from rlframework.errors import ConfigError

MOVING = Path(__file__).resolve().parents[2] / "docs" / "moving"
MINIMAL = {"policy": {"model_name": "m"}, "algorithm": {"name": "grpo"}, "environment": {"name": "addition"}}
PARTS = {"environment": DatasetConfig, "worker_group": RayGroupConfig}
KEYS = {
    ".".join(path)
    for algorithm in (GRPOConfig, SFTConfig)
    for path in key_paths(narrow({**PARTS, "algorithm": algorithm}, {}))
}


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(MINIMAL, overrides)
    return str(error.value)


@pytest.mark.parametrize("key", sorted(set(PEER_KEYS.values())))
def test_every_target_is_a_key_of_the_schema(key: str) -> None:
    assert key in KEYS


@pytest.mark.parametrize("note", sorted(set(WITHOUT_COUNTERPART.values())))
def test_the_keys_in_notes_are_keys_of_the_schema(note: str) -> None:
    assert set(re.findall(r"`([a-z_.]+)`", note)) <= KEYS


def test_no_peer_word_hides_a_key_of_ours() -> None:
    assert not {word for word in PEER_KEYS if word in KEYS}


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("learning_rate=1e-6", "policy.optimizer.lr"),
        ("policy.learning_rate=1e-6", "policy.optimizer.lr"),
        ("policy.optimizer.learning_rate=1e-6", "policy.optimizer.lr"),
        ("policy.per_device_train_batch_size=4", "policy.train_micro_batch_size"),
        ("policy.gradient_accumulation_steps=4", "policy.train_global_batch_size"),
        ("algorithm.n=8", "algorithm.samples_per_prompt"),
        ("generation.n=8", "algorithm.samples_per_prompt"),
        ("rollout.n=8", "algorithm.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n=8", "algorithm.samples_per_prompt"),
        ("algorithm.num_generations=8", "algorithm.samples_per_prompt"),
        ("algorithm.num_generations_per_prompt=8", "algorithm.samples_per_prompt"),
        ("grpo.num_prompts_per_step=8", "algorithm.prompts_per_step"),
        ("algorithm.beta=0.1", "algorithm.loss.kl_coef"),
        ("algorithm.loss.kl_loss_coef=0.1", "algorithm.loss.kl_coef"),
        ("algorithm.loss.clip_ratio_high=0.28", "algorithm.loss.ratio_clip_max"),
        ("max_prompt_length=512", "generation.max_new_tokens"),
        ("generation.max_completion_length=512", "generation.max_new_tokens"),
        ("policy.ppo_mini_batch_size=64", "policy.train_global_batch_size"),
        ("policy.tensor_model_parallel_size=2", "policy.parallelism.tensor"),
        ("policy.optimizer.max_grad_norm=1", "policy.max_grad_norm"),
    ],
)
def test_the_error_names_our_key(written: str, ours: str) -> None:
    message = error_of(written)
    assert "unknown key" in message
    assert f"`{ours}`" in message


def test_the_message_in_full() -> None:
    assert error_of("algorithm.num_generations=8") == (
        "`algorithm.num_generations`: unknown key (given 8 in override `algorithm.num_generations=8`). "
        "In rlframework this is `algorithm.samples_per_prompt`."
    )
    assert error_of("grpo={num_prompts_per_step: 4, max_num_steps: 9}") == (
        "`grpo`: unknown key (in override `grpo={num_prompts_per_step: 4, max_num_steps: 9}`). In rlframework "
        "`num_prompts_per_step` is `algorithm.prompts_per_step`, `max_num_steps` is `algorithm.num_steps`."
    )


def test_a_misspelled_sibling_is_preferred_to_a_peer_word() -> None:
    assert "Did you mean `policy.optimizer.betas`?" in error_of("policy.optimizer.beta=0.9")


def test_the_longest_matching_path_counts() -> None:
    assert "optimizer.eps" in peer_hint(("policy", "optimizer", "epsilon"))
    assert "ratio_clip_min" in peer_hint(("algorithm", "epsilon"))
    assert "whole model" in peer_hint(("rollout", "tensor_model_parallel_size"))
    assert peer_hint(("zzz",), {"yyy": 1}) == ""


def rows_of_the_pages() -> list[tuple[list[str], str]]:
    """The rows of the tables in docs/moving: the words of the peer, and the rest of the row."""
    rows = []
    for page in sorted(MOVING.glob("*.md")):
        for line in page.read_text(encoding="utf-8").splitlines():
            cells = line.strip("|").split(" | ", 1)
            if line.startswith("| `") and len(cells) == 2:
                rows.append((re.findall(r"`([\w.]+)`", cells[0]), cells[1]))
    return rows


def test_the_table_agrees_with_the_pages() -> None:
    rows = rows_of_the_pages()
    compared = 0
    for word, key in PEER_KEYS.items():
        rest = [cell for words, cell in rows if any(f".{one}".endswith(f".{word}") for one in words)]
        rest = [cell for cell in rest if "no counterpart" not in cell]
        if rest:
            compared += 1
            assert any(f"`{key}" in cell for cell in rest), (word, key, rest)
    assert compared > 50
