"""Notes about a configuration with keys of another framework as a whole: its preset, and its batches in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, get_args

from pydantic import BaseModel

from rlframework.config.algorithm_presets import PRESETS
from rlframework.config.algorithms import GRPOConfig, PPOConfig
from rlframework_tools.peers.hints import keys_inside

_LEAVE_ONE_OUT = "use_leave_one_out_baseline"
_SYSTEMS: Mapping[str, tuple[str, str, str]] = {
    "trl": (
        "TRL",
        "normalization, which groups count",
        (
            "num_generations per_device_train_batch_size steps_per_generation scale_rewards max_completion_length "
            "reward_funcs num_train_epochs"
        ),
    ),
    "nemo_rl": (
        "NeMo-RL",
        "leave-one-out baseline, normalization, which groups count, KL term",
        (
            f"loss_fn num_prompts_per_step num_generations_per_prompt normalize_rewards {_LEAVE_ONE_OUT} dtensor_cfg "
            "megatron_cfg"
        ),
    ),
    "verl": (
        "verl",
        "which groups count, bounds of the loss",
        (
            "actor_rollout_ref adv_estimator ppo_mini_batch_size ppo_micro_batch_size_per_gpu use_kl_in_reward "
            "norm_adv_by_std_in_grpo"
        ),
    ),
}
"""Presets, with the name of the system, the formulas of its GRPO that differ, and keys that only it has."""

_OF_ANY_ALGORITHM = {
    "per_device_train_batch_size",
    "max_completion_length",
    "num_train_epochs",
    "dtensor_cfg",
    "megatron_cfg",
}
"""Those of the keys that say nothing about the algorithm; others are of GRPO, or of PPO."""

_TRL_DEFAULTS: Mapping[str, str] = {
    "weight_decay": "`policy.optimizer.weight_decay: 0.0`",
    "lr_scheduler_type": "`policy.scheduler.name: linear`",
}
"""TRL's keys to its defaults that are not ours, which no preset has."""


def peer_notes(
    unknown: Mapping[tuple[str, ...], Any],
    hints: Iterable[str],
    given: Mapping[str, Any],
    algorithm: type[BaseModel] | None,
) -> str:
    """Return notes about the keys of another framework among those that are `unknown`, with their values; "" if none.

    `given` has the keys of the section `algorithm`, whose model is `algorithm`; `hints` are about single keys. Without
    a name of the algorithm, the notes are for the one that the keys are of, if they say that.
    """
    if algorithm is None:
        return ""
    inside = chain.from_iterable(keys_inside(path, value) for path, value in unknown.items())
    words, told, name = {path[-1]: value for path, value in inside}, " ".join(hints), ""
    if "name" not in given:
        words = {**given, **words}  # no key in that section is unknown yet
        name = _meant_algorithm(words)
        given, algorithm = {**given, "name": name}, PPOConfig if name == "ppo" else GRPOConfig
        if not name:
            return _end_note(words)
    preset = _preset_of(words, given, algorithm)
    note = "" if f"algorithm.preset={preset}" in told else _preset_note(preset, words, given, unnamed=bool(name))
    return " ".join(filter(None, (note, _batches_note(words, given, algorithm), _end_note(words))))


def _meant_algorithm(words: Mapping[str, Any]) -> str:
    """The name of the algorithm that `words` are of: grpo unless they name another; "" if they do not say."""
    of_grpo = {key for _, _, keys in _SYSTEMS.values() for key in keys.split()} - _OF_ANY_ALGORITHM
    if words.keys().isdisjoint(of_grpo):
        return ""
    said = words.get("adv_estimator", words.get("loss_type"))
    said = said.get("name") if isinstance(said, Mapping) else said
    if said in ("gae", "cispo"):
        return "ppo" if said == "gae" else "cispo"
    return "grpo" if "adv_estimator" not in words else said if isinstance(said, str) and said in PRESETS else ""


def _preset_of(words: Mapping[str, Any], given: Mapping[str, Any], algorithm: type[BaseModel]) -> str:
    """The preset with the formulas of the framework whose words `words` are; "" if one is set or none fits."""
    field = algorithm.model_fields.get("preset")
    if field is None or "preset" in given or words.get(_LEAVE_ONE_OUT) is False:
        return ""
    own = PRESETS.get(str(given.get("name")))
    known = own or {name for part in (field.annotation, *get_args(field.annotation)) for name in get_args(part)}
    theirs = (preset for preset, (_, _, keys) in _SYSTEMS.items() if not words.keys().isdisjoint(keys.split()))
    return next((preset for preset in theirs if preset in known), "")


def _preset_note(preset: str, words: Mapping[str, Any], given: Mapping[str, Any], *, unnamed: bool) -> str:
    """Say how to set `preset`, with the name of the algorithm if it is `unnamed`, and what it does not set."""
    if not preset:
        return ""
    system, about, _ = _SYSTEMS[preset]
    differing = f" ({about})" if given.get("name") in PRESETS and given.get("name") != "ppo" else ""
    name = f"`algorithm.name: {given['name']}` and " if unnamed else ""
    note = f"For the formulas of {system}{differing}, add {name}`algorithm.preset: {preset}`."
    defaults = [ours for word, ours in _TRL_DEFAULTS.items() if word not in words] if preset == "trl" else []
    return f"{note} TRL's defaults, not set by it: {', '.join(defaults)}." if defaults else note


def _batches_note(words: Mapping[str, Any], given: Mapping[str, Any], algorithm: type[BaseModel]) -> str:
    """Return TRL's batch sizes in our keys; "" unless its arguments say how many rows a device has."""
    fields = algorithm.model_fields
    if not {"prompts_per_step", "samples_per_prompt"} <= fields.keys() or "generation_batch_size" in words:
        return ""
    rows, accumulated = words.get("per_device_train_batch_size"), words.get("gradient_accumulation_steps", 1)
    steps = words.get("steps_per_generation", accumulated)
    samples = words.get("num_generations", given.get("samples_per_prompt", fields["samples_per_prompt"].default))
    if any(type(number) is not int or number < 1 for number in (rows, accumulated, steps, samples)):
        return ""
    if rows * steps % samples:
        return ""
    return (
        f"TRL's batches are `policy.train_global_batch_size: {rows * accumulated}` and `algorithm.prompts_per_step: "
        f"{rows * steps // samples}`, each times the number of devices."
    )


def _end_note(words: Mapping[str, Any]) -> str:
    """Say which of TRL's two ends of a run counts; "" unless both are given."""
    steps = words.get("max_steps")
    if "num_train_epochs" not in words or type(steps) is not int or steps < 1:
        return ""
    return "TRL ends at max_steps where num_train_epochs is given too: set only `algorithm.num_steps`."
