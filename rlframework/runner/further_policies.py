"""Build the further policies of a run: its critic, teacher and reward model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import ConfigError, NotSupported, PluginError
from rlframework.config.further_policies import naming
from rlframework.interfaces.named_sharding import policy_sharding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.algorithms.algorithm import Algorithm
    from rlframework.config.sections import RunConfig
    from rlframework.plugins.manager import PluginManager
    from rlframework.policy.client import Policy


class Placeholder:
    """Has the attributes `known`. Every other raises `NotSupported`, as there are no workers yet."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupported(f"no worker is started yet, and {name!r} needs one; call it in `Algorithm.run`")


def used_policies(config: RunConfig, algorithm: type[Algorithm]) -> Mapping[str, int]:
    """Return `algorithm.further_policies`; raise `ConfigError` unless their sections are those that `config` has."""
    used, given, name = algorithm.further_policies(config), config.further_policies, config.algorithm.name
    for missing in (each for each in used if each not in given):
        raise ConfigError(
            f"algorithm.name={name} needs the section {missing!r}, which is missing. Add it, with the keys that differ "
            f"from those of `policy`: {missing}={{}} takes all of them from there"
        )
    for unused in (each for each in given if each not in used):
        reads = ", ".join(used) or "no such section"
        raise ConfigError(
            f"the section {unused!r} is not used: algorithm.name={name} reads {reads}. Remove it (~{unused}), or "
            "choose an algorithm that reads it"
        )
    for wrong in (each for each, calls in used.items() if given[each].trained != bool(calls)):
        raise PluginError(
            f"algorithm {name!r} returns {used[wrong]} calls of `train` for {wrong!r} in `further_policies`; a critic "
            "is trained, a teacher and a reward model are not"
        )
    return used


def planned_models(
    config: RunConfig, manager: PluginManager, tokenizer: PreTrainedTokenizerBase, algorithm: type[Algorithm]
) -> dict[str, Any]:
    """Make the checks of `started_models` that need no workers, and return placeholders of the further policies."""
    from rlframework.policy.client import worker_spec

    found: dict[str, Any] = {}
    for name, calls in used_policies(config, algorithm).items():
        view = config.of(name)
        with naming(name):
            require_same_tokens(config, name, tokenizer)
            require_same_images(config, name)
            options = {"init_reference_model": False, "init_optimizer": calls > 0}
            worker_spec(view, tokenizer, manager, training_calls=calls, **options)
            manager.load(manager.select("worker_group", view.worker_group.name).record)
            record = manager.select("policy_worker", view.policy.backend).record
            size = policy_sharding(view.worker_group.num_workers, view.policy.parallelism)
        found[name] = Placeholder(
            config=view,
            record=record,
            capabilities=record.capabilities,
            data_parallel_size=size.get_axis_size("data_parallel"),
        )
    return found


@contextmanager
def started_models(
    config: RunConfig,
    manager: PluginManager,
    tokenizer: PreTrainedTokenizerBase,
    algorithm: type[Algorithm],
    device: str,
) -> Iterator[dict[str, Policy]]:
    """Start the workers of the further policies, in turn, and shut them down on exit."""
    from rlframework.policy.client import Policy

    with ExitStack() as stack:
        models: dict[str, Policy] = {}
        for name, calls in used_policies(config, algorithm).items():
            view = config.of(name)
            with naming(name):
                models[name] = model = Policy(
                    view, tokenizer, manager, device=device, init_optimizer=calls > 0, training_calls=calls
                )
            stack.callback(model.shutdown)
            model.rest()
        yield models


def require_same_tokens(config: RunConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` unless the further policy `name` reads the token ids of the policy's `tokenizer`."""
    from rlframework.huggingface.model_directories import model_sizes
    from rlframework.huggingface.tokenizer import load_tokenizer

    policy, section = config.policy, config.further_policies[name]
    source = section.tokenizer_name or section.model_name
    if source == (policy.tokenizer_name or policy.model_name) and section.model_name == policy.model_name:
        return
    known, theirs = tokenizer.get_vocab(), load_tokenizer(source, section.trust_remote_code).get_vocab()
    remedy = f"{name} reads the tokens of the policy, so choose a {name}.model_name with its tokenizer"
    for token, number in known.items():
        if (other := theirs.get(token)) != number:
            shown = "is not one" if other is None else f"has the id {other}"
            raise ConfigError(
                f"the token {token!r} has the id {number} in the policy's tokenizer, but {shown} in that of {source!r} "
                f"({name}). {remedy}"
            )
    sizes = [model_sizes(each.model_name, each.trust_remote_code)[1] for each in (policy, section)]
    needed = min(max(known.values()) + 1, sizes[0] or max(known.values()) + 1)
    if sizes[1] is not None and sizes[1] < needed:
        raise ConfigError(
            f"the model {name}.model_name={section.model_name!r} has embeddings of {sizes[1]:,} tokens, but the "
            f"policy's tokenizer has ids up to {needed - 1:,}. {remedy}"
        )


def require_same_images(config: RunConfig, name: str) -> None:
    """Raise `ConfigError` unless the further policy `name` takes the images that the policy's processor makes, if any.

    It must be a model of the same kind, whose image encoder has patches of the same size.
    """
    from rlframework.huggingface.model_directories import read_config
    from rlframework.huggingface.vision_models import image_inputs

    policy, section = config.policy, config.further_policies[name]
    if config.environment.images is None or section.model_name == policy.model_name:
        return
    ours, theirs = (image_inputs(read_config(each.model_name, each.trust_remote_code)) for each in (policy, section))
    if different := [key for key in ours if theirs.get(key) != ours[key]]:
        found = ", ".join(f"{key}={theirs.get(key)} where the policy has {ours[key]}" for key in different)
        raise ConfigError(
            f"{name}.model_name={section.model_name!r} does not take the images of the policy: its configuration has "
            f"{found}. With environment.images it must be a vision-language model of the policy's kind, or remove "
            "environment.images"
        )
