"""Placeholders for the policy and the generation of a run before its workers start."""

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


class Placeholder:
    """Raises `NotSupported` for every attribute, as there are no workers yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupported(f"no worker is started yet, and {name!r} needs one; call it in `Algorithm.run`")


class PolicyPlaceholder(Placeholder):
    """The properties of a policy without workers. The constructor checks what `Policy` checks before starting them."""

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
