"""Rows from Python, epochs and mixtures in runs: which steps there are, and that a resumed run has the same data."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from probe_runs import numbers_of, refused, rows_of

from rlframework import build_parts, load_config, resume, run, with_data
from rlframework.algorithms.grpo import GRPO
from rlframework.algorithms.sft import SFT
from rlframework.base.errors import ConfigError, DataError
from rlframework.runner.data import with_steps

OWN = ["~environment", 'environment={"name": "dataset"}', "policy.train_global_batch_size=8"]
EPOCHS = ["~algorithm.num_steps", "algorithm.num_epochs=1"]
ROWS = [{"question": f"{number}+1?", "answer": str(number + 1)} for number in range(14)]
DATA = {"train": ROWS[:12], "validation": ROWS[12:]}


class Samples:
    """An environment with 13 training samples."""

    def samples(self, split: str) -> range:
        return range(13)


def of_epochs(config: Any, algorithm: Any = SFT) -> Any:
    return with_steps(config, algorithm, Samples())  # type: ignore[arg-type]


@pytest.mark.slow
def test_steps_of_epochs_are_rounded_up(run_config, caplog) -> None:
    """13 samples, 8 rows a step: two steps an epoch, 39 rows and 5 steps for three; GRPO takes 4 prompts a step.

    A curriculum, which skips prompts, does not change their number.
    """
    caplog.set_level("INFO")
    for epochs, steps in ((1, 2), (3, 5)):
        config = run_config("sft", *OWN, *EPOCHS, f"algorithm.num_epochs={epochs}")
        counted = of_epochs(config).algorithm
        assert (counted.num_steps, counted.num_epochs) == (steps, None)
    own = [*OWN[:1], 'environment={"name": "dataset", "check": "exact"}']
    assert of_epochs(run_config("grpo", *own, *EPOCHS), GRPO).algorithm.num_steps == 4
    skipping = run_config("grpo", *own, *EPOCHS, "algorithm.curriculum={}", "algorithm.samples_per_prompt=4")
    assert of_epochs(skipping, GRPO).algorithm.num_steps == 4
    assert caplog.messages[-1] == (
        "1 epoch(s) of 13 training samples, 4 a step: 4 step(s), whatever algorithm.curriculum skips"
    )
    plain = run_config("sft", *OWN)
    assert of_epochs(plain) is plain


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.num_epochs=2"], "num_steps=3 and num_epochs=2 both say how long to train; set only one"),
        (["algorithm.num_steps=0"], "num_steps is 0, so num_epochs must be set"),
        ([*EPOCHS, "algorithm.num_epochs=0"], "`algorithm.num_epochs`: must be greater than 0"),
    ],
)
def test_steps_or_epochs(run_config, overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config("sft", *OWN, *overrides)


def test_steps_after_the_last_epoch_are_found_when_the_data_is_open(run_config) -> None:
    config = run_config("sft", *OWN, *EPOCHS, "recording.steps=[3]")
    with pytest.raises(ConfigError, match=r"recording\.steps.*must be steps of the run, 1 to 2"):
        of_epochs(config)
    of_epochs(load_config(config, ["algorithm.num_epochs=2"]))


@pytest.mark.slow
def test_a_configuration_takes_rows_in_place_of_a_path(run_config) -> None:
    config = run_config("sft", *OWN)
    given = with_data(config, ROWS)
    assert given.environment.given.train[3] == ROWS[3]
    assert load_config(given, []).environment.given is None  # rows are in no dump
    assert "+1?" not in json.dumps(given.model_dump(mode="json"))
    again = with_data(load_config(given, []), datasets.Dataset.from_list(ROWS))
    assert again.environment.data_digest == given.environment.data_digest
    with pytest.raises(ConfigError, match=r"started with other rows: .* the 13 training rows given now"):
        with_data(given, ROWS[1:])
    with pytest.raises(ConfigError, match=r"environment\.path names the training data, and `data` was given too"):
        with_data(load_config(config, ["environment.path=a.jsonl"]), ROWS)
    with pytest.raises(ConfigError, match=r"environment\.validation_path is set, and `data` has validation rows"):
        with_data(load_config(config, ["environment.validation_path=a.jsonl"]), DATA)
    with pytest.raises(ConfigError, match=r"environment\.name=addition does not take rows"):
        with_data(run_config("sft"), ROWS)


def test_a_run_without_data(run_config) -> None:
    config = run_config("sft", *OWN)
    assert "environment.path: required key is missing" in refused(config, ConfigError)
    dumped = load_config(with_data(config, ROWS), [])
    assert "Resume it with rlframework.resume(output_dir, data=rows)" in refused(dumped, ConfigError)
    with pytest.raises(DataError, match=r"train rows from Python, row 1 \(counted from 0\): no conversation"):
        run(config, data=[ROWS[0], {"a": 1}])
    assert not config.output_dir.exists()


@pytest.mark.slow
def test_a_mixture_is_resumed_bit_for_bit(run_config, tmp_path) -> None:
    def source(name: str, rows: list[dict[str, Any]], weight: float) -> dict[str, Any]:
        path = Path(tmp_path / f"{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(path), "weight": weight}

    mixture = {"first": source("a", ROWS[:9], 0.75), "second": source("b", ROWS[9:], 0.25)}
    keys = [OWN[0], f"environment={json.dumps({'name': 'dataset', 'mixture': mixture})}", OWN[2]]
    keys += ["algorithm.validation={at_start: false, at_end: false, every: 0}", "checkpoints.every=2"]
    run(run_config("sft", *keys, "algorithm.num_steps=4", f"output_dir={tmp_path}/whole"))
    run(run_config("sft", *keys, "algorithm.num_steps=2", f"output_dir={tmp_path}/parts"))
    resume(tmp_path / "parts", ["algorithm.num_steps=4"])
    whole, parts = numbers_of(tmp_path / "whole"), numbers_of(tmp_path / "parts")
    assert [whole[step] for step in (1, 2, 3, 4)] == [parts[step] for step in (1, 2, 3, 4)]
    for row in rows_of(tmp_path / "whole"):
        assert (row["train/rows/first"], row["train/rows/second"]) == (6.0, 2.0)
    with pytest.raises(DataError, match="saved position in the data is for mixture"):
        resume(tmp_path / "parts", ["algorithm.num_steps=6", "environment.mixture.first.weight=0.5"])


@pytest.mark.slow
def test_prompts_from_python_by_grpo(run_config) -> None:
    keys = [OWN[0], 'environment={"name": "dataset", "check": "exact"}', *EPOCHS]

    async def cell() -> Any:
        """A notebook runs its cells inside an event loop."""
        return run(run_config("grpo", *keys), data=DATA)

    result = asyncio.run(cell())
    assert result.metrics["step"] == 3  # 12 prompts, 4 a step
    assert result.metrics["train/epoch"] == 1.0


@pytest.mark.slow
def test_parts_on_rows_from_python(run_config) -> None:
    with build_parts(run_config("sft", *OWN, *EPOCHS), data=DATA) as parts:
        assert parts.config.algorithm.num_steps == 2
        assert len(parts.environment.samples("train")) == 12
