"""`rlframework convert`: checkpoints and models between all formats; training resumes from the results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from probe_runs import call
from safetensors.torch import load_file, save_file

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.base.errors import DataError, UserError
from rlframework.policy.trained_weights import open_saved
from rlframework.runner.launch import resume
from rlframework.runner.models import find_model
from rlframework.runner.parts import build_parts
from rlframework_tools.convert import convert

pytestmark = pytest.mark.slow

STEPS = ("algorithm.num_steps=4", "algorithm.validation={at_start: false, at_end: false}", "checkpoints.every=2")


@pytest.fixture
def finished(run_config, tmp_path):
    """`finished(form)`: the folder of a run of four steps with checkpoints of that format."""

    def make(form: str) -> Path:
        out = tmp_path / f"run-{form}"
        run(run_config("sft", f"output_dir={out}", *STEPS, f"checkpoints.format={form}"))
        return out

    return make


def read(folder: Path) -> dict[str, torch.Tensor]:
    with open_saved(folder) as found:
        return {name: found[name].clone() for name in found}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize(("form", "other"), [("portable", "sharded"), ("sharded", "portable")])
def test_there_and_back_is_the_same_to_the_bit(finished, tmp_path, form, other):
    path = finished(form)
    [_, newest] = checkpoints_in(path)
    told = convert(str(path), str(tmp_path / "there"), other)
    assert told.startswith("done: ")
    assert f"tensors of {newest}, {other}, in {tmp_path / 'there'}" in told
    convert(str(tmp_path / "there"), str(tmp_path / "back"), form)
    for kind in ("model", "optimizer"):
        tensors = (
            len(read(newest / kind)) if other == "sharded" else 0
        )  # one file each: DCP holds one until it is written
        assert len(list((tmp_path / "there" / kind).glob("*.distcp"))) == tensors
        assert_equal(read(newest / kind), read(tmp_path / "there" / kind))
        assert_equal(read(newest / kind), read(tmp_path / "back" / kind))
    for name in ("optimizer/training.json", "optimizer/random.safetensors", "run.json", "model/tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (newest / name).read_bytes()


def test_training_goes_on_from_what_was_converted_where_it_lies(finished, tmp_path):
    whole, other = finished("portable"), finished("sharded")
    shutil.rmtree(checkpoints_in(other)[1])
    [step] = checkpoints_in(other)
    with pytest.raises(UserError, match="already exists; choose another folder"):
        convert(str(step), str(step), "portable")
    convert(str(step), str(step), "portable", overwrite=True)
    assert not list(step.rglob("*.distcp"))
    resume(other)
    assert_equal(read(whole / "model"), read(other / "model"))


def test_a_hugging_face_model_is_the_one_that_was_trained(finished, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = finished("sharded")
    convert(str(path), str(tmp_path / "hf"), "huggingface")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    AutoTokenizer.from_pretrained(tmp_path / "hf")
    right = load_file(path / "model" / "model.safetensors")
    found = dict(loaded.named_parameters())
    for name, weight in right.items():
        assert torch.equal(found[name].detach(), weight), name
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {path.name for path in (path / "model").iterdir()}


def test_large_models_become_several_files(finished, tmp_path, monkeypatch):
    from rlframework.policy.checkpoint import pretrained

    path = finished("sharded")
    monkeypatch.setattr(pretrained, "SHARD_BYTES", 20_000)
    convert(str(path), str(tmp_path / "portable"), "portable")
    assert len(list((tmp_path / "portable" / "model").glob("model-*.safetensors"))) > 1
    assert_equal(read(checkpoints_in(path)[1] / "optimizer"), read(tmp_path / "portable" / "optimizer"))


@pytest.mark.parametrize("form", ["portable", "sharded"])
def test_a_model_has_weights_only_and_the_summary_says_so(run_config, tiny_llama, tmp_path, form):
    half = tmp_path / "half"
    shutil.copytree(tiny_llama, half)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(half / "model.safetensors").items()}
    save_file(weights, half / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((half / "config.json").read_text()) | {"dtype": "bfloat16"}
    (half / "config.json").write_text(json.dumps(config))
    told = convert(str(half), str(tmp_path / "made"), form)
    assert told.endswith("; weights only, as the source has no optimizer state")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model"]
    found = read(tmp_path / "made" / "model")
    assert_equal(found, {name: tensor.float() for name, tensor in weights.items()})
    assert json.loads((tmp_path / "made" / "model" / "config.json").read_text())["dtype"] == "float32"
    with build_parts(run_config("sft", *STEPS)) as parts:
        parts.policy.load_checkpoint(str(tmp_path / "made" / "model"))


def test_invalid_sources_are_errors(finished, tiny_llama, tmp_path):
    path = finished("sharded")
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    new = str(tmp_path / "new")
    for given, to, error, told in (
        (str(path), "gguf", UserError, "--to gguf: must be one of portable, sharded, huggingface"),
        (str(path), "sharded", UserError, "is already sharded"),
        (str(tiny_llama), "huggingface", UserError, "is already huggingface"),
        (str(tmp_path / "nothing"), "portable", UserError, "there is no directory"),
        (str(empty), "portable", DataError, r"neither model\*\.safetensors nor the shards"),
    ):
        with pytest.raises(error, match=told):
            convert(given, new, to)
    for name in (checkpoints_in(path)[0], checkpoints_in(path)[0] / "model"):
        with pytest.raises(UserError, match=f"rlframework convert {name} NEW_FOLDER --to huggingface"):
            find_model(str(name))
    with pytest.raises(UserError, match="holds no checkpoint or model, so --overwrite does not replace it"):
        convert(str(path), str(tmp_path / "photos"), "portable", overwrite=True)
    assert (tmp_path / "photos" / "cat.jpg").exists()
    pieces = checkpoints_in(path)[1] / "optimizer" / "__0_0.distcp"
    content = pieces.read_bytes()
    pieces.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    with pytest.raises(DataError, match=r"optimizer/__0_0\.distcp is damaged"):
        convert(str(path), new, "portable")
    assert not Path(new).exists()


def test_the_command_tells_what_it_did_and_how_it_is_used(finished, tmp_path, capsys):
    path = finished("sharded")
    words = ["convert", path, tmp_path / "hf", "--to", "huggingface"]
    assert call(*words) == 0
    assert "huggingface, in " in capsys.readouterr().out
    assert call(*words) == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert call("convert", "--help") == 0
    assert "rlframework convert runs/grpo models/grpo --to huggingface" in capsys.readouterr().out
