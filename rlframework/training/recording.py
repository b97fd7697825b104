"""Recording a training step: what `policy.train` was given, what it saw, and the weights before it.

`rlframework parity --replay` computes the step again on any backend (`conformance.parity.recorded` reads what is
written here). Left out: the moments of the optimizer, and calls of `policy.train` within a step after the first.

    recorded/step-000003/
        step.json            what kind of step it was, its result, versions, and the sizes of the other files
        model/               the weights before the step, as `save_pretrained` writes them
        batch.safetensors    the tensors of the batch
        batch.json           its lists
        logprobs.safetensors the run's own log-probabilities of the batch, before the step
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sys
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

FORMAT = 1
"""Version of what is written."""

FOLDER = "recorded"
"""Where recorded steps lie in the folder of a run."""


def folder_of(step: int) -> str:
    """The name of the folder of a step in `FOLDER`."""
    return f"step-{step:06d}"


class Recorder:
    """Trains the policy of `parts`, and records the steps that its configuration asks for.

    Recording changes no number of the run. A step that fails is recorded too, with its error.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config.recording
        self._recorded: set[int] = set()

    def wants(self, step: int) -> bool:
        """Whether the configuration asks for `step`."""
        every = self._config.every
        return step in self._config.steps or (every > 0 and step % every == 0)

    def train(self, step: int, data: BatchedDataDict[Any], loss: LossFunction) -> dict[str, Any]:
        """`policy.train`; the first call within a step that is asked for is recorded."""
        if not self.wants(step) or step in self._recorded:
            return self._parts.policy.train(data, loss)
        self._recorded.add(step)
        return self._record(step, data, loss)

    def require(self, step: int) -> None:
        """Say so on stderr where `step` was to be recorded, and its algorithm trained without `train`."""
        if self.wants(step) and step not in self._recorded:
            name = self._parts.config.algorithm.name
            print(
                f"step {step} is not recorded: in it the algorithm {name!r} made no call of StepLoop.train, which is "
                "what `recording` records",
                file=sys.stderr,
                flush=True,
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
            except Exception as error:  # noqa: BLE001 - raised below: the step that fails is the one to look at
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
    """How `loss` is made again, `{"target", "config"}`, or why it cannot be: `{"not_replayable": reason}`.

    It can where its class, found under its own name (see `is_loss_class`), takes nothing and holds nothing, or takes a
    pydantic model as its only argument and holds it as `config`.
    """
    kind = type(loss)
    target = f"{kind.__module__}:{kind.__qualname__}"
    try:
        if load_target(target) is not kind:
            raise TypeError("another class is there")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        return {"not_replayable": f"{target} cannot be imported ({error})"}
    if not is_loss_class(kind):
        return {"not_replayable": f"{target} has no input_type as a class: it is told for a loss by that"}
    config = getattr(loss, "config", None)
    try:
        again = kind(config) if isinstance(config, BaseModel) else kind()
    except Exception as error:  # noqa: BLE001 - as above
        return {"not_replayable": f"{target} is not made of nothing or of a pydantic model `config` ({error})"}
    if not isinstance(config, BaseModel):
        config = None
    if vars(again) != vars(loss):
        return {"not_replayable": f"{target} holds more than what it is made of"}
    model = None if config is None else f"{type(config).__module__}:{type(config).__qualname__}"
    return {"target": target, "config": None if config is None else config.model_dump(mode="json"), "model": model}


def is_loss_class(kind: Any) -> bool:
    """Whether `kind` is a class of losses: its instances can be called, and itself it says what they read.

    `loss_type` may depend on the settings, and then only instances have it.
    """
    if not isinstance(kind, type) or not any("__call__" in vars(base) for base in kind.__mro__):
        return False
    return getattr(kind, "input_type", None) in tuple(LossInput)


def _write_batch(folder: Path, data: BatchedDataDict[Any]) -> dict[str, str]:
    """Write what can be written; keys that cannot be, and why."""
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
    """What `policy.train` returned, as JSON's types; numbers that are not finite as text."""

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
    """The bytes of each file under `folder`, and of those beside the model their SHA-256."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size}
        if path.parent == folder:
            found[path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
