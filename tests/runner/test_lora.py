"""Runs that train adapters: their files, resuming, and engines in other processes that merge the adapters."""

from __future__ import annotations

import json

import pytest
import torch
from probe_runs import numbers_of
from safetensors.torch import load_file

from rlframework import run
from rlframework.errors import UserError
from rlframework.evaluation.plan import configurations, find_model
from rlframework.runner.launch import resume
from rlframework.training.checkpoints import checkpoints_in

pytestmark = pytest.mark.slow

LORA = "policy.lora={rank: 4, alpha: 8}"


def options(out, *more):
    lasting = ["algorithm.num_steps=4", "checkpoints.every=2", "algorithm.validation.every=0"]
    return [LORA, f"output_dir={out}", *lasting, "policy.optimizer.lr=1e-2", *more]


def losses(path):
    return {step: row["train/loss"] for step, row in numbers_of(path).items() if "train/loss" in row}


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_run_goes_on_from_adapters_and_ends_with_a_merged_model_and_the_adapters(
    run_config, tiny_llama, tmp_path, algorithm
):
    more = [] if algorithm == "sft" else ["algorithm.loss.kl_coef=0.1", "generation.temperature=1.0"]
    whole = tmp_path / "whole"
    run(run_config(algorithm, *options(whole, *more)))
    run(run_config(algorithm, *options(tmp_path / "two", "algorithm.num_steps=2", *more)))
    resume(tmp_path / "two", ["algorithm.num_steps=4"])
    assert losses(tmp_path / "two") == losses(whole)

    base, merged = load_file(tiny_llama / "model.safetensors"), load_file(whole / "model" / "model.safetensors")
    adapters = load_file(whole / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        layer = "base_model.model." + name.removesuffix(".weight")
        if layer + ".lora_A.weight" in adapters:
            added = 2.0 * adapters[layer + ".lora_B.weight"] @ adapters[layer + ".lora_A.weight"]
            torch.testing.assert_close(merged[name], weight.float() + added, rtol=1e-5, atol=1e-6)
            assert added.abs().max() > 0
        else:
            assert torch.equal(merged[name], weight.float()), name
    newest = checkpoints_in(whole)[-1]
    assert sorted(load_file(newest / "model" / "adapter_model.safetensors")) == sorted(adapters)
    assert not list((newest / "model").glob("model*.safetensors")), "the base is named, and not copied"
    told = json.loads((newest / "model" / "base.json").read_text())
    assert told["model_name"] == str(tiny_llama)
    with pytest.raises(UserError, match="holds LoRA adapters"):
        find_model(str(newest))
    [asked] = configurations([find_model(str(whole))], [])
    assert asked.policy.lora is None, "what is evaluated is merged already"


@pytest.mark.parametrize("transport", ["ipc", "collective"])
def test_engines_in_processes_of_their_own_get_adapters_and_sample_as_those_inside(run_config, tmp_path, transport):
    generation = ["generation.workers={group: processes}", f"generation.refit.transport={transport}"]
    run(run_config("grpo", *options(tmp_path / "inside")))
    run(run_config("grpo", *options(tmp_path / "apart", *generation, "policy.lora.refit=adapters")))
    inside, apart = losses(tmp_path / "inside"), losses(tmp_path / "apart")
    assert apart == pytest.approx(inside, rel=1e-3, abs=1e-5)
