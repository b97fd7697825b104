"""Notes about a configuration with keys of another framework as a whole: its preset, and its batches in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, get_args

from pydantic import BaseModel

from rlframework.config.algorithm_presets import PRESETS
from rlframework.config.algorithms import GRPOConfig, PPOConfig
from rlframework_tools.peers.frameworks import Framework, frameworks
from rlframework_tools.peers.hints import keys_inside

_LEAVE_ONE_OUT = "use_leave_one_out_baseline"


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
    theirs, note = _framework_of(words, given, algorithm), ""
    if theirs and f"algorithm.preset={theirs.preset}" not in told:
        note = _preset_note(theirs, words, given, unnamed=bool(name))
    elif "preset" not in algorithm.model_fields:
        used = (each for each in frameworks().values() if _uses(each, words))
        note = next((_defaults_note(each, words, given, "which are others here") for each in used), "")
    return " ".join(filter(None, (note, _batches_note(words, given, algorithm), _end_note(words))))


def _meant_algorithm(words: Mapping[str, Any]) -> str:
    """The name of the algorithm that `words` are of: grpo unless they name another; "" if they do not say."""
    if all(words.keys().isdisjoint(framework.words_of_grpo) for framework in frameworks().values()):
        return ""
    said = words.get("adv_estimator", words.get("loss_type"))
    said = said.get("name") if isinstance(said, Mapping) else said
    if said in ("gae", "cispo"):
        return "ppo" if said == "gae" else "cispo"
    return "grpo" if "adv_estimator" not in words else said if isinstance(said, str) and said in PRESETS else ""


def _framework_of(words: Mapping[str, Any], given: Mapping[str, Any], algorithm: type[BaseModel]) -> Framework | None:
    """The framework whose words `words` are, if its preset could be set; None if one is set or none fits."""
    field = algorithm.model_fields.get("preset")
    if field is None or "preset" in given or words.get(_LEAVE_ONE_OUT) is False:
        return None
    own = PRESETS.get(str(given.get("name")))
    presets = own or {name for part in (field.annotation, *get_args(field.annotation)) for name in get_args(part)}
    return next((each for each in frameworks().values() if _uses(each, words) and each.preset in presets), None)


def _uses(framework: Framework, words: Mapping[str, Any]) -> bool:
    """Whether one of `words` is a key that only `framework` has."""
    return not words.keys().isdisjoint((*framework.words_of_grpo, *framework.words))


def _defaults_note(theirs: Framework, words: Mapping[str, Any], given: Mapping[str, Any], which: str) -> str:
    """The defaults of `theirs` that are others here, in our keys, apart from those of `words`; "" if there are none."""
    others = {**theirs.defaults, **theirs.defaults_of.get(str(given.get("name")), {})}
    defaults = [ours for keys, ours in others.items() if words.keys().isdisjoint(keys.split())]
    return f"{theirs.name}'s defaults, {which}: {', '.join(defaults)}." if defaults else ""


def _preset_note(theirs: Framework, words: Mapping[str, Any], given: Mapping[str, Any], *, unnamed: bool) -> str:
    """Say how to set the preset of `theirs`, with the algorithm's name if it is `unnamed`, and what it does not set."""
    differing = f" ({theirs.formulas})" if given.get("name") in PRESETS and given.get("name") != "ppo" else ""
    name = f"`algorithm.name: {given['name']}` and " if unnamed else ""
    note = f"For the formulas of {theirs.name}{differing}, add {name}`algorithm.preset: {theirs.preset}`."
    return f"{note} {_defaults_note(theirs, words, given, 'not set by it')}".rstrip()


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
