"""A whole run from a configuration, and the parts it is made of.

    config = load_config("grpo.yaml", ["seed=1"])
    result = run(config)

or, to use the parts yourself:

    with build_parts(config) as parts:
        parts.policy.train(batch, loss)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.configure import config_yaml, resolve_device
from rlframework.errors import ConfigError, UserError
from rlframework.files import check_writable, write_atomically
from rlframework.interfaces.algorithm import Algorithm, Parts, RunResult
from rlframework.plugins.hookspec import RunInfo
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.plugins.manager import PluginManager


def run(config: RunConfig, *, manager: PluginManager | None = None) -> RunResult:
    """Train as `config` says; the trained model lies in `config.output_dir / "model"` afterwards.

    Everything that can be wrong with the input is a `UserError` before `output_dir` is made. An `output_dir` that
    holds a run already is refused.
    """
    _check_output_dir(config.output_dir)
    manager = manager or create_manager(config.plugins)
    with build_parts(config, manager=manager) as parts:
        algorithm = _algorithm_class(config, manager)(parts)
        write_config(config)
        with parts.observers:
            result = algorithm.run()
            path = config.output_dir / "model"
            parts.policy.save_pretrained(str(path))
            parts.observers.checkpoint_saved(int(result.metrics["step"]), path)
            parts.observers.run_finished(result.metrics)
    return result


@contextmanager
def build_parts(config: RunConfig, *, manager: PluginManager | None = None) -> Iterator[Parts]:
    """The parts of a run, shut down at the end: environment, tokenizer, policy, generation, observers."""
    from rlframework.data.tokenizer import load_tokenizer
    from rlframework.generation.driver import Generation
    from rlframework.observers.dispatch import Observers
    from rlframework.policy.policy import Policy, require

    manager = manager or create_manager(config.plugins)
    backend = manager.select("policy_worker", config.policy.backend).record
    # every generation engine lives in the workers so far
    require(backend, Capability.EMBEDDED_GENERATION, "a run generates in the workers of its policy")
    device = _device(config)
    with ExitStack() as stack:
        environment = _make(manager, "environment", config.environment.name)(config.environment, seed=config.seed)
        stack.callback(environment.shutdown)
        policy_config = config.policy
        tokenizer = load_tokenizer(
            policy_config.tokenizer_name or policy_config.model_name,
            policy_config.trust_remote_code,
            policy_config.chat_template,
        )
        algorithm = _algorithm_class(config, manager)
        policy = Policy(
            config,
            tokenizer,
            manager,
            device=device,
            init_reference_model=algorithm.needs_reference_model(config.algorithm),
            training_calls=algorithm.training_calls(config.algorithm),
        )
        stack.callback(policy.shutdown)
        yield Parts(
            config=config,
            tokenizer=tokenizer,
            policy=policy,
            generation=Generation(policy.worker_group, config.generation, tokenizer),
            environment=environment,
            observers=Observers(config.observers, RunInfo(config, config.output_dir), manager.hook),
        )


def write_config(config: RunConfig) -> None:
    """Make `output_dir` and write the resolved configuration into it."""
    write_atomically(config.output_dir / "config.yaml", config_yaml(config))


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
