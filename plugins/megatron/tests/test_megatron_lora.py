"""LoRA beyond the suite's: models, axes and precisions that it lacks, and targets that are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_kinds import KINDS, tiny_model
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig

from rlframework.base.errors import ConfigError, NotSupported
from rlframework.config.policy import LoraConfig
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.manager import create_manager
from rlframework_conformance import cases
from rlframework_conformance.further_oracles import LoraOracle
from rlframework_conformance.layouts import Layout
from rlframework_conformance.policies import InspectedPolicy, run_config, weights_of
from rlframework_conformance.suites.policy_worker.worker_harness import loss_function
from rlframework_megatron.adapter_weights import (
    adapter_weights,
    kind_of,
    linear_weights,
    require_adapters_on_each_stage,
)
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.worker import MegatronPolicyWorker

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0, "target_modules": TARGETS}
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
PACKED = {"mode": "packed", "tokens": 40}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def policy(models, tmp_path):
    """`policy(model, layout, targets, **keys)`: a policy with LoRA, shut down after the test."""
    started = []

    def start(model="untied", layout="data=1", targets=TARGETS, **keys):
        path, manager = cases.model(model, models), create_manager()
        keys = {"lora": LORA | {"target_modules": targets}, "optimizer": {"lr": 1e-2}, **keys}
        config = run_config("megatron", path, Layout.parse(layout), manager=manager, folder=tmp_path, **keys)
        started.append(InspectedPolicy(config, load_tokenizer(str(path)), manager, device="cpu"))
        return started[-1]

    yield start
    for one in started:
        one.shutdown()


def adapters_of(policy: InspectedPolicy, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    policy.save_adapter(str(folder))
    found = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): matrix for name, matrix in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "targets", "keys"),
    [
        ("untied", "tensor=2", TARGETS, {}),
        ("norms_of_heads", "tensor=2,sequence", TARGETS, {"activation_checkpointing": "selective"}),
        ("untied", "tensor=2,sequence", ["k_proj", "gate_proj"], {"activation_checkpointing": True}),
        ("tied", "data=2", TARGETS, {"megatron": OVERLAPPED}),
        ("tied", "pipeline=2", ["layers.0.mlp.up_proj", "layers.1.self_attn.k_proj"], {}),
        ("untied", "context=2", TARGETS, {"batching": PACKED}),
        ("experts", "tensor=2,sequence", ["q_proj", "o_proj"], {}),
    ],
    ids=str,
)
def test_steps_match_the_oracle(policy, models, tmp_path, model, layout, targets, keys):
    trained = policy(model, layout, targets, **keys)
    oracle = LoraOracle(cases.model(model, models), adapters_of(trained, tmp_path / "start"), 1.5, lr=1e-2)
    base = oracle.weights()
    for seed in range(3):
        data = cases.batch(seed=seed)
        torch.testing.assert_close(trained.get_logprobs(data)["logprobs"], oracle.logprobs(data), rtol=1e-5, atol=1e-5)
        got, right = trained.train(data, loss_function("nll")), oracle.step(data, "nll")
        assert got["loss"] == pytest.approx(right.loss, rel=1e-5)
        assert float(got["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=1e-5)
    weights, merged = weights_of(trained, tmp_path / "weights"), oracle.weights()
    for name, weight in merged.items():
        assert (weights[name] - weight).norm() / weight.norm() < 1e-5, name
        assert (name.removesuffix(".weight") + ".lora_A.weight" in oracle.adapters) != weight.equal(base[name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "glm4", "gpt_oss", "phi3", "qwen2_moe"])
def test_all_linear_layers_of_a_kind_have_the_gradients_of_the_oracle(tmp_path, kind):
    """Layers with biases, that transformers fuses too, and of shared experts."""
    tiny_model(KINDS[kind]).save_pretrained(tmp_path)
    linear = {kind_of(weight) for weight in linear_weights(AutoConfig.from_pretrained(tmp_path))}
    data = cases.batch(vocabulary=40)
    config = {
        "model_name": str(tmp_path),
        "batching": PACKED,
        "train_global_batch_size": 8,
        "max_grad_norm": None,
        "lora": LORA | {"target_modules": sorted(linear)},
        "optimizer": {"lr": 1e-9, "betas": (0.9, 0.999), "weight_decay": 0.0},
    }
    worker = MegatronPolicyWorker(config, cases.tokenizer(), init_reference_model=False)
    try:
        generator = torch.Generator().manual_seed(1)
        specs = worker.engine.adapter_specs()
        given = {name: 0.2 * torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}
        worker.engine.take_adapters(given)
        oracle = LoraOracle(tmp_path, given, 1.5)
        found = worker.get_logprobs(data)["logprobs"]
        torch.testing.assert_close(found, oracle.logprobs(data), rtol=1e-5, atol=3e-5)
        worker.train(data, loss_function("nll"))
        gradients = oracle.gradients(data, "nll")
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, moments in worker.engine.gather_moments():
            assert (moments.exp_avg / 0.1 - gradients[name]).norm() < 1e-5 * norm, name
    finally:
        worker.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True])
def test_bfloat16_trains_adapters_in_fp32_and_resumes_to_the_bit(policy, models, tmp_path, distributed):
    keys = {"precision": "bfloat16", "megatron": {"distributed_optimizer": distributed}}
    first, data = policy(layout="data=2", **keys), cases.batch()
    for seed in range(2):
        first.train(cases.batch(seed=seed), loss_function("nll"))
    given = adapters_of(first, tmp_path / "adapters")
    assert all(matrix.dtype == torch.float32 for matrix in given.values())
    assert not any(matrix.equal(matrix.bfloat16().float()) for matrix in given.values())
    right = LoraOracle(cases.model("untied", models), given, 1.5).logprobs(data)
    torch.testing.assert_close(first.get_logprobs(data)["logprobs"], right, rtol=3e-2, atol=6e-2)
    first.save_checkpoint(str(tmp_path / "model"), str(tmp_path / "optimizer"))
    first.train(cases.batch(seed=2), loss_function("nll"))
    second = policy(layout="data=2", **keys)
    second.load_checkpoint(str(tmp_path / "model"), str(tmp_path / "optimizer"))
    second.train(cases.batch(seed=2), loss_function("nll"))
    wanted = adapters_of(first, tmp_path / "wanted")
    for name, matrix in adapters_of(second, tmp_path / "got").items():
        assert matrix.equal(wanted[name]), name


@pytest.mark.slow
def test_other_checkpoint_formats_are_rejected(models, tmp_path):
    path = cases.model("untied", models)
    worker = MegatronPolicyWorker({"model_name": str(path), "lora": LORA}, load_tokenizer(str(path)))
    try:
        for form in ("native", "sharded"):
            with pytest.raises(NotSupported, match=r"checkpoints\.format to portable"):
                worker.save_checkpoint(str(tmp_path / form), form=form)
            assert not (tmp_path / form).exists()
    finally:
        worker.shutdown()


MIXTURE = Qwen3MoeConfig(num_hidden_layers=2, num_experts=4, mlp_only_layers=[0])


@pytest.mark.parametrize(
    ("config", "target", "known"),
    [
        (LlamaConfig(num_hidden_layers=1), "lm_head", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (LlamaConfig(num_hidden_layers=1), "mlp", "down_proj, gate_proj"),
        (LlamaConfig(num_hidden_layers=1), "linear_qkv", "down_proj, gate_proj"),
        (Qwen3MoeConfig(num_hidden_layers=1, num_experts=4), "gate_proj", "k_proj, o_proj, q_proj, v_proj"),
        (MIXTURE, "gate", "down_proj, gate_proj"),
    ],
)
def test_targets_that_are_no_linear_layers_are_rejected_with_those_that_are(config, target, known):
    with pytest.raises(ConfigError, match=f"{target!r}, which is not a linear layer of .*: {known}"):
        adapter_weights(config, LoraConfig(target_modules=(target,)))


def test_dense_layers_of_a_mixture_have_adapters_and_experts_have_none():
    names = [weight.name for weight in adapter_weights(MIXTURE, LoraConfig(target_modules=("gate_proj",)))]
    assert names == [f"model.layers.0.mlp.gate_proj.lora_{which}.weight" for which in "AB"]


def test_a_pipeline_stage_without_adapters_is_rejected():
    config, lora = LlamaConfig(num_hidden_layers=2), LoraConfig(target_modules=("layers.0.self_attn.q_proj",))
    require_adapters_on_each_stage(config, lora, Coordinates())
    with pytest.raises(ConfigError, match="no layer of pipeline stage 1"):
        require_adapters_on_each_stage(config, lora, Coordinates(pipeline_size=2))
