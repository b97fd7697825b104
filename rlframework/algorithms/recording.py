"""Record and profile the steps that the sections `recording` and `profiler` select.

A recording has the input and result of `policy.train`, and the weights before it. `rlframework parity --replay` repeats
the step on any backend (`conformance.parity.recorded_step` reads the files). Not recorded: the optimizer's moments, and
calls of `policy.train` after the first one of a step.

    recorded/step-000003/
        step.json            configuration, loss, result, versions, and sizes of the other files
        model/               the weights before the step, as `save_pretrained` writes them
        batch.safetensors    the tensors of the batch
        batch.json           its lists
        logprobs.safetensors the run's log-probabilities of the batch before the step
    traces/step-000003/
        rank-0.json.gz       the torch profiler's trace of rank 0, without validation and checkpoints
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel
from safetensors.torch import save

import rlframework
from rlframework.base.files import replacing_directory, write_atomically
from rlframework.base.secrets import hide_in_text, hide_secrets
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.loss import LossFunction, LossInput
from rlframework.interfaces.policy_worker import SamplingBound, TrainResult
from rlframework.plugins.configure import dump_config
from rlframework.plugins.discovery import load_target
from rlframework.rollout.parts import Parts

_LOG = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file format."""

FOLDER, TRACES = "recorded", "traces"
"""Folders of the recorded steps and of the traces in a run's folder."""


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

    def train(
        self,
        step: int,
        data: BatchedDataDict[Any],
        loss: LossFunction,
        gbs: int | None = None,
        sampling_bound: SamplingBound | None = None,
    ) -> TrainResult:
        """Call `policy.train`; record the first call of a selected step."""
        policy, config = self._parts.policy, self._parts.config
        bound: dict[str, Any] = {} if sampling_bound is None else {"sampling_bound": sampling_bound}
        if not self.wants(step) or step in self._recorded:
            return cast("TrainResult", policy.train(data, loss, gbs=gbs, **bound))
        self._recorded.add(step)
        facts: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "config": hide_secrets(dump_config(config)),
            "temperature": config.generation.temperature or 1.0,
            "loss": describe_loss(loss),
            "result": None,
            "failure": None,
            "versions": {
                "rlframework": rlframework.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        }
        failure: Exception | None = None
        with replacing_directory(config.output_dir / FOLDER / folder_of(step)) as folder:
            policy.save_pretrained(str(folder / "model"))
            facts["not_recorded"] = _write_batch(folder, data)
            policy.prepare_for_lp_inference()
            _write_tensors(folder / "logprobs.safetensors", {"logprobs": policy.get_logprobs(data)["logprobs"]})
            policy.prepare_for_training()
            try:
                result = policy.train(data, loss, gbs=gbs, **bound)
                facts["result"] = plain_json({name: result[name] for name in result if name not in ("rank", "times")})
            except Exception as error:  # noqa: BLE001 - raised below, after the failing step has been recorded
                failure, facts["failure"] = error, hide_in_text(f"{type(error).__name__}: {error}")
            write_atomically(folder / "step.json", json.dumps(facts | {"files": _sizes(folder)}, indent=1))
        if failure is not None:
            raise failure
        return cast("TrainResult", result)

    def require(self, step: int) -> None:
        """Warn if `step` is selected but the algorithm never called `train` in it."""
        if self.wants(step) and step not in self._recorded:
            _LOG.warning(
                "step %d is not recorded: the algorithm %r did not call StepLoop.train in it, and only these calls are "
                "recorded",
                step,
                self._parts.config.algorithm.name,
            )


@contextmanager
def profiling(parts: Parts, step: int) -> Iterator[dict[str, float]]:
    """Profile the block as step `step` if it is selected, with one trace per worker, and log where the traces are.

    Yields metrics that are filled in at the end of the block: the mean times of the profiled devices. A step that fails
    leaves no trace, as its workers may be gone.
    """
    policy, config = parts.policy, parts.config.profiler
    metrics: dict[str, float] = {}
    if not config.profiles(step):
        yield metrics
        return
    policy.start_profiling(
        ranks=config.ranks, with_stack=config.with_stack, record_shapes=config.record_shapes, memory=config.memory
    )
    try:
        yield metrics
    except BaseException:
        with suppress(Exception):  # raise the step's own error
            policy.stop_profiling(None)
        raise
    written = policy.stop_profiling(str(parts.config.output_dir.absolute() / TRACES / folder_of(step)))
    from rlframework.algorithms.performance import read_trace

    times = [read_trace(Path(path)) for path in written]
    lines = "\n".join(
        f"  {path}: {time or 'without the times of its device'}" for path, time in zip(written, times, strict=True)
    )
    how = "open them in https://ui.perfetto.dev (they stay in the browser) or chrome://tracing"
    _LOG.info("traces of step %d; %s:\n%s", step, how, lines)
    known = [vars(time) for time in times if time is not None]
    for name in known[0] if known else ():
        metrics[f"time/device/{name}"] = sum(time[name] for time in known) / len(known)


def describe_loss(loss: LossFunction) -> dict[str, Any]:
    """Describe how to recreate `loss` (`{"target", "config", "model"}`), or why not (`{"not_replayable": reason}`).

    A loss can be recreated if its class can be imported by name (see `is_loss_class`) and either has no arguments and
    no state, or takes a pydantic model as its only argument and stores it as `config`.
    """
    kind, given = type(loss), getattr(loss, "config", None)
    target, config = f"{kind.__module__}:{kind.__qualname__}", given if isinstance(given, BaseModel) else None
    problem = "cannot be imported"
    try:
        if load_target(target) is not kind:
            raise TypeError("the name refers to another class")
        if not is_loss_class(kind):
            return {"not_replayable": f"{target} is not a loss class: it needs input_type as a class attribute"}
        problem = "takes other arguments than a pydantic model `config`"
        again = kind() if config is None else kind(config)
    except Exception as error:  # noqa: BLE001 - any error is the reason
        return {"not_replayable": f"{target} {problem} ({error})"}
    if vars(again) != vars(loss):
        return {"not_replayable": f"{target} has state besides its `config`"}
    if config is None:
        return {"target": target, "config": None, "model": None}
    model = f"{type(config).__module__}:{type(config).__qualname__}"
    return {"target": target, "config": config.model_dump(mode="json"), "model": model}


def is_loss_class(kind: Any) -> bool:
    """Whether `kind` is a loss class: its instances are callable, and it has `input_type` as a class attribute.

    `loss_type` may depend on the settings, so only instances need it.
    """
    if not isinstance(kind, type) or not any("__call__" in vars(base) for base in kind.__mro__):
        return False
    return getattr(kind, "input_type", None) in tuple(LossInput)


def _write_batch(folder: Path, data: BatchedDataDict[Any]) -> dict[str, str]:
    """Write the tensors and plain lists of the batch. Return the keys not written, each with the reason."""
    tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
    lists = {key: value for key, value in data.items() if isinstance(value, list) and _is_plain(value)}
    _write_tensors(folder / "batch.safetensors", tensors)
    write_atomically(folder / "batch.json", json.dumps(lists))
    return {
        key: f"a {type(value).__name__} that is neither a tensor nor a list of plain values"
        for key, value in data.items()
        if key not in tensors and key not in lists
    }


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    write_atomically(path, save({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}))


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def plain_json(value: Any) -> Any:
    """Return `value` as JSON takes it: tensors and tuples as lists, mappings as dicts, non-finite numbers as text."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    return [plain_json(item) for item in value] if isinstance(value, list | tuple) else value


def _sizes(folder: Path) -> dict[str, dict[str, Any]]:
    """The size in bytes of each file in `folder`, with the SHA-256 of those outside the model."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size}
        if path.parent == folder:
            found[path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
