"""Values of keys in TRL, verl, OpenRLHF and NeMo-RL, and what they are in rlframework.

`docs/moving/` has them too, in the rows of their keys.
"""

from __future__ import annotations

from collections.abc import Mapping

_NONE = "has no counterpart"
_WITHOUT_LIMIT = dict.fromkeys(("-1", "0"), "is null here: sample from all tokens")
_PADDING = {"true": "is dynamic, or packed for no padding at all", "false": "is padded"}

PEER_VALUES: Mapping[str, Mapping[str, str]] = {
    "algorithm.name": {
        "gae": "is `ppo`, with the section `critic`",
        "group_norm": "is `grpo`",
        "reinforce": "is `reinforce_plus_plus`",
        "reinforce_baseline": "is `reinforce_plus_plus_baseline`",
        "reinforce++": "is `reinforce_plus_plus`",
        **dict.fromkeys(("grpo", "dr_grpo", "rloo"), "has the same name here"),
        **dict.fromkeys(("reinforce_plus_plus", "reinforce_plus_plus_baseline"), "has the same name here"),
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
    "generation.name": {"hf": "is transformers", "sglang": _NONE},
    "generation.top_k": _WITHOUT_LIMIT,
    "checkpoints.every": {"-1": "is 0 here: no checkpoints, only the final model"},
    "algorithm.validation.every": {
        "-1": "is 0 here: only at the start and end, where algorithm.validation.at_start and at_end are true"
    },
}
"""Our key to values that peers give it, as YAML writes them, and what each is here."""


def value_hint(key: str, value: object) -> str:
    """Return what the value of a peer is for our `key`; "" if it is no peer's, or ours."""
    written = str(value).lower() if isinstance(value, bool) else str(value)
    meaning = PEER_VALUES.get(key, {}).get(written, "")
    return f"Another framework's {written} {meaning}." if meaning else ""
