"""Build the parts of a run, of an evaluation, or of generation alone, and shut them down at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.algorithms.algorithm import Algorithm
from rlframework.base.errors import ConfigError, PluginError, RLFrameworkError, UserError
from rlframework.huggingface.hub import require_available
from rlframework.observers.run_environment import read_environment
from rlframework.plugins.configure import resolve_device
from rlframework.plugins.hookspec import RunInfo
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability, GenerationEngineRecord, PolicyWorkerRecord
from rlframework.rollout.parts import Parts
from rlframework.runner.data import require_data, with_data, with_steps
from rlframework.runner.further_policies import Placeholder, planned_models, started_models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.policy import PolicyConfig
    from rlframework.config.sections import RunConfig
    from rlframework.datasets.image_inputs import ImageInputs
    from rlframework.datasets.sources.memory import Data
    from rlframework.generation.driver import Generation
    from rlframework.interfaces.environment import Environment
    from rlframework.plugins.manager import PluginManager
    from rlframework.policy.client import Policy


@contextmanager
def build_parts(
    config: RunConfig,
    *,
    manager: PluginManager | None = None,
    checkpoint: Path | None = None,
    planning: Callable[[Parts], None] | None = None,
    data: Data | None = None,
) -> Iterator[Parts]:
    """Build the parts of a run (environment, tokenizer, policy, generation, observers), and shut them down on exit.

    The `config` of the parts has the number of steps in place of `algorithm.num_epochs`. `planning(parts)` is called
    before workers start: the policy and generation of these `parts` are placeholders. `data`: see `with_data`.
    """
    config = config if data is None else with_data(config, data)
    manager = manager or create_manager(config.plugins)
    with planned_parts(config, manager) as parts:
        parts.environment.start(config.output_dir)
        if planning is not None:
            planning(parts)
        config = parts.config
        algorithm, device = algorithm_class(config, manager), resolve_device(config.device)
        reference = algorithm.needs_reference_model(config.algorithm)
        with (
            _workers(config, manager, parts.tokenizer, init_reference_model=reference) as (policy, generation),
            started_models(config, manager, parts.tokenizer, algorithm, device) as models,
        ):
            yield replace(parts, policy=policy, generation=generation, checkpoint=checkpoint, models=models)


@contextmanager
def planned_parts(config: RunConfig, manager: PluginManager, *, elsewhere: bool = False) -> Iterator[Parts]:
    """Build the parts of a run without starting workers, and check everything that needs none.

    `elsewhere`: the run is planned for another machine, so that its device need not exist here.
    """
    from rlframework.interfaces.named_sharding import policy_sharding
    from rlframework.observers.dispatch import Observers
    from rlframework.policy.client import require, worker_spec

    _checked_device(config, manager, elsewhere=elsewhere)
    with open_environment(config, manager) as environment:
        algorithm = algorithm_class(config, manager)
        _require_head(config, algorithm.head(config.algorithm))
        config = with_steps(config, algorithm, environment)
        tokenizer = open_tokenizer(config.policy)
        record = backend_record(config, manager)
        if reference := algorithm.needs_reference_model(config.algorithm):
            why = f"algorithm.name={config.algorithm.name} needs a reference policy, as configured"
            require(record, Capability.REFERENCE_MODEL, why)
        worker_spec(
            config,
            tokenizer,
            manager,
            init_reference_model=reference,
            init_optimizer=True,
            training_calls=algorithm.training_calls(config.algorithm),
        )
        manager.load(manager.select("worker_group", config.worker_group.name).record)
        sharding = policy_sharding(config.worker_group.num_workers, config.policy.parallelism)
        size = sharding.get_axis_size("data_parallel")
        policy: Any = Placeholder(config=config, capabilities=record.capabilities, data_parallel_size=size)
        generation: Any = Placeholder()
        observers = Observers(config.observers, RunInfo(config, config.output_dir), manager)
        models = planned_models(config, manager, tokenizer, algorithm)
        images = open_images(config, tokenizer)
        yield Parts(config, tokenizer, policy, generation, environment, observers, models=models, images=images)


def _require_head(config: RunConfig, head: str) -> None:
    """Raise `ConfigError` unless the model has the head that the algorithm trains, and steps with it are recordable."""
    if config.policy.head == head:
        if head != "language" and (config.recording.steps or config.recording.every):
            raise ConfigError(
                f"recording: a recorded step has log-probabilities of tokens, and a model with policy.head={head} has "
                "none; remove recording.steps and recording.every"
            )
        return
    new = "" if head == "language" else "; and policy.head_init=zeros, if policy.model_name is a language model"
    raise ConfigError(
        f"algorithm.name={config.algorithm.name} trains a model with policy.head={head}, but it is "
        f"{config.policy.head}; set policy.head={head}{new}"
    )


@contextmanager
def build_generation(
    config: RunConfig, *, manager: PluginManager | None = None
) -> Iterator[tuple[PreTrainedTokenizerBase, Policy, Generation]]:
    """Build only what generation needs (tokenizer, policy, engine): no optimizer, no reference model, no data.

    Of a model that a run has trained, nothing is logged about its chat template: the run has logged it.
    """
    require_models(config)
    from rlframework.datasets.chat.chat_template import without_template_warnings

    manager, tokenizer = manager or create_manager(config.plugins), open_tokenizer(config.policy)
    with (
        without_template_warnings() if _is_of_a_run(config.policy.model_name) else nullcontext(),
        _workers(config, manager, tokenizer, init_optimizer=False) as (policy, generation),
    ):
        yield tokenizer, policy, generation


def _is_of_a_run(name: str) -> bool:
    """Whether the model `name` is that of a run, or of one of its checkpoints."""
    folder = Path(name).resolve()
    return any("run_id" in read_environment(above) for above in (folder.parent, *folder.parents[2:3]))


@contextmanager
def open_environment(config: RunConfig, manager: PluginManager) -> Iterator[Environment]:
    """Build the environment of `config`, and shut it down on exit. `PluginError` if it cannot score as it declares."""
    from rlframework.interfaces.environment import has_episodes, runs_agents, scores_turns

    require_data(config)
    part = manager.load(manager.select("environment", config.environment.name).record)
    environment: Environment
    try:
        environment = part(config.environment, seed=config.seed)
    except Exception as error:
        if isinstance(error, RLFrameworkError) or ":" not in config.environment.name:
            raise
        from rlframework.environments.user_tracebacks import described

        raise UserError(
            f"environment.name: {config.environment.name!r} cannot be made: {described(error, 'its constructor')}. It "
            "is called as `__init__(config, *, seed)`; keys of its own need a `config_model`, see docs/own_parts.md"
        ) from error
    try:
        played = has_episodes(environment) or runs_agents(environment)
        if environment.scores and not (played or scores_turns(environment)):
            raise PluginError(
                f"environment.name: {config.environment.name!r} implements neither `step` nor `episode`; implement "
                "one, or set `scores = False` where samples are only trained on"
            )
        yield environment
    finally:
        environment.shutdown()


def open_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the policy, with the configured chat template."""
    from rlframework.huggingface.tokenizer import load_tokenizer

    return load_tokenizer(config.tokenizer_name or config.model_name, config.trust_remote_code, config.chat_template)


def open_images(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ImageInputs | None:
    """Load what makes the policy's inputs of images; None if rows have none (`environment.images`)."""
    if config.environment.images is None:
        return None
    from rlframework.datasets.image_inputs import ImageInputs
    from rlframework.huggingface.model_directories import read_config

    name = config.policy.model_name
    return ImageInputs(name, read_config(name, config.policy.trust_remote_code), tokenizer)


def engine_record(config: RunConfig, manager: PluginManager) -> GenerationEngineRecord:
    """The record of the generation engine that `config` selects."""
    record = manager.select("generation_engine", config.generation.name).record
    assert isinstance(record, GenerationEngineRecord)
    return record


def start_generation(
    config: RunConfig, policy: Policy, tokenizer: PreTrainedTokenizerBase, manager: PluginManager, *, device: str
) -> Generation:
    """Return the handle on generation that `config` describes: in the workers of `policy`, or on separate workers."""
    if config.generation.workers is not None:
        from rlframework.generation.remote import RemoteGeneration

        return RemoteGeneration(config, policy, tokenizer, manager, device=device)
    from rlframework.generation.driver import Generation

    return Generation(policy, tokenizer, probe_bounds=engine_record(config, manager).probe_bounds)


def backend_record(config: RunConfig, manager: PluginManager) -> PolicyWorkerRecord:
    """The record of the training backend that `config` selects."""
    record = manager.select("policy_worker", config.policy.backend).record
    assert isinstance(record, PolicyWorkerRecord)
    return record


def algorithm_class(config: RunConfig, manager: PluginManager) -> type[Algorithm]:
    """The class of the algorithm that `config` selects."""
    algorithm: type[Algorithm] = manager.load(manager.select("algorithm", config.algorithm.name).record)
    return algorithm


def require_models(config: RunConfig) -> None:
    """Raise a `DataError` within seconds, before torch is imported, if the model or tokenizer is not available."""
    for name, section in {"policy": config.policy, **config.further_policies}.items():
        require_available(section.model_name, f"{name}.model_name")
        if section.tokenizer_name is not None:
            require_available(section.tokenizer_name, f"{name}.tokenizer_name")


@contextmanager
def _workers(
    config: RunConfig, manager: PluginManager, tokenizer: PreTrainedTokenizerBase, **options: bool
) -> Iterator[tuple[Policy, Generation]]:
    """Start the policy, with `options` of its constructor, and generation; shut them down on exit."""
    from rlframework.generation.stop_tokens import stop_tokens
    from rlframework.policy.client import Policy

    device = _checked_device(config, manager)
    stop_tokens(config.generation, tokenizer, config.policy.model_name, config.policy.trust_remote_code)  # checks them
    calls = algorithm_class(config, manager).training_calls(config.algorithm)  # the schedule is checked against them
    with ExitStack() as stack:
        policy = Policy(config, tokenizer, manager, device=device, training_calls=calls, **options)
        stack.callback(policy.shutdown)
        generation = start_generation(config, policy, tokenizer, manager, device=device)
        stack.callback(generation.shutdown)
        yield policy, generation


def _checked_device(config: RunConfig, manager: PluginManager, *, elsewhere: bool = False) -> str:
    """Resolve `device`, and check that the run can generate and that a worker in this process finds its GPU.

    Raises `NotSupported` if the backend can neither generate in its workers nor send weights to engines that do.
    """
    from rlframework.policy.client import require

    backend = backend_record(config, manager)
    if config.generation.workers is None:
        reason = "a run without generation.workers generates in the workers of its policy"
        require(backend, Capability.EMBEDDED_GENERATION, reason)
    elif not backend.capabilities & {Capability.IPC_REFIT, Capability.COLLECTIVE_REFIT}:
        require(backend, Capability.IPC_REFIT, "generation.workers needs a trainer that sends weights to its engines")
    device = resolve_device(config.device)
    inline = config.worker_group.name == "inline"  # other groups check their own machines
    if device == "cuda" and inline and not elsewhere:
        import torch

        if not torch.cuda.is_available():
            built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise ConfigError(
                f"device=cuda, but PyTorch finds no GPU on this machine (torch {torch.__version__}, built {built}). "
                "Set device=cpu or device=auto, or run where nvidia-smi shows a GPU"
            )
    return device
