"""Scenarios of algorithms: the batches that an algorithm's own code makes, and its own loss.

The algorithm runs once, step by step, on `StoredTask`, with the oracle in the place of policy, critic, teacher and
generation. So its batches have the columns that it needs (advantages, pairs, log-probabilities of a reference), and
nothing that a backend computes is in them. Every backend takes the same optimizer steps on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlframework.algorithms.loop import StepLoop, Timer
from rlframework.base.errors import NotSupported
from rlframework.config.sections import EnvironmentConfig
from rlframework.huggingface.model_directories import read_config
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.environment import Environment, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message, text_of
from rlframework.plugins.configure import load_config
from rlframework.rollout.parts import Parts
from rlframework.runner.parts import algorithm_class, open_environment
from rlframework_conformance.parity.oracle_policy import OraclePolicy, StoredGeneration, oracle_step_with
from rlframework_conformance.parity.scenario import LR, Scenario, new_oracle
from rlframework_conformance.sections import merged, parse_section

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pydantic import BaseModel

    from rlframework.config.sections import RunConfig
    from rlframework.plugins.manager import PluginManager

PAIRS = 48
LONGEST_ANSWER = 6
"""Characters of the longest answer."""


class StoredTask(Environment):
    """Sums of two numbers below 100, in a fixed order; the held-out ones are the last four."""

    def __init__(self, config: EnvironmentConfig, *, seed: int) -> None:
        numbers = [(7 + 13 * index % 83, 5 + 29 * index % 71) for index in range(PAIRS + 4)]
        self._samples = [_sample(str(index), *pair) for index, pair in enumerate(numbers)]

    def samples(self, split: Split) -> Sequence[Sample]:
        """See `Environment.samples`."""
        return self._samples[:PAIRS] if split == "train" else self._samples[PAIRS:]

    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """See `Environment.step`."""
        texts = [text_of(turns[-1]) for turns in conversations]
        return [StepOutcome(zlib.crc32(text.encode()) % 1000 / 1000) for text in texts]


def _sample(name: str, first: int, second: int) -> Sample:
    total = first + second
    wrong = f"{total + 1}?" if total % 2 else f"{total - 10} or"
    prompt = Message(role="user", content=f"{first}+{second}=")
    steps = {"steps": [f"{first}", f"{total}"], "labels": [1.0, float(total % 2)]}
    metadata = {"rejected": wrong, "margin": total % 7 / 7, **steps}
    return Sample(name, (prompt,), str(total), completion=str(total), metadata=metadata)


GROUP = 4
"""Answers to a prompt, of algorithms that compare them."""

FLOOR = 1.0
"""Losses are compared relative to at least this: with advantages around 0 a loss is a small difference."""

HEADS = {"critic": "value", "teacher": "language"}
"""Further policies that the oracle can play, and their heads."""

TEACHER_NOISE = 0.2
"""Standard deviation of what is added to the weights of a teacher, relative to each tensor's: it is another model."""

_TASK = "rlframework_conformance.parity.algorithm_scenario:StoredTask"


def algorithm_scenarios(
    name: str,
    keys: Sequence[str],
    models: Mapping[str, Path | str],
    *,
    steps: int,
    rows: int,
    vocabulary: int,
    backend: str,
    manager: PluginManager,
) -> list[Scenario]:
    """Return scenarios of `steps` optimizer steps of `rows` rows: of the algorithm `name`, and of its critic.

    `keys`: of its section, as `parse_section` reads them. `models`: by the values of `policy.head`; a language model
    gets a new head where another is needed. `backend`: any that is installed; only its section is used. Raises
    `NotSupported` with the reason if the algorithm cannot be compared.
    """
    try:
        config = _config(name, keys, models, steps=steps, rows=rows, backend=backend, manager=manager)
        policy, further = _trained(config, steps, vocabulary, manager)
    except NotSupported as error:
        raise NotSupported(f"parity of the algorithm {name!r}: {error}") from error
    trained = {"": policy} | {f" {other}": model for other, model in further.items() if model.batches}
    return [_scenario("/".join((name, *keys)) + suffix, each, steps) for suffix, each in trained.items()]


def _scenario(name: str, trained: OraclePolicy, steps: int) -> Scenario:
    config = trained.config.policy
    assert trained.loss is not None
    return Scenario(
        name=name,
        model=config.model_name,
        batches=trained.batches[:steps],
        loss=trained.loss,
        oracle_step=oracle_step_with(trained.loss),
        floor=FLOOR,
        settings={} if config.head == "language" else {"head": config.head, "head_init": config.head_init},
    )


def _config(
    name: str,
    keys: Sequence[str],
    models: Mapping[str, Path | str],
    *,
    steps: int,
    rows: int,
    backend: str,
    manager: PluginManager,
) -> RunConfig:
    """Return the configuration of the run that makes the batches, with the further policies that it uses."""
    record = manager.select("algorithm", name).record
    section = merged(_sizes(record.config_model or record.section, steps, rows), parse_section(keys))
    source: dict[str, Any] = {
        "device": "cpu",
        "algorithm": {**section, "name": name},
        "environment": {"name": _TASK},
        # the stored answers are not those of the policy
        "generation": {"max_new_tokens": LONGEST_ANSWER + 1, "logprob_check": {"action": "off"}},
        "policy": {
            "model_name": str(models["language"]),
            "backend": backend,
            "train_global_batch_size": rows,
            "optimizer": {"lr": LR},
            "batching": {"mode": "padded"},
        },
    }
    config = load_config(source, manager=manager)
    kind = _comparable(config, manager)
    source["policy"] |= _model(models, kind.head(config.algorithm))
    for further in kind.further_policies(config):
        if further not in HEADS:
            raise NotSupported(f"it uses the further policy {further!r}, which is not compared")
        source[further] = _model(models, HEADS[further])
    return load_config(source, manager=manager)


def _comparable(config: RunConfig, manager: PluginManager) -> type[StepLoop]:
    kind = algorithm_class(config, manager)
    if not issubclass(kind, StepLoop):
        raise NotSupported("it is not derived from rlframework.algorithms.loop.StepLoop, whose steps are compared")
    return kind


def _model(models: Mapping[str, Path | str], head: str) -> dict[str, Any]:
    """Return the keys of a policy with this head; a language model gets a new one."""
    if head == "language":
        return {"model_name": str(models[head])}
    kinds = read_config(str(models[head])).architectures or [""]
    start = "checkpoint" if kinds[0].endswith("SequenceClassification") else "zeros"
    return {"model_name": str(models[head]), "head": head, "head_init": start}


def _sizes(model: type[BaseModel], steps: int, rows: int) -> dict[str, Any]:
    """Return the keys of an algorithm's section that the stored task needs, of those that it has.

    A rollout is trained on twice, if the algorithm can: in the second pass its ratios are not 1.
    """
    group = GROUP if rows % GROUP == 0 else 1
    known: dict[str, Any] = {"prompts_per_step": rows, "epochs_per_batch": 2, "separator": "+"}  # any tokenizer has it
    if "samples_per_prompt" in model.model_fields:
        known |= {"prompts_per_step": rows // group, "samples_per_prompt": group}
    off = {"every": 0, "at_start": False, "at_end": False}
    return {key: value for key, value in known.items() if key in model.model_fields} | {
        "num_steps": steps,
        "validation": off,
    }


def _trained(
    config: RunConfig, steps: int, vocabulary: int, manager: PluginManager
) -> tuple[OraclePolicy, dict[str, OraclePolicy]]:
    """Run the algorithm of `config` until it has taken `steps` optimizer steps; return its policy and further ones."""
    kind = _comparable(config, manager)
    policy, further = _policy(config), {name: _policy(config.of(name)) for name in kind.further_policies(config)}
    if "teacher" in further:
        further["teacher"].disturb(TEACHER_NOISE)
    tokenizer = load_tokenizer(str(config.policy.model_name))
    generation = StoredGeneration(policy, vocabulary, int(tokenizer.eos_token_id), int(tokenizer.pad_token_id))
    with open_environment(config, manager) as environment:
        handles: dict[str, Any] = {"policy": policy, "generation": generation, "models": further}
        handles["observers"] = None  # nothing is reported
        parts = Parts(config=config, tokenizer=tokenizer, environment=environment, **handles)
        algorithm = kind(parts)
        for step in range(1, steps + 1):
            before = len(policy.batches)
            algorithm.train_step(step, Timer())
            if len(policy.batches) == before:
                raise NotSupported(f"it did not call StepLoop.train in step {step}")
            if len(policy.batches) >= steps:
                break
    return policy, further


def _policy(config: RunConfig) -> OraclePolicy:
    section = config.policy
    head = None if section.head == "language" else section.head_init
    return OraclePolicy(config, partial(new_oracle, section.model_name, LR, 1.0, section.max_grad_norm, {}, head))
