"""Hints for keys and values of other libraries, as `rlframework.config.hints.Hints` asks for them; and notes on a
configuration with their keys as a whole: its preset, and its batches in numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, get_args

from pydantic import BaseModel

from rlframework.config.algorithm_presets import PRESETS
from rlframework.config.algorithms import GRPOConfig, PPOConfig
from rlframework.config.further_policies import FURTHER_POLICIES, in_section
from rlframework.config.hints import Path, key_paths, models_in
from rlframework.config.problems import shortened
from rlframework.config.sections import AlgorithmConfig
from rlframework.config.validate import has_no_kind
from rlframework_tools.peers.frameworks import IS, Framework, frameworks, vocabulary

OF_SECTIONS_TOO = ("optim", "model")
"""Keys that are the name of another framework's section, which has keys of its own."""

_MOST = 40
_MOST_NAMES = 12
_LEAVE_ONE_OUT = "use_leave_one_out_baseline"

_METRICS: Mapping[str, str] = {
    "accurac": "accuracy",
    "margin": "margin",
    "chosen": "chosen_reward",
    "rejected": "rejected_reward",
    **{name: name for name in ("reward", "accuracy", "loss")},
}
"""Parts of peers' names of metrics, with the name of ours."""

_OBSERVERS: Mapping[str, str] = {
    **dict.fromkeys(("console", "tensorboard"), "true"),
    **dict.fromkeys(("wandb", "mlflow", "trackio"), "{}"),
}
"""Observers that peers have too, by the name of ours, with the value that enables each."""


def peer_hint(path: Path, value: Any = None, model: type[BaseModel] | None = None) -> str:
    """Return what the unknown key `path` is called in rlframework, or "" if no peer uses the word.

    If the key is a section, the hint has a line for each known key inside `value`, and one that names the others. Some
    words mean something else to the algorithm of `model`; one that is the name of its own key is no peer's.
    """
    if _on_pairs(model) and model and len(path) == 1 and ("algorithm", path[0]) in key_paths(model):
        return ""
    found = _hint_of(path, value, model)
    hints, others = _hints_inside(path, value, model)
    if others and not hints and model and _is_section(_word(path, vocabulary().keys), model):
        found += _without(others)
    if hints:
        lines = [f"\n    `{'.'.join(key)}`: {hint.removeprefix(IS)}" for key, hint in hints.items()]
        more = f"\n    and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        found = f"{found} Its keys in rlframework:{''.join(lines[:_MOST])}{more}{_without(others)}".lstrip()
    return in_section(found, path[0]) if path[0] in FURTHER_POLICIES else found


def _algorithm_of(model: type[BaseModel] | None) -> type[AlgorithmConfig] | None:
    """The section of the algorithm that a configuration has chosen; None if it is not known."""
    field = model.model_fields.get("algorithm") if model else None
    chosen = field.annotation if field else None
    return chosen if isinstance(chosen, type) and issubclass(chosen, AlgorithmConfig) else None


def _on_pairs(model: type[BaseModel] | None) -> bool:
    """Whether the algorithm of `model` trains on preference pairs."""
    chosen = _algorithm_of(model)
    return chosen is not None and chosen.on_preferences


def _hints_inside(path: Path, value: Any, model: type[BaseModel] | None) -> tuple[dict[Path, str], list[Path]]:
    """Return the hints for the keys within `value`, by their paths from `path`, and the paths of keys without any.

    A section whose keys have no hints, but which has one itself, is not among the others.
    """
    ours = [key for key in key_paths(model) if key[0] not in FURTHER_POLICIES] if model else []
    hints, leaves = dict[Path, str](), list[Path]()
    for inside, item in keys_inside(path, value):
        if inside == path:
            continue
        leaf = not (isinstance(item, Mapping) and item)
        if hint := _hint_of(inside, item, model) or (leaf and _of_the_same_name(inside, item, ours)) or "":
            hints[inside[len(path) :]] = hint
        elif leaf:
            leaves.append(inside[len(path) :])
    sections = [key for key in hints if not any(other[: len(key)] == key != other for other in hints)]
    return hints, [leaf for leaf in leaves if not any(leaf[: len(key)] == key for key in sections)]


def _is_section(word: str, model: type[BaseModel]) -> bool:
    """Whether the key that a peer calls `word` is a section of `model`."""
    info = key_paths(model).get(tuple(vocabulary().keys.get(word, "").split(".")))
    return info is not None and bool(models_in(info.annotation))


def _of_the_same_name(path: Path, value: Any, ours: Collection[Path]) -> str:
    """The hint for a key that only one of `ours` is called like: by its section too, or by a name of several words.

    It has what `value` is here, too.
    """
    same = [key for key in ours if key[-1] == path[-1] and ("_" in path[-1] or key[-2:] == path[-2:])]
    key = ".".join(same[0]) if len(same) == 1 else ""
    return f"{IS}`{key}`. {value_hint(key, value)}".rstrip() if key else ""


def _without(keys: Sequence[Path]) -> str:
    """The line that names `keys`, which no hint is about; "" if there are none."""
    if not keys:
        return ""
    named = ", ".join(shortened(".".join(key)) for key in keys[:_MOST_NAMES])
    count = "1 more key has" if len(keys) == 1 else f"{len(keys)} more keys have"
    return f"\n    {count} no counterpart that is known: {named}{', ...' if len(keys) > _MOST_NAMES else '.'}"


def _hint_of(path: Path, value: Any, model: type[BaseModel] | None) -> str:
    """The hint for the longest end of `path` that is a peer's word, and for its value; "" if there is none."""
    known = vocabulary()
    word = _word(path, known.hints)
    if word in OF_SECTIONS_TOO and isinstance(value, Mapping):
        return ""
    if hint := (_on_pairs(model) and known.of_pairs.get(_word(path, known.of_pairs))) or known.hints.get(word):
        return _not_of(model, hint) or f"{hint} {value_hint(known.keys.get(word, ''), value, word)}".rstrip()
    return ""


def _not_of(model: type[BaseModel] | None, hint: str) -> str:
    """Say that the algorithm of `model` has none of the keys of algorithms that `hint` names; "" if it may have one.

    Keys of `grpo` and its relatives are never left out: which of them has a key is in the hint.
    """
    chosen, keys = _algorithm_of(model), re.findall(r"`(algorithm\.[\w.]+)`", hint)
    name = chosen.model_fields["name"].default if chosen and not issubclass(chosen, GRPOConfig) else None
    if (
        not model
        or not isinstance(name, str)
        or not keys
        or any(tuple(key.split(".")) in key_paths(model) for key in keys)
    ):
        return ""
    return f"It has no counterpart with `algorithm.name` {name}: remove the key."


def _word(path: Path, table: Mapping[str, str]) -> str:
    """The longest end of `path` that is in `table`; "" if there is none."""
    ends = (".".join(path[start:]) for start in range(len(path)))
    return next((end for end in ends if end in table), "")


def keys_inside(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Each key within `value`, sections too, with its value; not those of a section that has no counterpart."""
    yield path, value
    if isinstance(value, Mapping) and vocabulary().keys.get(_word(path, vocabulary().keys)) != "":
        for key, item in value.items():
            yield from keys_inside((*path, str(key)), item)


def value_hint(key: str, value: object, word: str = "") -> str:
    """Return what the value of a peer is for our `key`, which the peer calls `word`; "" if it is no peer's, or ours."""
    written = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    known = vocabulary()
    if meaning := known.word_values.get(word, {}).get(written) or known.values.get(key, {}).get(written):
        return f"Another framework's {written} {meaning}."
    if key == "observers":
        return _observers(value)
    if key == "policy.scheduler":
        return _scheduler(value)
    if key in ("checkpoints.metric", "algorithm.early_stopping.metric"):
        return _metric(value)
    if key == "checkpoints.best" and isinstance(value, Mapping):
        return "The name of the metric is the key checkpoints.metric, and checkpoints.best is highest or lowest."
    return ""


def _metric(value: object) -> str:
    """The name of the metric that a peer calls `value`; "" if it is not known, or may be ours."""
    if not isinstance(value, str) or not has_no_kind(value):
        return ""
    meant = next((name for part, name in _METRICS.items() if part in value.lower()), "")
    return f"Set it to validation/{meant}." if meant else ""


def _scheduler(value: object) -> str:
    """How to write `value`, a list of torch's schedulers; "" for anything else."""
    if not isinstance(value, list):
        return ""
    parts = {str(part.get("name", "")).rpartition(".")[2]: part for part in value if isinstance(part, Mapping)}
    kwargs = parts.get("LinearLR", {}).get("kwargs")
    steps = kwargs.get("total_iters", "N") if isinstance(kwargs, Mapping) else "N"
    name = "cosine" if "CosineAnnealingLR" in parts else "constant"
    warmup = f", warmup_steps: {steps}" if "LinearLR" in parts else ""
    return (
        "A warm-up (torch's LinearLR, of total_iters steps) and what follows it are one section: write "
        f"`policy.scheduler: {{name: {name}{warmup}}}`."
    )


def _observers(value: object) -> str:
    """How to write `value`, a list of observers or the name of one; "" if it has none that are known."""
    names = value if isinstance(value, (list, tuple)) else [value]
    known = [name for name in _OBSERVERS if name in names]
    example = ", ".join(f"{name}: {_OBSERVERS[name]}" for name in known)
    return f"Each observer is a key: write `observers: {{{example}}}`." if known else ""


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
