"""Every kind of causal language model is computed and saved as by a plain model, or rejected as on the dtensor backend.

Selected kinds also on two workers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from causal_kinds import KINDS, LIMIT, tiny_model
from kind_outcomes import EQUAL, MODES, Place, outcomes
from kind_ranks import ContextRanks
from models_page import PAGE, rows_of_page, version_of_page
from torch import Tensor

from rlframework_deepspeed.worker import DeepSpeedPolicyWorker

pytestmark = pytest.mark.slow
TARGET = "rlframework_deepspeed.worker:DeepSpeedPolicyWorker"


def gradients(worker: Any) -> dict[str, Tensor]:
    """The whole gradients of a worker, by the names of parameters. Collective."""
    shards, tensor = worker.engine._shards, worker.engine._tensor
    held = {id(parameter): part.reshape(-1) for parameter, part in shards.gradients()}
    return {
        name: tensor.join(shards.all_of(parameter, held.get(id(parameter))), tensor.partition(parameter))
        for name, parameter in worker.engine.model.named_parameters()
    }


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_is_equal_or_rejected_as_on_the_dtensor_backend(kind: str, tmp_path: Path):
    found = outcomes(KINDS[kind], tmp_path, DeepSpeedPolicyWorker, place=Place(gradients_of=gradients, generates=False))
    text = PAGE.read_text()
    if version_of_page(text) != transformers.__version__:
        assert not any(outcome.startswith("differs") for outcome in found.values())
    else:
        _, _, dynamic, packed, *_, why, _ = re.split(r" *(?<!\\)\| *", rows_of_page(text)[kind])
        for outcome, expected in zip((found[mode] for mode in MODES), (dynamic, packed), strict=True):
            assert (outcome == EQUAL) == (expected == EQUAL)
            assert outcome == EQUAL or outcome.splitlines()[0].replace("|", "\\|") in why.split("<br>")


# -- several workers ---------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ulysses": ({"parallelism": {"context": 2}}, {"sequence_exchange": "ulysses"}),
    "tensor": ({"parallelism": {"tensor": 2}}, {}),
    # both ranks have the same rows
    "ZeRO-3": ({"parallelism": {}, "train_global_batch_size": 8}, {"zero_optimization": {"stage": 3}}),
}
SELECTED: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "gemma2": {},
    "cohere": {},
    "mixtral": {"router_jitter_noise": 0.3, "sliding_window": LIMIT},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        }
    },
}
"""Kinds with sinks, soft caps, a factor of the logits, experts with noise, and rotary embeddings by the length."""

NO_PLAN = ("mixtral", "phi3")
"""Those whose plan has styles that AutoTP does not know."""


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_selected_kinds_are_equal_on_two_workers_or_rejected(layout: str, tmp_path: Path):
    ranks = ContextRanks(TARGET, *LAYOUTS[layout], gradients_of="test_deepspeed_kinds:gradients")
    found = {}
    for kind, own in SELECTED.items():
        tiny_model(KINDS[kind], **own).save_pretrained(tmp_path / kind)
        found[kind] = ranks.outcome(tmp_path / kind)
    ranks.close()
    rejected = {kind: outcome for kind, outcome in found.items() if outcome != EQUAL}
    assert set(rejected) == (set(NO_PLAN) if layout == "tensor" else set())
    assert all(reason.startswith("AutoTP cannot split ") for reason in rejected.values())
