"""Defaults of the policy-gradient algorithms: settings of `GRPOConfig`, by algorithm and by whose definition it is.

What was read of TRL, verl and NeMo-RL is on the page of each algorithm (docs/algorithms), and in which versions in
docs/definitions.md.
Weights that a paper does not fix are TRL's where it has them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]
"""The algorithms of `rlframework.algorithms.grpo.GRPO`."""

PresetName = Literal["paper", "trl", "verl", "nemo_rl"]
"""Whose definition of an algorithm."""

Settings = Mapping[str, Any]

_COUNTED = {"skip_zero_variance": False}
_DAPO_CLIP = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
_GSPO_CLIP = {"ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4}
_UNSCALED = {"normalize_std": False}
_LEAVE_ONE_OUT = {"leave_one_out": True, "normalize_std": False}
_CISPO = {"surrogate": "cispo", "ratio_clip_min": 1.0, "ratio_clip_max": 4.0}
_GLOBAL = {"normalize_std": False, "batch_normalization": "population", **_COUNTED}
_TRL = {"std_epsilon": 1e-4, **_COUNTED}
_TRL_LOSS = {"kl_correction": "ratio"}
_VERL_LOSS = {"ratio_clip_c": 3.0, "kl_max": 10.0}
_NEMO_RL = {"leave_one_out": True, "normalize_std": "others", **_COUNTED}
_NEMO_RL_KL = {"kl_max": 10.0, "kl_correction": "score"}
_NEMO_RL_LOSS = {"kl_coef": 0.01, **_NEMO_RL_KL}

PRESETS: Mapping[str, Mapping[str, Settings]] = {
    "grpo": {
        "paper": {**_COUNTED, "loss": {"level": "sequence", "kl_coef": 0.04}},
        "trl": {**_TRL, "loss": _TRL_LOSS},
        "verl": {**_COUNTED, "loss": _VERL_LOSS},
        "nemo_rl": {**_NEMO_RL, "loss": _NEMO_RL_LOSS},
    },
    "dr_grpo": {
        "paper": {**_UNSCALED, **_COUNTED, "loss": {"level": "constant"}},
        "trl": {**_TRL, **_UNSCALED, "loss": {**_TRL_LOSS, "level": "constant"}},
        "verl": {**_UNSCALED, **_COUNTED, "loss": {**_VERL_LOSS, "level": "constant"}},
    },
    "dapo": {
        "paper": {"dynamic_sampling": 10, "loss": _DAPO_CLIP},
        "trl": {**_TRL, "loss": {**_TRL_LOSS, **_DAPO_CLIP}},
        "verl": {"dynamic_sampling": 10, "loss": {**_DAPO_CLIP, "ratio_clip_c": 10.0, "kl_max": 10.0}},
        "nemo_rl": {"dynamic_sampling": 10, "loss": {**_DAPO_CLIP, "ratio_clip_c": 10.0, **_NEMO_RL_KL}},
    },
    "gspo": {
        "paper": {**_COUNTED, "loss": {**_GSPO_CLIP, "ratio": "sequence", "level": "sequence"}},
        "trl": {**_TRL, "loss": {**_TRL_LOSS, **_GSPO_CLIP, "ratio": "sequence", "level": "sequence"}},
        "verl": {**_COUNTED, "loss": {**_GSPO_CLIP, "ratio": "sequence_token", "level": "sequence", "kl_max": 10.0}},
        "nemo_rl": {**_NEMO_RL, "loss": {**_NEMO_RL_LOSS, **_GSPO_CLIP, "ratio": "sequence", "level": "sequence"}},
    },
    "cispo": {
        "paper": {**_COUNTED, "loss": _CISPO},
        "trl": {**_TRL, "loss": {**_TRL_LOSS, **_CISPO}},
        "verl": {**_COUNTED, "loss": {"surrogate": "cispo", "kl_max": 10.0}},
        "nemo_rl": {
            **_NEMO_RL,
            "loss": {**_NEMO_RL_KL, "surrogate": "cispo", "ratio_clip_min": 1.0, "ratio_clip_max": 0.8},
        },
    },
    "rloo": {
        "paper": {
            **_LEAVE_ONE_OUT,
            **_COUNTED,
            "reward_kl": {"coef": 0.05},
            "loss": {"surrogate": "reinforce", "level": "constant", "constant_length": 1},
        },
        "trl": {
            **_LEAVE_ONE_OUT,
            **_COUNTED,
            "reward_kl": {"coef": 0.05},
            "loss": {"ratio": "product", "level": "sequence"},
        },
        "verl": {**_LEAVE_ONE_OUT, **_COUNTED, "loss": _VERL_LOSS},
        "nemo_rl": {**_LEAVE_ONE_OUT, **_COUNTED, "loss": {**_NEMO_RL_LOSS, "surrogate": "reinforce"}},
    },
    "reinforce_plus_plus": {
        "paper": {"group_baseline": False, **_GLOBAL, "reward_kl": {"coef": 0.01, "spread": "to_go"}},
        "verl": {"group_baseline": False, **_GLOBAL, "batch_normalization": "sample", "loss": _VERL_LOSS},
        "nemo_rl": {
            "group_baseline": False,
            **_GLOBAL,
            "reward_kl": {"coef": 0.01, "estimator": "k3", "max": 10.0, "spread": "token"},
        },
    },
    "reinforce_plus_plus_baseline": {
        "paper": {**_GLOBAL, "loss": {"kl_coef": 0.01, "kl_estimator": "k2"}},
        "verl": {**_GLOBAL, "batch_normalization": "sample", "loss": _VERL_LOSS},
        "nemo_rl": {**_GLOBAL, "loss": _NEMO_RL_LOSS},
    },
    "ppo": {
        "paper": {},
        "trl": {"batch_normalization": "sample", "reward_kl": {"coef": 0.05}, "value_loss": {"coef": 0.1}},
        "verl": {
            "gae_lambda": 1.0,
            "batch_normalization": "sample",
            "value_loss": {"clip": 0.5},
            "loss": _VERL_LOSS,
        },
        "nemo_rl": {
            "batch_normalization": "sample",
            "value_loss": {"coef": 0.4},
            "loss": {**_DAPO_CLIP, "ratio_clip_c": 10.0, **_NEMO_RL_KL},
        },
    },
}
"""Settings by algorithm and preset. A missing preset: that system has no algorithm of this name."""


def with_preset(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `values`, the keys of a section, with those of its preset of the algorithm `name` that they do not set.

    Raises `ValueError` if the system that `preset` names does not have this algorithm.
    """
    preset = values.get("preset")
    if name == "grpo" and preset is None:
        return dict(values)
    known = PRESETS[name]
    settings = known.get("paper" if preset is None else str(preset))
    if settings is None:
        raise ValueError(f"there is no preset {preset!r} of {name}; it has {', '.join(known)}")
    return _joined(settings, values)


def _joined(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, overridden by `values`, section by section."""
    joined = copy.deepcopy(dict(settings))
    for key, value in values.items():
        below = _as_mapping(value)
        if isinstance(joined.get(key), dict) and below is not None and "name" not in below:
            if below.get("level", "constant") != "constant":
                joined[key].pop("constant_length", None)
            joined[key] = _joined(joined[key], below)
        else:
            joined[key] = value
    return joined


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    """The keys that are set in a section or a mapping; None for other values."""
    if isinstance(value, BaseModel):
        return {key: getattr(value, key) for key in value.model_fields_set}
    return value if isinstance(value, Mapping) else None
