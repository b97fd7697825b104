"""Start runs and evaluations from a configuration, or build their parts.

    config = load_config("grpo.yaml", ["seed=1"])
    result = run(config)

To use the parts yourself:

    with build_parts(config) as parts:
        parts.policy.train(batch, loss)
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rlframework.algorithm import Algorithm, Parts, RunResult
from rlframework.configure import config_yaml, load_config, resolve_device
from rlframework.errors import ConfigError, RunTerminated
from rlframework.files import exclusive_directory, write_atomically
from rlframework.huggingface.hub import require_available
from rlframework.logs import log_to_stderr
from rlframework.plugins.hookspec import RunInfo
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.evaluation.completions import Answerer
    from rlframework.evaluation.evaluate import Evaluation
    from rlframework.evaluation.plan import EvaluationPlan
    from rlframework.generation.client import Generation
    from rlframework.plugins.manager import PluginManager
    from rlframework.policy.client import Policy
    from rlframework.runner.estimates.estimate import Estimate
    from rlframework.runner.restarts import Attempt


def run(
    config: RunConfig,
    *,
    manager: PluginManager | None = None,
    checkpoint: Path | None = None,
    overwrite: bool = False,
) -> RunResult:
    """Train as `config` describes and save the trained model in `config.output_dir / "model"`.

    Invalid input raises a `UserError` before `output_dir` is created or changed. An `output_dir` that holds a run is an
    error, unless that run is resumed from `checkpoint` (see `resume`) or replaced (`overwrite`); one that failed before
    the end of its first step is always replaced. Files that no run wrote are never deleted. A run that loses a worker
    restarts as `config.fault_tolerance` allows; the result's `history` is then that of the last attempt.
    """
    from rlframework.observers.services import check_services
    from rlframework.runner.output_folder import check_output_dir

    log_to_stderr()
    check_services(config.observers)
    if checkpoint is None:
        check_output_dir(config, overwrite)
    _require_models(config)
    from rlframework.runner.restarts import Restarts

    manager = manager or create_manager(config.plugins)
    with _raising_on_sigterm(), ExitStack() as lock:
        return Restarts(config, checkpoint).run(lambda attempt: _train(config, manager, attempt, lock, overwrite))


def _train(config: RunConfig, manager: PluginManager, attempt: Attempt, lock: ExitStack, overwrite: bool) -> RunResult:
    """Make one attempt at the run. The first attempt locks the run's folder until `lock` is closed."""
    from rlframework.observers.environment import write_environment
    from rlframework.runner.estimates.estimate import print_estimate
    from rlframework.runner.output_folder import check_no_results

    starts = attempt.first and attempt.checkpoint is None
    locked = False

    def before_workers(parts: Parts, reference: bool) -> None:
        nonlocal locked
        print_estimate(parts, reference)
        if starts:
            locked = _clear_output_dir(parts, manager, lock, overwrite)

    planning = before_workers if attempt.first else None
    with build_parts(config, manager=manager, checkpoint=attempt.checkpoint, planning=planning) as parts:
        algorithm = _algorithm_class(config, manager)(parts)
        if attempt.first:
            if not locked:
                lock.enter_context(exclusive_directory(config.output_dir))
            if starts:
                check_no_results(config.output_dir)
            write_config(config)
        write_environment(config.output_dir, manager.listing())  # before observers read the run's id from it
        with parts.observers:
            attempt.observers = parts.observers
            result = algorithm.run()
            path = config.output_dir / "model"
            parts.policy.save_pretrained(str(path))
            if config.policy.lora is not None:
                parts.policy.save_adapter(str(config.output_dir / "adapter"))
            parts.observers.checkpoint_saved(int(result.metrics["step"]), path)
            parts.observers.run_finished(result.metrics)
    return result


def _clear_output_dir(parts: Parts, manager: PluginManager, lock: ExitStack, overwrite: bool) -> bool:
    """Lock the folder and delete what an earlier run left in it. Return False, without a lock, if it left nothing."""
    from rlframework.runner.output_folder import check_output_dir, clear, read_contents

    config = parts.config
    if not read_contents(config.output_dir).deletable:
        return False
    _algorithm_class(config, manager)(parts)  # makes the last checks of the input before anything is deleted
    lock.enter_context(exclusive_directory(config.output_dir))
    check_output_dir(config, overwrite)  # again, because another process may have used the folder since
    clear(config.output_dir)
    return True


@contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that workers and observers shut down. `StepLoop` installs its own handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise RunTerminated("terminated")

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def resume(run_dir: str | Path, overrides: Sequence[str] = ()) -> RunResult:
    """Resume the run in `run_dir` from its newest checkpoint; the numbers equal those of an uninterrupted run.

    `overrides` change its configuration, for example `algorithm.num_steps=200`. Raises `ConfigError` if the folder has
    no run or no checkpoint.
    """
    from rlframework.training.checkpoints import latest_checkpoint

    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run to resume: it has no config.yaml. Give a run's output_dir")
    checkpoint = latest_checkpoint(run_dir)
    return run(load_config(path, [*overrides, f"output_dir={run_dir}"]), checkpoint=checkpoint)


def dry_run(config: RunConfig, *, manager: PluginManager | None = None, overwrite: bool = False) -> Estimate:
    """Make every check that `run` makes before it starts workers, and estimate what the run needs. Writes nothing.

    An `output_dir` in which `run` would not start (with this `overwrite`) is a warning of the estimate, not an error.
    """
    _require_models(config)
    from rlframework.observers.services import check_services
    from rlframework.runner.estimates.estimate import estimate
    from rlframework.runner.output_folder import check_output_dir

    check_services(config.observers)
    manager = manager or create_manager(config.plugins)
    with _planned_parts(config, manager) as parts:
        algorithm = _algorithm_class(config, manager)
        algorithm(parts)
        found = estimate(parts, algorithm.needs_reference_model(config.algorithm))
    try:
        check_output_dir(config, overwrite)
    except ConfigError as error:
        return replace(found, output_dir_problem=str(error))
    return found


@contextmanager
def build_parts(
    config: RunConfig,
    *,
    manager: PluginManager | None = None,
    checkpoint: Path | None = None,
    planning: Callable[[Parts, bool], None] | None = None,
) -> Iterator[Parts]:
    """Build the parts of a run (environment, tokenizer, policy, generation, observers), and shut them down on exit.

    `planning(parts, reference)` is called before workers start: the policy and generation of these `parts` are
    placeholders, and `reference` says whether the run keeps a reference policy.
    """
    from rlframework.generation.remote import start_generation
    from rlframework.policy.client import Policy

    manager = manager or create_manager(config.plugins)
    with ExitStack() as stack:
        parts = stack.enter_context(_planned_parts(config, manager))
        algorithm = _algorithm_class(config, manager)
        reference = algorithm.needs_reference_model(config.algorithm)
        if planning is not None:
            planning(parts, reference)
        policy = Policy(
            config,
            parts.tokenizer,
            manager,
            device=_device(config),
            init_reference_model=reference,
            training_calls=algorithm.training_calls(config.algorithm),
        )
        stack.callback(policy.shutdown)
        generation = start_generation(config, policy, parts.tokenizer, manager, device=_device(config))
        stack.callback(generation.shutdown)
        yield replace(parts, policy=policy, generation=generation, checkpoint=checkpoint)


@contextmanager
def _planned_parts(config: RunConfig, manager: PluginManager) -> Iterator[Parts]:
    """Build the parts of a run without starting workers, and check everything that needs none."""
    from rlframework.huggingface.tokenizer import load_tokenizer
    from rlframework.observers.dispatch import Observers
    from rlframework.runner.placeholders import Placeholder, PolicyPlaceholder

    _require_generation(config, manager)
    _device(config)
    with ExitStack() as stack:
        environment = _make(manager, "environment", config.environment.name)(config.environment, seed=config.seed)
        stack.callback(environment.shutdown)
        given = config.policy
        tokenizer = load_tokenizer(
            given.tokenizer_name or given.model_name, given.trust_remote_code, given.chat_template
        )
        algorithm = _algorithm_class(config, manager)
        policy: Any = PolicyPlaceholder(
            config,
            tokenizer,
            manager,
            init_reference_model=algorithm.needs_reference_model(config.algorithm),
            training_calls=algorithm.training_calls(config.algorithm),
        )
        generation: Any = Placeholder()
        observers = Observers(config.observers, RunInfo(config, config.output_dir), manager.hook)
        yield Parts(config, tokenizer, policy, generation, environment, observers)


@contextmanager
def build_generation(
    config: RunConfig, *, manager: PluginManager | None = None
) -> Iterator[tuple[PreTrainedTokenizerBase, Policy, Generation]]:
    """Build only what generation needs (tokenizer, policy, engine): no optimizer, no reference model, no data."""
    _require_models(config)
    from rlframework.generation.remote import start_generation
    from rlframework.huggingface.tokenizer import load_tokenizer
    from rlframework.policy.client import Policy

    manager = manager or create_manager(config.plugins)
    given = config.policy
    _require_generation(config, manager)
    device = _device(config)
    tokenizer = load_tokenizer(given.tokenizer_name or given.model_name, given.trust_remote_code, given.chat_template)
    calls = _algorithm_class(config, manager).training_calls(config.algorithm)  # the schedule is checked against them
    policy = Policy(config, tokenizer, manager, device=device, init_optimizer=False, training_calls=calls)
    with policy, ExitStack() as stack:
        generation = start_generation(config, policy, tokenizer, manager, device=device)
        stack.callback(generation.shutdown)
        yield tokenizer, policy, generation


@contextmanager
def build_answerer(config: RunConfig, *, samples: int = 1, raw: bool = False) -> Iterator[Answerer]:
    """Build an `Answerer` for the model of `config`: `samples` completions per prompt; `raw`: no chat template."""
    from rlframework.evaluation.completions import Answerer

    with build_generation(config) as (tokenizer, _, generation):
        yield Answerer(config, tokenizer, generation, samples=samples, raw=raw)


@contextmanager
def build_evaluation(config: RunConfig, *, manager: PluginManager | None = None) -> Iterator[Parts]:
    """Build `Parts` for an evaluation: `build_generation`, the environment that scores, and no observers."""
    _require_models(config)
    from rlframework.config.sections import ObserversConfig
    from rlframework.observers.dispatch import Observers

    manager = manager or create_manager(config.plugins)
    silent = ObserversConfig(console=False, jsonl=False, tensorboard=False, curve=False)
    with ExitStack() as stack:
        environment = _make(manager, "environment", config.environment.name)(config.environment, seed=config.seed)
        stack.callback(environment.shutdown)
        tokenizer, policy, generation = stack.enter_context(build_generation(config, manager=manager))
        observers = Observers(silent, RunInfo(config, config.output_dir))
        yield Parts(config, tokenizer, policy, generation, environment, observers)


def evaluate(
    plan: EvaluationPlan, *, progress: Callable[[str], AbstractContextManager[Callable[[int, int], None]]] | None = None
) -> tuple[list[Evaluation], list[dict[str, Any]]]:
    """Evaluate each model of `plan` in turn and write its summary. Return the evaluations and the summaries.

    `progress(name)` opens a progress display for a model; its context yields a callable that takes the number of
    finished completions and the total.
    """
    from rlframework.evaluation import evaluate as evaluation
    from rlframework.evaluation.report import comparison, summary

    results: list[Evaluation] = []
    summaries: list[dict[str, Any]] = []
    for number, (source, config) in enumerate(zip(plan.models, plan.configs, strict=True)):
        out = plan.folder(number)
        display = progress(source.name) if progress else nullcontext(lambda done, total: None)
        with display as report, build_evaluation(config) as parts:
            results.append(evaluation.evaluate(parts, plan.settings, out, progress=report))
            summaries.append(summary(source, parts, plan.settings, results[-1]))
        write_atomically(out / evaluation.SUMMARY, json.dumps(summaries[-1], indent=2, allow_nan=False) + "\n")
    if len(results) > 1:
        compared = json.dumps(comparison(plan.models, results), indent=2, allow_nan=False)
        write_atomically(plan.out / "comparison.json", compared + "\n")
    return results, summaries


def write_config(config: RunConfig) -> None:
    """Write the resolved configuration to `config.yaml` in `output_dir`, which is created."""
    write_atomically(config.output_dir / "config.yaml", config_yaml(config))


def _require_generation(config: RunConfig, manager: PluginManager) -> None:
    """Raise `NotSupported` if the backend can neither generate in its workers nor send weights to engines that do."""
    from rlframework.policy.client import require

    backend = manager.select("policy_worker", config.policy.backend).record
    if config.generation.workers is None:
        reason = "a run without generation.workers generates in the workers of its policy"
        require(backend, Capability.EMBEDDED_GENERATION, reason)
    elif not backend.capabilities & {Capability.IPC_REFIT, Capability.COLLECTIVE_REFIT}:
        require(backend, Capability.IPC_REFIT, "generation.workers needs a trainer that sends weights to its engines")


def _require_models(config: RunConfig) -> None:
    """Raise a `DataError` within seconds, before torch is imported, if the model or tokenizer is not available."""
    require_available(config.policy.model_name)
    if config.policy.tokenizer_name is not None:
        require_available(config.policy.tokenizer_name, "policy.tokenizer_name")


def _make(manager: PluginManager, kind: str, name: str) -> Any:
    return manager.load(manager.select(kind, name).record)


def _algorithm_class(config: RunConfig, manager: PluginManager) -> type[Algorithm]:
    algorithm: type[Algorithm] = _make(manager, "algorithm", config.algorithm.name)
    return algorithm


def _device(config: RunConfig) -> str:
    """Resolve `device`. A GPU is required only for a worker in this process; other groups check their machines."""
    device = resolve_device(config.device)
    if device == "cuda" and config.worker_group.name == "inline":
        import torch

        if not torch.cuda.is_available():
            built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise ConfigError(
                f"device=cuda, but PyTorch finds no GPU on this machine (torch {torch.__version__}, built {built}). "
                "Set device=cpu or device=auto, or run where nvidia-smi shows a GPU"
            )
    return device
