"""Notes on settings that probably do not say what is meant."""

from __future__ import annotations

import pytest

from rlframework import load_config
from rlframework_tools.notes import notes_on_meaning

CONFIG = {
    "output_dir": "run",
    "algorithm": {"name": "sft"},
    "environment": {"name": "addition"},
    "policy": {"model_name": "somewhere"},
}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["policy.optimizer.lr=1e-6"], ""),
        ([], "policy.optimizer.lr is not set: its default, 1e-06, is a rate for reinforcement learning, and low for"),
        (["checkpoints.metric=validation/acuracy"], "checkpoints.metric=validation/acuracy: is validation/accuracy m"),
        (
            ["algorithm.early_stopping={metric: validation/acuracy}", "algorithm.validation.every=1"],
            "algorithm.early_stopping.metric=validation/acuracy: is validation/accuracy meant?",
        ),
        (
            ["algorithm.early_stopping={metric: train/loss}", "checkpoints={keep_best: 1, metric: validation/loss}"],
            "checkpoints.keep_best compares checkpoints.metric=validation/loss, and early stopping another metric",
        ),
    ],
)
def test_settings_that_do_not_say_what_is_meant_have_one_note(overrides: list[str], told: str) -> None:
    rate = [] if told.startswith("policy") else ["policy.optimizer.lr=1e-5"]
    notes = list(notes_on_meaning(load_config(CONFIG, [*rate, *overrides])))
    assert [note.startswith(f"note: {told}") for note in notes] == ([True] if told else [])
