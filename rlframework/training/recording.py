"""Record training steps: the input and result of `policy.train`, and the weights before it.

`rlframework parity --replay` repeats a recorded step on any backend (`conformance.parity.recorded_step` reads the
files). Not recorded: the moments of the optimizer, and calls of `policy.train` after the first one of a step.

    recorded/step-000003/
        step.json            configuration, loss, result, versions, and sizes of the other files
        model/               the weights before the step, as `save_pretrained` writes them
        batch.safetensors    the tensors of the batch
        batch.json           its lists
        logprobs.safetensors the run's log-probabilities of the batch before the step
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel

import rlframework
from rlframework.configure import dump_config
from rlframework.files import replacing_directory, write_atomically
from rlframework.interfaces.loss import LossInput
from rlframework.plugins.loading import load_target

if TYPE_CHECKING:
    from rlframework.algorithm import Parts
    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.loss import LossFunction

_LOG = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file format."""

FOLDER = "recorded"
"""Folder of the recorded steps in a run's folder."""


def folder_of(step: int) -> str:
    """The name of a step's folder in `FOLDER`."""
    return f"step-{step:06d}"


class Recorder:
    """Trains the policy of `parts`, and records the steps that the section `recording` selects.

    Recording does not change the run's numbers. A step that fails is recorded with its error.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config.recording
        self._recorded: set[int] = set()

    def wants(self, step: int) -> bool:
        """Whether the configuration selects `step`."""
        every = self._config.every
        return step in self._config.steps or (every > 0 and step % every == 0)

    def train(self, step: int, data: BatchedDataDict[Any], loss: LossFunction) -> dict[str, Any]:
        """Call `policy.train`; record the first call of a selected step."""
        if not self.wants(step) or step in self._recorded:
            return self._parts.policy.train(data, loss)
        self._recorded.add(step)
        return self._record(step, data, loss)

    def require(self, step: int) -> None:
        """Warn if `step` is selected but the algorithm never called `train` in it."""
        if self.wants(step) and step not in self._recorded:
            _LOG.warning(
                "step %d is not recorded: the algorithm %r did not call StepLoop.train in it, and only these calls are "
                "recorded",
                step,
                self._parts.config.algorithm.name,
            )

    def _record(self, step: int, data: BatchedDataDict[Any], loss: LossFunction) -> dict[str, Any]:
        policy = self._parts.policy
        result: dict[str, Any] | None = None
        failure: Exception | None = None
        with replacing_directory(self._parts.config.output_dir / FOLDER / folder_of(step)) as folder:
            policy.save_pretrained(str(folder / "model"))
            missing = _write_batch(folder, data)
            policy.prepare_for_lp_inference()
            _write_tensors(folder / "logprobs.safetensors", {"logprobs": policy.get_logprobs(data)["logprobs"]})
            policy.prepare_for_training()
            try:
                result = policy.train(data, loss)
            except Exception as error:  # noqa: BLE001 - raised below, after the failing step has been recorded
                failure = error
            description = self._description(step, loss, missing, result, failure)
            write_atomically(folder / "step.json", json.dumps(description | {"files": _sizes(folder)}, indent=1))
        if failure is not None:
            raise failure
        assert result is not None
        return result

    def _description(
        self,
        step: int,
        loss: LossFunction,
        missing: Mapping[str, str],
        result: Mapping[str, Any] | None,
        failure: Exception | None,
    ) -> dict[str, Any]:
        config = self._parts.config
        return {
            "format": FORMAT,
            "step": step,
            "config": dump_config(config),
            "temperature": config.generation.temperature or 1.0,
            "loss": describe_loss(loss),
            "not_recorded": dict(missing),
            "result": None if result is None else _plain_result(result),
            "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
            "versions": {
                "rlframework": rlframework.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        }


def describe_loss(loss: LossFunction) -> dict[str, Any]:
    """Describe how to recreate `loss` (`{"target", "config", "model"}`), or why not (`{"not_replayable": reason}`).

    A loss can be recreated if its class can be imported by name (see `is_loss_class`) and either has no arguments and
    no state, or takes a pydantic model as its only argument and stores it as `config`.
    """
    kind = type(loss)
    target = f"{kind.__module__}:{kind.__qualname__}"
    try:
        if load_target(target) is not kind:
            raise TypeError("the name refers to another class")
    except Exception as error:  # noqa: BLE001 - any error is the reason
        return {"not_replayable": f"{target} cannot be imported ({error})"}
    if not is_loss_class(kind):
        return {"not_replayable": f"{target} is not a loss class: it needs input_type as a class attribute"}
    config = getattr(loss, "config", None)
    try:
        again = kind(config) if isinstance(config, BaseModel) else kind()
    except Exception as error:  # noqa: BLE001 - any error is the reason
        return {"not_replayable": f"{target} takes other arguments than a pydantic model `config` ({error})"}
    if not isinstance(config, BaseModel):
        config = None
    if vars(again) != vars(loss):
        return {"not_replayable": f"{target} has state besides its `config`"}
    model = None if config is None else f"{type(config).__module__}:{type(config).__qualname__}"
    return {"target": target, "config": None if config is None else config.model_dump(mode="json"), "model": model}


def is_loss_class(kind: Any) -> bool:
    """Whether `kind` is a loss class: its instances are callable, and it has `input_type` as a class attribute.

    `loss_type` may depend on the settings, so only instances need it.
    """
    if not isinstance(kind, type) or not any("__call__" in vars(base) for base in kind.__mro__):
        return False
    return getattr(kind, "input_type", None) in tuple(LossInput)


def _write_batch(folder: Path, data: BatchedDataDict[Any]) -> dict[str, str]:
    """Write the tensors and plain lists of the batch. Return the keys not written, each with the reason."""
    tensors: dict[str, torch.Tensor] = {}
    lists: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, list) and _is_plain(value):
            lists[key] = value
        else:
            missing[key] = f"a {type(value).__name__} that is neither a tensor nor a list of plain values"
    _write_tensors(folder / "batch.safetensors", tensors)
    write_atomically(folder / "batch.json", json.dumps(lists))
    return missing


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save

    whole = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    write_atomically(path, save(whole))


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _plain_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result of `policy.train` as JSON values; non-finite numbers as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return {key: plain(value) for key, value in result.items() if key not in ("rank", "times")}


def _sizes(folder: Path) -> dict[str, dict[str, Any]]:
    """The size in bytes of each file in `folder`, with the SHA-256 of those outside the model."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size}
        if path.parent == folder:
            found[path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
