"""Notes on settings of a run that probably do not say what is meant, which it logs before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from rlframework.base.logs import plugin_logger
from rlframework.config.sections import RunConfig
from rlframework.config.validate import METRICS

_LOG = plugin_logger(__name__)

_MISSPELLED = 0.85
"""Minimum similarity of a metric to one of `METRICS` that is probably meant."""


def notes_on_meaning(config: RunConfig) -> Iterator[str]:
    """Yield a note for each setting of `config` that probably does not say what is meant."""
    yield from (f"note: {note}" for notes in (_unset_rate, _unlike_metrics) for note in notes(config))


def log_notes(config: RunConfig) -> None:
    """Log the notes of `notes_on_meaning`."""
    for note in notes_on_meaning(config):
        _LOG.info("%s", note)


def _unset_rate(config: RunConfig) -> Iterator[str]:
    """A default learning rate, which is one of reinforcement learning, where a model is trained on data."""
    policy, name = config.policy, config.algorithm.name
    if (name == "sft" or policy.head != "language") and "lr" not in policy.optimizer.model_fields_set:
        theirs = {"sft": "; TRL's default is 2e-5", "reward_model": "; TRL's default is 1e-4"}.get(name, "")
        yield (
            f"policy.optimizer.lr is not set: its default, {policy.optimizer.lr:g}, is a rate for reinforcement "
            f"learning, and low for {name}. Usual are 1e-5 and more{theirs}"
        )


def _unlike_metrics(config: RunConfig) -> Iterator[str]:
    """Metrics that are probably misspelled, and a best checkpoint by another metric than that of early stopping."""
    stopping, metric = config.algorithm.early_stopping, config.checkpoints.metric
    keys = {metric: "checkpoints.metric"} | ({stopping.metric: "algorithm.early_stopping.metric"} if stopping else {})
    for name, key in keys.items():
        kind, _, short = name.partition("/")
        near = get_close_matches(short, METRICS, 1, _MISSPELLED) if kind == "validation" else []
        if near and short not in METRICS:
            yield f"{key}={name}: is validation/{near[0]} meant? A name that no step measures selects nothing"
    if stopping and config.checkpoints.keep_best and metric != stopping.metric:
        yield (
            f"checkpoints.keep_best compares checkpoints.metric={metric}, and early stopping another metric, "
            f"{stopping.metric}: the best step that it names may have no checkpoint"
        )
