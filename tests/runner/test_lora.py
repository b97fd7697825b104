"""Runs that train adapters: their files, resuming, and engines in other processes that merge the adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from probe_runs import numbers_of
from safetensors.torch import load_file

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.base.errors import DataError, UserError
from rlframework.runner.launch import resume
from rlframework.runner.models import configurations, find_model
from rlframework_tools.convert import convert

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
    with pytest.raises(UserError, match=f"holds LoRA adapters.*: rlframework convert {newest} NEW_FOLDER --to hugging"):
        find_model(str(newest))
    [asked] = configurations([find_model(str(whole))], [])
    assert asked.policy.lora is None, "what is evaluated is merged already"


def test_adapters_of_a_checkpoint_are_merged_into_a_model_directory(run_config, tmp_path):
    """The same one, to the bit, that the run writes when it ends with these adapters."""
    out, made = tmp_path / "run", tmp_path / "made"
    run(run_config("sft", *options(out)))
    for number, source in enumerate((out, checkpoints_in(out)[-1], out / "adapter")):
        convert(str(source), f"{made}{number}", "huggingface")
        ours, theirs = Path(f"{made}{number}"), out / "model"
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()} - {"checksums.json"}
        merged, wanted = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
        assert merged.keys() == wanted.keys()
        assert all(torch.equal(merged[name], wanted[name]) for name in wanted)
        assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()
    convert(str(checkpoints_in(out)[0]), str(tmp_path / "best"), "huggingface")
    earlier = load_file(tmp_path / "best" / "model.safetensors")
    assert not all(torch.equal(earlier[name], wanted[name]) for name in wanted)
    for to, message in (("sharded", "--to huggingface merges them"), ("portable", "is already portable")):
        with pytest.raises(UserError, match=message):
            convert(str(out), str(tmp_path / "no"), to)


def test_adapters_are_not_merged_into_another_base(run_config, tmp_path):
    out = tmp_path / "run"
    run(run_config("sft", *options(out, "algorithm.num_steps=2")))
    file = out / "adapter" / "adapter_config.json"
    values = json.loads(file.read_text())
    for base, message in (
        (str(tmp_path / "gone"), "neither a directory here nor a downloaded model; a relative path counts from"),
        (str(out / "model"), "were trained on .*, whose files differ"),
    ):
        file.write_text(json.dumps(values | {"base_model_name_or_path": base}))
        with pytest.raises(DataError, match=message):
            convert(str(out / "adapter"), str(tmp_path / "new"), "huggingface")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("transport", ["ipc", "collective"])
def test_engines_in_processes_of_their_own_get_adapters_and_sample_as_those_inside(run_config, tmp_path, transport):
    generation = ["generation.workers={group: processes}", f"generation.refit.transport={transport}"]
    run(run_config("grpo", *options(tmp_path / "inside")))
    run(run_config("grpo", *options(tmp_path / "apart", *generation, "policy.lora.refit=adapters")))
    inside, apart = losses(tmp_path / "inside"), losses(tmp_path / "apart")
    assert apart == pytest.approx(inside, rel=1e-3, abs=1e-5)
