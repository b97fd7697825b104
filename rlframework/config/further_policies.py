"""Sections of the policies that a run uses besides the one it trains: `critic`, `teacher` and `reward_model`.

Each has the keys of `policy`, and a `worker_group`. A key that a section leaves out has the value of the same key in
`policy`, or in `worker_group`, except for those of `NEVER_SHARED`, `OF_THE_MODEL` and `OF_TRAINING`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from rlframework.base.errors import ConfigError, DataError, NotSupported, UnsupportedConfig
from rlframework.config.numbers import Coefficient
from rlframework.config.policy import Head, PolicyConfig, WorkerGroupConfig
from rlframework.config.problems import Problem
from rlframework.config.yaml_text import Keys, Tree


class FurtherPolicyConfig(PolicyConfig):
    """Keys that the sections of all further policies have in addition to those of `policy`."""

    trained: ClassVar[bool] = False
    """Whether it has an optimizer, and is in checkpoints."""

    new_head: ClassVar[bool] = False
    """Whether it begins with a new head (`head_init: zeros`) if it shares the language model of the policy."""

    worker_group: SerializeAsAny[WorkerGroupConfig] = Field(
        WorkerGroupConfig(), description="where its workers run; keys left out: those of the run's `worker_group`"
    )
    offload_when_idle: bool = Field(
        False, description="on a GPU, keep the model in CPU memory except while it computes; needs cpu_offload"
    )


class CriticConfig(FurtherPolicyConfig):
    """The critic of PPO: a model that predicts a value for each token, trained with the policy."""

    trained: ClassVar[bool] = True
    new_head: ClassVar[bool] = True

    head: Head = Field("value", description="value: a scalar per token, as PPO needs; others for algorithms of yours")
    head_init: Literal["checkpoint", "zeros"] = Field(
        "checkpoint",
        description="start of the head. checkpoint: the weights in `model_name`; zeros: a new head, also the default "
        "without a `model_name`, which is then that of the policy",
    )


class TeacherConfig(FurtherPolicyConfig):
    """The teacher of a distillation: a language model that is not trained."""

    head: Literal["language"] = Field("language", description="a causal language model")
    lora: None = Field(None, description="must be null: a teacher is not trained")


class RewardModelConfig(FurtherPolicyConfig):
    """A reward model that is not trained, whose scores are rewards of rollouts."""

    head: Literal["score"] = Field("score", description="a scalar per row")
    head_init: Literal["checkpoint"] = Field("checkpoint", description="the weights in `model_name`")
    lora: None = Field(None, description="must be null: a reward model is not trained here")
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = Field(
        1.0, description="factor of its scores in the reward of an episode"
    )
    environment_weight: Coefficient = Field(
        1.0, description="factor of the environment's reward in the reward of an episode; 0: the scores alone"
    )


FURTHER_POLICIES: Mapping[str, type[FurtherPolicyConfig]] = {
    "critic": CriticConfig,
    "teacher": TeacherConfig,
    "reward_model": RewardModelConfig,
}
"""The models of the sections, by name."""

NEVER_SHARED = frozenset({"head", "head_init", "lora"})
"""Keys of `policy` that have their own defaults in each section."""

OF_THE_MODEL = frozenset({"tokenizer_name", "chat_template", "trust_remote_code"})
"""Keys of `policy` that have their own defaults in a section with its own `model_name`: they describe that model."""

OF_TRAINING = frozenset({"optimizer", "scheduler"})
"""Keys of `policy` that have their own defaults in sections of models that are not trained."""


def with_shared_keys(tree: Tree) -> Tree:
    """Return `tree` with the keys that sections of further policies leave out, as the module describes.

    A key that the command line gave `policy` counts as given to the section too, also for trust.
    """
    values, overridden = dict(tree.values), set(tree.overridden)
    policy, group = values.get("policy"), values.get("worker_group", {})
    for name, model in FURTHER_POLICIES.items():
        section = values.get(name)
        if not isinstance(section, Mapping) or not isinstance(policy, Mapping):
            continue  # absent, or reported by validation
        own = NEVER_SHARED | (OF_THE_MODEL if "model_name" in section else set())
        own |= set() if model.trained else OF_TRAINING
        shared = {key: value for key, value in policy.items() if key not in own}
        values[name] = _merged(shared, section, ("policy",), (name,), overridden)
        if model.new_head and "model_name" not in section and section.get("head") != "language":
            values[name].setdefault("head_init", "zeros")
        given = section.get("worker_group")
        given = {} if given is None else given
        if isinstance(group, Mapping) and isinstance(given, Mapping):
            same = given.get("name", group.get("name")) == group.get("name")
            above = ("worker_group",), (name, "worker_group")
            values[name]["worker_group"] = _merged(group if same else {}, given, *above, overridden)
    return replace(tree, values=values, overridden=frozenset(overridden))


def _merged(
    shared: Mapping[str, Any], given: Mapping[str, Any], source: Keys, target: Keys, overridden: set[Keys]
) -> dict[str, Any]:
    """`given` with the values of `shared` that it lacks; adds to `overridden` the keys whose values were overridden."""
    merged = copy.deepcopy(dict(given))
    for key, value in shared.items():
        mine = given.get(key)
        if key not in given:
            merged[key] = copy.deepcopy(value)
            above = (*source, key)
            inside = [keys for keys in overridden if keys[: len(above)] == above]
            overridden.update((*target, key, *keys[len(above) :]) for keys in inside)
        elif isinstance(value, Mapping) and isinstance(mine, Mapping):
            merged[key] = _merged(value, mine, (*source, key), (*target, key), overridden)
    return merged


_KEY = re.compile(r"(?<![\w.:/])(policy|worker_group)\.(?=[a-z])")


def in_section(text: str, name: str) -> str:
    """Return `text`, a message or a key, with those of the section `name` as the keys of `policy`, `worker_group`."""
    return _KEY.sub(lambda found: f"{name}." if found[1] == "policy" else f"{name}.worker_group.", text)


def problem_in_section(problem: Problem, name: str) -> Problem:
    """Return `problem` of `policy` or `worker_group` as one of the section `name`."""
    key, message, hint = (in_section(text, name) for text in (problem.key, problem.message, problem.hint))
    return replace(problem, key=key, message=message, hint=hint)


def as_of_policy(key: str) -> str:
    """Return `key` of a further policy as that of `policy` or `worker_group`; any other key as it is."""
    name, _, rest = key.partition(".")
    if name not in FURTHER_POLICIES:
        return key
    return rest if rest.partition(".")[0] == "worker_group" else f"policy.{rest}"


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let errors about the keys of `policy` in the block name those of the section `name`."""
    try:
        yield
    except (ConfigError, DataError, NotSupported) as error:
        known = next(
            kind for kind in (UnsupportedConfig, ConfigError, DataError, NotSupported) if isinstance(error, kind)
        )
        text = in_section(str(error), name)
        raise known(text if name in text else f"{name}: {text}") from error
