"""A whole run from a configuration, and the parts it is made of.

    config = load_config("grpo.yaml", ["seed=1"])
    result = run(config)

or, to use the parts yourself:

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
from rlframework.errors import ConfigError, RunTerminated, UserError
from rlframework.files import alone_in, check_writable, write_atomically
from rlframework.plugins.hookspec import RunInfo
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.evaluation.completions import Answerer
    from rlframework.evaluation.evaluate import Evaluation
    from rlframework.evaluation.run_or_model import EvaluationPlan
    from rlframework.generation.client import Generation
    from rlframework.plugins.manager import PluginManager
    from rlframework.policy.client import Policy
    from rlframework.runner.estimates.estimate import Estimate
    from rlframework.runner.restarts import Attempt


def run(config: RunConfig, *, manager: PluginManager | None = None, checkpoint: Path | None = None) -> RunResult:
    """Train as `config` says; the trained model lies in `config.output_dir / "model"` afterwards.

    Everything that can be wrong with the input is a `UserError` before `output_dir` is made. An `output_dir` that
    holds a run already is refused, unless the run goes on from `checkpoint`: see `resume`. A run that lost a worker
    starts again as `config.fault_tolerance` says; the result's `history` is then that of the last start.
    """
    from rlframework.observers.services import check_services
    from rlframework.runner.restarts import Restarts

    check_services(config.observers)
    if checkpoint is None:
        _check_output_dir(config.output_dir)
    manager = manager or create_manager(config.plugins)
    with _ending_on_sigterm(), ExitStack() as held:
        return Restarts(config, checkpoint).run(lambda tried: _train(config, manager, tried, held))


def _train(config: RunConfig, manager: PluginManager, tried: Attempt, held: ExitStack) -> RunResult:
    """One attempt at the run. The first one takes its folder, for as long as `held` is open."""
    from rlframework.runner.estimates.estimate import tell_estimate

    planning = tell_estimate if tried.first else None
    with build_parts(config, manager=manager, checkpoint=tried.checkpoint, planning=planning) as parts:
        algorithm = _algorithm_class(config, manager)(parts)
        if tried.first:
            held.enter_context(alone_in(config.output_dir))
            write_config(config)
        with _described(config, manager), parts.observers:
            tried.observers = parts.observers
            result = algorithm.run()
            path = config.output_dir / "model"
            parts.policy.save_pretrained(str(path))
            if config.policy.lora is not None:
                parts.policy.save_adapter(str(config.output_dir / "adapter"))
            parts.observers.checkpoint_saved(int(result.metrics["step"]), path)
            parts.observers.run_finished(result.metrics)
    return result


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM is an exception, so that workers and observers are let go of. The loop listens for it itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def told(number: int, frame: FrameType | None) -> None:
        raise RunTerminated("terminated")

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def resume(run_dir: str | Path, overrides: Sequence[str] = ()) -> RunResult:
    """Go on with the run in `run_dir` from its newest checkpoint, with the same numbers as one that was never stopped.

    `overrides` change its configuration, such as `algorithm.num_steps=200`. A `ConfigError` where there is no run, or
    no checkpoint.
    """
    from rlframework.training.checkpoints import latest_checkpoint

    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run to go on with: it has no config.yaml")
    checkpoint = latest_checkpoint(run_dir)
    return run(load_config(path, [*overrides, f"output_dir={run_dir}"]), checkpoint=checkpoint)


def dry_run(config: RunConfig, *, manager: PluginManager | None = None) -> Estimate:
    """Check all that `run` checks before it starts workers, and reckon what the run needs; nothing is written."""
    from rlframework.observers.services import check_services
    from rlframework.runner.estimates.estimate import estimate

    check_services(config.observers)
    _check_output_dir(config.output_dir)
    manager = manager or create_manager(config.plugins)
    with _planned_parts(config, manager) as parts:
        algorithm = _algorithm_class(config, manager)
        algorithm(parts)
        return estimate(parts, algorithm.needs_reference_model(config.algorithm))


@contextmanager
def build_parts(
    config: RunConfig,
    *,
    manager: PluginManager | None = None,
    checkpoint: Path | None = None,
    planning: Callable[[Parts, bool], None] | None = None,
) -> Iterator[Parts]:
    """The parts of a run, shut down at the end: environment, tokenizer, policy, generation, observers.

    `planning` is called before workers start, with the parts, whose policy and generation are not there yet, and with
    whether a reference policy is kept.
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
    """The parts of a run before its workers are started, with what can be checked of these."""
    from rlframework.huggingface.tokenizer import load_tokenizer
    from rlframework.observers.dispatch import Observers
    from rlframework.runner.estimates.planned import NotStarted, PlannedPolicy

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
        policy: Any = PlannedPolicy(
            config,
            tokenizer,
            manager,
            init_reference_model=algorithm.needs_reference_model(config.algorithm),
            training_calls=algorithm.training_calls(config.algorithm),
        )
        generation: Any = NotStarted()
        observers = Observers(config.observers, RunInfo(config, config.output_dir), manager.hook)
        yield Parts(config, tokenizer, policy, generation, environment, observers)


@contextmanager
def build_generation(
    config: RunConfig, *, manager: PluginManager | None = None
) -> Iterator[tuple[PreTrainedTokenizerBase, Policy, Generation]]:
    """What generates with the model of `config` and does not train it: no optimizer, no reference model, no data."""
    from rlframework.generation.remote import start_generation
    from rlframework.huggingface.tokenizer import load_tokenizer
    from rlframework.policy.client import Policy

    manager = manager or create_manager(config.plugins)
    given = config.policy
    _require_generation(config, manager)
    device = _device(config)
    tokenizer = load_tokenizer(given.tokenizer_name or given.model_name, given.trust_remote_code, given.chat_template)
    calls = _algorithm_class(config, manager).training_calls(config.algorithm)  # the schedule must fit into them
    policy = Policy(config, tokenizer, manager, device=device, init_optimizer=False, training_calls=calls)
    with policy, ExitStack() as stack:
        generation = start_generation(config, policy, tokenizer, manager, device=device)
        stack.callback(generation.shutdown)
        yield tokenizer, policy, generation


@contextmanager
def build_answerer(config: RunConfig, *, samples: int = 1, raw: bool = False) -> Iterator[Answerer]:
    """What answers prompts with the model of `config`, `samples` times each; `raw`: without the chat template."""
    from rlframework.evaluation.completions import Answerer

    with build_generation(config) as (tokenizer, _, generation):
        yield Answerer(config, tokenizer, generation, samples=samples, raw=raw)


@contextmanager
def build_evaluation(config: RunConfig, *, manager: PluginManager | None = None) -> Iterator[Parts]:
    """`build_generation` with the environment that judges the answers, as parts to which no observer listens."""
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
    """Ask each subject of `plan`, one after the other; what came of each, and its summary, which is also written.

    `progress` gives a context for each subject's name, which yields what is called with completions done and all.
    """
    from rlframework.evaluation import evaluate as evaluation
    from rlframework.evaluation.report import comparison, summary

    results: list[Evaluation] = []
    summaries: list[dict[str, Any]] = []
    for number, (subject, config) in enumerate(zip(plan.subjects, plan.configs, strict=True)):
        out = plan.folder(number)
        bar = progress(subject.name) if progress else nullcontext(lambda done, total: None)
        with bar as told, build_evaluation(config) as parts:
            results.append(evaluation.evaluate(parts, plan.settings, out, progress=told))
            summaries.append(summary(subject, parts, plan.settings, results[-1]))
        write_atomically(out / evaluation.SUMMARY, json.dumps(summaries[-1], indent=2, allow_nan=False) + "\n")
    if len(results) > 1:
        compared = json.dumps(comparison(plan.subjects, results), indent=2, allow_nan=False)
        write_atomically(plan.out / "comparison.json", compared + "\n")
    return results, summaries


@contextmanager
def _described(config: RunConfig, manager: PluginManager) -> Iterator[None]:
    """Write `environment.json` on entry: after the directory is this run's alone, before observers ask for its id."""
    from rlframework.observers.environment import write_environment

    write_environment(config.output_dir, manager.listing())
    yield


def write_config(config: RunConfig) -> None:
    """Make `output_dir` and write the resolved configuration into it."""
    write_atomically(config.output_dir / "config.yaml", config_yaml(config))


def _require_generation(config: RunConfig, manager: PluginManager) -> None:
    """`NotSupported` where the backend can neither generate in its workers nor send weights to those that do."""
    from rlframework.policy.client import require

    backend = manager.select("policy_worker", config.policy.backend).record
    if config.generation.workers is None:
        reason = "a run generates in the workers of its policy, unless generation.workers says otherwise"
        require(backend, Capability.EMBEDDED_GENERATION, reason)
    elif not backend.capabilities & {Capability.IPC_REFIT, Capability.COLLECTIVE_REFIT}:
        require(backend, Capability.IPC_REFIT, "generation.workers asks for engines that the trainer sends weights to")


def _make(manager: PluginManager, kind: str, name: str) -> Any:
    return manager.load(manager.select(kind, name).record)


def _algorithm_class(config: RunConfig, manager: PluginManager) -> type[Algorithm]:
    algorithm: type[Algorithm] = _make(manager, "algorithm", config.algorithm.name)
    return algorithm


def _device(config: RunConfig) -> str:
    """What `device` comes to. A GPU for a worker in this process must be here; other groups look for themselves."""
    device = resolve_device(config.device)
    if device == "cuda" and config.worker_group.name == "inline":
        import torch

        if not torch.cuda.is_available():
            built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise ConfigError(
                f"device=cuda, but PyTorch finds no GPU here (torch {torch.__version__}, built {built}). Set "
                "device=cpu or device=auto, or run where nvidia-smi shows a GPU"
            )
    return device


def _check_output_dir(path: Path) -> None:
    try:
        check_writable(path)
    except UserError as error:
        raise ConfigError(f"output_dir={str(path)!r}: {error}") from error
    if path.exists() and any(path.iterdir()):
        raise ConfigError(
            f"output_dir={str(path)!r} is not empty, and nothing in it is overwritten. "
            "Take another one (output_dir=...), or remove it"
        )
