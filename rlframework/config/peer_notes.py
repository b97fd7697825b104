"""Notes about a configuration with keys of another framework as a whole: its preset, and its batches in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from rlframework.config.algorithm_presets import PRESETS

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


def peer_notes(
    unknown: Mapping[tuple[str, ...], Any],
    hints: Iterable[str],
    given: Mapping[str, Any],
    algorithm: type[BaseModel] | None,
) -> str:
    """Return notes about the keys of another framework among those that are `unknown`, with their values; "" if none.

    `given` has the keys of the section `algorithm`, whose model is `algorithm`; `hints` are about single keys.
    """
    if algorithm is None:
        return ""
    words = {str(keys[-1]): value for keys, value in unknown.items()}
    told = any("algorithm.preset=" in hint for hint in hints)
    notes = "" if told else _preset_note(words, given, algorithm), _batches_note(words, given, algorithm)
    return " ".join(filter(None, notes))


def _preset_note(words: Mapping[str, Any], given: Mapping[str, Any], algorithm: type[BaseModel]) -> str:
    """Name the preset with the formulas of the framework whose words `words` are; "" if one is set or none fits."""
    field = algorithm.model_fields.get("preset")
    if field is None or "preset" in given or words.get(_LEAVE_ONE_OUT) is False:
        return ""
    own = PRESETS.get(str(given.get("name")))
    known = own or {name for part in (field.annotation, *get_args(field.annotation)) for name in get_args(part)}
    for preset, (system, about, keys) in _SYSTEMS.items():
        if preset in known and not words.keys().isdisjoint(keys.split()):
            differing = f" ({about})" if own and given.get("name") != "ppo" else ""
            return f"For the formulas of {system}{differing}, add `algorithm.preset: {preset}`."
    return ""


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
