"""DeepSpeed keys that this backend does not support, and why. Files may contain them switched off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OBSERVED = "runs are observed by the framework: see the section observers"
GONE = "DeepSpeed has removed it"
SUMS = "gradients are sums over the whole global batch in this framework"
QUANTIZED = "quantised communication does not compute the same as one worker"

_TOP: Mapping[str, str] = {
    "amp": f"{GONE}; policy.precision decides",
    "autotuning": "it is DeepSpeed's own launcher that tunes",
    "bfloat16": "DeepSpeed's name for it is bf16 now; policy.precision decides",
    "checkpoint": "checkpoints are written by the framework: see the section checkpoints",
    "comet": OBSERVED,
    "compile": "graphs compiled by DeepSpeed have not been verified",
    "compression_training": GONE,
    "csv_monitor": OBSERVED,
    "curriculum_learning": GONE,
    "data_efficiency": "rows are chosen by the algorithm and the environment",
    "dataloader_drop_last": "the framework feeds the engine",
    "disable_allgather": "weights must be the same on all workers after a step",
    "eigenvalue": GONE,
    "elasticity": f"{GONE}; see the section fault_tolerance",
    "expert_parallel": "experts are not spread by this backend",
    "gradient_allreduce_op": SUMS,
    "gradient_predivide_factor": SUMS,
    "graph_harvesting": GONE,
    "hybrid_engine": "generation is an engine of its own: see the section generation",
    "managed_gradient_accumulation": "the framework accumulates",
    "nebula": GONE,
    "pipeline": "this backend has no pipeline",
    "prescale_gradients": SUMS,
    "progressive_layer_drop": GONE,
    "quantize_training": GONE,
    "seq_parallel_communication_data_type": "sequence shards are exchanged in their own dtype",
    "sparse_attention": GONE,
    "sparse_gradients": GONE,
    "tensorboard": OBSERVED,
    "torch_autocast": "policy.precision decides",
    "use_data_before_expert_parallelism": "experts are not spread by this backend",
    "wandb": OBSERVED,
    "weight_quantization": "it is for inference",
}

REJECTED: Mapping[str, Mapping[str, str]] = {
    "": _TOP,
    "zero_optimization": {
        "compute_grad_norm": "the framework asks for the norm of the gradient",
        "cpu_offload": "its name is offload_optimizer now",
        "cpu_offload_param": "its name is offload_param now",
        "cpu_offload_use_pin_memory": "it is pin_memory of offload_param and offload_optimizer now",
        "elastic_checkpoint": "portable checkpoints resume under any number of workers",
        "legacy_stage1": "DeepSpeed has deprecated it",
        "mics_hierarchical_params_gather": GONE,
        "mics_shard_size": GONE,
        "override_module_apply": "weights are loaded by the framework",
        "pipeline_loading_checkpoint": "this backend has no pipeline",
        "save_muon_momentum_buffer_in_memory": "the optimizer is AdamW",
        "stage3_gather_fp16_weights_on_model_save": "its name is stage3_gather_16bit_weights_on_model_save now",
        "zenflow": "delayed steps do not compute the same as one worker",
        "zero_hpz_partition_size": "secondary weight partitions have not been verified",
        "zero_quantized_gradients": QUANTIZED,
        "zero_quantized_nontrainable_weights": QUANTIZED,
        "zero_quantized_weights": QUANTIZED,
        "zeropp_loco_param": GONE,
    },
    "zero_optimization.offload_optimizer": {
        "cpuadam_cores_perc": "the optimizer is torch's",
        "super_offload": "the optimizer is torch's",
    },
    "bf16": {
        "bf16_master_weights_and_grads": "weights and the optimizer's state stay fp32",
        "bf16_optimizer_states": "weights and the optimizer's state stay fp32",
        "check_grad_overflow": "policy.non_finite_gradients decides",
        "immediate_grad_update": "the framework accumulates",
    },
    "fp16": {
        "auto_cast": "inputs are token ids",
        "fp16_master_weights_and_grads": "weights and the optimizer's state stay fp32",
    },
    "tensor_parallel": {
        "tp": "its size is autotp_size, and its groups are the framework's",
        "tensor_parallel": "its size is autotp_size, and its groups are the framework's",
        "tp_size": "its name is autotp_size",
        "vocab_parallel_ce_backend": "the framework computes log-probabilities",
        "vocab_parallel_lm_head": "the framework computes log-probabilities",
    },
}
"""Reasons by section and key. A key that is switched off ({"enabled": false}, false, empty) is ignored."""


def switched_off(value: Any) -> bool:
    """Whether a value disables its feature."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled", value.get("device")) in (False, "none")
    return value in (None, False, 0, "")
