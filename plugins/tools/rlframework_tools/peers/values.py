"""Hints for values of other frameworks: those of `keys.yaml`, and those that take a look inside."""

from __future__ import annotations

from collections.abc import Mapping

from rlframework.config.validate import has_no_kind
from rlframework_tools.peers.frameworks import vocabulary

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
