"""The vocabulary of TRL, peft, verl, OpenRLHF and NeMo-RL, for hints on unknown keys.

`docs/moving/` explains the differences in meaning; a test holds this table to those pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PEER_KEYS: Mapping[str, str] = {
    # model and adapters
    "model_name_or_path": "policy.model_name",
    "pretrain": "policy.model_name",
    "model.path": "policy.model_name",
    "tokenizer.name": "policy.tokenizer_name",
    "tokenizer.chat_template": "policy.chat_template",
    "strategy": "policy.backend",
    "bf16": "policy.precision",
    "fp16": "policy.precision",
    "gradient_checkpointing": "policy.activation_checkpointing",
    "enable_gradient_checkpointing": "policy.activation_checkpointing",
    "param_offload": "policy.offload.parameters",
    "optimizer_offload": "policy.offload.optimizer",
    "cpu_offload": "policy.offload.parameters",
    "lora_rank": "policy.lora.rank",
    "lora_r": "policy.lora.rank",
    "r": "policy.lora.rank",
    "lora_alpha": "policy.lora.alpha",
    "lora_dropout": "policy.lora.dropout",
    "lora_target_modules": "policy.lora.target_modules",
    # optimizer and schedule
    "learning_rate": "policy.optimizer.lr",
    "actor_learning_rate": "policy.optimizer.lr",
    "optim.lr": "policy.optimizer.lr",
    "kwargs.lr": "policy.optimizer.lr",
    "optim.weight_decay": "policy.optimizer.weight_decay",
    "adam_beta1": "policy.optimizer.betas",
    "adam_beta2": "policy.optimizer.betas",
    "adam_betas": "policy.optimizer.betas",
    "adam_epsilon": "policy.optimizer.eps",
    "optimizer.epsilon": "policy.optimizer.eps",
    "lr_scheduler_type": "policy.scheduler.name",
    "lr_scheduler": "policy.scheduler.name",
    "lr_warmup_steps": "policy.scheduler.warmup_steps",
    "grad_clip": "policy.max_grad_norm",
    "max_norm": "policy.max_grad_norm",
    "clip_grad": "policy.max_grad_norm",
    # batches
    "per_device_train_batch_size": "policy.train_micro_batch_size",
    "micro_train_batch_size": "policy.train_micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "policy.train_micro_batch_size",
    "ppo_micro_batch_size": "policy.train_micro_batch_size",
    "ppo_mini_batch_size": "policy.train_global_batch_size",
    "train_batch_size": "algorithm.prompts_per_step",
    "data.train_batch_size": "algorithm.prompts_per_step",
    "rollout_batch_size": "algorithm.prompts_per_step",
    "log_prob_micro_batch_size_per_gpu": "policy.logprob_batch_size",
    "packing": "policy.batching.mode",
    "packing_samples": "policy.batching.mode",
    "sequence_packing": "policy.batching.mode",
    "dynamic_batching": "policy.batching.mode",
    "use_dynamic_bsz": "policy.batching.mode",
    "use_remove_padding": "policy.batching.mode",
    "ppo_max_token_len_per_gpu": "policy.batching.tokens",
    "train_mb_tokens": "policy.batching.tokens",
    "logprob_mb_tokens": "policy.batching.logprob_tokens",
    # parallelism
    "tensor_parallel_size": "policy.parallelism.tensor",
    "tensor_model_parallel_size": "policy.parallelism.tensor",
    "pipeline_model_parallel_size": "policy.parallelism.pipeline",
    "context_parallel_size": "policy.parallelism.context",
    "ulysses_sequence_parallel_size": "policy.parallelism.context",
    "ring_attn_size": "policy.parallelism.context",
    "expert_model_parallel_size": "policy.parallelism.expert",
    "sequence_parallel": "policy.parallelism.sequence",
    "nnodes": "worker_group.num_workers",
    "num_nodes": "worker_group.num_workers",
    "num_processes": "worker_group.num_workers",
    "n_gpus_per_node": "worker_group.workers_per_node",
    "gpus_per_node": "worker_group.workers_per_node",
    # rollouts and generation
    "n": "algorithm.samples_per_prompt",
    "rollout.n": "algorithm.samples_per_prompt",
    "n_samples_per_prompt": "algorithm.samples_per_prompt",
    "num_generations": "algorithm.samples_per_prompt",
    "num_generations_per_prompt": "algorithm.samples_per_prompt",
    "num_prompts_per_step": "algorithm.prompts_per_step",
    "max_completion_length": "generation.max_new_tokens",
    "max_response_length": "generation.max_new_tokens",
    "response_length": "generation.max_new_tokens",
    "generate_max_len": "generation.max_new_tokens",
    "generation.max_length": "generation.max_new_tokens",
    "generation.max_tokens": "generation.max_new_tokens",
    # algorithm and loss
    "max_steps": "algorithm.num_steps",
    "max_num_steps": "algorithm.num_steps",
    "total_training_steps": "algorithm.num_steps",
    "num_iterations": "algorithm.epochs_per_batch",
    "ppo_epochs": "algorithm.epochs_per_batch",
    "beta": "algorithm.loss.kl_coef",
    "kl_coef": "algorithm.loss.kl_coef",
    "init_kl_coef": "algorithm.loss.kl_coef",
    "kl_loss_coef": "algorithm.loss.kl_coef",
    "use_kl_loss": "algorithm.loss.kl_coef",
    "reference_policy_kl_penalty": "algorithm.loss.kl_coef",
    "kl_loss_type": "algorithm.loss.kl_estimator",
    "epsilon": "algorithm.loss.ratio_clip_min",
    "clip_ratio": "algorithm.loss.ratio_clip_min",
    "clip_ratio_low": "algorithm.loss.ratio_clip_min",
    "eps_clip": "algorithm.loss.ratio_clip_min",
    "epsilon_high": "algorithm.loss.ratio_clip_max",
    "clip_ratio_high": "algorithm.loss.ratio_clip_max",
    "clip_ratio_c": "algorithm.loss.ratio_clip_c",
    "delta": "algorithm.loss.ratio_clip_c",
    "loss_type": "algorithm.loss.level",
    "loss_agg_mode": "algorithm.loss.level",
    "token_level_loss": "algorithm.loss.level",
    "use_importance_sampling_correction": "algorithm.loss.importance_correction",
    "scale_rewards": "algorithm.normalize_std",
    "normalize_rewards": "algorithm.normalize_std",
    "norm_adv_by_std_in_grpo": "algorithm.normalize_std",
    "use_leave_one_out_baseline": "algorithm.leave_one_out",
    "adv_estimator": "algorithm.name",
    "mask_truncated_completions": "algorithm.overlong.drop_truncated",
    "overlong_buffer.len": "algorithm.overlong.buffer",
    "overlong_buffer.penalty_factor": "algorithm.overlong.penalty",
    "filter_groups": "algorithm.skip_zero_variance",
    # supervised training and data
    "max_seq_length": "algorithm.max_tokens",
    "max_length": "algorithm.max_tokens",
    "assistant_only_loss": "algorithm.train_on",
    "completion_only_loss": "algorithm.train_on",
    "train_files": "environment.path",
    "prompt_data": "environment.path",
    "val_files": "environment.validation_path",
    "prompt_key": "environment.columns.prompt",
    "input_key": "environment.columns.prompt",
    "label_key": "environment.columns.answer",
    "dataset_text_field": "environment.columns.text",
    "reward_funcs": "environment.reward",
    "custom_reward_function": "environment.reward",
    # validation, checkpoints and logging
    "eval_steps": "algorithm.validation.every",
    "test_freq": "algorithm.validation.every",
    "val_period": "algorithm.validation.every",
    "val_at_start": "algorithm.validation.at_start",
    "val_before_train": "algorithm.validation.at_start",
    "max_val_samples": "algorithm.validation.samples",
    "save_steps": "checkpoints.every",
    "save_freq": "checkpoints.every",
    "save_period": "checkpoints.every",
    "save_total_limit": "checkpoints.keep_last",
    "max_ckpt_num": "checkpoints.keep_last",
    "keep_top_k": "checkpoints.keep_best",
    "metric_name": "checkpoints.metric",
    "higher_is_better": "checkpoints.best",
    "checkpoint_dir": "output_dir",
    "default_local_dir": "output_dir",
    "save_path": "output_dir",
    "report_to": "observers",
    "logger": "observers",
    "use_wandb": "observers.wandb",
    "wandb_enabled": "observers.wandb",
    "mlflow_enabled": "observers.mlflow",
    "tensorboard_enabled": "observers.tensorboard",
    "project_name": "observers.wandb.project",
    "wandb_project": "observers.wandb.project",
    "experiment_name": "observers.wandb.run_name",
    "log_completions": "observers.samples",
}
"""A peer's key, as the end of a dotted path, to our key. The longest matching path counts."""

WITHOUT_COUNTERPART: Mapping[str, str] = {
    "gradient_accumulation_steps": (
        "rlframework derives the accumulation steps from `policy.train_global_batch_size`, the rows per optimizer step."
    ),
    "max_prompt_length": (
        "rlframework has no such limit: a prompt that leaves no room for `generation.max_new_tokens` tokens is an "
        "error before training starts."
    ),
    "num_train_epochs": "rlframework counts steps: set `algorithm.num_steps`.",
    "num_episodes": "rlframework counts steps: set `algorithm.num_steps`.",
    "total_epochs": "rlframework counts steps: set `algorithm.num_steps`.",
    "rollout.tensor_model_parallel_size": "A generation engine holds the whole model; remove the key.",
    "resume_from_checkpoint": "To resume a run, use `rlframework train --resume RUN_DIR`.",
    "resume_mode": "To resume a run, use `rlframework train --resume RUN_DIR`.",
    "logging_steps": "rlframework logs every step; remove the key.",
}
"""A peer's key without an equivalent, to what to do instead."""

_HINTS = {word: f"In rlframework this is `{key}`." for word, key in PEER_KEYS.items()} | dict(WITHOUT_COUNTERPART)
_MOST = 8


def peer_hint(path: Sequence[str], value: Any = None) -> str:
    """Return what the unknown key `path` is called in rlframework, or "" if no peer uses the word.

    If the key is a section that rlframework does not have, the hint translates the known keys inside `value`.
    """
    if found := _longest(path, _HINTS):
        return found
    inner = {
        ".".join(inside[len(path) :]): key for inside in _leaves(path, value) if (key := _longest(inside, PEER_KEYS))
    }
    if not inner:
        return ""
    shown = ", ".join(f"`{written}` is `{key}`" for written, key in list(inner.items())[:_MOST])
    return f"In rlframework {shown}{', ...' if len(inner) > _MOST else '.'}"


def _longest(path: Sequence[str], table: Mapping[str, str]) -> str:
    """The entry for the longest end of `path`; "" if there is none."""
    ends = (".".join(path[start:]) for start in range(len(path)))
    return next((table[end] for end in ends if end in table), "")


def _leaves(path: Sequence[str], value: Any) -> Iterator[tuple[str, ...]]:
    if not isinstance(value, Mapping):
        yield tuple(path)
        return
    for key, item in value.items():
        yield from _leaves((*path, str(key)), item)
