"""The words of TRL, peft, verl, OpenRLHF and NeMo-RL for our keys, and what becomes of those without an equivalent.

`docs/moving/` explains the differences in meaning; a test holds these tables to those pages.
"""

from __future__ import annotations

from collections.abc import Mapping

_WORDS: Mapping[str, str] = {
    # model and adapters
    "policy.model_name": "model model_name_or_path pretrain model.path critic.path reward_model.path teacher.path",
    "policy.tokenizer_name": "tokenizer.name data.tokenizer model.tokenizer_path",
    "policy.chat_template": "tokenizer.chat_template",
    "policy.precision": "dtype torch_dtype",
    "policy.trust_remote_code": "model.trust_remote_code data.trust_remote_code",
    "policy.backend": "strategy dtensor_cfg.enabled megatron_cfg.enabled",
    "policy.activation_checkpointing": (
        "gradient_checkpointing enable_gradient_checkpointing dtensor_cfg.activation_checkpointing "
        "megatron_cfg.activation_checkpointing"
    ),
    "policy.offload.parameters": "param_offload cpu_offload",
    "policy.offload.optimizer": "optimizer_offload adam_offload",
    "policy.lora": "use_peft lora_cfg.enabled",
    "policy.lora.rank": "lora_rank lora_r r lora_cfg.dim",
    "policy.lora.alpha": "lora_alpha lora_cfg.alpha",
    "policy.lora.dropout": "lora_dropout lora_cfg.dropout",
    "policy.lora.target_modules": "lora_target_modules",
    # optimizer and schedule
    "policy.optimizer.name": "optim",
    "policy.optimizer.lr": "learning_rate actor_learning_rate optim.lr kwargs.lr",
    "policy.optimizer.weight_decay": "optim.weight_decay kwargs.weight_decay",
    "policy.optimizer.betas": "adam_beta1 adam_beta2 adam_betas kwargs.betas",
    "policy.optimizer.eps": "adam_epsilon optimizer.epsilon kwargs.eps",
    "policy.scheduler.name": "lr_scheduler_type lr_scheduler",
    "policy.scheduler.warmup_steps": "lr_warmup_steps warmup_steps",
    "policy.max_grad_norm": "grad_clip max_norm clip_grad",
    # batches
    "policy.train_micro_batch_size": (
        "per_device_train_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu ppo_micro_batch_size"
    ),
    "policy.train_global_batch_size": "ppo_mini_batch_size",
    "algorithm.prompts_per_step": "train_batch_size data.train_batch_size rollout_batch_size num_prompts_per_step",
    "policy.logprob_batch_size": (
        "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size forward_micro_batch_size_per_gpu"
    ),
    "policy.batching.mode": (
        "packing packing_samples sequence_packing dynamic_batching use_dynamic_bsz use_remove_padding "
        "log_prob_use_dynamic_bsz sequence_packing.enabled dynamic_batching.enabled"
    ),
    "policy.batching.tokens": "ppo_max_token_len_per_gpu train_mb_tokens",
    "policy.batching.logprob_tokens": (
        "logprob_mb_tokens log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu"
    ),
    # parallelism
    "policy.parallelism.tensor": "tensor_parallel_size tensor_model_parallel_size",
    "policy.parallelism.pipeline": "pipeline_model_parallel_size",
    "policy.parallelism.context": "context_parallel_size ulysses_sequence_parallel_size ring_attn_size",
    "policy.parallelism.expert": "expert_model_parallel_size",
    "policy.parallelism.sequence": "sequence_parallel",
    "worker_group.num_workers": "nnodes num_nodes num_processes actor_num_nodes",
    # rollouts and generation
    "algorithm.samples_per_prompt": "n rollout.n n_samples_per_prompt num_generations num_generations_per_prompt",
    "generation.name": "use_vllm rollout.name generation.backend",
    "generation.workers": "vllm_mode colocated.enabled",
    "generation.workers.num_workers": "vllm_num_engines",
    "generation.batch_size": "max_num_seqs",
    "generation.top_k": "algorithm.top_k rollout.top_k",
    "generation.top_p": "rollout.top_p",
    "generation.temperature": "rollout.temperature",
    "generation.max_new_tokens": (
        "max_completion_length max_response_length response_length generate_max_len "
        "generation.max_length generation.max_tokens"
    ),
    # algorithm and loss
    "algorithm.reference_sync": "sync_ref_model",
    "algorithm.reference_sync.alpha": "ref_model_mixup_alpha",
    "algorithm.reference_sync.steps": "ref_model_sync_steps",
    "algorithm.num_epochs": "num_train_epochs total_epochs num_episodes max_num_epochs",
    "algorithm.num_steps": "max_steps max_num_steps total_training_steps",
    "algorithm.epochs_per_batch": "num_iterations ppo_epochs max_epochs",
    "algorithm.async": "async_grpo.enabled",
    "algorithm.async.max_staleness": "max_trajectory_age_steps",
    "algorithm.loss.kl_coef": "beta kl_coef init_kl_coef kl_loss_coef use_kl_loss reference_policy_kl_penalty",
    "algorithm.loss.kl_estimator": "kl_loss_type reference_policy_kl_type",
    "algorithm.loss.ratio_clip_min": "epsilon clip_ratio clip_ratio_low eps_clip loss_fn.ratio_clip_min",
    "algorithm.loss.ratio_clip_max": "epsilon_high clip_ratio_high loss_fn.ratio_clip_max",
    "algorithm.loss.ratio_clip_c": "clip_ratio_c delta dual_clip loss_fn.ratio_clip_c",
    "algorithm.loss.kl_max": "kl_output_clamp_value",
    "algorithm.loss.kl_correction": "use_bias_correction_kl use_on_policy_kl_approximation",
    "algorithm.loss.constant_length": "loss_scale_factor",
    "algorithm.loss.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.loss.level": "loss_agg_mode token_level_loss",
    "algorithm.loss.importance_correction": "use_importance_sampling_correction vllm_importance_sampling_correction",
    "algorithm.loss.importance_level": "rollout_is vllm_importance_sampling_mode",
    "algorithm.loss.importance_cap": (
        "rollout_is_threshold truncated_importance_sampling_ratio vllm_importance_sampling_cap"
    ),
    "algorithm.loss.ratio": "importance_sampling_level sequence_level_importance_ratios",
    "algorithm.loss.surrogate": "loss_mode use_cispo disable_ppo_ratio",
    "algorithm.gae_lambda": "lam lambd",
    "algorithm.value_loss.clip": "cliprange_value value_clip",
    "algorithm.reward_kl": "use_kl_in_reward",
    "algorithm.reward_kl.coef": "kl_ctrl.kl_coef",
    "algorithm.reward_kl.estimator": "kl_penalty",
    "algorithm.normalize_std": "normalize_rewards norm_adv_by_std_in_grpo",
    "algorithm.leave_one_out": "use_leave_one_out_baseline",
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.overlong.drop_truncated": "mask_truncated_completions overlong_filtering",
    "algorithm.overlong.buffer": "overlong_buffer.len overlong_buffer_len",
    "algorithm.overlong.penalty": "overlong_buffer.penalty_factor overlong_penalty_factor",
    "algorithm.dynamic_sampling": (
        "filter_groups use_dynamic_sampling dynamic_sampling_max_gen_batches dynamic_filtering"
    ),
    # supervised training and data
    "algorithm.max_tokens": "max_seq_length max_length",
    "algorithm.train_on": "assistant_only_loss completion_only_loss",
    "environment": "env",
    "environment.max_turns": "max_assistant_turns max_rollout_turns",
    "environment.system_prompt": "system_prompt_file",
    "environment.instruction": "prompt_file",
    "environment.check": "env.math",
    "environment.path": "train_files prompt_data dataset_name train_dataset",
    "environment.validation_path": "val_files eval_dataset",
    "environment.columns.prompt": "prompt_key input_key",
    "environment.columns.answer": "label_key",
    "environment.columns.text": "dataset_text_field",
    "environment.reward": "reward_funcs custom_reward_function remote_rm_url",
    # validation, checkpoints and logging
    "algorithm.validation.every": "eval_steps test_freq val_period",
    "algorithm.validation.at_start": "val_at_start val_before_train eval_on_start",
    "algorithm.validation.samples": "max_val_samples",
    "algorithm.validation.attempts": (
        "num_generations_eval val_kwargs.n validation.n validation.num_generations validation.samples_per_prompt"
    ),
    "algorithm.validation.temperature": "val_kwargs.temperature",
    "checkpoints": "checkpointing",
    "checkpoints.every": "save_steps save_freq save_period checkpointing.enabled",
    "checkpoints.keep_last": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
    "checkpoints.keep_best": "keep_top_k load_best_model_at_end",
    "checkpoints.metric": "metric_name metric_for_best_model",
    "checkpoints.best": "higher_is_better greater_is_better",
    "seed": "data.seed trainer.seed grpo.seed",
    "plugins": "external_lib",
    "output_dir": "checkpoint_dir default_local_dir save_path",
    "observers": "report_to logger",
    "observers.wandb": "use_wandb wandb_enabled",
    "observers.mlflow": "mlflow_enabled",
    "observers.tensorboard": "tensorboard_enabled",
    "observers.wandb.project": "project_name wandb_project",
    "observers.wandb.run_name": "experiment_name wandb.name",
    "observers.mlflow.experiment": "mlflow.experiment_name",
    "observers.trackio.space_id": "trackio_space_id",
    "observers.samples": "log_completions",
}
"""Our key to the peers' keys for it, each the end of a dotted path."""

PEER_KEYS: Mapping[str, str] = {word: key for key, words in _WORDS.items() for word in words.split()}
"""A peer's key, as the end of a dotted path, to our key. The longest matching path counts."""

OF_SECTIONS_TOO = ("optim", "model")
"""Those that are the name of another peer's section, which has keys of its own."""

_OPTIMIZER_STEPS = (
    "TRL counts optimizer steps: for GRPO, divide by those of a step here, `algorithm.epochs_per_batch` (TRL's "
    "num_iterations) times the rows of a step, divided by `policy.train_global_batch_size`."
)

_TRL_ROWS = "per_device_train_batch_size x gradient_accumulation_steps x devices"
_PADDED = (
    "It acts only with `policy.batching.mode` padded: with packed and dynamic, `policy.batching.tokens` bounds a "
    "microbatch."
)
_TRL_PROMPTS = (
    "In TRL's numbers, `algorithm.prompts_per_step` is per_device_train_batch_size x devices x steps_per_generation / "
    "num_generations, where steps_per_generation is gradient_accumulation_steps unless it is set."
)

REMARKS: Mapping[str, str] = {
    "num_generations": _TRL_PROMPTS,
    "per_device_train_batch_size": (
        f"{_PADDED} The rows of an optimizer step, `policy.train_global_batch_size`, are {_TRL_ROWS}."
    ),
    "normalize_rewards": (
        "With use_leave_one_out_baseline, NeMo-RL divides by the deviation of the other rewards: others, which "
        "`algorithm.preset` nemo_rl has too."
    ),
    "max_num_epochs": "NeMo-RL ends at this or max_num_steps: set that of the two which it reaches first.",
    "mask_truncated_completions": (
        "With loss_type grpo and dr_grpo, TRL still counts truncated rows in the denominator; here they are left out "
        "of it too."
    ),
    "prompt_file": "The text itself, in place of a file; it is put after the user's message.",
    "system_prompt_file": "The text itself, in place of a file.",
    "dynamic_sampling_max_gen_batches": "Only if use_dynamic_sampling is true: otherwise remove the key.",
    "env.math": "Set it to math.",
    "save_steps": _OPTIMIZER_STEPS,
    "eval_steps": _OPTIMIZER_STEPS,
    "max_steps": _OPTIMIZER_STEPS,
    "lr_warmup_steps": "It counts passes over rollouts: verl's number times `algorithm.epochs_per_batch`.",
    "warmup_steps": (
        "It counts passes over rollouts, `algorithm.epochs_per_batch` in a step of the run; TRL counts optimizer steps."
    ),
    "ppo_mini_batch_size": (
        "Here it counts rows: verl counts prompts, so multiply by `algorithm.samples_per_prompt`, verl's rollout.n."
    ),
    "train_batch_size": (
        "That is verl's meaning, prompts. OpenRLHF's, the completions of an optimizer step, is "
        "`policy.train_global_batch_size`."
    ),
    "clip_ratio": "It is `algorithm.loss.ratio_clip_max` too: set both, unless clip_ratio_low and clip_ratio_high are.",
    "eps_clip": "It is `algorithm.loss.ratio_clip_max` too: set both, unless eps_clip_low_high is.",
    "epsilon": "It is `algorithm.loss.ratio_clip_max` too, unless epsilon_high is: set both.",
    **dict.fromkeys(("lam", "lambd", "cliprange_value", "value_clip"), "It is a key of `algorithm.name` ppo."),
    **dict.fromkeys(("rollout.top_k", "rollout.top_p"), "GRPO and PPO sample from all tokens: verl's default."),
    "external_lib": "A list of Python modules to import.",
    "init_kl_coef": (
        "That is with OpenRLHF's use_kl_loss; without it the KL is in the reward: `algorithm.reward_kl.coef`."
    ),
    "log_prob_micro_batch_size_per_gpu": "It is of all scoring, by the policy and the reference.",
    "log_prob_micro_batch_size": "It is of each worker: verl's number is of all, so divide by the workers.",
    "use_kl_loss": "A coefficient above 0 enables it.",
    **dict.fromkeys(
        ("nnodes", "num_nodes", "actor_num_nodes"),
        "It counts workers in all: nodes times GPUs of each.",
    ),
    "use_kl_in_reward": (
        "True: write this section, with kl_ctrl.kl_coef as `algorithm.reward_kl.coef`. False: remove the key, and "
        "kl_ctrl too."
    ),
    "kl_ctrl.kl_coef": "Only if use_kl_in_reward is True: otherwise the KL is not in the reward, so remove the key.",
    "kl_penalty": (
        "Only if use_kl_in_reward is True: otherwise remove the key. verl's kl is k1, mse is k2, low_var_kl is k3 with "
        "`algorithm.reward_kl.max` 10; abs and full have no counterpart."
    ),
    "remote_rm_url": "An import path of a function; one that asks a service is an async function.",
    "custom_reward_function": "One import path, module:name, in place of path and name.",
    "vllm_mode": (
        "The run starts its engines itself. TRL's colocate, on the GPUs of the trainer, is `generation.workers.group` "
        "processes; for GPUs of their own, instead of TRL's server, set it and `worker_group.name` to ray."
    ),
}
"""Differences in the values of peers' keys in `PEER_KEYS`."""

_NONE = "It has no counterpart: remove the key."
_WHOLE = "The model's distribution is sampled as it is, apart from `generation.temperature`: remove the key."
_RATIO = (
    "rlframework counts passes over the rows: set `policy.scheduler.warmup_steps` to this fraction of "
    "`algorithm.num_steps`, times `algorithm.epochs_per_batch` where there is such a key."
)
_VLLM_TENSOR = (
    "With vLLM it is generation.vllm.tensor_parallel_size, the GPUs of an engine; the embedded engine has the "
    "whole model."
)
_PARALLEL = ("tensor_model", "pipeline_model", "context", "expert_model")

WITHOUT_COUNTERPART: Mapping[str, str] = {
    "gradient_accumulation_steps": (
        "In TRL's numbers, `policy.train_global_batch_size`, the rows of an optimizer step, is "
        f"{_TRL_ROWS}: remove the key."
    ),
    "max_prompt_length": (
        "Prompts are not truncated, and one that leaves no room for an answer is an error: remove the key. Answers "
        "have at most `generation.max_new_tokens` tokens."
    ),
    **dict.fromkeys(
        ("n_gpus_per_node", "gpus_per_node", "actor_num_gpus_per_node"),
        "`worker_group.num_workers` is the GPUs in all, nodes times GPUs of each. With `worker_group.name` ray this is "
        "`worker_group.workers_per_node` too; otherwise remove the key.",
    ),
    "max_prompt_tokens": "Prompts are not truncated: remove the key.",
    "steps_per_generation": f"{_TRL_PROMPTS} Remove the key.",
    "generation_batch_size": (
        "In TRL's numbers, `algorithm.prompts_per_step` is generation_batch_size / num_generations, and NeMo-RL's "
        "policy.generation_batch_size is `generation.batch_size`: remove the key."
    ),
    "reward_weights": (
        "Weights are beside the functions, in `environment.reward`: "
        '{correct: {function: "my_rewards:correct", weight: 1.0}, brief: {function: "my_rewards:brief", weight: 0.2}}.'
    ),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), _RATIO),
    "repetition_penalty": _WHOLE,
    "min_p": _WHOLE,
    "ref_model": "The reference has the weights that the run starts from: remove the key.",
    **dict.fromkeys(
        (
            f"ref.{word}"
            for word in (
                *("fsdp_config", "fsdp_config.param_offload", "fsdp_config.optimizer_offload", "param_offload"),
                *("megatron.param_offload", "megatron.optimizer_offload", "optimizer_offload"),
            )
        ),
        "The reference's weights are always in CPU memory: remove the key. `policy.offload.parameters` would offload "
        "the model that is trained.",
    ),
    **dict.fromkeys(
        (
            f"ref.{word}"
            for word in (
                *("strategy", "model", "megatron", "ulysses_sequence_parallel_size", "megatron.sequence_parallel"),
                *(f"megatron.{size}_parallel_size" for size in _PARALLEL),
            )
        ),
        "The reference has the model, the backend and the layout of the policy: remove the key.",
    ),
    "precompute_ref_log_probs": "The reference scores each batch: remove the key.",
    "remove_unused_columns": "Reward functions get every column: remove the key.",
    "per_device_eval_batch_size": "`algorithm.validation.samples` is the number of validation samples: remove the key.",
    "val_kwargs.do_sample": (
        "In rlframework this is `algorithm.validation.temperature`: 0 for greedy answers, remove the key otherwise."
    ),
    **dict.fromkeys(
        ("val_kwargs.top_k", "val_kwargs.top_p"), "Validation has the run's top_k and top_p: remove the key."
    ),
    "eval_strategy": "Set `algorithm.validation.every` to the steps between validations; 0: at the start and end only.",
    "save_strategy": "Set `checkpoints.every` to the steps between checkpoints.",
    "loss_type": (
        "In rlframework this is `algorithm.loss.level`: TRL's grpo is sequence, dapo is token (bnpo too, but for its "
        "denominator), dr_grpo is constant, and cispo is `algorithm.name` cispo."
    ),
    "scale_rewards": (
        "In rlframework this is `algorithm.normalize_std`: TRL's group and True are true, batch is batch, and none "
        "and False are false."
    ),
    "bf16": "Set `policy.precision` to bfloat16; weights and optimizer stay fp32.",
    "fp16": "Set `policy.precision` to float16; weights and optimizer stay fp32.",
    "eos_token": "The end of an answer is the chat template's or the tokenizer's: remove the key.",
    **dict.fromkeys(
        ("use_liger_kernel", "logprob_chunk_size"),
        "The output head always works in chunks, without whole logits: remove the key.",
    ),
    "make_sequence_length_divisible_by": "Rows are padded as the parallel layout needs: remove the key.",
    "disable_dropout": "Dropout is always off: remove the key.",
    "shuffle_dataset": "Rows are always shuffled, by `seed`: remove the key.",
    **dict.fromkeys(("dataloader_num_workers", "ddp_find_unused_parameters", "torch_compile"), _NONE),
    "attn_implementation": "The attention is chosen for the device: remove the key.",
    "callbacks": (
        "EarlyStoppingCallback is `algorithm.early_stopping`; for others write an observer, a plugin: remove the key."
    ),
    "model_init_kwargs": "`policy.precision` is the dtype, and the attention is chosen for the device: remove the key.",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id"), "Upload the model that the run saves with `hf upload`: remove the key."
    ),
    "top_entropy_quantile": _NONE,
    "off_policy_mask_threshold": "`algorithm.loss.importance_mask` geometric is the nearest: remove the key.",
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), _NONE),
    "neftune_noise_alpha": _NONE,
    **{
        f"{prefix}{word}": f"With vLLM it is generation.vllm.{word}."
        for word in ("gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens", "max_model_len")
        for prefix in ("", "vllm_")
    },
    **dict.fromkeys(
        (
            "rollout.tensor_model_parallel_size",
            "generation.tensor_model_parallel_size",
            "generation.tensor_parallel_size",
            "vllm_cfg.tensor_parallel_size",
            "vllm_tensor_parallel_size",
        ),
        _VLLM_TENSOR,
    ),
    "reward_manager": (
        "A reward is a function, `environment.reward`; what verl's dapo adds is `algorithm.overlong`: remove the key."
    ),
    "reward_fn_key": "A reward function gets data_source from the row's column of that name: remove the key.",
    **dict.fromkeys(
        ("reward_model.enable", "critic.enable", "reward_model.reward_model.enable"),
        "The section itself is what enables the model. True: remove the key. False: remove the section.",
    ),
    "overlong_buffer.enable": (
        "`algorithm.overlong.buffer` above 0 enables it. True: remove the key. False: leave the buffer at 0."
    ),
    **dict.fromkeys(
        ("actor.shuffle", "critic.shuffle"), "The rows of a step are trained on in their order: remove the key."
    ),
    "critic.loss_agg_mode": "The loss of the critic is averaged over tokens: remove the key.",
    "balance_batch": "Rows are always divided so that the workers have equally much to do: remove the key.",
    "val_batch_size": (
        "Validation has its own batches, and `algorithm.validation.samples` is the number of prompts: remove the key."
    ),
    "return_raw_chat": "Environments always have the messages: remove the key.",
    "hybrid_engine": "Training and generation share their GPUs unless `generation.workers` is set: remove the key.",
    "free_cache_engine": "On GPUs vLLM's sleep mode is always on: remove the key.",
    "zero_stage": "With policy.backend=deepspeed it is policy.deepspeed.zero_optimization.stage.",
    "max_total_sequence_length": (
        "Prompts are not truncated. Answers have at most `generation.max_new_tokens` tokens, and rows of supervised "
        "training `algorithm.max_tokens`."
    ),
    **dict.fromkeys(
        ("rollout.mode", "generation.mode"),
        "Requests are always served as they come: remove the key. To generate while training, set algorithm.async.",
    ),
    "normalize_reward": (
        "Rewards are not normalized over the run: remove the key. For advantages it is `algorithm.normalize_std`."
    ),
    **dict.fromkeys(
        ("kl_ctrl.type", "kl_ctrl.horizon", "kl_ctrl.target_kl"), "The coefficient is constant: remove the key."
    ),
    "truncation": "No prompt is dropped or cut: remove the key.",
    "prompt_max_len": "No prompt is cut, and one that leaves no room for an answer is an error: remove the key.",
    "data.shuffle": "Rows are always shuffled, by `seed`: remove the key.",
    "apply_chat_template": "The tokenizer's template is used; another one is `policy.chat_template`: remove the key.",
    "no_advantage_std_norm": "In rlframework this is `algorithm.normalize_std` false.",
    "filter_overlong_prompts": "No prompt is dropped: filter the file beforehand, and remove the key.",
    "resume_from_checkpoint": "To resume a run, use `rlframework train --resume RUN_DIR`.",
    "resume_mode": "To resume a run, use `rlframework train --resume RUN_DIR`.",
    "logging_steps": "rlframework logs every step; remove the key.",
}
"""A peer's key without an equivalent, to what to do instead."""

_PAIRS = f"`policy.train_global_batch_size` counts rows, two for each pair: it is twice {_TRL_ROWS}."
OF_PAIRS: Mapping[str, str] = {
    "loss_type": (
        "TRL's sigmoid is `algorithm.name` dpo, ipo is `algorithm.name` ipo (with `algorithm.preset` trl, the mean "
        "over tokens), and sigmoid_norm is `algorithm.length_mean` true; robust is `algorithm.label_smoothing` with "
        "`algorithm.preset` trl. Others have no counterpart."
    ),
    "per_device_train_batch_size": f"In rlframework this is `policy.train_micro_batch_size`. {_PADDED} {_PAIRS}",
    "gradient_accumulation_steps": f"{_PAIRS} Remove the key.",
    "rpo_alpha": "In rlframework this is `algorithm.sft_weight`.",
    "loss_weights": "In rlframework these are `algorithm.weight` and `algorithm.sft_weight`.",
    "max_prompt_length": "Rows are truncated as a whole, to `algorithm.max_tokens`: remove the key.",
    "max_completion_length": "Rows are truncated as a whole, to `algorithm.max_tokens`: remove the key.",
    "truncation_mode": "Rows are truncated at their end, to `algorithm.max_tokens`: remove the key.",
    "reference_free": "For a loss without a reference, set `algorithm.name` to simpo or orpo.",
    "f_divergence_type": "The divergence is the reverse KL, TRL's default: remove the key.",
    "padding_free": "In rlframework this is `policy.batching.mode` packed.",
    "ld_alpha": _NONE,
    "use_weighting": _NONE,
    "simpo_gamma": "In rlframework this is `algorithm.gamma` of `algorithm.name` simpo.",
}
"""Meanings of peers' keys to algorithms on preference pairs, where they differ."""
