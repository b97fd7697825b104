"""Mixtures of experts: names of files, experts spread over workers, and the loss of the routers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlframework.algorithms.losses import NLLLoss
from rlframework.config.policy import PolicyConfig
from rlframework.conformance import cases
from rlframework.conformance.layouts import Layout
from rlframework.conformance.oracle import Oracle
from rlframework.conformance.policies import InspectedPolicy, read_weights, run_config
from rlframework.errors import ConfigError, UserError
from rlframework.generation.client import Generation
from rlframework.generation.engine_model import OwnModel
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.microbatches.data_processor import make_dummy, make_microbatch
from rlframework.models.file_names import FileWeight, file_weights, gathered
from rlframework.models.load_balancing import real_tokens
from rlframework.plugins.manager import create_manager
from rlframework.workers import process_groups
from rlframework_dtensor import loading
from rlframework_dtensor.build import build_model
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.experts import require_experts
from rlframework_dtensor.file_names import here
from rlframework_dtensor.mesh import Sizes
from rlframework_dtensor.shards import whole
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


def a_mixture(kind: str = "qwen3_moe"):
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type=kind)))


# -- names ------------------------------------------------------------------------------------------------------------


def test_each_expert_is_a_weight_of_its_own_outside():
    tensors = {
        "a.mlp.experts.gate_up_proj": torch.arange(24.0).view(2, 4, 3),
        "a.mlp.experts.down_proj": torch.arange(12.0).view(2, 3, 2),
        "a.mlp.gate.weight": torch.zeros(2, 3),
    }
    found = file_weights(a_mixture(), tensors)
    assert {name: weight.shape for name, weight in found.items()} == {
        "a.mlp.experts.0.gate_proj.weight": (2, 3),
        "a.mlp.experts.0.up_proj.weight": (2, 3),
        "a.mlp.experts.1.gate_proj.weight": (2, 3),
        "a.mlp.experts.1.up_proj.weight": (2, 3),
        "a.mlp.experts.0.down_proj.weight": (3, 2),
        "a.mlp.experts.1.down_proj.weight": (3, 2),
        "a.mlp.gate.weight": (2, 3),
    }
    up = found["a.mlp.experts.1.up_proj.weight"]
    right = torch.tensor([[18.0, 19.0, 20.0], [21.0, 22.0, 23.0]])  # the second half of the second expert
    assert torch.equal(up.of(tensors[up.source]), right)
    part, where = here(up, tensors[up.source])
    assert torch.equal(part, right)
    assert where == (slice(0, 2), slice(0, 3))
    part.zero_()
    assert tensors[up.source][1, 2:].abs().sum() == 0
    assert list(file_weights(a_mixture("mixtral"), tensors)) == list(tensors)


def test_a_tensor_is_gathered_once_for_names_that_follow():
    names = ["e.0", "e.1", "w", "e.0"]
    weights = {f"e.{n}": FileWeight(f"e.{n}", "e", (2, 2), n) for n in (0, 1)} | {"w": FileWeight("w", "w", (2,))}
    tensors, asked = {"e": torch.arange(8.0).view(2, 2, 2), "w": torch.ones(2)}, []

    def gather(source):
        asked.append(source)
        return tensors[source]

    found = [(name, weight.tolist()) for name, weight in gathered(names, weights, gather)]
    first, second = [[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]
    assert found == [("e.0", first), ("e.1", second), ("w", [1.0, 1.0]), ("e.0", first)]
    assert asked == ["e", "w", "e"]


def test_an_engine_takes_experts_of_a_refit_in_place(models):
    """The second time into the module that is there; what it answers is of the new weights."""
    path = cases.model("experts", models)
    right = load_file(path / "model.safetensors")
    engine = OwnModel(str(path), "cpu", "float32")
    module = engine.load(right.items())
    changed = {name: weight + 1.0 for name, weight in right.items()}
    assert engine.load(changed.items()) is module
    held = module.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    path = "model.layers.1.mlp.experts.3"
    gate_and_up = [changed[f"{path}.{kind}_proj.weight"] for kind in ("gate", "up")]
    assert torch.equal(held[3], torch.cat(gate_and_up))
    with pytest.raises(UserError, match=r"missing: model.layers.1.mlp.experts.3.gate_proj.weight"):
        engine.load((name, weight) for name, weight in right.items() if name != f"{path}.gate_proj.weight")


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_files_of_experts_are_read_without_a_whole_model(models, tmp_path, monkeypatch, together):
    """Also where files hold experts as the model does, which transformers reads too."""
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
    monkeypatch.setattr(loading, "load_whole", None)  # no whole model is made
    built = build_model(
        PolicyConfig(model_name=str(tmp_path), precision="bfloat16"),
        DTensorConfig(),
        WorkerContext(),
        Sizes(1, 1, 1, 1),
        cases.tokenizer(),
        torch.device("cpu"),
    )
    try:
        held = {name: whole(weight.detach()) for name, weight in built.model.named_parameters()}
        found = file_weights(built.model, held)
        assert found.keys() == right.keys()
        assert all(torch.equal(part.of(held[part.source]), right[name]) for name, part in found.items())
    finally:
        process_groups.leave()


def test_the_other_mixture_of_the_family_learns_as_the_oracle(tmp_path):
    """Qwen2-MoE, whose blocks also have an expert that all tokens go to."""
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
    saved = dict(worker.gather_weights(worker.weight_specs()))
    assert saved.keys() == read_weights(tmp_path).keys()
    for name, weight in oracle.weights().items():
        assert (saved[name] - weight).norm() <= 2e-4 * weight.norm(), name
    worker.shutdown()


# -- experts on several workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["data=2", "context=2"])
def test_a_mixture_that_is_not_spread_learns_as_the_oracle(policy, layout):
    """FSDP has some experts of each block in each process, and gathers them."""
    data, split = cases.batch(), policy(layout, max_grad_norm=None)
    oracle = Oracle(split.config.policy.model_name, max_grad_norm=None)
    torch.testing.assert_close(split.get_logprobs(data)["logprobs"], oracle.logprobs(data), rtol=1e-5, atol=1e-5)
    for seed in range(2):
        data = cases.batch(seed=seed)
        result, right = split.train(data, NLLLoss()), oracle.step(data, "nll")
        assert result["loss"] == pytest.approx(right.loss, rel=1e-5)
        assert float(result["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=1e-5)


@pytest.mark.slow
def test_what_experts_on_two_workers_wrote_goes_on_on_one_and_back(policy, tmp_path):
    """In pieces from two workers to one, whole from one to two; and the engine generates with the experts of now."""
    steps = [cases.batch(seed=seed) for seed in range(3)]
    spread = policy("data=2,expert=2", batching={"mode": "packed", "tokens": 40}, activation_checkpointing=True)
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
    output = Generation(policy.worker_group, policy.config.generation, tokenizer).generate(type(prompts)(rows))
    lengths = output["unpadded_sequence_lengths"]
    data = type(prompts)({"input_ids": output["output_ids"], "input_lengths": lengths})
    places = torch.arange(data["input_ids"].shape[1])
    answers = (places >= (lengths - output["generation_lengths"])[:, None]) & (places < lengths[:, None])
    own = policy.get_logprobs(data)["logprobs"] * answers
    torch.testing.assert_close(output["logprobs"], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "layout", "keys", "message"),
    [
        ("untied", "data=2,expert=2", {}, r"parallelism.expert.*type 'llama' has no experts that this backend knows"),
        ("experts", "data=8,expert=8", {}, r"parallelism.expert.*has 4 experts.*expert=8 does not divide"),
        ("experts", "data=2,expert=4", {}, r"parallelism.expert.*4 does not divide 2, the workers that share the rows"),
        ("experts", "data=2,tensor=2,expert=2", {}, r"parallelism.expert.*not spread where policy.parallelism.tensor"),
        ("experts", "data=2,context=2,expert=2", {}, r"not spread where policy.parallelism.context is 2"),
        ("experts", "data=4,expert=2", {"dtensor": {"replicate": 2}}, r"where policy.dtensor.replicate is 2"),
        ("experts", "data=2,expert=2", {"lora": {}}, r"parallelism.expert.*adapters"),
        ("untied", "data=1", {"router_aux_loss_coef": 0.1}, r"router_aux_loss_coef.*'llama' has no experts"),
        ("experts", "context=2", {"router_aux_loss_coef": 0.1}, r"router_aux_loss_coef.*context parallelism"),
        ("experts", "data=1", {"router_aux_loss_coef": -0.1}, r"router_aux_loss_coef"),
    ],
)
def test_what_cannot_be_is_refused_before_a_worker_starts(models, model, layout, keys, message):
    with pytest.raises(ConfigError, match=r"(?s)" + message):
        run_config("dtensor", cases.model(model, models), Layout.parse(layout), manager=create_manager(), **keys)


def test_workers_refuse_too_where_the_driver_does_not_see_the_model():
    dense = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="llama"))
    odd = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="qwen3_moe", num_experts=6))
    require_experts(dense, 1, router_loss=False)
    require_experts(odd, 3, router_loss=True)
    with pytest.raises(ConfigError, match=r"policy.parallelism.expert=2 cannot be.*'llama' has no experts.*to 1"):
        require_experts(dense, 2, router_loss=False)
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef cannot be.*'llama' has no experts.*to 0"):
        require_experts(dense, 1, router_loss=True)
    with pytest.raises(ConfigError, match=r"the model has 6 experts, which policy.parallelism.expert=4"):
        require_experts(odd, 4, router_loss=False)
    sizes = {"tensor": 1, "context": 1, "pipeline": 1}
    for world, keys, message in (
        (6, {"expert": 4}, r"expert=4 does not divide 6"),
        (4, {"expert": 2, "tensor": 2}, r"expert=2 goes with none of"),
    ):
        parallelism = PolicyConfig(model_name="m", parallelism={**sizes, **keys}).parallelism
        with pytest.raises(ConfigError, match=message):
            Sizes.of(world, parallelism)


# -- the loss of the routers ------------------------------------------------------------------------------------------


def test_the_tokens_that_count_are_those_of_rows():
    data = cases.batch(3)
    data["input_lengths"] = torch.tensor([2, 4, 3])
    data["token_mask"] = (torch.arange(14) < data["input_lengths"][:, None]).float()
    rows = torch.arange(3)
    padded = make_microbatch(data, rows, packed=False, positions="loss", pad_multiple=5)
    assert real_tokens(padded).view(3, 5).int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    packed = make_microbatch(data, rows, packed=True, positions="loss", pad_multiple=5)
    assert real_tokens(packed).int().tolist() == [1] * 9 + [0]
    assert not real_tokens(make_dummy(data, packed=True)).any()
