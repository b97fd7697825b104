"""Hints for unknown keys: the closest valid key, or the name of a key that other libraries call differently.

`docs/moving/` explains the differences in meaning from TRL, peft, verl, OpenRLHF and NeMo-RL; a test holds the table of
their words to those pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlframework.config.further_policies import FURTHER_POLICIES, in_section

Path = tuple[str, ...]

CLOSE = 0.6
"""Minimum `difflib` similarity for a sibling of the unknown key to be suggested."""

VERY_CLOSE = 0.75
"""Minimum similarity of other keys; such a sibling is preferred to a key of exactly that name elsewhere."""

_WORDS: Mapping[str, str] = {
    # model and adapters
    "policy.model_name": "model_name_or_path pretrain model.path",
    "policy.tokenizer_name": "tokenizer.name",
    "policy.chat_template": "tokenizer.chat_template",
    "policy.backend": "strategy",
    "policy.precision": "bf16 fp16",
    "policy.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "policy.offload.parameters": "param_offload cpu_offload",
    "policy.offload.optimizer": "optimizer_offload",
    "policy.lora.rank": "lora_rank lora_r r",
    "policy.lora.alpha": "lora_alpha",
    "policy.lora.dropout": "lora_dropout",
    "policy.lora.target_modules": "lora_target_modules",
    # optimizer and schedule
    "policy.optimizer.lr": "learning_rate actor_learning_rate optim.lr kwargs.lr",
    "policy.optimizer.weight_decay": "optim.weight_decay",
    "policy.optimizer.betas": "adam_beta1 adam_beta2 adam_betas",
    "policy.optimizer.eps": "adam_epsilon optimizer.epsilon",
    "policy.scheduler.name": "lr_scheduler_type lr_scheduler",
    "policy.scheduler.warmup_steps": "lr_warmup_steps lr_warmup_steps_ratio",
    "policy.max_grad_norm": "grad_clip max_norm clip_grad",
    # batches
    "policy.train_micro_batch_size": (
        "per_device_train_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu ppo_micro_batch_size"
    ),
    "policy.train_global_batch_size": "ppo_mini_batch_size",
    "algorithm.prompts_per_step": "train_batch_size data.train_batch_size rollout_batch_size num_prompts_per_step",
    "policy.logprob_batch_size": "log_prob_micro_batch_size_per_gpu",
    "policy.batching.mode": (
        "packing packing_samples sequence_packing dynamic_batching use_dynamic_bsz use_remove_padding "
        "log_prob_use_dynamic_bsz"
    ),
    "policy.batching.tokens": "ppo_max_token_len_per_gpu train_mb_tokens",
    "policy.batching.logprob_tokens": "logprob_mb_tokens log_prob_max_token_len_per_gpu",
    # parallelism
    "policy.parallelism.tensor": "tensor_parallel_size tensor_model_parallel_size",
    "policy.parallelism.pipeline": "pipeline_model_parallel_size",
    "policy.parallelism.context": "context_parallel_size ulysses_sequence_parallel_size ring_attn_size",
    "policy.parallelism.expert": "expert_model_parallel_size",
    "policy.parallelism.sequence": "sequence_parallel",
    "worker_group.num_workers": "nnodes num_nodes num_processes",
    "worker_group.workers_per_node": "n_gpus_per_node gpus_per_node",
    # rollouts and generation
    "algorithm.samples_per_prompt": "n rollout.n n_samples_per_prompt num_generations num_generations_per_prompt",
    "generation.max_new_tokens": (
        "max_completion_length max_response_length response_length generate_max_len "
        "generation.max_length generation.max_tokens"
    ),
    # algorithm and loss
    "algorithm.num_epochs": "num_train_epochs total_epochs",
    "algorithm.num_steps": "max_steps max_num_steps total_training_steps",
    "algorithm.epochs_per_batch": "num_iterations ppo_epochs",
    "algorithm.loss.kl_coef": "beta kl_coef init_kl_coef kl_loss_coef use_kl_loss reference_policy_kl_penalty",
    "algorithm.loss.kl_estimator": "kl_loss_type",
    "algorithm.loss.ratio_clip_min": "epsilon clip_ratio clip_ratio_low eps_clip",
    "algorithm.loss.ratio_clip_max": "epsilon_high clip_ratio_high",
    "algorithm.loss.ratio_clip_c": "clip_ratio_c delta",
    "algorithm.loss.kl_max": "kl_output_clamp_value",
    "algorithm.loss.kl_correction": "use_bias_correction_kl use_on_policy_kl_approximation",
    "algorithm.loss.constant_length": "loss_scale_factor",
    "algorithm.loss.level": "loss_type loss_agg_mode token_level_loss",
    "algorithm.loss.importance_correction": "use_importance_sampling_correction",
    "algorithm.loss.importance_level": "rollout_is vllm_importance_sampling_mode",
    "algorithm.loss.importance_cap": "rollout_is_threshold truncated_importance_sampling_ratio",
    "algorithm.loss.ratio": "importance_sampling_level sequence_level_importance_ratios",
    "algorithm.loss.surrogate": "loss_mode use_cispo disable_ppo_ratio",
    "algorithm.reward_kl": "use_kl_in_reward",
    "algorithm.reward_kl.coef": "kl_ctrl.kl_coef",
    "algorithm.normalize_std": "scale_rewards normalize_rewards norm_adv_by_std_in_grpo",
    "algorithm.leave_one_out": "use_leave_one_out_baseline",
    "algorithm.name": "adv_estimator",
    "algorithm.overlong.drop_truncated": "mask_truncated_completions",
    "algorithm.overlong.buffer": "overlong_buffer.len",
    "algorithm.overlong.penalty": "overlong_buffer.penalty_factor",
    "algorithm.dynamic_sampling": "filter_groups use_dynamic_sampling",
    # supervised training and data
    "algorithm.max_tokens": "max_seq_length max_length",
    "algorithm.train_on": "assistant_only_loss completion_only_loss",
    "environment.path": "train_files prompt_data",
    "environment.validation_path": "val_files",
    "environment.columns.prompt": "prompt_key input_key",
    "environment.columns.answer": "label_key",
    "environment.columns.text": "dataset_text_field",
    "environment.reward": "reward_funcs custom_reward_function",
    # validation, checkpoints and logging
    "algorithm.validation.every": "eval_steps test_freq val_period",
    "algorithm.validation.at_start": "val_at_start val_before_train",
    "algorithm.validation.samples": "max_val_samples",
    "checkpoints.every": "save_steps save_freq save_period",
    "checkpoints.keep_last": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
    "checkpoints.keep_best": "keep_top_k",
    "checkpoints.metric": "metric_name",
    "checkpoints.best": "higher_is_better",
    "output_dir": "checkpoint_dir default_local_dir save_path",
    "observers": "report_to logger",
    "observers.wandb": "use_wandb wandb_enabled",
    "observers.mlflow": "mlflow_enabled",
    "observers.tensorboard": "tensorboard_enabled",
    "observers.wandb.project": "project_name wandb_project",
    "observers.wandb.run_name": "experiment_name",
    "observers.samples": "log_completions",
}
"""Our key to the peers' keys for it, each the end of a dotted path."""

PEER_KEYS: Mapping[str, str] = {word: key for key, words in _WORDS.items() for word in words.split()}
"""A peer's key, as the end of a dotted path, to our key. The longest matching path counts."""

WITHOUT_COUNTERPART: Mapping[str, str] = {
    "gradient_accumulation_steps": "It follows from `policy.train_global_batch_size`, the rows per optimizer step.",
    "max_prompt_length": "No limit; a prompt that leaves no room for `generation.max_new_tokens` tokens is an error.",
    "num_episodes": "rlframework counts steps: set `algorithm.num_steps`.",
    "rollout.tensor_model_parallel_size": (
        "The embedded engine holds the whole model; with vLLM it is generation.vllm.tensor_parallel_size."
    ),
    "filter_overlong_prompts": "No prompt is dropped: filter the file beforehand, and remove the key.",
    "resume_from_checkpoint": "To resume a run, use `rlframework train --resume RUN_DIR`.",
    "resume_mode": "To resume a run, use `rlframework train --resume RUN_DIR`.",
    "logging_steps": "rlframework logs every step; remove the key.",
}
"""A peer's key without an equivalent, to what to do instead."""

_HINTS = {word: f"In rlframework this is `{key}`." for word, key in PEER_KEYS.items()} | dict(WITHOUT_COUNTERPART)
_MOST = 8


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models inside a field's annotation: `Model`, `Model | None`, `Annotated[Model, ...]`, `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def key_paths(model: type[BaseModel], above: Path = ()) -> dict[Path, FieldInfo]:
    """Return the field of every key of `model`, including sections and their keys, by its path from the top."""
    found: dict[Path, FieldInfo] = {}
    for name, info in model.model_fields.items():
        path = (*above, info.alias or name)
        found[path] = info
        for inner in models_in(info.annotation):
            found = key_paths(inner, path) | found
    return found


def unknown_key_hint(path: Path, value: Any, model: type[BaseModel]) -> str:
    """Suggest what `path` was meant to be: a misspelled sibling, else what a peer means by it, else any similar key."""
    near = nearest_key(path, model)
    meant = f"Did you mean `{'.'.join(near)}`?" if near else ""
    misspelled = near is not None and near[:-1] == path[:-1] and _similarity(near[-1], path[-1]) >= VERY_CLOSE
    return meant if misspelled else peer_hint(path, value) or meant


def nearest_key(path: Path, model: type[BaseModel]) -> Path | None:
    """Return the key of `model` that was most likely meant by `path`, or None if nothing is similar.

    In order of preference: a key of the same name deeper in the same section (`policy.optimizer.lr` for `policy.lr`);
    a sibling that differs by a letter or two; a key of the same name anywhere; other similar keys.
    """
    parent, name = path[:-1], path[-1]
    known = [key for key in key_paths(model) if key[0] not in FURTHER_POLICIES or key[0] == path[0] or len(key) == 1]

    def rank(other: Path) -> tuple[float, float]:
        near, inside = _similarity(name, other[-1]), parent and other[: len(parent)] == parent
        bonus = 1.0 if inside and name == other[-1] else 0.3 if parent == other[:-1] else 0.0
        return near + bonus, _similarity(".".join(path), ".".join(other))

    best = max(known, key=rank, default=None)
    needed = CLOSE if best and best[:-1] == parent else VERY_CLOSE
    return best if best and _similarity(name, best[-1]) >= needed else None


def _similarity(left: str, right: str) -> float:
    if len(left) > 10 * len(right):
        return 0.0  # such a key can be of any length, and comparing takes time in proportion
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()


def peer_hint(path: Path, value: Any = None) -> str:
    """Return what the unknown key `path` is called in rlframework, or "" if no peer uses the word.

    If the key is a section that rlframework does not have, the hint translates the known keys inside `value`.
    """
    if not (found := _longest(path, _HINTS)):
        inner = {
            ".".join(inside[len(path) :]): key
            for inside in _leaves(path, value)
            if (key := _longest(inside, PEER_KEYS))
        }
        if not inner:
            return ""
        shown = ", ".join(f"`{written}` is `{key}`" for written, key in list(inner.items())[:_MOST])
        found = f"In rlframework {shown}{', ...' if len(inner) > _MOST else '.'}"
    return in_section(found, path[0]) if path[0] in FURTHER_POLICIES else found


def _longest(path: Path, table: Mapping[str, str]) -> str:
    """The entry for the longest end of `path`; "" if there is none."""
    ends = (".".join(path[start:]) for start in range(len(path)))
    return next((table[end] for end in ends if end in table), "")


def _leaves(path: Path, value: Any) -> Iterator[Path]:
    if not isinstance(value, Mapping):
        yield path
        return
    for key, item in value.items():
        yield from _leaves((*path, str(key)), item)
