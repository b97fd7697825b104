"""Configurations that the deepspeed backend rejects, by key, before a process starts."""

from __future__ import annotations

import json

import pytest
from pydantic import create_model

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import AlgorithmConfig, EnvironmentConfig, RunConfig
from rlframework.plugins import model_checks
from rlframework_deepspeed import config_checks
from rlframework_deepspeed.config import DeepSpeedConfig

Policy = create_model("Policy", __base__=PolicyConfig, deepspeed=(DeepSpeedConfig, DeepSpeedConfig()))
ZERO = "policy.deepspeed.zero_optimization"


def problems(device="cpu", workers=1, checkpoints=None, own=None, **policy):
    config = RunConfig(
        algorithm=AlgorithmConfig(name="a"),
        worker_group={"num_workers": workers},
        policy=Policy.model_validate({"model_name": "m", "deepspeed": own or {}, **policy}),
        environment=EnvironmentConfig(name="e"),
        checkpoints=checkpoints or {},
    )
    return [(problem.key, problem.message) for problem in config_checks.check(config, device)]


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_stage_has_no_problems(stage, device):
    assert problems(device, own=zero(stage), workers=2, precision="bfloat16") == []


# -- keys that stand for neutral ones ----------------------------------------------------------------------------------

AGREE = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "sequence_parallel_size": 1,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "tensor_parallel": {"autotp_size": 0},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_num_steps": 5,
            "total_num_steps": 50,
            "warmup_max_lr": 1e-4,
            "warmup_min_lr": 0,
            "warmup_type": "linear",
        },
    },
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
}
NEUTRAL = {
    "train_global_batch_size": 32,
    "train_micro_batch_size": 4,
    "max_grad_norm": 0.5,
    "precision": "bfloat16",
    "optimizer": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1},
    "scheduler": {"name": "linear", "warmup_steps": 5, "total_steps": 50},
}


def test_values_that_say_the_same_are_taken():
    assert problems(own=AGREE, workers=2, **NEUTRAL) == []
    assert problems(own={"gradient_clipping": 0.0}, max_grad_norm=None) == []


DISAGREE = [
    ("train_batch_size", 64, "train_batch_size", "policy.train_global_batch_size, which decides, is 32"),
    ("train_micro_batch_size_per_gpu", 8, "train_micro_batch_size_per_gpu", "policy.train_micro_batch_size"),
    ("gradient_accumulation_steps", 1, "gradient_accumulation_steps", "it says 1, and 4 microbatches follow from"),
    ("gradient_clipping", 1.0, "gradient_clipping", "policy.max_grad_norm, which decides, is 0.5"),
    ("sequence_parallel_size", 2, "sequence_parallel_size", "policy.parallelism.context"),
    ("tensor_parallel", {"autotp_size": 2}, "tensor_parallel.autotp_size", "policy.parallelism.tensor"),
    ("bf16", {"enabled": False}, "bf16.enabled", "it says false, and policy.precision, which decides, is bfloat16"),
    ("fp16", {"enabled": True}, "fp16.enabled", "it says true, and policy.precision, which decides, is bfloat16"),
    ("optimizer", {"type": "Lamb"}, "optimizer.type", "it says Lamb, and policy.optimizer.name"),
    (
        "optimizer",
        {"type": "Adam", "params": {"adam_w_mode": False}},
        "optimizer.type",
        "Adam without decoupled weight decay",
    ),
    ("optimizer", {"params": {"lr": 2.0}}, "optimizer.params.lr", "policy.optimizer.lr, which decides, is 0.0001"),
    ("optimizer", {"params": {"betas": [0.9, 0.9]}}, "optimizer.params.betas", "policy.optimizer.betas"),
    ("optimizer", {"params": {"amsgrad": True}}, "optimizer.params.amsgrad", "policy.optimizer decides"),
    ("scheduler", {"type": "WarmupLR"}, "scheduler.type", "policy.scheduler.name, which decides, is linear"),
    ("scheduler", {"type": "OneCycle"}, "scheduler.type", "it says OneCycle"),
    (
        "scheduler",
        {"params": {"warmup_num_steps": 7}},
        "scheduler.params.warmup_num_steps",
        "policy.scheduler.warmup_steps, which decides, is 5",
    ),
    (
        "scheduler",
        {"params": {"warmup_type": "log"}},
        "scheduler.params.warmup_type",
        "the form of a warm-up is always linear",
    ),
    ("scheduler", {"params": {"cycle": 1}}, "scheduler.params.cycle", "policy.scheduler decides"),
    (
        "activation_checkpointing",
        {"cpu_checkpointing": True},
        "activation_checkpointing.cpu_checkpointing",
        "policy.activation_checkpointing decides",
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "key", "said"), DISAGREE, ids=[f"{case[2]}-{case[3][:9]}" for case in DISAGREE]
)
def test_values_that_say_something_else_are_refused_with_both_keys(name, value, key, said):
    [(found, message)] = problems(own={name: value}, workers=2, **NEUTRAL)
    assert found == f"policy.deepspeed.{key}"
    assert said in message


@pytest.mark.parametrize(
    ("own", "offload"), [("offload_optimizer", {"optimizer": True}), ("offload_param", {"parameters": True})]
)
def test_no_offload_beside_a_neutral_key_that_asks_for_it_is_a_contradiction(own, offload):
    [(key, message)] = problems(own=zero(3, **{own: {"device": "none"}}), offload=offload)
    assert (key, f"policy.offload.{next(iter(offload))}" in message) == (f"{ZERO}.{own}.device", True)
    assert problems(own=zero(3, **{own: {"device": "cpu"}}), offload=offload) == []


# -- keys that are not taken -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "key", "said"),
    [
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine", "generation is an engine of its own"),
        ({"wandb": {"enabled": True}}, "wandb", "section observers"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "gradients are sums"),
        (zero(2, zero_quantized_gradients=True), "zero_optimization.zero_quantized_gradients", "quantised"),
        (zero(2, cpu_offload=True), "zero_optimization.cpu_offload", "its name is offload_optimizer now"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states", "stay fp32"),
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast", "inputs are token ids"),
        (
            zero(3, offload_optimizer={"device": "cpu", "super_offload": True}),
            "zero_optimization.offload_optimizer.super_offload",
            "the optimizer is torch's",
        ),
        ({"tensor_parallel": {"tp_size": 2}}, "tensor_parallel.tp_size", "its name is autotp_size"),
    ],
)
def test_what_this_backend_does_not_take_is_told_with_the_reason(own, key, said):
    [(found, message)] = problems(own=own)
    assert found == f"policy.deepspeed.{key}"
    assert said in message


def test_what_is_switched_off_is_let_pass():
    off = {"wandb": {"enabled": False}, "tensorboard": {}, "prescale_gradients": False, "amp": None}
    assert problems(own=off | zero(2, zero_quantized_weights=False)) == []


# -- combinations ------------------------------------------------------------------------------------------------------


def test_float16_needs_a_gpu():
    [(key, message)] = problems(precision="float16")
    assert (key, "needs a GPU" in message) == ("policy.precision", True)
    assert problems("cuda", precision="float16") == []


@pytest.mark.parametrize(
    ("keys", "key"),
    [({"freeze": "language"}, "policy.freeze"), ({"lora": {"rank": 2, "part": "vision"}}, "policy.lora.part")],
)
def test_a_frozen_language_model_is_refused(keys, key):
    assert problems(**keys) == [(key, "a frozen language model is not supported by this backend.")]


def test_the_other_part_may_be_frozen():
    assert problems(freeze="vision") == problems(lora={"rank": 2, "part": "language"}) == []


def test_attention():
    key, flash = "policy.deepspeed.attention", {"attention": "flash_attention_2"}
    assert problems(own=flash, precision="bfloat16") == [(key, "flash_attention_2 needs a GPU, but the device is cpu.")]
    [(found, message)] = problems(own={"attention": "eager"}, parallelism={"context": 2}, workers=2)
    assert (found, "its own attention" in message) == (key, True)


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attention_needs_its_package_and_half_precision(monkeypatch, installed):
    monkeypatch.setattr(model_checks, "find_spec", lambda name: object() if installed else None)
    key, flash = "policy.deepspeed.attention", {"attention": "flash_attention_2"}
    missing = [(key, "flash_attention_2 needs the package flash-attn.")]
    wrong = [(key, "flash_attention_2 does not support float32.")]
    assert problems("cuda", own=flash, precision="bfloat16") == ([] if installed else missing)
    assert problems("cuda", own=flash) == ([] if installed else missing) + wrong


def test_heads_that_tensor_parallelism_does_not_divide_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2}))
    [(key, message)] = problems(workers=4, model_name=str(tmp_path), parallelism={"tensor": 4})
    assert key == "policy.parallelism.tensor"
    assert message == "the model has 2 key-value heads, not divisible by policy.parallelism.tensor=4."
    assert problems(workers=2, model_name=str(tmp_path), parallelism={"tensor": 2}) == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "split", "said"),
    [
        (4, 2, {"context": 2}, None),
        (4, 1, {"context": 4}, None),  # repeated
        (8, 4, {"context": 2, "tensor": 2}, None),
        (4, None, {"context": 2}, None),  # as many as attention heads
        (6, 3, {"context": 4}, "6 attention heads, which policy.parallelism.context=4 does not divide"),
        (6, 3, {"context": 2}, "3 key-value heads, which policy.parallelism.context=2 cannot share"),
        (4, 4, {"context": 4, "tensor": 2}, "4 attention heads, 1/2 of them after policy.parallelism.tensor"),
    ],
)
def test_heads_that_ulysses_cannot_exchange_are_refused(tmp_path, heads, kv_heads, split, said):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads, "num_key_value_heads": kv_heads}))
    keys = {"model_name": str(tmp_path), "parallelism": split, "workers": 8}
    found = problems(own={"sequence_exchange": "ulysses"}, **keys)
    assert [key for key, _ in found] == ["policy.deepspeed.sequence_exchange"] * (said is not None)
    assert all(said in message for _, message in found)
    assert problems(**keys) == []
    assert problems(own={"sequence_exchange": "ulysses"}, model_name=str(tmp_path)) == []


def test_a_plan_of_tensor_parallelism_without_it_is_refused():
    plan = {"tensor_parallel": {"preset_model": "llama", "partition_config": {}}}
    keys = [key for key, _ in problems(own=plan)]
    assert keys == [f"policy.deepspeed.tensor_parallel.{name}" for name in ("preset_model", "partition_config")]
    assert problems(own=plan, workers=2, parallelism={"tensor": 2}) == []


@pytest.mark.parametrize(
    ("offload", "stage", "key"),
    [
        ({"optimizer": True}, 0, "policy.offload.optimizer"),
        ({"parameters": True}, 2, "policy.offload.parameters"),
        ({"optimizer": True}, 1, None),
        ({"parameters": True}, 3, None),
    ],
)
def test_offload_needs_a_stage_that_does_it_where_there_is_a_gpu(offload, stage, key):
    found = [key for key, _ in problems("cuda", own=zero(stage), offload=offload)]
    assert found == [key] * (key is not None)
    assert problems("cpu", own=zero(stage), offload=offload) == []


def test_deepspeeds_own_keys_of_offload_need_the_stage_too():
    own = zero(2, offload_param={"device": "cpu"})
    assert problems("cuda", own=own) == [(f"{ZERO}.offload_param", f"it needs ZeRO stage 3, but {ZERO}.stage is 2.")]


def test_a_disk_needs_stage_3_a_folder_a_gpu_and_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(config_checks, "which", lambda name: f"/usr/bin/{name}")
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    assert problems("cuda", own=zero(3, offload_param=disk)) == []
    [(key, message)] = problems("cpu", own=zero(3, offload_param=disk))
    assert (key, "needs a GPU" in message) == (f"{ZERO}.offload_param.device", True)
    [(key, message)] = problems("cuda", own=zero(2, offload_optimizer=disk))
    assert (key, "nvme needs ZeRO stage 3" in message) == (f"{ZERO}.offload_optimizer.device", True)
    [(key, _)] = problems("cuda", own=zero(3, offload_param={"device": "nvme"}))
    assert key == f"{ZERO}.offload_param.nvme_path"
    [(key, message)] = problems("cuda", own=zero(3, offload_param={**disk, "nvme_path": str(tmp_path / "none")}))
    assert (key, "is not a folder" in message) == (f"{ZERO}.offload_param.nvme_path", True)


def test_a_disk_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(config_checks, "which", lambda name: None)
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    [(key, message)] = problems("cuda", own=zero(3, offload_param=disk))
    assert (key, "g++ and ninja" in message) == (f"{ZERO}.offload_param.device", True)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"lora": {"target_modules": []}}, "policy.lora.target_modules"),
        ({"lora": {}, "head": "score"}, "policy.lora"),
        ({"lora": {}}, None),
    ],
)
def test_what_adapters_do_not_go_with(keys, found):
    assert [key for key, _ in problems(**keys)] == [found] * (found is not None)
