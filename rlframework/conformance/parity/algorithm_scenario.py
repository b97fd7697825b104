"""Scenarios of algorithms: the batches that an algorithm's own code makes, and its own loss.

The algorithm runs once, step by step, on `StoredTask`, with the oracle in the place of policy and generation. So its
batches have the columns that it needs (advantages, pairs, log-probabilities of a reference), and nothing that a backend
computes is in them. Every backend takes the same optimizer steps on them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.algorithm import Parts
from rlframework.configure import load_config
from rlframework.conformance.parity.oracle_policy import OraclePolicy, StoredGeneration
from rlframework.conformance.parity.scenario import LR, Scenario, new_oracle, oracle_step_with
from rlframework.conformance.parity.stored_task import LONGEST_ANSWER
from rlframework.conformance.sections import merged, parse_section
from rlframework.errors import NotSupported
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.runner.parts import algorithm_class, open_environment
from rlframework.training.loop import StepLoop, Timer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from rlframework.config.sections import RunConfig
    from rlframework.plugins.manager import PluginManager

GROUP = 4
"""Answers to a prompt, of algorithms that compare them."""

FLOOR = 1.0
"""Losses are compared relative to at least this: with advantages around 0 a loss is a small difference."""

_TASK = "rlframework.conformance.parity.stored_task:StoredTask"


def algorithm_scenario(
    name: str,
    keys: Sequence[str],
    model: Path | str,
    *,
    steps: int,
    rows: int,
    vocabulary: int,
    backend: str,
    manager: PluginManager,
) -> Scenario:
    """Return the scenario of `steps` optimizer steps of `rows` rows of the algorithm `name`.

    `keys`: of its section, as `parse_section` reads them. `backend`: any that is installed; only its section is used.
    Raises `NotSupported` with the reason if the algorithm cannot be compared.
    """
    config = _config(name, keys, model, steps=steps, rows=rows, backend=backend, manager=manager)
    try:
        policy = _trained(config, model, steps, vocabulary, manager)
    except NotSupported as error:
        raise NotSupported(f"parity of the algorithm {name!r}: {error}") from error
    assert policy.loss is not None
    return Scenario(
        name="/".join((name, *keys)),
        model=model,
        batches=policy.batches[:steps],
        loss=policy.loss,
        oracle_step=oracle_step_with(policy.loss),
        floor=FLOOR,
    )


def _config(
    name: str,
    keys: Sequence[str],
    model: Path | str,
    *,
    steps: int,
    rows: int,
    backend: str,
    manager: PluginManager,
) -> RunConfig:
    record = manager.select("algorithm", name).record
    section = merged(_sizes(record.config_model or record.section, steps, rows), parse_section(keys))
    source = {
        "device": "cpu",
        "algorithm": {**section, "name": name},
        "environment": {"name": _TASK},
        "generation": {"max_new_tokens": LONGEST_ANSWER + 1},
        "policy": {
            "model_name": str(model),
            "backend": backend,
            "train_global_batch_size": rows,
            "optimizer": {"lr": LR},
            "batching": {"mode": "padded"},
        },
    }
    return load_config(source, manager=manager)


def _sizes(model: type[BaseModel], steps: int, rows: int) -> dict[str, Any]:
    """Return the keys of an algorithm's section that say how much a step computes, of those that it has.

    A rollout is trained on twice, if the algorithm can: in the second pass its ratios are not 1.
    """
    group = GROUP if rows % GROUP == 0 else 1
    known = {"prompts_per_step": rows, "epochs_per_batch": 2}
    if "samples_per_prompt" in model.model_fields:
        known |= {"prompts_per_step": rows // group, "samples_per_prompt": group}
    off = {"every": 0, "at_start": False, "at_end": False}
    return {key: value for key, value in known.items() if key in model.model_fields} | {
        "num_steps": steps,
        "validation": off,
    }


def _trained(config: RunConfig, model: Path | str, steps: int, vocabulary: int, manager: PluginManager) -> OraclePolicy:
    """Run the algorithm of `config` until it has taken `steps` optimizer steps; return its policy."""
    kind = algorithm_class(config, manager)
    if not issubclass(kind, StepLoop):
        raise NotSupported("it is not derived from rlframework.training.loop.StepLoop, whose steps are compared")
    if further := kind.further_policies(config):
        raise NotSupported(f"it trains with further policies ({', '.join(further)}), which are not compared")
    tokenizer = load_tokenizer(str(model))
    policy = OraclePolicy(config, partial(new_oracle, model, LR, 1.0, config.policy.max_grad_norm, {}))
    generation = StoredGeneration(policy, vocabulary, int(tokenizer.eos_token_id), int(tokenizer.pad_token_id))
    with open_environment(config, manager) as environment:
        handles: dict[str, Any] = {"policy": policy, "generation": generation, "observers": None}  # nothing is reported
        parts = Parts(config=config, tokenizer=tokenizer, environment=environment, **handles)
        algorithm = kind(parts)
        for step in range(1, steps + 1):
            before = len(policy.batches)
            algorithm.train_step(step, Timer())
            if len(policy.batches) == before:
                raise NotSupported(f"it did not call StepLoop.train in step {step}")
            if len(policy.batches) >= steps:
                break
    return policy
