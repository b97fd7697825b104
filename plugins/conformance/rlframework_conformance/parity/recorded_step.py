"""Read a training step written by `rlframework.algorithms.recording`, and replay it on each backend.

A replay shows why a run behaves differently on another engine. Both sides start with a fresh optimizer, because its
moments are not recorded; the run's own figures are therefore comparable up to its first optimizer step:
log-probabilities, and that step's loss and gradient norm.

Damaged files are an error. A recorded step names its loss and its plugins' modules, which are imported unless they are
in the run's folder (see `rlframework.config.trust`). The only code called is a loss class and the pydantic model of its
settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rlframework.algorithms.recording import FOLDER, FORMAT, folder_of, is_loss_class
from rlframework.base.errors import DataError, NotSupported
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import PolicyConfig
from rlframework.config.trust import require_trusted, require_trusted_imports
from rlframework.config.yaml_text import Tree
from rlframework.interfaces.loss import LossInput
from rlframework.plugins.configure import restore_config
from rlframework.plugins.discovery import load_target
from rlframework_conformance.layouts import Layout
from rlframework_conformance.parity.compare import compare_results, logprobs_measured, loss_measured, norm_measured
from rlframework_conformance.parity.oracle_policy import oracle_step_with
from rlframework_conformance.parity.outcome import LOSS, NORM, Candidate, Observed, Outcome
from rlframework_conformance.parity.scenario import Scenario

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.interfaces.loss import LossFunction
    from rlframework.plugins.manager import PluginManager
    from rlframework_conformance.measure import Measurement

HOW = "set recording.steps=[3,10] or recording.every=50 in a run's configuration to record steps"


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step: `data` and `loss` were passed to `policy.train`; `logprobs` are the run's, before the step.

    `result` is the return value of `policy.train`, or None if it failed with `failure`.
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
        """Directory of the weights before the step."""
        return self.path / "model"

    @property
    def policy(self) -> Mapping[str, Any]:
        """The section `policy` of the run."""
        policy: Mapping[str, Any] = self.config["policy"]
        return policy


def read_step(run: Path, step: int, *, trust_run: bool = False) -> RecordedStep:
    """Read step `step` of the run in the folder `run`.

    Raises `DataError` if the run or step does not exist or a file is damaged, `ConfigError` if it would import code
    from `run` and `trust_run` is false, and `NotSupported` with the reason if the step cannot be replayed.
    """
    path = _find(run, step)
    try:
        description = json.loads((path / "step.json").read_text(encoding="utf-8"))
        found = description["format"]
        if found != FORMAT:
            raise DataError(f"{path} has format {found!r}; this version of rlframework reads format {FORMAT}")
        _check_files(path, description["files"])
        _check_replayable(path, description)
        if not trust_run:
            named = [description["loss"][key] for key in ("target", "model") if description["loss"].get(key)]
            require_trusted_imports(run, Tree(description["config"]), named)
        return _read(path, description)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"the recorded step in {path} is damaged ({why}); record it again")


def _find(run: Path, step: int) -> Path:
    if not (run / "config.yaml").is_file():
        raise DataError(f"{run} is not the folder of a run: it contains no config.yaml. Give the run's output_dir")
    path = run / FOLDER / folder_of(step)
    if path.is_dir():
        return path
    recorded = sorted(int(found.name.removeprefix("step-")) for found in (run / FOLDER).glob("step-[0-9]*"))
    listed = f"recorded steps: {', '.join(map(str, recorded))}" if recorded else f"no step is recorded; {HOW}"
    raise DataError(f"step {step} of the run in {run} is not recorded; {listed}")


def _check_files(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise _damaged(path, f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}")
        if "sha256" in expected and hashlib.sha256(file.read_bytes()).hexdigest() != expected["sha256"]:
            raise _damaged(path, f"{name} has another checksum than when it was written")


def _check_replayable(path: Path, description: Mapping[str, Any]) -> None:
    reasons = [f"{key!r} of its batch is {why}" for key, why in description["not_recorded"].items()]
    if why := description["loss"].get("not_replayable"):
        reasons.append(f"its loss {why}")
    if description["config"]["policy"].get("lora"):
        reasons.append("it trains LoRA adapters, which the oracle does not support")
    if description["config"]["policy"].get("trust_remote_code"):
        reasons.append("its model has custom code, which the oracle does not run")
    if reasons:
        raise NotSupported(f"the step in {path} cannot be replayed: {'; '.join(reasons)}")


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
    except Exception as error:  # reported with the name of the loss
        raise _cannot_create(path, target, error) from error
    _require_loss_types(path, target, kind, model, config_kind)
    try:
        made: LossFunction = kind() if config_kind is None else kind(config_kind(**description["config"]))
        made_of = made.loss_type, made.input_type
    except Exception as error:  # as above
        raise _cannot_create(path, target, error) from error
    if made_of[1] != LossInput.LOGPROBS:
        raise NotSupported(f"the step in {path} cannot be replayed: its loss {target} reads logits")
    return made


def _cannot_create(path: Path, target: str, error: Exception) -> NotSupported:
    return NotSupported(f"the loss {target} of the step in {path} cannot be created: {error}")


def _require_loss_types(path: Path, target: str, kind: Any, model: str | None, config_kind: Any) -> None:
    """Reject names that are not a loss class or a pydantic model: the file may come from anyone, so nothing else is
    called.
    """
    if not is_loss_class(kind):
        raise DataError(f"the step in {path} names {target} as its loss, which is not a loss class; it is not called")
    if model is not None and not (isinstance(config_kind, type) and issubclass(config_kind, BaseModel)):
        raise DataError(
            f"the step in {path} names {model} for its loss, which is not a pydantic model; it is not called"
        )


def require_trusted_policy(run: Path, recorded: RecordedStep, manager: PluginManager) -> None:
    """Raise `ConfigError` if the section `policy` of a step of `run` has values that need trust."""
    known = {*PolicyConfig.model_fields, recorded.policy["backend"]}
    policy = {key: value for key, value in recorded.policy.items() if key in known}
    values: dict[str, Any] = {"algorithm": {"name": "sft"}, "environment": {"name": "addition"}, "policy": policy}
    require_trusted(run, Tree(values), restore_config(values, manager=manager))


# -- the replay --------------------------------------------------------------------------------------------------------

FLOOR = 1.0
"""Losses are compared relative to at least this; with advantages around 0 a loss is a small difference."""

_OF_CANDIDATE = {
    "model_name",
    "tokenizer_name",
    "backend",
    "parallelism",
    "precision",
    "optimizer",
    "scheduler",
    "lora",
}
"""Keys of `policy` that come from the candidate or the scenario instead of the run."""


def recorded_scenario(recorded: RecordedStep) -> Scenario:
    """Return the scenario of a recorded step: one global batch per optimizer step, with the run's settings and learning
    rate.
    """
    policy = recorded.policy
    rows = policy["train_global_batch_size"]
    batches: list[BatchedDataDict[Any]] = [
        recorded.data.slice(start, start + rows) for start in range(0, recorded.data.size, rows)
    ]
    optimizer = policy["optimizer"]
    return Scenario(
        name=type(recorded.loss).__name__,
        model=recorded.model,
        batches=batches,
        loss=recorded.loss,
        oracle_step=oracle_step_with(recorded.loss),
        lr=optimizer["lr"] if recorded.result is None else recorded.result["lr"],
        temperature=recorded.temperature,
        optimizer={name: optimizer[name] for name in ("betas", "eps", "weight_decay")},
        max_grad_norm=policy["max_grad_norm"],
        settings={name: policy[name] for name in PolicyConfig.model_fields if name not in _OF_CANDIDATE},
        sections={policy["backend"]: policy[policy["backend"]]} if policy.get(policy["backend"]) else {},
        floor=FLOOR,
    )


def run_candidate(recorded: RecordedStep) -> Candidate:
    """Return the run itself as a candidate: its backend, layout and precision."""
    policy, workers = recorded.policy, recorded.config["worker_group"]["num_workers"]
    sizes = dict(policy["parallelism"])
    data = workers // (sizes["tensor"] * sizes["context"] * sizes["pipeline"])
    return Candidate(policy["backend"], Layout(data=data, **sizes), policy["precision"], recorded.config["device"])


def run_outcome(recorded: RecordedStep, scenario: Scenario) -> Outcome:
    """Compare the run's own figures with the oracle."""
    rows = scenario.batches[0].size
    logprobs = list(recorded.logprobs.split(rows))
    candidate = run_candidate(recorded)
    if recorded.result is None:
        found: dict[str, Measurement] = logprobs_measured(logprobs, scenario.answers.outputs)
        reason = f"the step failed in the run: {recorded.failure}"
        return Outcome(candidate, scenario.name, found, reason=reason, is_run=True)
    outcome = compare_results(scenario, candidate, logprobs, _first_step(recorded), None)
    return replace(outcome, is_run=True)


def _first_step(recorded: RecordedStep) -> list[tuple[float, float]]:
    """Return the loss and gradient norm of the run's first optimizer step."""
    assert recorded.result is not None
    return [(float(recorded.result["global_loss"][0]), float(recorded.result["grad_norm"][0]))]


def against_run(recorded: RecordedStep, scenario: Scenario, observed: Observed) -> dict[str, Measurement]:
    """Compare a backend with the run's own figures: log-probabilities and the first optimizer step."""
    rows = scenario.batches[0].size
    found = logprobs_measured(observed.outputs, list(recorded.logprobs.split(rows)))
    if recorded.result is not None:
        (loss, norm), (own_loss, own_norm) = observed.steps[0], _first_step(recorded)[0]
        found[LOSS] = loss_measured(scenario, 1, loss, own_loss)
        found[NORM] = norm_measured(1, norm, own_norm)
    return found
