"""Validates a merged configuration: first against its model, then for conflicts between keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlframework.config.algorithms import GRPOConfig, PPOConfig, SFTConfig, WithReferenceSync
from rlframework.config.further_policies import FURTHER_POLICIES, as_of_policy, in_section, problem_in_section
from rlframework.config.hints import Hints, key_paths, models_in, no_hints, section_example, unknown_key_hint
from rlframework.config.problems import MOST, NOT_GIVEN, Problem
from rlframework.config.sections import AlgorithmConfig, EarlyStoppingConfig, RunConfig
from rlframework.config.yaml_text import Keys, Tree

Model = TypeVar("Model", bound=BaseModel)

_SECTION = "must be a section (a mapping of keys)"
_ALLOWED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), _SECTION),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "string_type": "must be a string (quote values that look like numbers)",
    "extra_forbidden": "unknown key",
    "missing": "required key is missing",
}
"""Pydantic error type to our message. Other types keep pydantic's message."""

_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "greater than or equal to"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "less than or equal to"),
}
"""Pydantic error type to the key of the bound and our words: pydantic writes 1e-30 with all its zeros."""


_OWN_KEY = "The keys of a class of yours are declared by its attribute `config_model`, see docs/own_parts.md."

_INSTEAD_OF_NULL = {
    "algorithm.validation": (
        "To switch validation off, set algorithm.validation.at_start=false and algorithm.validation.at_end=false; "
        "algorithm.validation.every=0, the default, has none in between."
    ),
    "observers": "Each observer is a key that can be false, such as observers.tensorboard=false.",
}
"""Hints for null in place of a section that is always there."""


METRICS = ("reward", "accuracy", "loss")
"""The metrics of validation by which checkpoints are compared."""


def validate(
    tree: Tree,
    model: type[Model],
    elsewhere: Mapping[Keys, str] | None = None,
    most: int = MOST,
    hints: Hints = no_hints,
) -> tuple[Model | None, list[Problem]]:
    """Return an instance of `model` and no problems, or None and the problems in `tree`, of which `most` are shown.

    `elsewhere` has hints for keys that `model` lacks but that another choice of plugins would have; `hints`
    has those of plugins.
    """
    try:
        config = model.model_validate(tree.values)
    except ValidationError as error:
        return None, _problems(error, tree, model, elsewhere or {}, most, hints)
    problems = [
        replace(problem, hint=hints("value_hint", key=problem.key, value=problem.given))
        for problem in _mistaken_booleans(tree.values, config.model_dump(mode="json"), (), tree)
    ]
    problems += _null_characters(tree.values, (), tree)
    return (None, problems) if problems else (config, [])


def _problems(
    error: ValidationError, tree: Tree, model: type[BaseModel], elsewhere: Mapping[Keys, str], most: int, hints: Hints
) -> list[Problem]:
    """One problem per key. The members of a union each report an error, and are joined as alternatives."""
    by_key: dict[Keys, Problem] = {}
    wrong_types = set[Keys]()
    for item in error.errors(include_url=False):
        kind, keys = item["type"], _place(item["loc"], item["type"], tree)
        path, value = tuple(map(str, keys)), tree.get(keys)
        message = _message(kind, item["msg"], item.get("ctx", {}))
        problem = Problem(".".join(path), message, given=value, origin=tree.origin(keys))
        if kind.endswith("_type"):
            wrong_types.add(keys)
            example = section_example(path, value, model) if message == _SECTION else ""
            problem = replace(problem, hint=_INSTEAD_OF_NULL.get(problem.key, "") if value is None else example)
        if kind == "extra_forbidden" and len(by_key) < MOST:
            other = elsewhere.get(keys)  # a word of another framework may be a key of another plugin too
            if other and (meant := hints("key_hint", path=path, value=value, model=model)):
                said = f"{meant[0].lower()}{meant[1:]} Otherwise: {other[0].lower()}{other[1:]}"
                other = f"If it is a key of another framework: {said}"
            own = _OWN_KEY if ":" in str(tree.get((*keys[:-1], "name"))) else ""
            problem = replace(problem, hint=other or unknown_key_hint(path, value, model, hints) or own)
        elif kind == "missing":
            info = key_paths(model).get(path)
            described = f" ({info.description})" if info and info.description else ""
            problem = replace(problem, message=f"{problem.message}{described}", origin=tree.origin(keys[:-1]))
        elif meaning := hints("value_hint", key=as_of_policy(problem.key), value=value):
            problem = replace(problem, hint=in_section(meaning, path[0]) if path[0] in FURTHER_POLICIES else meaning)
        known = by_key.get(keys)
        if known and problem.message != known.message:
            hint = known.hint or problem.hint
            problem = replace(known, message=f"{known.message}, or {problem.message}", hint=hint)
        by_key[keys] = problem
    kept = {
        keys: problem
        for keys, problem in by_key.items()
        if not (keys in wrong_types and _has_deeper(keys, by_key)) and not _inherited(keys, by_key, tree)
    }
    _add_notes(kept, tree, model, most, hints)
    return list(kept.values())


def _add_notes(problems: dict[Keys, Problem], tree: Tree, model: type[BaseModel], most: int, hints: Hints) -> None:
    """Add what is known of another framework's configuration as a whole to the last unknown key that is shown."""
    shown = list(problems.items())[:most]
    unknown = [keys for keys, problem in shown if problem.message == _ALLOWED["extra_forbidden"]]
    algorithm, given = model.model_fields.get("algorithm"), tree.get(("algorithm",))
    if not (unknown and algorithm and isinstance(given, Mapping)):
        return
    values = {tuple(map(str, keys)): tree.get(keys) for keys in unknown}
    told = [problem.hint for problem in problems.values()]
    section = next(iter(models_in(algorithm.annotation)), None)
    if note := hints("configuration_hint", unknown=values, hints=told, algorithm=given, model=section):
        last = problems[unknown[-1]]
        problems[unknown[-1]] = replace(last, hint=f"{last.hint}\n    {note}".lstrip())


def _inherited(keys: Keys, problems: Collection[Keys], tree: Tree) -> bool:
    """Whether a further policy has this problem from `policy` or `worker_group`, where it is reported."""
    source = tuple(as_of_policy(".".join(map(str, keys))).split("."))
    same = source in problems and tree.get(source) == tree.get(keys)
    return same and keys[0] in FURTHER_POLICIES and keys not in tree.origins


def _has_deeper(keys: Keys, problems: Collection[Keys]) -> bool:
    """Whether a value within that of `keys` has a problem: then it is the member of a union that `keys` may have."""
    return any(len(other) > len(keys) and other[: len(keys)] == keys for other in problems)


def _message(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind in _ALLOWED:
        return _ALLOWED[kind]
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        bound = context[key]
        return f"must be {words} {bound:,}" if isinstance(bound, int) else f"must be {words} {bound:,.10g}"
    if kind == "literal_error":  # as YAML writes it
        message = message.replace("False", "false")
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"must {message.removeprefix('Input should ')}" if message.startswith("Input should ") else message


def _place(loc: Keys, kind: str, tree: Tree) -> Keys:
    """`loc` without the entries that pydantic adds for union members: only keys that are in `tree`."""
    keys: Keys = ()
    for index, part in enumerate(loc):
        missing = kind == "missing" and index == len(loc) - 1
        if missing or tree.get((*keys, part)) is not NOT_GIVEN:
            keys = (*keys, part)
    return keys


def _mistaken_booleans(given: Any, taken: Any, keys: Keys, tree: Tree) -> Iterator[Problem]:
    """Report booleans given for numbers and numbers given for booleans, which pydantic accepts."""
    if isinstance(given, (Mapping, list)) and isinstance(taken, (Mapping, list)):
        for key in given if isinstance(given, Mapping) else range(len(given)):
            if not isinstance(taken, Mapping) or key in taken:
                yield from _mistaken_booleans(given[key], taken[key], (*keys, key), tree)
    elif isinstance(given, bool) != isinstance(taken, bool) and {type(given), type(taken)} <= {bool, int, float}:
        message = "must be true or false" if isinstance(taken, bool) else "must be a number"
        yield Problem(".".join(map(str, keys)), message, given=given, origin=tree.origin(keys))


def _null_characters(given: Any, keys: Keys, tree: Tree) -> Iterator[Problem]:
    """Report texts with the character 0, which no path, name or environment variable can have."""
    if isinstance(given, (Mapping, list)):
        for key, value in given.items() if isinstance(given, Mapping) else enumerate(given):
            yield from _null_characters(str(key) if "\0" in str(key) else value, (*keys, key), tree)
    elif isinstance(given, str) and "\0" in given:
        message = "must not contain the character U+0000"
        yield Problem(".".join(map(str, keys)), message, given=given, origin=tree.origin(keys))


def check_run(config: RunConfig) -> Iterator[Problem]:
    """Yield the conflicts between keys that exist for every choice of plugins."""
    conflicts = (
        *(_conflicts, _metric_conflicts, _step_conflicts),
        *(_generation_conflicts, _image_conflicts, _reference_conflicts),
    )
    for problem in chain.from_iterable(find(config) for find in conflicts):
        yield replace(problem, given=attrgetter(problem.key)(config))


def notes_on(config: RunConfig) -> tuple[str, ...]:
    """Notes about keys that are set, but that other keys leave without effect."""
    policy, key = config.policy, "train_micro_batch_size"
    given, batching = getattr(policy, key), policy.batching
    default = type(policy).model_fields[key].default
    if batching.limited != "tokens" or key not in policy.model_fields_set or given == default:
        return ()
    bound = f"with policy.batching.mode={batching.mode}, policy.batching.tokens bounds microbatches"
    return (f"note: {bound}, not policy.{key}={given}",)


def check_further_policies(config: RunConfig, device: str) -> Iterator[Problem]:
    """Yield the conflicts of further policies: between their own keys, and with other models of their process.

    What is set for a whole process must be equal for all models with `worker_group.name=inline`.
    """
    inline = config.worker_group.name == "inline"
    for name, section in config.further_policies.items():
        view = config.of(name)
        for problem in _conflicts(view):
            if (
                problem.key in ("policy.train_global_batch_size", "policy.scheduler.warmup_steps")
                and not section.trained
            ):
                continue
            if problem.key.startswith(("policy.", "worker_group.")):
                yield problem_in_section(replace(problem, given=attrgetter(problem.key)(view)), name)
        for key in _OF_A_PROCESS if inline and section.worker_group.name == "inline" and device == "cuda" else ():
            given, wanted = getattr(section, key), getattr(config.policy, key)
            if given != wanted:
                message = f"must be {str(wanted).lower()} like policy.{key}, because both models are in one process"
                hint = f"Or set {name}.worker_group.name to processes."
                yield Problem(f"{name}.{key}", message, hint, given=given)


_OF_A_PROCESS = ("tf32", "cudnn_attention", "expandable_segments")
"""Keys of `policy` that set up torch for a process."""


def _conflicts(config: RunConfig) -> Iterator[Problem]:
    policy, checkpoints, workers = config.policy, config.checkpoints, config.worker_group.num_workers
    size, rows, total = policy.parallelism.model_size, policy.train_global_batch_size, policy.scheduler.total_steps
    if workers % size:
        message = (
            f"must be a multiple of {size}, the workers per model replica (policy.parallelism: tensor x context x "
            "pipeline)"
        )
        yield Problem("worker_group.num_workers", message)
    elif rows % (data_parallel := workers // size):
        below = rows - rows % data_parallel
        near = f"{below} or {below + data_parallel}" if below else str(data_parallel)
        message = f"must be a multiple of {data_parallel}, the number of data-parallel workers"
        yield Problem("policy.train_global_batch_size", message, f"Try {near}, or change worker_group.num_workers.")
    if total is not None and policy.scheduler.warmup_steps > total:
        yield Problem(
            "policy.scheduler.warmup_steps", f"must not exceed policy.scheduler.total_steps, which is {total}"
        )
    if checkpoints.asynchronous and checkpoints.format != "sharded":
        message = f"must be false when checkpoints.format is {checkpoints.format}, which all workers write together"
        yield Problem("checkpoints.asynchronous", message, "Set checkpoints.format to sharded.")
    if checkpoints.format != "portable" and policy.lora is not None:
        message = "must be portable with policy.lora: adapters are small, and are saved in no other format"
        yield Problem("checkpoints.format", message)
    if policy.optimizer.name == "muon" and policy.lora is not None:
        message = "must be adamw with policy.lora: muon needs matrices, of which an adapter is two factors"
        yield Problem("policy.optimizer.name", message)


def has_no_kind(metric: str) -> bool:
    """Whether `metric` lacks a kind of metrics, as `validation/`, or has that of a peer."""
    kind = metric.partition("/")[0]
    return kind in (metric, "eval", "val", "rewards") or kind.startswith("eval_")


def _metric_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Metrics that no algorithm of core reports: names without a kind, and those of a validation that never is."""
    algorithm, stopping = config.algorithm, config.algorithm.early_stopping
    if not type(algorithm).__module__.startswith("rlframework.") or ":" in algorithm.name:
        return
    metrics = {config.checkpoints.metric: "checkpoints.metric"}
    if stopping is not None:  # checkpoints follow it
        metrics[stopping.metric] = "algorithm.early_stopping.metric"
    for metric, key in metrics.items():
        if has_no_kind(metric):
            names = ", ".join(f"validation/{name}" for name in METRICS)
            yield Problem(key, f"must be a metric as named in metrics.jsonl, such as {names}")
        elif of := re.match(r"validation/(avg|pass)@(\d+)", metric):
            attempts, k = algorithm.validation.attempts, int(of[2])
            if k > attempts or (of[1] == "avg" and k < attempts):
                yield Problem(key, f"needs algorithm.validation.attempts={k}; it is {attempts}")
    if stopping is not None and stopping.metric.startswith("validation/"):
        yield from _stopping_conflicts(config, stopping)


def _stopping_conflicts(config: RunConfig, stopping: EarlyStoppingConfig) -> Iterator[Problem]:
    """Early stopping by validations that are too few before the last step; they compare with the first one."""
    algorithm, key = config.algorithm, "algorithm.early_stopping"
    every, steps, needed = algorithm.validation.every, algorithm.num_steps, stopping.patience + 1
    before_last = (steps - 1) // every if every and steps else 0  # 0 steps: known when the data is open
    if not every or (steps and not before_last):
        message = f"never ends the run, because algorithm.validation.every={every} is no step before its last"
    elif steps and before_last < needed:
        message = (
            f"never ends the run, because {key}.patience={stopping.patience} needs {needed} validations before its "
            f"last step, and algorithm.validation.every={every} gives {before_last}"
        )
    else:
        return
    yield Problem(key, message, _stopping_hint(config, stopping))


def _stopping_hint(config: RunConfig, stopping: EarlyStoppingConfig) -> str:
    """Return what makes early stopping by a validation work, and the ways out of it."""
    steps, needed, key = config.algorithm.num_steps, stopping.patience + 1, "algorithm.early_stopping"
    if steps and steps <= needed:
        most = f", or lower {key}.patience to at most {steps - 2}, with algorithm.validation.every=1"
        remedy = f"Set algorithm.num_steps above {needed}{most if steps > 2 else ''}"
    else:
        remedy = f"Set algorithm.validation.every, such as {min(10, (steps - 1) // needed) if steps else 10}"
    if getattr(config.environment, "validation_fraction", None) == 0:
        remedy += " (environment.validation_fraction=0 holds no samples out: raise it, unless you give validation data)"
    return f"{remedy}. Or set {other_metric(config.algorithm)}, or remove it: ~{key}."


def other_metric(algorithm: AlgorithmConfig) -> str:
    """Return the settings of early stopping by a metric of training, which needs no validation."""
    of_rewards = isinstance(algorithm, GRPOConfig | PPOConfig)
    key = "algorithm.early_stopping"
    return f"{key}.metric=train/reward" if of_rewards else f"{key}={{metric: train/loss, best: lowest}}"


def _step_conflicts(config: RunConfig) -> Iterator[Problem]:
    recording, profiler = config.recording, config.profiler
    last, workers = config.algorithm.num_steps, config.worker_group.num_workers
    start, stop = profiler.start or 0, profiler.stop or 0
    given = {"recording.steps": recording.steps, "profiler.steps": profiler.steps}
    for key, steps in (given | {"profiler.start": (start,), "profiler.stop": (stop,)}).items():
        if last and any(step > last for step in steps):  # 0: known when the data is open
            yield Problem(key, f"must be steps of the run, 1 to {last} (algorithm.num_steps)")
    if stop and (not start or stop < start):
        needed = f"profiler.start={start}" if start else "profiler.start, which is not set"
        yield Problem("profiler.stop", f"must not be before {needed}")
    if not profiler.ranks or max(profiler.ranks) >= workers:
        ranks = f"each from 0 to {workers - 1} (worker_group.num_workers={workers})"
        yield Problem("profiler.ranks", f"must list at least one worker rank, {ranks}")


def _generation_conflicts(config: RunConfig) -> Iterator[Problem]:
    workers, lora = config.generation.workers, config.policy.lora
    validation = config.algorithm.validation
    if validation.attempts > 1 and validation.temperature_of(config.generation) == 0.0:
        message = "must be 1 at temperature 0, because all greedy answers to a prompt are the same"
        yield Problem("algorithm.validation.attempts", message, "Set algorithm.validation.temperature, such as 1.")
    if workers is None:
        if lora is not None and lora.refit == "adapters":
            reason = "generation.workers is not set, and generation runs in the trainer's own processes"
            yield Problem("policy.lora.refit", f"must be merged, because {reason}")
        return
    if workers.python is not None and workers.group != "ray":
        message = "needs workers started by Ray; other workers run this process's Python"
        yield Problem("generation.workers.python", message, "Set generation.workers.group to ray.")
    if workers.group == "inline" and workers.num_workers > 1:
        message = "must be 1 with generation.workers.group=inline, because the driver process holds a single engine"
        yield Problem("generation.workers.num_workers", message, "Set generation.workers.group to processes or ray.")
    if workers.group == config.worker_group.name == "inline" and config.generation.refit.transport == "collective":
        message = "must be auto or ipc when trainer and engine are both inline: a process group needs several processes"
        yield Problem("generation.refit.transport", message)


def _reference_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Updates of a reference policy that does not exist, or that has no weights of its own."""
    algorithm, key = config.algorithm, "algorithm.reference_sync"
    if not isinstance(algorithm, WithReferenceSync) or algorithm.reference_sync is None:
        return
    if config.policy.lora is not None:
        message = "must be null with policy.lora: the reference is the base model without the adapters, not a copy"
        yield Problem(key, message, "Remove it, or train all weights without policy.lora.")
    own = ":" in algorithm.name  # its class tells whether it needs a reference
    if isinstance(algorithm, GRPOConfig) and not (own or algorithm.loss.kl_coef or algorithm.reward_kl_coef):
        message = "needs a reference policy, which the algorithm has only with a KL term"
        yield Problem(key, message, "Set algorithm.loss.kl_coef or algorithm.reward_kl.coef above 0, or remove it.")


def _image_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Settings that rows with images do not go with: such rows must never be trained on without their images."""
    environment, algorithm = config.environment, config.algorithm
    if environment.images is None:
        return
    if type(algorithm) not in (SFTConfig, GRPOConfig, PPOConfig) and not algorithm.takes_images:
        allowed = "sft, grpo and its presets, ppo, and algorithms on preference pairs"
        yield Problem("environment.images", f"is for {allowed}, not for algorithm.name={algorithm.name}")
    if getattr(algorithm, "token_data", None) is not None:
        yield Problem("algorithm.token_data", "must be null with environment.images: token data has no images")
    if "teacher" in config.further_policies:
        yield Problem("environment.images", "must be null with the further policy teacher, which gets no images")
