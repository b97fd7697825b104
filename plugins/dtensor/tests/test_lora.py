"""LoRA: compatibility with peft, rejected configurations, and models and layouts that the conformance suite lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlframework.base.errors import ConfigError, NotSupported, UserError
from rlframework.generation.remote import RemoteGeneration
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.plugins.manager import create_manager
from rlframework_conformance import cases
from rlframework_conformance.further_oracles import LoraOracle
from rlframework_conformance.layouts import Layout
from rlframework_conformance.policies import InspectedPolicy, run_config
from rlframework_conformance.suites.policy_worker.saving import prompts
from rlframework_conformance.suites.policy_worker.worker_harness import loss_function

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 6.0, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}


# peft asks transformers by a name that it will drop
PEFT_MODEL = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def policy(models, tmp_path):
    """`policy(model, **keys)`: a policy with LoRA in this process, shut down after the test."""
    started = []

    def start(model="untied", layout: Layout | None = None, reference: bool = False, **keys):
        path, device = cases.model(model, models), keys.get("device", "cpu")
        keys = {"lora": LORA, "optimizer": {"lr": 1e-2}, **keys}
        config = run_config("dtensor", path, layout or Layout(), manager=create_manager(), folder=tmp_path, **keys)
        tokens = load_tokenizer(str(path))
        started.append(InspectedPolicy(config, tokens, create_manager(), device=device, init_reference_model=reference))
        return started[-1]

    yield start
    for one in started:
        one.shutdown()


def adapters_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): matrix for name, matrix in found.items()}


@PEFT_MODEL
@pytest.mark.parametrize("targets", [LORA["target_modules"], "all-linear"], ids=["named", "all"])
def test_peft_reads_what_is_saved_and_computes_the_same(policy, models, tmp_path, targets):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained, data = policy(lora=LORA | {"target_modules": targets}), cases.batch()
    for seed in range(2):
        trained.train(cases.batch(seed=seed), loss_function("nll"))
    trained.save_adapter(str(tmp_path / "adapter"))
    kinds = {name.split(".")[-3] for name in adapters_in(tmp_path / "adapter")}
    everything = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert kinds == (everything if targets == "all-linear" else set(targets))
    base = AutoModelForCausalLM.from_pretrained(cases.model("untied", models))
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    real = (torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]).long()
    with torch.no_grad():
        logs = model(input_ids=data["input_ids"], attention_mask=real).logits[:, :-1].log_softmax(-1)
    right = logs.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1) * real[:, 1:]
    torch.testing.assert_close(trained.get_logprobs(data)["logprobs"][:, 1:], right, rtol=1e-5, atol=1e-5)


@PEFT_MODEL
def test_what_peft_wrote_is_loaded(policy, models, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        base = AutoModelForCausalLM.from_pretrained(cases.model("untied", models))
        model = get_peft_model(
            base,
            LoraConfig(r=4, lora_alpha=6, target_modules=LORA["target_modules"], init_lora_weights=False),
        )
    model.save_pretrained(tmp_path / "from-peft")
    given, data = adapters_in(tmp_path / "from-peft"), cases.batch()
    loaded = policy()
    loaded.load_adapter(str(tmp_path / "from-peft"))
    right = LoraOracle(cases.model("untied", models), given, 1.5).logprobs(data)
    torch.testing.assert_close(loaded.get_logprobs(data)["logprobs"], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [{"activation_checkpointing": True}, {"batching": {"mode": "packed"}}], ids=str)
@pytest.mark.parametrize("model", ["tied", "norms_of_heads", "experts"])
def test_steps_match_the_oracle(policy, models, tmp_path, model, keys):
    targets = ["q_proj", "o_proj"] if model == "experts" else LORA["target_modules"]
    trained = policy(model, lora={**LORA, "target_modules": targets}, **keys)
    trained.save_adapter(str(tmp_path / "start"))
    oracle = LoraOracle(cases.model(model, models), adapters_in(tmp_path / "start"), 1.5, lr=1e-2)
    for seed in range(3):
        data = cases.batch(seed=seed)
        got, right = trained.train(data, loss_function("nll")), oracle.step(data, "nll")
        assert got["loss"] == pytest.approx(right.loss, rel=1e-5)
        assert float(got["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=2e-5)


OTHERS = {
    "copies": (Layout(data=2), {"dtensor": {"replicate": 2}}),
    "kept whole": (Layout(data=2), {"dtensor": {"reshard_after_forward": False}}),
    "in CPU memory": (Layout(), {"offload": {"parameters": True, "optimizer": True}}),
}


def started(trained, data, models, folder):
    """Log-probabilities of the start, and an oracle with the adapters of `trained`, which go to `folder`."""
    start = trained.get_logprobs(data)["logprobs"]
    trained.save_adapter(str(folder))
    return start, LoraOracle(cases.model("untied", models), adapters_in(folder), 1.5, lr=1e-2)


@pytest.mark.parametrize("case", OTHERS)
def test_steps_and_reference_match_in_other_layouts(policy, models, tmp_path, case):
    layout, keys = OTHERS[case]
    trained, data = policy(layout=layout, reference=True, **keys), cases.batch()
    start, oracle = started(trained, data, models, tmp_path / "start")
    for seed in range(3):
        assert torch.equal(trained.get_reference_policy_logprobs(data)["reference_logprobs"], start)
        got = trained.train(cases.batch(seed=seed), loss_function("nll"))
        right = oracle.step(cases.batch(seed=seed), "nll")
        assert got["loss"] == pytest.approx(right.loss, rel=1e-5)
        assert float(got["grad_norm"][0]) == pytest.approx(right.grad_norm, rel=2e-5)


def test_bfloat16_keeps_adapters_in_fp32_and_the_reference_is_the_base_bit_for_bit(policy, models, tmp_path):
    trained, data = policy(precision="bfloat16"), cases.batch()
    start = trained.get_logprobs(data)["logprobs"]
    for seed in range(2):
        trained.train(cases.batch(seed=seed), loss_function("nll"))
    trained.save_adapter(str(tmp_path / "adapter"))
    given = adapters_in(tmp_path / "adapter")
    assert {matrix.dtype for matrix in given.values()} == {torch.float32}
    right = LoraOracle(cases.model("untied", models), given, 1.5).logprobs(data)
    torch.testing.assert_close(trained.get_logprobs(data)["logprobs"], right, rtol=3e-2, atol=6e-2)
    fresh = policy(precision="bfloat16", lora=None).get_logprobs(data)["logprobs"]
    assert torch.equal(start, fresh), "with B at 0 the model is its base"


def test_a_checkpoint_resumes_under_another_layout(policy, models, tmp_path):
    first = policy()
    for seed in range(2):
        first.train(cases.batch(seed=seed), loss_function("nll"))
    first.save_checkpoint(str(tmp_path / "model"), str(tmp_path / "optimizer"))
    wanted = [first.train(cases.batch(seed=seed), loss_function("nll")) for seed in (2, 3)]
    second = policy(layout=Layout(data=2))
    second.load_checkpoint(str(tmp_path / "model"), str(tmp_path / "optimizer"))
    for seed, right in zip((2, 3), wanted, strict=True):
        got = second.train(cases.batch(seed=seed), loss_function("nll"))
        assert got["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert float(got["grad_norm"][0]) == pytest.approx(float(right["grad_norm"][0]), rel=1e-4)


def test_adapters_of_another_base_are_rejected_by_its_files(policy, models, tmp_path):
    import json

    trained = policy()
    trained.save_adapter(str(tmp_path / "adapter"))
    told = json.loads((tmp_path / "adapter" / "base.json").read_text())
    [facts] = told["files"].values()
    facts["sha256_of_ends"] = "0" * 64
    (tmp_path / "adapter" / "base.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match="use the base that they were trained on"):
        trained.load_adapter(str(tmp_path / "adapter"))


@pytest.mark.parametrize("target", ["c_attn", "nothing", "lm_head", "mlp"])
def test_non_linear_targets_are_rejected_listing_linear_layers(policy, target):
    model = "learned_positions" if target == "c_attn" else "untied"
    known = "none" if target == "c_attn" else "down_proj, gate_proj, k_proj"
    with pytest.raises(ConfigError, match=f"'{target}', which is not a linear layer.*: {known}"):
        policy(model, lora={"target_modules": [target]})


REFUSED = {
    "policy.dtensor.compile": {"dtensor": {"compile": True}},
    "policy.lora.target_modules": {"lora": {"target_modules": []}},
    "policy.lora.dropout": {"lora": {"dropout": 0.1}},
}


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_unsupported_combinations_are_rejected_before_anything_starts(models, key):
    keys = {"lora": LORA, **REFUSED[key]}
    with pytest.raises((NotSupported, ConfigError), match=key):
        run_config("dtensor", cases.model("untied", models), Layout(), manager=create_manager(), **keys)


def test_without_adapters_there_are_none_to_save(policy, tmp_path):
    with pytest.raises(NotSupported, match=r"policy\.lora is not set"):
        policy(lora=None).save_adapter(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter").exists()


def test_refit_of_adapters_equals_refit_of_merged_weights(models, tmp_path):
    path, manager = cases.model("untied", models), create_manager()
    tokens, sampled, sent = load_tokenizer(str(path)), {}, {}
    for refit in ("merged", "adapters"):
        config = run_config(
            "dtensor",
            path,
            Layout(),
            manager=manager,
            folder=tmp_path,
            generation={"workers": {"group": "inline"}, "max_new_tokens": 6},
            lora={**LORA, "refit": refit},
            optimizer={"lr": 3e-2},
        )
        with InspectedPolicy(config, tokens, manager) as trained:
            generation = RemoteGeneration(config, trained, tokens, manager)
            for seed in range(2):  # the second refit goes into the existing model
                trained.train(cases.batch(seed=seed), loss_function("nll"))
                generation.prepare_for_generation()
                output = generation.generate(prompts())
                sampled.setdefault(refit, []).append(output)
            sent[refit] = generation.pop_metrics()["refit/mb"]
            assert generation.shutdown()
    for merged, adapters in zip(sampled["merged"], sampled["adapters"], strict=True):
        assert torch.equal(merged["output_ids"], adapters["output_ids"])
        assert torch.equal(merged["logprobs"], adapters["logprobs"]), "to the bit: the engines hold the same weights"
    assert sent["adapters"] < sent["merged"] / 2
    assert not torch.equal(sampled["merged"][0]["logprobs"], sampled["merged"][1]["logprobs"])


def test_adapters_are_not_sent_to_engines_in_the_trainers_own_processes(models):
    with pytest.raises(ConfigError, match=r"policy\.lora\.refit"):
        run_config(
            "dtensor", cases.model("untied", models), Layout(), manager=create_manager(), lora={"refit": "adapters"}
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gpu_steps_match_the_oracle_and_the_reference_is_the_base_bit_for_bit(policy, models, tmp_path, precision):
    """fp32 on a GPU may use other kernels than the CPU, so the tolerance is wider than on a CPU."""
    trained, data = policy(device="cuda", precision=precision, reference=True), cases.batch()
    start, oracle = started(trained, data, models, tmp_path / "start")
    for seed in range(3):
        assert torch.equal(trained.get_reference_policy_logprobs(data)["reference_logprobs"], start)
        got = trained.train(cases.batch(seed=seed), loss_function("nll"))
        right = oracle.step(cases.batch(seed=seed), "nll")
        assert got["loss"] == pytest.approx(right.loss, rel=1e-3 if precision == "float32" else 0.1)
