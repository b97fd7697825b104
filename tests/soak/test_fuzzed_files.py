"""Damaged files: what is read equals what was written, or one error of ours names the file.

Each input is a file that ends or continues at one of its regions, or has a region that is flipped, zeroed, cut out or
repeated. Files without checksums may read as other numbers; these are `UNCHECKED`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from rlframework import run
from rlframework.algorithms.checkpoints import Checkpoints, newest_checkpoint
from rlframework.base.errors import UserError
from rlframework.datasets.tokens import TokenData, write_token_data
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.observers.jsonl import drop_steps_after, read_history
from rlframework.policy.checkpoint.manifest import check_files
from rlframework.policy.checkpoint.pretrained import save_native
from rlframework.policy.checkpoint.saved import native_files
from rlframework.policy.trained_weights import open_saved
from rlframework.runner.parts import build_parts
from rlframework_conformance.parity.recorded_step import read_step
from rlframework_preferences.reward_data import RewardData
from rlframework_report.report import render
from rlframework_report.report.content import content
from rlframework_report.report.runs import read_runs
from rlframework_tools.evaluation.plan import plan_evaluation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("flip", "zero", "cut", "repeat", "truncate", "extend")
LINES = ("metrics.jsonl", "samples.jsonl", "timeline.jsonl")
UNCHECKED = ("config.yaml", *LINES, "environment.json", ".memmap", "step.json")
"""Ends of the names of files without a checksum, or that are text which a user may change."""
REGIONS = 24


def damaged(data: bytes, kind: str, at: float, dice: Random) -> bytes:
    """`data` with a region of up to 64 bytes, which begins at this fraction of it, damaged in this way."""
    start = min(int(at * len(data)), max(len(data) - 1, 0))
    region, after = data[start : start + dice.choice((1, 8, 64))], b""
    after = data[start + len(region) :]
    changed = {
        "flip": lambda: bytes(byte ^ (1 << dice.randrange(8)) for byte in region),
        "zero": lambda: bytes(len(region)),
        "cut": lambda: b"",
        "repeat": lambda: region + region,
    }
    if kind == "truncate":
        return data[:start]
    return data + dice.randbytes(1 + start) if kind == "extend" else data[:start] + changed[kind]() + after


@dataclass
class Target:
    """A folder, the function that reads it and returns what it found, and the files to damage."""

    folder: Path
    read: Callable[[Path], Any]
    files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        self.files = self.files or tuple(path for path in sorted(self.folder.rglob("*")) if path.is_file())


def tensors_in(folder: Path) -> dict[str, bytes]:
    with open_saved(folder) as saved:
        return {name: saved[name].numpy().tobytes() for name in saved}


def token_rows(folder: Path) -> Any:
    data = TokenData(folder)
    data.verify()
    return [[part.tolist() for part in data.rows([number])] for number in range(len(data))]


def reward_rows(folder: Path) -> Any:
    data = RewardData.load(folder)
    return {name: value.tolist() for name, value in data.items()}


def native(folder: Path) -> Any:
    check_files(folder, required=True)
    engine = native_files(str(folder), "mine", optimizer=True)
    return {path.name: path.read_bytes() for path in engine.iterdir()}


def report(folder: Path) -> str:
    return render(content(read_runs([folder]), 1) | {"made": "the time of a report is not of its run"})


def restarted(folder: Path) -> Any:
    drop_steps_after(folder, 1)
    return read_history(folder / "metrics.jsonl")


def replayed(folder: Path) -> Any:
    step = read_step(folder, 1)
    return {name: getattr(value, "tolist", lambda value=value: value)() for name, value in step.data.items()}


@pytest.fixture(scope="module")
def finished(make_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The configuration of a run that is finished, with a checkpoint, samples and a recorded step."""
    keys = ["algorithm.num_steps=2", "checkpoints.every=2", "recording.steps=[1]", "plugins=[]"]
    config = make_config(tmp_path_factory.mktemp("runs"), "sft", *keys, "algorithm.validation={every: 1, samples: 4}")
    run(config)
    return config


@pytest.fixture(scope="module")
def targets(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    place, out = tmp_path_factory.mktemp("intact"), finished.output_dir
    write_token_data(
        place / "tokens", [([1, 2, 3], [False, True, True]), ([4] * 40, [True] * 40)], vocab_size=9, tokenizer="t",
        train_on="last", source={"path": "a"},
    )  # fmt: skip
    RewardData.from_lengths(
        torch.arange(48).view(12, 4), torch.arange(12) % 4 + 1, end_scores=torch.arange(12) / 4
    ).save(place / "rewards")

    def engine_files(folder: Path) -> None:
        (folder / "rank0.pt").write_bytes(bytes(range(256)) * 4)

    save_native(
        str(place / "native"), WorkerContext(), beside=lambda folder: None, write=engine_files,
        facts={"backend": "mine", "workers": 1, "optimizer": True},
    )  # fmt: skip
    checkpoint = newest_checkpoint(out)
    assert checkpoint is not None
    with build_parts(finished) as parts:
        parts.policy.save_checkpoint(str(place / "sharded/model"), str(place / "sharded/optimizer"), form="sharded")
        for name in ("run.json", "checksums.json"):
            shutil.copyfile(checkpoint / name, place / "sharded" / name)

        def resumed(folder: Path) -> Any:
            state = Checkpoints(replace(parts, checkpoint=folder)).restore()
            assert state is not None
            return state.model_dump(), [tensors_in(folder / name) for name in ("model", "optimizer")]

        def texts(*names: str) -> tuple[Path, ...]:
            return tuple(out / name for name in names)

        yield {
            "portable": Target(checkpoint, resumed),
            "sharded": Target(place / "sharded", resumed),
            "native": Target(place / "native", native),
            "tokens": Target(place / "tokens", token_rows),
            "rewards": Target(place / "rewards", reward_rows),
            "report": Target(out, report, texts(*LINES, "config.yaml", "environment.json")),
            "restart": Target(out, restarted, texts(*LINES)),
            "evaluate": Target(out, lambda folder: plan_evaluation([str(folder)]).configs, texts("config.yaml")),
            "recorded": Target(
                out, replayed, tuple(path for path in (out / "recorded/step-000001").iterdir() if path.is_file())
            ),
        }


def write(path: Path, data: bytes) -> None:
    """Replace the file: one that is mapped keeps its pages."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    os.replace(new, path)


NAMES = ("portable", "sharded", "native", "tokens", "rewards", "report", "restart", "evaluate", "recorded")


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_an_error_that_names_it_or_changes_nothing(targets: Any, soak: Any, name: str) -> None:
    target, dice = targets[name], soak.random()
    wanted = target.read(target.folder)
    inputs = [(path, kind, n / REGIONS) for path in target.files for kind in KINDS for n in range(REGIONS)]
    tried = dice.sample(inputs, min(len(inputs), soak.times(short=3, full=len(inputs))))
    outcomes = {"error": 0, "equal": 0, "unchecked": 0}
    for path, kind, at in tried:
        intact = {each: each.read_bytes() for each in target.files}
        write(path, damaged(intact[path], kind, at, dice))
        what = f"{path.name}: {kind} at {at:.2f}"
        try:
            found = target.read(target.folder)
        except UserError as error:
            outcomes["error"] += 1
            passed = path.name in str(error) or str(target.folder) in str(error) or path.name == "config.yaml"
        except BaseException as error:
            raise AssertionError(what) from error
        else:
            equal = found == wanted
            outcomes["equal" if equal else "unchecked"] += 1
            passed = equal or path.name.endswith(UNCHECKED)
        assert passed, what
        for each, data in intact.items():
            write(each, data)
    assert target.read(target.folder) == wanted
    soak.figures |= {"inputs": len(tried), **outcomes}
    print(json.dumps(soak.figures))
