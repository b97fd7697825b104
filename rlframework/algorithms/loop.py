"""The training loop of all algorithms: steps, validation, timing, observers. Algorithms implement `train_step`."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Protocol, TypeAlias

import psutil
import torch

from rlframework.algorithms.algorithm import Algorithm, RunResult
from rlframework.algorithms.checkpoints import Checkpoints, RunState, restore_random_states
from rlframework.algorithms.ending import EarlyStopping, raise_if_ended
from rlframework.algorithms.input_checks import InputCheck
from rlframework.algorithms.performance import collecting_what_is_new, performance_metrics
from rlframework.algorithms.recording import Recorder, profiling
from rlframework.algorithms.reference_sync import SYNCS, ReferenceSync
from rlframework.algorithms.sampling_check import SamplingCheck
from rlframework.algorithms.validation import validate
from rlframework.base.errors import ConfigError, DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.validate import other_metric
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.loss import LossFunction
from rlframework.interfaces.policy_worker import TrainResult
from rlframework.observers.timeline import TRAINER, Timeline
from rlframework.plugins.hookspec import SampleRecord
from rlframework.rollout.parts import Parts
from rlframework.rollout.result import LIMITS

_LOG = logging.getLogger(__name__)

StepResult: TypeAlias = tuple[dict[str, float], list[SampleRecord]]
"""The metrics of a step or a validation by name, and some of its samples to inspect."""


def require_step_result(result: Any, algorithm: str) -> StepResult:
    """Return `result`, the value of `train_step` of the class `algorithm`; raise TypeError if it is no `StepResult`."""
    expected = (
        "it must return (metrics, samples): a dictionary of numbers by name, and a list of SampleRecord, maybe []"
    )
    match result:
        case (dict() as metrics, list()):
            wrong = next((name for name, value in metrics.items() if not isinstance(value, Real)), None)
            if wrong is None:
                return metrics, result[1]
            described = f"the metric {wrong!r} as a {type(metrics[wrong]).__name__}"
        case tuple():
            described = f"a tuple of {', '.join(type(value).__name__ for value in result) or 'nothing'}"
        case _:
            described = f"a {type(result).__name__}"
    raise TypeError(f"{algorithm}.train_step returned {described}; {expected}")


class PositionInData(Protocol):
    """The source of the data of each step, such as a `PromptLoader`."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the position."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Timer:
    """Measures the seconds of each phase of one step, and adds them to `timeline`, except `step` itself."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._timeline = timeline

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to phase `name`. Raises at its beginning and its end if the run was ended."""
        raise_if_ended()
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[name] += ended - started
            if self._timeline is not None and name != "step":
                self._timeline.add(TRAINER, name, started, ended)
        raise_if_ended()


def training_metrics(results: Sequence[TrainResult]) -> dict[str, float]:
    """Combine what the `train` calls of one step returned: means, and the total number of skipped steps."""
    norms = [norm for result in results if (norm := result["grad_norm"]) is not None]
    return {
        "train/loss": sum(result["loss"] for result in results) / len(results),
        "train/grad_norm": float(torch.cat(norms).mean()),
        "train/lr": results[-1]["lr"],
        "train/skipped_steps": float(sum(result["skipped"] for result in results)),
        "train/global_valid_toks": sum(result["global_valid_toks"] for result in results) / len(results),
    }


class StepLoop(Algorithm):
    """Runs `num_steps` steps, with validation before, during and after them.

    The constructor checks the validation data. The constructor of an algorithm checks its training data with `inputs`,
    and creates the `loader`.
    """

    loader: PositionInData

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config.algorithm
        self.train_samples = parts.environment.samples("train")
        validation, name = self.config.validation, parts.config.environment.name
        validates = validation.at_start or validation.at_end or validation.every > 0
        if not len(self.train_samples):
            raise DataError(f"environment {name!r} has no train samples; give it more data")
        if validates and not len(parts.environment.samples("validation")):
            raise DataError(
                f"environment {name!r} has no validation samples; give it more data (an environment.validation_path, "
                "or an environment.validation_fraction above 0), or switch validation off: "
                "algorithm.validation={every: 0, at_start: false, at_end: false}" + self._ways_out_of_stopping()
            )
        self.inputs = InputCheck(parts)
        self.recorder = Recorder(parts)
        self.sampling_check = SamplingCheck(parts.config, lambda: parts.generation.probe_bounds)
        self.checkpoints = Checkpoints(parts)
        self.early_stopping = EarlyStopping(self.config.early_stopping)
        self.reference_sync = ReferenceSync(getattr(self.config, "reference_sync", None))
        self.timeline = Timeline()
        self._history: list[dict[str, float]] = []
        self._restored: RunState | None = None
        self._trained: list[TrainResult] = []
        self._noted_truncated = False
        self._warned_metrics: set[str] = set()
        if validates:
            self._reject_attempts()
            self.check_validation(parts.environment.samples("validation")[: validation.samples])

    def with_loss_metrics(
        self, metrics: Mapping[str, float], of_loss: Mapping[str, float], taken: Iterable[str] = ()
    ) -> dict[str, float]:
        """Return `metrics` and, as `train/NAME`, those that the loss has returned.

        A name in `metrics`, in `taken` or of the loop's own keeps its value; a warning names those of the loss once.
        """
        reserved = {*metrics, *taken, "train/tokens"}
        clashes = [name for name in of_loss if f"train/{name}" in reserved]
        if not self._warned_metrics.issuperset(clashes):
            self._warned_metrics.update(clashes)
            _LOG.warning(
                "the loss returns metrics under names that the framework uses for its own: its metrics %s are left "
                "out. Rename them",
                ", ".join(sorted(clashes)),
            )
        return {**metrics, **{f"train/{name}": value for name, value in of_loss.items() if name not in clashes}}

    def _ways_out_of_stopping(self) -> str:
        """Return what to do about early stopping if validation is switched off."""
        stopping = self.config.early_stopping
        if stopping is None or not stopping.metric.startswith("validation/"):
            return ""
        return (
            f". Without validation, algorithm.early_stopping.metric={stopping.metric} does not go: set "
            f"{other_metric(self.config)}, or remove it: ~algorithm.early_stopping"
        )

    def _reject_attempts(self) -> None:
        """Raise `ConfigError` for settings of sampling if validation samples nothing, as it then measures losses."""
        validation, environment = self.config.validation, self.parts.config.environment.name
        for key in () if self.parts.environment.scores else ("attempts", "temperature"):
            if (value := getattr(validation, key)) != type(validation).model_fields[key].default:
                raise ConfigError(
                    f"algorithm.validation.{key}={value}: environment {environment!r} does not score answers, so "
                    "validation samples none; remove the key, or choose another environment"
                )

    def check_validation(self, samples: Sequence[Sample]) -> None:
        """Check that `validate` can use `samples`; by default the environment must score answers."""
        if not self.parts.environment.scores:
            raise DataError(
                f"environment {self.parts.config.environment.name!r} does not score answers, so it cannot be "
                "validated; set algorithm.validation={at_start: false, at_end: false}, or choose another environment"
            )
        self.inputs.prompts("validation", samples)

    def validate(self, step: int) -> StepResult:
        """Return metrics over held-out samples (by default of answers to them), and some samples to inspect."""
        return validate(self.parts, step, self._warned_metrics)

    @abstractmethod
    def train_step(self, step: int, timer: Timer) -> StepResult:
        """Run step `step` (counted from 1); return its metrics and the samples to keep.

        Implementations call `self.train`, so that the step can be recorded.
        """

    def train(self, step: int, data: BatchedDataDict[Any], loss: LossFunction, gbs: int | None = None) -> TrainResult:
        """Call `policy.train` in step `step`, and record the step if the configuration asks for it.

        `gbs`: the rows of an optimizer step; None: `policy.train_global_batch_size`. Raises `SamplingMismatch` for
        sampled tokens whose log-probabilities are not the policy's, before they are learned from.
        """
        bound = self.sampling_check.of_workers(data)
        result = self.recorder.train(step, data, loss, gbs, bound)
        self._trained.append(result)
        self.sampling_check.after(step, data, result, self.parts)
        return result

    def should_stop(self, metrics: dict[str, float]) -> bool:
        """Whether to end the run before `num_steps`."""
        return False

    def run(self) -> RunResult:
        """See `Algorithm.run`. The `history` of a resumed run begins at its checkpoint."""
        validation = self.config.validation
        held_out = len(self.parts.environment.samples("validation"))
        _LOG.info("samples: %d to train on, %d held out for validation", len(self.train_samples), held_out)
        self.parts.timeline = self.parts.generation.client.timeline = self.timeline
        with collecting_what_is_new(), self.checkpoints.handling_signals(), self.checkpoints.finishing():
            last = self._begin()
            stopped = self.early_stopping.ended
            stopped |= self._restored is not None and self.should_stop(self._restored.measured)
            for step in range(int(last["step"]) + 1, 0 if stopped else self.config.num_steps + 1):
                raise_if_ended()
                metrics, samples = self._timed_step(step)
                self._note_truncated(step, metrics)
                last_of_all = validation.at_end and step == self.config.num_steps
                if last_of_all or (validation.every > 0 and step % validation.every == 0):
                    scores, more = self._timed_validation(step)
                    metrics, samples = metrics | scores, [*samples, *more]
                # after the validation, which so compares with the reference that this step was trained with
                timer = Timer(self.timeline)
                metrics |= self.reference_sync.after_step(step, self.parts.policy, timer.phase)
                metrics |= {f"time/{name}": seconds for name, seconds in timer.seconds.items()}
                last |= self._report(step, metrics, samples)
                stopped = self.early_stopping.update(step, metrics) or self.should_stop(metrics)
                ends = stopped or step == self.config.num_steps
                with Timer(self.timeline).phase("checkpoint"):
                    state = self.state_dict() | {"early_stopping": self.early_stopping.state_dict()}
                    state |= {SYNCS: self.reference_sync.count}
                    self.checkpoints.after_step(step, state, last, metrics, last=ends)
                if stopped:
                    break
            self.early_stopping.finish()
        return RunResult(metrics=last, history=self._history)

    def restore(self) -> None:
        """See `Algorithm.restore`."""
        if (restored := self.checkpoints.restore()) is not None:
            self.load_state_dict(restored.state)
            if (state := restored.state.get("early_stopping")) is not None:
                self.early_stopping.load_state_dict(state)
            self.reference_sync.count = restored.state.get(SYNCS, 0)
            self._restored = restored

    def _begin(self) -> dict[str, float]:
        """Go on after the restored checkpoint, or validate as step 0. Return the latest metrics, including `step`."""
        if (restored := self._restored) is not None:
            restore_random_states(restored.random)  # last, as observers may have drawn numbers
            if restored.step >= self.config.num_steps:
                _LOG.warning(
                    "nothing is left to do: the checkpoint is of step %d, and the run has %d. To train further, raise "
                    "algorithm.num_steps, or algorithm.num_epochs if that is set: %s",
                    restored.step,
                    self.config.num_steps,
                    self.parts.config.resume_with(f"algorithm.num_steps={2 * restored.step}"),
                )
            elif self.early_stopping.ended:
                _LOG.warning(
                    "nothing is left to do: algorithm.early_stopping ended this run at step %d of %d. To train "
                    "further, remove it, or raise algorithm.early_stopping.patience: %s",
                    restored.step,
                    self.config.num_steps,
                    self.parts.config.resume_with("~algorithm.early_stopping"),
                )
            return {**restored.metrics, "step": float(restored.step)}
        if self.config.validation.at_start:
            metrics, samples = self._timed_validation(0)
            self.early_stopping.note_names(metrics)
            self.checkpoints.note_metric(metrics)
            return dict(self._report(0, metrics, samples))
        return {"step": 0.0}

    def _timed_step(self, step: int) -> StepResult:
        timer, parts = Timer(self.timeline), self.parts
        self._trained = []
        parts.policy.reset_peak_memory_stats()
        with profiling(parts, step) as profiled, timer.phase("step"):
            metrics, samples = require_step_result(self.train_step(step, timer), type(self).__name__)
        metrics |= self.loader.pop_metrics()
        self.recorder.require(step)
        metrics |= {f"time/{name}": value for name, value in timer.seconds.items()} | parts.generation.pop_metrics()
        if parts.uploads is not None:
            metrics |= parts.uploads.pop_metrics()
        metrics |= profiled | performance_metrics(
            self._trained,
            parts.policy.get_info(),
            tokens=metrics.get("train/tokens"),
            seconds=timer.seconds["step"],
            peak_flops=None if (peak := parts.config.observers.peak_tflops) is None else peak * 1e12,
        )
        return metrics | {"memory/rss_mb": psutil.Process().memory_info().rss / 2**20}, samples

    def _note_truncated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log, once per run, that most of the answers or episodes of a step were cut at a limit, and at which."""
        fraction = metrics.get("train/truncated_fraction", 0.0)
        if self._noted_truncated or fraction <= 0.5:
            return
        self._noted_truncated = True
        of_each = {setting: metrics.get(f"train/truncated/{name}", 0.0) for name, setting in LIMITS.items()}
        largest_first = sorted(of_each.items(), key=lambda each: -each[1])
        limits = [f"{100 * part:.0f}% at {setting}" for setting, part in largest_first if part]
        answers = f"they reached generation.max_new_tokens={self.parts.config.generation.max_new_tokens}"
        _LOG.warning(
            "step %d: %.0f%% of the %s were truncated: %s. They are scored as they are, without an end. If this goes "
            "on (metric train/truncated_fraction), raise the limit; if a model never ends its answers, check its chat "
            "template with `rlframework tokenize CONFIG --show 3`",
            step,
            100 * fraction,
            "episodes" if limits else "answers",
            ", ".join(limits) or answers,
        )

    def _timed_validation(self, step: int) -> StepResult:
        timer = Timer(self.timeline)
        with timer.phase("validation"):
            metrics, samples = self.validate(step)
        seconds = timer.seconds["validation"]
        if refit := self.parts.generation.pop_metrics():  # the time of this refit is part of the validation
            metrics |= {"validation/refit_seconds": refit.pop("time/refit", 0.0), **refit}
            seconds -= refit.get("time/engine_start", 0.0)
        return metrics | {"time/validation": seconds}, samples

    def _report(self, step: int, metrics: dict[str, float], samples: list[SampleRecord]) -> dict[str, float]:
        """Pass the metrics of `step` on; return them with `step`."""
        self._history.append({"step": float(step), **metrics})
        self.parts.observers.step_finished(step, metrics, samples, self.timeline.pop())
        return self._history[-1]

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's own state for a checkpoint, as JSON values: the position in the data."""
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.loader.load_state_dict(state["loader"])
