"""Mixtures of experts: names in files, expert parallelism, and the load-balancing loss."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import ConfigError, UserError
from rlframework.config.policy import PolicyConfig
from rlframework.generation.driver import Generation
from rlframework.generation.engine_model import EngineModel
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.models import loading
from rlframework.models.file_weights import FileWeight
from rlframework.models.load_balancing import real_tokens
from rlframework.plugins.manager import create_manager
from rlframework.policy.microbatches.data_processor import make_dummy, make_microbatch
from rlframework.policy.microbatches.shapes import Padding
from rlframework.workers import process_groups
from rlframework_conformance import cases
from rlframework_conformance.layouts import Layout
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.policies import InspectedPolicy, read_weights, run_config
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.experts import require_experts
from rlframework_dtensor.mesh import Sizes
from rlframework_dtensor.model_builder import build_model
from rlframework_dtensor.shards import gather_full, local_shard
from rlframework_dtensor.worker import DTensorPolicyWorker


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("mixtures")


@pytest.fixture
def policy(models, tmp_path):
    """`policy(layout, **keys)`: one at a time, on the suite's mixture."""
    started = []

    def start(layout: str, **keys):
        while started:
            started.pop().shutdown()
        path, manager = cases.model("experts", models), create_manager()
        config = run_config("dtensor", path, Layout.parse(layout), manager=manager, folder=tmp_path, **keys)
        reference = keys.get("batching") is not None
        started.append(InspectedPolicy(config, load_tokenizer(str(path)), manager, init_reference_model=reference))
        return started[-1]

    yield start
    while started:
        started.pop().shutdown()


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_shard_of_rows_is_a_view_with_its_place_in_the_weight():
    stack, rows = torch.arange(24.0).view(2, 4, 3), torch.arange(12.0).view(4, 3)
    right = [[18.0, 19.0, 20.0], [21.0, 22.0, 23.0]]  # the second half of the second expert
    for whole, expert in ((stack, 1), (rows + 12, None)):
        shard, where = local_shard(FileWeight("up", "both", (2, 3), tuple(whole.shape), expert, 2), whole)
        assert shard.tolist() == right
        assert where == (slice(0, 2), slice(0, 3))
        shard.zero_()
        assert whole.flatten()[-6:].abs().sum() == 0


@pytest.mark.slow
def test_a_refit_updates_an_engines_experts_in_place(models):
    """The second refit goes into the existing module; its output must be that of the new weights."""
    path = cases.model("experts", models)
    right = load_file(path / "model.safetensors")
    engine = EngineModel(str(path), "cpu", "float32")
    module = engine.load(right.items())
    changed = {name: weight + 1.0 for name, weight in right.items()}
    assert engine.load(changed.items()) is module
    held = module.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    path = "model.layers.1.mlp.experts.3"
    gate_and_up = [changed[f"{path}.{kind}_proj.weight"] for kind in ("gate", "up")]
    assert torch.equal(held[3], torch.cat(gate_and_up))
    with pytest.raises(UserError, match=r"missing: model.layers.1.mlp.experts.3.gate_proj.weight"):
        engine.load((name, weight) for name, weight in right.items() if name != f"{path}.gate_proj.weight")


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_expert_files_are_read_without_a_whole_model(models, tmp_path, monkeypatch, together):
    """Also if the files hold experts in the model's own layout, which transformers reads too."""
    source = cases.model("experts", models)
    weights = right = load_file(source / "model.safetensors")
    if together:
        weights = {name: weight for name, weight in right.items() if ".experts." not in name}
        for layer in (0, 1):
            path = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                [right[f"{path}.{n}.{kind}_proj.weight"] for n in range(4)] for kind in ("gate", "up", "down")
            )
            halves = [torch.cat(both) for both in zip(gate, up, strict=True)]
            weights |= {f"{path}.gate_up_proj": torch.stack(halves), f"{path}.down_proj": torch.stack(down)}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(loading, "load_model", None)  # no whole model is made
    built = build_model(
        PolicyConfig(model_name=str(tmp_path), precision="bfloat16"),
        DTensorConfig(),
        WorkerContext(),
        Sizes(1, 1, 1, 1),
        cases.tokenizer(),
        torch.device("cpu"),
    )
    try:
        held = {name: gather_full(weight.detach()) for name, weight in built.model.named_parameters()}
        found = built.layout.weights
        assert found.keys() == right.keys()
        assert all(torch.equal(part.of(held[part.source]), right[name]) for name, part in found.items())
    finally:
        process_groups.leave()


@pytest.mark.slow
def test_qwen2_moe_training_matches_the_oracle(tmp_path):
    """Qwen2-MoE, whose blocks also have a shared expert for all tokens."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    tokenizer = cases.tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40}
    sizes |= {"shared_expert_intermediate_size": 24, "max_position_embeddings": 64, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    made = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))
    cases.randomize(made)
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = PolicyConfig(
        model_name=str(tmp_path),
        train_global_batch_size=8,
        train_micro_batch_size=3,
        router_aux_loss_coef=0.5,
        optimizer={"lr": 1e-4},
    )
    worker = DTensorPolicyWorker(config, tokenizer, init_reference_model=False)
    oracle, data = Oracle(tmp_path, router_loss=0.5), cases.batch()
    loss = oracle.router_loss(data).item()
    result, right = worker.train(data, NLLLoss()), oracle.step(data, "nll")
    assert float(result["global_loss"]) == pytest.approx(right.loss, rel=1e-5)
    assert float(result["grad_norm"]) == pytest.approx(right.grad_norm, rel=1e-5)
    assert result["metrics"]["router_aux_loss"] == pytest.approx(loss, rel=1e-5)
    saved = dict(worker.engine.gather_weights(worker.engine.weight_specs()))
    assert saved.keys() == read_weights(tmp_path).keys()
    for name, weight in oracle.weights().items():
        assert (saved[name] - weight).norm() <= 2e-4 * weight.norm(), name
    worker.shutdown()


# -- experts on several workers ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=2", "context=2"])
def test_training_without_expert_parallelism_matches_the_oracle(policy, layout):
    """FSDP shards the experts of each block and gathers them."""
    data, split = cases.batch(), policy(layout, max_grad_norm=None)
    oracle = Oracle(split.config.policy.model_name, max_grad_norm=None)
    torch.testing.assert_close(split.get_logprobs(data)["logprobs"], oracle.logprobs(data), rtol=1e-5, atol=1e-5)
    for seed in range(2):
        data = cases.batch(seed=seed)
        result, right = split.train(data, NLLLoss()), oracle.step(data, "nll")
        assert result["loss"] == pytest.approx(right.loss, rel=1e-5)
        assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=1e-5)


@pytest.mark.slow
def test_checkpoints_resume_with_and_without_expert_parallelism(policy, tmp_path):
    """Sharded from two workers to one, whole from one to two; the engine generates with the current experts."""
    steps = [cases.batch(seed=seed) for seed in range(3)]
    spread = policy("data=2,expert=2", batching={"mode": "packed", "tokens": 40}, activation_checkpointing="selective")
    oracle = Oracle(spread.config.policy.model_name)
    reference = oracle.logprobs(steps[0])
    assert spread.train(steps[0], NLLLoss())["loss"] == pytest.approx(oracle.step(steps[0], "nll").loss, rel=1e-5)
    _assert_generates_with_its_weights(spread)
    torch.testing.assert_close(
        spread.get_reference_policy_logprobs(steps[0])["reference_logprobs"], reference, rtol=1e-5, atol=1e-5
    )
    pieces = str(tmp_path / "pieces" / "model"), str(tmp_path / "pieces" / "optimizer")
    spread.save_checkpoint(*pieces, form="sharded")

    alone = policy("data=1")
    alone.load_checkpoint(*pieces)
    assert alone.train(steps[1], NLLLoss())["loss"] == pytest.approx(oracle.step(steps[1], "nll").loss, rel=1e-5)
    parts = str(tmp_path / "whole" / "model"), str(tmp_path / "whole" / "optimizer")
    alone.save_checkpoint(*parts)

    again = policy("data=2,expert=2")
    again.load_checkpoint(*parts)
    assert again.train(steps[2], NLLLoss())["loss"] == pytest.approx(oracle.step(steps[2], "nll").loss, rel=1e-5)
    again.save_pretrained(str(tmp_path / "end"))
    found = read_weights(tmp_path / "end")
    for name, weight in oracle.weights().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


def _assert_generates_with_its_weights(policy) -> None:
    prompts = cases.batch(2)
    rows = {"input_ids": prompts["input_ids"], "input_lengths": prompts["input_lengths"], "seeds": torch.arange(2)}
    tokenizer = load_tokenizer(policy.config.policy.model_name)
    output = Generation(policy, tokenizer).generate(type(prompts)(rows))
    lengths = output["unpadded_sequence_lengths"]
    data = type(prompts)({"input_ids": output["output_ids"], "input_lengths": lengths})
    places = torch.arange(data["input_ids"].shape[1])
    answers = (places >= (lengths - output["generation_lengths"])[:, None]) & (places < lengths[:, None])
    own = policy.get_logprobs(data)["logprobs"] * answers
    torch.testing.assert_close(output["logprobs"], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "layout", "keys", "message"),
    [
        ("untied", "data=2,expert=2", {}, r"parallelism.expert.*no experts of the model type 'llama'"),
        ("experts", "data=8,expert=8", {}, r"parallelism.expert.*has 4 experts, not divisible by .*expert=8"),
        (
            "experts",
            "data=2,expert=4",
            {},
            r"parallelism.expert.*4 does not divide 2, the number of data-parallel workers",
        ),
        (
            "experts",
            "data=2,tensor=2,expert=2",
            {},
            r"parallelism.expert.*cannot be combined with policy.parallelism.tensor=2",
        ),
        ("experts", "data=2,context=2,expert=2", {}, r"cannot be combined with policy.parallelism.context=2"),
        (
            "experts",
            "data=4,expert=2",
            {"dtensor": {"replicate": 2}},
            r"cannot be combined with policy.dtensor.replicate=2",
        ),
        ("experts", "data=2,expert=2", {"lora": {}}, r"parallelism.expert.*LoRA"),
        (
            "untied",
            "data=1",
            {"router_aux_loss_coef": 0.1},
            r"router_aux_loss_coef.*no experts of the model type 'llama'",
        ),
        ("experts", "context=2", {"router_aux_loss_coef": 0.1}, r"router_aux_loss_coef.*context parallelism"),
        ("experts", "data=1", {"router_aux_loss_coef": -0.1}, r"router_aux_loss_coef"),
    ],
)
def test_unsupported_configurations_are_rejected_before_workers_start(models, model, layout, keys, message):
    with pytest.raises(ConfigError, match=r"(?s)" + message):
        run_config("dtensor", cases.model(model, models), Layout.parse(layout), manager=create_manager(), **keys)


def test_workers_reject_what_the_driver_cannot_check():
    dense = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="llama"))
    odd = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="qwen3_moe", num_experts=6))
    require_experts(dense, 1, router_loss=False)
    require_experts(odd, 3, router_loss=True)
    with pytest.raises(ConfigError, match=r"expert=2 is not possible.*no experts of the model type 'llama'.*to 1"):
        require_experts(dense, 2, router_loss=False)
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef is not possible.*no experts .*'llama'.*to 0"):
        require_experts(dense, 1, router_loss=True)
    with pytest.raises(ConfigError, match=r"the model has 6 experts, not divisible by policy.parallelism.expert=4"):
        require_experts(odd, 4, router_loss=False)
    sizes = {"tensor": 1, "context": 1, "pipeline": 1}
    for world, keys, message in (
        (6, {"expert": 4}, r"expert=4 does not divide 6"),
        (4, {"expert": 2, "tensor": 2}, r"expert=2 cannot be combined with"),
    ):
        parallelism = PolicyConfig(model_name="m", parallelism={**sizes, **keys}).parallelism
        with pytest.raises(ConfigError, match=message):
            Sizes.of(world, parallelism)


# -- the load-balancing loss ------------------------------------------------------------------------------------------


def test_only_tokens_of_real_rows_are_counted():
    data = cases.batch(3)
    data["input_lengths"] = torch.tensor([2, 4, 3])
    data["token_mask"] = (torch.arange(14) < data["input_lengths"][:, None]).float()
    rows = torch.arange(3)
    padded = make_microbatch(data, rows, packed=False, positions="loss", padding=Padding(5))
    assert real_tokens(padded).view(3, 5).int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    packed = make_microbatch(data, rows, packed=True, positions="loss", padding=Padding(5))
    assert real_tokens(packed).int().tolist() == [1] * 9 + [0]
    dummy = make_dummy(data, partial(make_microbatch, packed=True, positions="all"))
    assert not real_tokens(dummy).any()
    many = data.select_indices([0, 1, 2] * 6).slice(0, 17)
    added = make_microbatch(many, torch.arange(17), packed=False, positions="loss", padding=Padding(few=True))
    counts = real_tokens(added).view(18, 128).sum(1).tolist()  # 17 rows are padded to 18, and all to 128 tokens
    assert counts == [2, 4, 3] * 5 + [2, 4, 0]
