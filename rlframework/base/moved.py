"""Import paths of the last release that have moved: they work until the next release, with a `DeprecationWarning`.

`MOVED` maps an old module or package to its new name; what lies inside a package follows it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "rlframework.algorithm": "rlframework.algorithms.algorithm",
    "rlframework.algorithms.losses.kl": "rlframework.algorithms.losses.terms",
    "rlframework.algorithms.losses.nll": "rlframework.algorithms.losses.targets",
    "rlframework.algorithms.losses.preference": "rlframework_preferences.preference_losses",
    "rlframework.algorithms.losses.reward_model": "rlframework_preferences.preference_losses",
    "rlframework.algorithms.losses.value": "rlframework.algorithms.losses.targets",
    "rlframework.algorithms.preferences": "rlframework_preferences.preference_training",
    "rlframework.algorithms.reward_model": "rlframework_preferences.reward_model_training",
    "rlframework.config.distillation": "rlframework.config.distillation_algorithms",
    "rlframework.config.episode_environments": "rlframework.config.environments",
    "rlframework.config.images": "rlframework.config.sections",
    "rlframework.config.judge": "rlframework.config.endpoint",
    "rlframework.config.ppo": "rlframework.config.algorithms",
    "rlframework.config.preference_algorithms": "rlframework_preferences.config",
    "rlframework.config.preference_environment": "rlframework_preferences.config",
    "rlframework.config.reward_model_training": "rlframework_preferences.config",
    "rlframework.config.worker_groups": "rlframework.config.policy",
    "rlframework.configure": "rlframework.plugins.configure",
    "rlframework.conformance": "rlframework_conformance",
    "rlframework.conformance.lora_oracle": "rlframework_conformance.further_oracles",
    "rlframework.conformance.muon_oracle": "rlframework_conformance.further_oracles",
    "rlframework.conformance.parity.report": "rlframework_conformance.parity.parity_report",
    "rlframework.conformance.plugin": "rlframework_conformance.pytest_plugin",
    "rlframework.datasets.gsm8k_preferences": "rlframework_preferences.gsm8k_preferences",
    "rlframework.datasets.image_addresses": "rlframework.datasets.pictures",
    "rlframework.datasets.memmap": "rlframework_preferences.memmap",
    "rlframework.datasets.pair_checks": "rlframework_preferences.preference_rows",
    "rlframework.datasets.preference_rows": "rlframework_preferences.preference_rows",
    "rlframework.datasets.preferences": "rlframework_preferences.pairs",
    "rlframework.datasets.rendering": "rlframework.datasets.chat.rendering",
    "rlframework.datasets.reward_data": "rlframework_preferences.reward_data",
    "rlframework.datasets.row_warnings": "rlframework.datasets.chat.template_checks",
    "rlframework.datasets.sources.splits": "rlframework.datasets.sources.opening",
    "rlframework.datasets.step_rows": "rlframework_preferences.preference_rows",
    "rlframework.datasets.tool_rows": "rlframework.datasets.conversations",
    "rlframework.doctor": "rlframework_tools.doctor",
    "rlframework.environments.agent": "rlframework_serve.agent_environment",
    "rlframework.environments.answer_scores": "rlframework.environments.counted_failures",
    "rlframework.environments.empty_columns": "rlframework.environments.reward_arguments",
    "rlframework.environments.gymnasium": "rlframework_environments.gymnasium",
    "rlframework.environments.judge": "rlframework_serve.judge",
    "rlframework.environments.judge_replies": "rlframework_serve.judge_replies",
    "rlframework.environments.mcp": "rlframework_environments.mcp",
    "rlframework.environments.openenv": "rlframework_environments.openenv",
    "rlframework.environments.preference_samples": "rlframework_preferences.preference_samples",
    "rlframework.environments.preferences": "rlframework_preferences.preference_samples",
    "rlframework.environments.reasoning_gym": "rlframework_environments.reasoning_gym",
    "rlframework.environments.tool_calls": "rlframework.environments.tool_episodes",
    "rlframework.environments.verifiers": "rlframework_environments.verifiers",
    "rlframework.errors": "rlframework.base.errors",
    "rlframework.estimates": "rlframework_tools.estimates",
    "rlframework.estimates.rows": "rlframework_tools.estimates.row_sizes",
    "rlframework.evaluation": "rlframework_tools.evaluation",
    "rlframework.files": "rlframework.base.files",
    "rlframework.generation.adapted_weights": "rlframework.generation.engine_model",
    "rlframework.generation.engine_software": "rlframework.generation.serving",
    "rlframework.generation.image_places": "rlframework.generation.media",
    "rlframework.generation.own_process": "rlframework.generation.serving",
    "rlframework.generation.row_limits": "rlframework.generation.requests",
    "rlframework.generation.sleeping": "rlframework.generation.serving",
    "rlframework.generation.torch_state": "rlframework.generation.serving",
    "rlframework.generation.transformers_engine": "rlframework_transformers.engine",
    "rlframework.generation.weight_fit": "rlframework.generation.engine_model",
    "rlframework.gpu_models": "rlframework.base.gpu_models",
    "rlframework.huggingface.image_features": "rlframework.huggingface.vision_models",
    "rlframework.huggingface.image_processor": "rlframework.huggingface.vision_models",
    "rlframework.interfaces.agents": "rlframework.interfaces.environment",
    "rlframework.interfaces.generation_exchange": "rlframework.interfaces.generation",
    "rlframework.interfaces.pictures": "rlframework.interfaces.messages",
    "rlframework.logs": "rlframework.base.logs",
    "rlframework.microbatches": "rlframework.policy.microbatches",
    "rlframework.microbatches.nemo_rl": "rlframework.nemo_rl.microbatches",
    "rlframework.models.media_positions": "rlframework.models.forward",
    "rlframework.models.named_tensors": "rlframework.models.file_weights",
    "rlframework.models.parts": "rlframework.models.loading",
    "rlframework.models.replacing": "rlframework.models.loading",
    "rlframework.models.scores": "rlframework.models.varlen",
    "rlframework.new_backend": "rlframework_tools.new_backend",
    "rlframework.observers.curve": "rlframework_report.curve",
    "rlframework.observers.environment": "rlframework.observers.run_environment",
    "rlframework.observers.report": "rlframework_report.report",
    "rlframework.observers.sample_images": "rlframework.observers.jsonl",
    "rlframework.observers.services": "rlframework_report.services",
    "rlframework.plugins.loading": "rlframework.plugins.discovery",
    "rlframework.plugins.state_layout": "rlframework_tools.estimates.state_layout",
    "rlframework.policy.all_ranks": "rlframework.workers.process_groups",
    "rlframework.policy.checkpoint.merged": "rlframework_tools.convert",
    "rlframework.policy.head.formula": "rlframework.policy.head.patch",
    "rlframework.policy.head.vocabulary_shard": "rlframework.policy.head.vocabulary",
    "rlframework.rollout.endpoint": "rlframework_serve",
    "rlframework.rollout.endpoint.requests": "rlframework_serve.request_bodies",
    "rlframework.runner.convert": "rlframework_tools.convert",
    "rlframework.runner.placeholder": "rlframework.runner.further_policies",
    "rlframework.runner.tokenize": "rlframework_tools.tokenize",
    "rlframework.secrets": "rlframework.base.secrets",
    "rlframework.storage": "rlframework_storage",
    "rlframework.training": "rlframework.algorithms",
    "rlframework.workers.allocator": "rlframework.workers.device",
    "rlframework.workers.ray": "rlframework_ray",
    "rlframework.workers.ray.worker_group": "rlframework_ray.ray_group",
}


def new_name(module: str) -> str | None:
    """Return the new name of a module that has moved, or None."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):  # the longest old name first: a module may leave a package that moved
        if new := MOVED.get(".".join(parts[:length])):
            return ".".join([new, *parts[length:]])
    return None


class _Finder(MetaPathFinder):
    """Finds modules under their old names, first: a folder that an update has emptied would be a namespace package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how `fullname` is imported if it has moved."""
        if not fullname.startswith("rlframework."):  # every import of the process comes by here
            return None
        new = new_name(fullname)
        return None if new is None else ModuleSpec(fullname, _Alias(new), is_package=True)


class _Alias(Loader):
    """Loads a module that passes on the names of another one. It is another module, as each has its own `__spec__`."""

    def __init__(self, new: str) -> None:
        self._new = new

    def exec_module(self, module: ModuleType) -> None:
        """Import the module under its new name, warn, and pass its names on."""
        try:
            target = import_module(self._new)
        except ModuleNotFoundError as error:
            if error.name != self._new.partition(".")[0]:
                raise
            extra = error.name.removeprefix("rlframework_")
            message = f"{module.__name__} is now {self._new}: pip install 'rlframework-core[{extra}]'"
            raise ModuleNotFoundError(message, name=error.name) from None
        text = f"{module.__name__} has moved to {self._new}; the old name will be removed in the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        module.__doc__ = target.__doc__
        module.__getattr__ = lambda name: getattr(target, name)  # type: ignore[method-assign]
        module.__dir__ = lambda: dir(target)  # type: ignore[method-assign]


def install() -> None:
    """Make old names importable. Called once, when `rlframework` is imported."""
    sys.meta_path.insert(0, _Finder())
