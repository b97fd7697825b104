"""Stands for the parts of a run whose workers are not started: what is known of them, and an error for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlframework.errors import NotSupported
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.plugins.types import Capability
from rlframework.policy.client import require, worker_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.plugins.manager import PluginManager


class NotStarted:
    """What asks it for anything is told that there are no workers."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupported(f"no worker is started yet, and {name!r} needs one; call it from `Algorithm.run`")


class PlannedPolicy(NotStarted):
    """A policy before its workers are started. Making it checks what `Policy` checks before it starts them."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        manager: PluginManager,
        *,
        init_reference_model: bool,
        training_calls: int,
    ) -> None:
        record = manager.select("policy_worker", config.policy.backend).record
        if init_reference_model:
            require(record, Capability.REFERENCE_MODEL, "algorithm.loss.kl_coef asks for a reference policy")
        worker_spec(
            config,
            tokenizer,
            manager,
            init_reference_model=init_reference_model,
            init_optimizer=True,
            training_calls=training_calls,
        )
        manager.load(manager.select("worker_group", config.worker_group.name).record)
        sharding = policy_sharding(config.worker_group.num_workers, config.policy.parallelism)
        self.config = config
        self.capabilities = record.capabilities
        self.data_parallel_size = sharding.get_axis_size("data_parallel")
