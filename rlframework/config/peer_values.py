"""Values of keys in TRL, verl, OpenRLHF and NeMo-RL, and what they are in rlframework.

`docs/moving/` has them too, in the rows of their keys.
"""

from __future__ import annotations

from collections.abc import Mapping

_VERL = "verl's formulas are those with algorithm.preset=verl"
_NONE = "has no counterpart"
_WITHOUT_LIMIT = dict.fromkeys(("-1", "0"), "is null here: sample from all tokens")
_PADDING = {"true": "is dynamic, or packed for no padding at all", "false": "is padded"}

PEER_VALUES: Mapping[str, Mapping[str, str]] = {
    "algorithm.name": {
        "gae": f"is `ppo`, with the section `critic`; {_VERL}",
        "group_norm": "is `grpo`",
        "reinforce": "is `reinforce_plus_plus`",
        "reinforce_baseline": "is `reinforce_plus_plus_baseline`",
        "reinforce++": "is `reinforce_plus_plus`",
        "dr_grpo": "has the same name here",
        **dict.fromkeys(
            ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), f"has the same name here; {_VERL}"
        ),
        **dict.fromkeys(("remax", "opo", "gpg", "grpo_passk", "rloo_vectorized", "grpo_vectorized"), _NONE),
    },
    "policy.backend": dict.fromkeys(("fsdp", "fsdp2"), "is dtensor"),
    "algorithm.loss.kl_estimator": {
        "kl": "is k1",
        "mse": "is k2",
        "low_var_kl": "is k3, which verl bounds as with algorithm.loss.kl_max=10.0",
        **dict.fromkeys(("abs", "full"), _NONE),
    },
    "algorithm.loss.level": {
        "token-mean": "is token",
        "seq-mean-token-mean": "is sequence",
        "seq-mean-token-sum-norm": "is constant",
        "seq-mean-token-sum": _NONE,
    },
    "policy.batching.mode": _PADDING,
    "policy.scheduler.name": {
        **{
            word: f"is {name}, with policy.scheduler.warmup_steps"
            for name in ("constant", "linear", "cosine")
            for word in (f"warmup_{name}", f"{name}_warmup", f"{name}_with_warmup")
        },
        "cosine_with_min_lr": "is cosine, with policy.scheduler.min_ratio",
        **dict.fromkeys(("polynomial", "cosine_with_restarts", "inverse_sqrt", "reduce_lr_on_plateau"), _NONE),
    },
    "algorithm.num_steps": dict.fromkeys(
        ("null", "-1"), "is algorithm.num_epochs here, the passes over the data, without algorithm.num_steps"
    ),
    "generation.name": {"hf": "is transformers", "sglang": _NONE},
    "generation.top_k": _WITHOUT_LIMIT,
    "checkpoints.every": {"-1": "is 0 here: no checkpoints, only the final model"},
    "algorithm.validation.every": {
        "-1": "is 0 here: only at the start and end, where algorithm.validation.at_start and at_end are true"
    },
}
"""Our key to values that peers give it, as YAML writes them, and what each is here."""


_OBSERVERS: Mapping[str, str] = {**dict.fromkeys(("console", "tensorboard"), "true"), "wandb": "{}", "mlflow": "{}"}
"""Observers that peers have too, by the name of ours, with the value that enables each."""


def value_hint(key: str, value: object) -> str:
    """Return what the value of a peer is for our `key`; "" if it is no peer's, or ours."""
    if key == "observers":
        return _observers(value)
    if key == "checkpoints.best" and isinstance(value, Mapping):
        return "The name of the metric is the key checkpoints.metric, and checkpoints.best is highest or lowest."
    written = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    meaning = PEER_VALUES.get(key, {}).get(written, "")
    return f"Another framework's {written} {meaning}." if meaning else ""


def _observers(value: object) -> str:
    """How to write `value`, a list of observers or the name of one; "" if it has none that are known."""
    names = value if isinstance(value, (list, tuple)) else [value]
    known = [name for name in _OBSERVERS if name in names]
    example = ", ".join(f"{name}: {_OBSERVERS[name]}" for name in known)
    return f"Each observer is a key: write `observers: {{{example}}}`." if known else ""
