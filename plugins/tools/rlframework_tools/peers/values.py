"""Values of keys in TRL, verl, OpenRLHF and NeMo-RL, and what they are in rlframework.

`docs/moving/` has them too, in the rows of their keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlframework.config.validate import metric_hint

_VERL = "verl's formulas are those with algorithm.preset=verl"
_NONE = "has no counterpart"
_WITHOUT_LIMIT = dict.fromkeys(("-1", "0"), "is null here: sample from all tokens")
_REMOVED = "needs no key: remove it"
_OFF = {"false": _REMOVED}
_ADAPTERS = "is this section, which `policy.lora: {}` gives its defaults"
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
    "algorithm.normalize_std": {"group": "is true", "none": "is false"},
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
        "dapo": "is token",
        "bnpo": "is token, but for its denominator",
        "grpo": "is sequence",
        "dr_grpo": "is constant",
    },
    "policy.batching.mode": _PADDING,
    "policy.optimizer.name": dict.fromkeys(("torch.optim.AdamW", "adamw_torch", "adamw_torch_fused"), "is adamw"),
    "policy.scheduler.name": {
        **{
            f"{module}{name}": meaning
            for module in ("", "torch.optim.lr_scheduler.")
            for name, meaning in (
                ("LinearLR", "is a warm-up: constant, with its total_iters as policy.scheduler.warmup_steps"),
                ("ConstantLR", "is constant"),
                ("CosineAnnealingLR", "is cosine"),
            )
        },
        **{
            word: f"is {name}, with policy.scheduler.warmup_steps"
            for name in ("constant", "linear", "cosine")
            for word in (f"warmup_{name}", f"{name}_warmup", f"{name}_with_warmup")
        },
        "cosine_with_min_lr": "is cosine, with policy.scheduler.min_ratio",
        **dict.fromkeys(("polynomial", "cosine_with_restarts", "inverse_sqrt", "reduce_lr_on_plateau"), _NONE),
    },
    "generation.stop_token_ids": {"null": _REMOVED},
    "generation.stop_strings": {"null": _REMOVED},
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

WORD_VALUES: Mapping[str, Mapping[str, str]] = {
    "token_level_loss": {"true": "is token", "false": "is sequence"},
    "sequence_level_importance_ratios": {"true": "is sequence", **_OFF},
    "use_importance_sampling_correction": {"true": "is truncated", **_OFF},
    "vllm_importance_sampling_correction": {"true": "is truncated", **_OFF},
    "use_on_policy_kl_approximation": {"true": "is generator", "false": "is score"},
    "use_bias_correction_kl": {"true": "is ratio", "false": "is none"},
    **{word: {"true": "is highest", "false": "is lowest"} for word in ("higher_is_better", "greater_is_better")},
    "load_best_model_at_end": {
        "true": "is a number of checkpoints to keep, such as 1, beside the final model, that of the last step",
        "false": "is 0, the default",
    },
    "assistant_only_loss": {"true": "is assistant", **_OFF},
    "completion_only_loss": {"true": "is last, the default"},
    "sequence_packing.enabled": {"true": "is packed", **_OFF},
    "dynamic_batching.enabled": {"true": "is dynamic", **_OFF},
    "packing": {"true": "is packed", **_OFF},
    "dtensor_cfg.enabled": {"true": "is dtensor, the default", "false": "is another backend: remove dtensor_cfg"},
    "megatron_cfg.enabled": {"true": "is megatron", "false": "is another backend: remove megatron_cfg"},
    "async_grpo.enabled": {"true": "is this section, with generation.workers too", **_OFF},
    "colocated.enabled": {"true": _REMOVED, "false": "is this section"},
    "use_vllm": {"true": "is vllm", **_OFF},
    "sync_ref_model": {"true": "is this section, which `algorithm.reference_sync: {}` gives its defaults", **_OFF},
    "use_peft": {"true": _ADAPTERS, **_OFF},
    "lora_cfg.enabled": {"true": _ADAPTERS, "false": "is no adapters: remove lora_cfg"},
    "use_dynamic_sampling": {
        "true": "is the most rollouts of a step, dynamic_sampling_max_gen_batches, such as 10",
        **_OFF,
    },
    "checkpointing.enabled": {"true": "is the steps between checkpoints, save_period", "false": "is 0, the default"},
    "log_completions": {
        "true": "is a number of completions: 4 of each step by default, or for example `observers.samples: 8`",
        "false": "is 0",
    },
    "report_to": {"none": _REMOVED},
    "system_prompt_file": {"null": _REMOVED},
    "prompt_file": {"null": _REMOVED},
}
"""Keys of peers with values of their own, which other keys for the same one of ours do not have: what each is here."""

_OBSERVERS: Mapping[str, str] = {
    **dict.fromkeys(("console", "tensorboard"), "true"),
    **dict.fromkeys(("wandb", "mlflow", "trackio"), "{}"),
}
"""Observers that peers have too, by the name of ours, with the value that enables each."""


def value_hint(key: str, value: object, word: str = "") -> str:
    """Return what the value of a peer is for our `key`, which the peer calls `word`; "" if it is no peer's, or ours."""
    written = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    meaning = WORD_VALUES.get(word, {}).get(written, "") or PEER_VALUES.get(key, {}).get(written, "")
    if meaning:
        return f"Another framework's {written} {meaning}."
    if key == "observers":
        return _observers(value)
    if key == "policy.scheduler":
        return _scheduler(value)
    if key == "checkpoints.metric":
        return metric_hint(value)
    if key == "checkpoints.best" and isinstance(value, Mapping):
        return "The name of the metric is the key checkpoints.metric, and checkpoints.best is highest or lowest."
    return ""


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
