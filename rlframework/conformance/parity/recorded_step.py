"""Reading what `rlframework.training.recording` wrote: one training step of a run. What is damaged is an error.

A step names its loss and the modules of its plugins, and these are imported, as for the run itself. Called is nothing
but the class of a loss, and a pydantic model of its settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.errors import DataError, NotSupported
from rlframework.interfaces.loss import LossInput
from rlframework.plugins.loading import load_target
from rlframework.training.recording import FOLDER, FORMAT, folder_of, is_loss_class

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.interfaces.loss import LossFunction

HOW = "a run records steps when its configuration says so: recording.steps=[3,10], or recording.every=50"


@dataclass(frozen=True)
class RecordedStep:
    """A step as it was: `data` went into `policy.train` with `loss`; `logprobs` are the run's own, before the step.

    `result` is what `policy.train` returned; None where it failed, and `failure` says how.
    """

    path: Path
    step: int
    config: Mapping[str, Any]
    data: BatchedDataDict[Any]
    logprobs: Tensor
    loss: LossFunction
    temperature: float
    result: Mapping[str, Any] | None
    failure: str
    versions: Mapping[str, str]

    @property
    def model(self) -> Path:
        """The weights before the step."""
        return self.path / "model"

    @property
    def policy(self) -> Mapping[str, Any]:
        """The section `policy` of the run."""
        policy: Mapping[str, Any] = self.config["policy"]
        return policy


def read_step(run: Path, step: int) -> RecordedStep:
    """Step `step` of the run in the folder `run`.

    `DataError` where there is no such run, step or where a file of it is damaged; `NotSupported` for a step that
    cannot be computed again, with the reason.
    """
    path = _find(run, step)
    try:
        description = json.loads((path / "step.json").read_text(encoding="utf-8"))
        found = description["format"]
        if found != FORMAT:
            raise DataError(f"{path} is of format {found!r}, and this version of rlframework reads {FORMAT}")
        _check_files(path, description["files"])
        _check_replayable(path, description)
        return _read(path, description)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"the recorded step in {path} is damaged ({why}); record it again")


def _find(run: Path, step: int) -> Path:
    if not (run / "config.yaml").is_file():
        raise DataError(f"{run} is no folder of a run: there is no config.yaml in it. Give the run's output_dir")
    path = run / FOLDER / folder_of(step)
    if path.is_dir():
        return path
    there = sorted(int(found.name.removeprefix("step-")) for found in (run / FOLDER).glob("step-[0-9]*"))
    told = f"recorded are: {', '.join(map(str, there))}" if there else f"nothing is recorded there; {HOW}"
    raise DataError(f"step {step} of the run in {run} is not recorded; {told}")


def _check_files(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise _damaged(path, f"{name} has {file.stat().st_size} bytes, and should have {expected['bytes']}")
        if "sha256" in expected and hashlib.sha256(file.read_bytes()).hexdigest() != expected["sha256"]:
            raise _damaged(path, f"{name} is not what was written")


def _check_replayable(path: Path, description: Mapping[str, Any]) -> None:
    reasons = [f"{key!r} of its batch is {why}" for key, why in description["not_recorded"].items()]
    if why := description["loss"].get("not_replayable"):
        reasons.append(f"its loss {why}")
    if description["config"]["policy"].get("lora"):
        reasons.append("it trains LoRA adapters, and the oracle has none")
    if description["config"]["policy"].get("trust_remote_code"):
        reasons.append("its model brings code of its own, which the oracle does not run")
    if reasons:
        raise NotSupported(f"the step in {path} cannot be computed again: {'; '.join(reasons)}")


def _read(path: Path, description: Mapping[str, Any]) -> RecordedStep:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path / "batch.safetensors")
        logprobs = load_file(path / "logprobs.safetensors")["logprobs"]
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error
    lists = json.loads((path / "batch.json").read_text(encoding="utf-8"))
    return RecordedStep(
        path=path,
        step=description["step"],
        config=description["config"],
        data=BatchedDataDict({**tensors, **lists}),
        logprobs=logprobs,
        loss=_loss(path, description["loss"]),
        temperature=description["temperature"],
        result=description["result"],
        failure=description["failure"] or "",
        versions=description["versions"],
    )


def _loss(path: Path, description: Mapping[str, Any]) -> LossFunction:
    target, model = description["target"], description["model"]
    try:
        kind = load_target(target)
        config_kind = None if model is None else load_target(model)
    except Exception as error:  # whatever it is, it is told with the name of the loss
        raise _cannot_be_made(path, target, error) from error
    _refuse_others(path, target, kind, model, config_kind)
    try:
        made: LossFunction = kind() if config_kind is None else kind(config_kind(**description["config"]))
        made_of = made.loss_type, made.input_type
    except Exception as error:  # as above
        raise _cannot_be_made(path, target, error) from error
    if made_of[1] != LossInput.LOGPROBS:
        raise NotSupported(f"the step in {path} cannot be computed again: its loss {target} reads logits")
    return made


def _cannot_be_made(path: Path, target: str, error: Exception) -> NotSupported:
    return NotSupported(f"the loss {target} of the step in {path} cannot be made again: {error}")


def _refuse_others(path: Path, target: str, kind: Any, model: str | None, config_kind: Any) -> None:
    """The file may be anybody's: what it names is called only if it is what a recorded step names."""
    if not is_loss_class(kind):
        raise DataError(f"the step in {path} names {target} as its loss, which is no class of losses; it is not called")
    if model is not None and not (isinstance(config_kind, type) and issubclass(config_kind, BaseModel)):
        raise DataError(f"the step in {path} names {model} for its loss, which is no pydantic model; it is not called")
