"""The section `generation` for vLLM, and what is checked before anything starts. Needs no vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlframework.base.errors import ConfigError, PluginError
from rlframework.generation import engine_environment
from rlframework.plugins.configure import load_config
from rlframework.plugins.manager import create_manager
from rlframework_vllm import checks, plugin
from rlframework_vllm.config import OWNED, VllmGenerationConfig, VllmKeys
from rlframework_vllm.plugin import rlframework_generation_engines
from rlframework_vllm.runtime import Runtime

ARGUMENTS = """
class EngineArgs:
    model: str = ""
    tensor_parallel_size: int = 1
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int = 0
    max_model_len: int = 0
"""
REGISTRY = """
_TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}
_EMBEDDING_MODELS = {"BertModel": ("bert", "BertModel")}
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "max_position_embeddings": 512,
}
VISION = {"vision_config": {}}
LIGHT = """
import sys
from rlframework.plugins.manager import create_manager
from rlframework_vllm import checks
record = create_manager(["rlframework_vllm.plugin"]).select("generation_engine", "vllm").record
assert record.target == "rlframework_vllm.engine:VllmEngine"
heavy = sorted({"torch", "ray", "transformers", "vllm"} & set(sys.modules))
sys.exit(f"imported {heavy}" if heavy else 0)
"""


@pytest.fixture
def engines(tmp_path) -> Path:
    """The Python of an environment with a package `vllm` of two files, and everything that the engine imports."""
    for name, text in {"engine/arg_utils.py": ARGUMENTS, "model_executor/models/registry.py": REGISTRY}.items():
        file = tmp_path / "site" / "vllm" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text("raise ImportError('it must not be imported')")
    folders = [str(tmp_path / "site"), *(str(Path(__file__).parents[level]) for level in (1, 3))]
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={":".join(folders)} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def problems(tmp_path, engines):
    """`problems(model={...}, **generation)`: key and text of each problem of a run with such a model."""

    def find(model=None, device="cpu", workers=None, **generation) -> dict[str, str]:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**LLAMA, **(model or {})}))
        values = {
            "algorithm": {"name": "grpo"},
            "environment": {"name": "addition"},
            "policy": {"model_name": str(folder)},
        }
        config = load_config(values)
        workers = {"group": "ray", "python": str(engines), **(workers or {})}
        section = VllmGenerationConfig(name="vllm", workers=workers, **generation)
        return {one.key: str(one) for one in checks.check(config.model_copy(update={"generation": section}), device)}

    return find


@pytest.mark.slow
def test_the_record_and_the_checks_import_neither_torch_nor_vllm():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("key", OWNED)
def test_a_key_that_the_plugin_decides_is_rejected_with_what_decides_it(key):
    for given in ({key: "x"}, {"arguments": {key: "x"}}):
        with pytest.raises(ValueError, match=f"{key} cannot be set here: "):
            VllmKeys(**given)
    assert key not in VllmKeys.model_fields


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("generation.vllm.tensor_paralel_size", {"vllm": {"tensor_paralel_size": 2}}),
        ("generation.session_cache_tokens", {"session_cache_tokens": 0}),
        ("generation.cache_after_update", {"cache_after_update": "recompute"}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_an_unknown_key_and_one_of_the_embedded_engine_are_rejected_by_name(key, given):
    values = {"generation": {"name": "vllm", **given}, "policy": {"model_name": "m"}}
    values |= {"algorithm": {"name": "grpo"}, "environment": {"name": "addition"}}
    with pytest.raises(ConfigError, match=key):
        load_config(values, manager=create_manager(["rlframework_vllm.plugin"]))


def test_only_given_keys_are_passed_on():
    assert VllmKeys(max_model_len=64, arguments={"cpu_offload_gb": 2}).given() == {
        "cpu_offload_gb": 2,
        "tensor_parallel_size": 1,
        "enable_prefix_caching": True,
        "max_model_len": 64,
    }


@pytest.mark.slow
def test_a_run_that_can_start_has_no_problems(problems):
    assert problems() == {}
    assert problems(model={"model_type": "qwen2_vl", **VISION}) == {}
    assert problems(model={"head_dim": 8}, device="cuda") == {}  # there all head sizes are left to vLLM


@pytest.mark.parametrize(
    ("key", "said", "given"),
    [
        ("generation.workers", "it needs one of its own", {"workers": {"group": "inline", "python": None}}),
        ("policy.model_name", "does not know the architecture BertModel", {"model": {"architectures": ["BertModel"]}}),
        ("policy.model_name", "attention heads have size 8", {"model": {"head_dim": 8}}),
        ("policy.model_name", "qwen2_vl, qwen2_5_vl, not with llava", {"model": {"model_type": "llava", **VISION}}),
        (
            "generation.vllm.tensor_parallel_size",
            "must be 1 for models that take images",
            {"model": {"model_type": "qwen2_vl", **VISION}, "vllm": {"tensor_parallel_size": 2}},
        ),
        (
            "generation.vllm.kv_cache_memory_bytes",
            "no room for one sequence",
            {"vllm": {"kv_cache_memory_bytes": 9999}},
        ),
        ("generation.vllm.block_size", "has no such argument", {"vllm": {"block_size": 16}}),
        ("generation.vllm.numa_bind", "has no such argument", {"vllm": {"arguments": {"numa_bind": True}}}),
        (
            "generation.refit.probes",
            "leaves a refit without proof",
            {"vllm": {"tensor_parallel_size": 2}, "refit": {"probes": 0}},
        ),
        ("generation.temperature", "takes 0 and 0.01 to 2", {"temperature": 2.5}),
        ("generation.workers.python", "does not answer", {"workers": {"python": "/nowhere/python"}}),
    ],
)
def test_what_keeps_it_from_starting_is_one_error_before_anything_starts(problems, key, said, given):
    found = problems(**given)
    assert list(found) == [key]
    assert said in found[key]


@pytest.mark.slow
def test_the_python_of_the_engines_is_found_as_workers_find_it(problems, engines, monkeypatch):
    monkeypatch.setenv("HOME", str(engines.parent))
    monkeypatch.chdir(engines.parent)
    for given in ("~/python", "./python"):
        engine_environment.answer_in.cache_clear()
        assert problems(workers={"python": given}) == {}
        section = VllmGenerationConfig(name="vllm", workers={"group": "ray", "python": given})
        run = load_config(
            {"algorithm": {"name": "grpo"}, "environment": {"name": "addition"}, "policy": {"model_name": "m"}}
        )
        described = checks.describe(run.model_copy(update={"generation": section}))
        assert re.fullmatch(rf"vLLM .+ in {re.escape(sys.executable)}", described)


def test_the_record_tells_the_longest_row_of_an_engine():
    (record,) = rlframework_generation_engines()
    assert record.longest_row(VllmGenerationConfig(name="vllm")) is None
    assert record.longest_row(VllmGenerationConfig(name="vllm", vllm={"max_model_len": 128})) == 128


def test_without_workers_the_missing_key_is_named():
    values = {"algorithm": {"name": "grpo"}, "environment": {"name": "addition"}, "policy": {"model_name": "none"}}
    config = load_config(values).model_copy(update={"generation": VllmGenerationConfig(name="vllm")})
    (problem,) = checks.check(config, "cpu")
    assert "generation.workers is not set" in str(problem)


@pytest.mark.slow
def test_an_environment_without_vllm_is_an_error_with_the_command_that_installs_it(problems, engines):
    hidden = "import sys; sys.modules['vllm'] = None"  # also where this Python has vLLM
    engines.parent.joinpath("site", "sitecustomize.py").write_text(hidden)
    text = problems()["generation.name"]
    assert "vllm needs vllm, not installed in the engines' environment" in text
    for install in ("rlframework-core[vllm]' 'rlframework-vllm[cpu]'", "-m pip install -e . -e 'plugins/vllm[cpu]'"):
        assert f"{install} && {sys.executable} -m pip uninstall -y torchvision torchaudio torchcodec triton " in text
    on_gpu = problems(device="cuda")["generation.name"]
    assert "-m pip install -e . -e 'plugins/vllm[gpu]'" in on_gpu
    assert "uninstall" not in on_gpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch", "torchvision", "fits"),
    [("2.13.0+cpu", "0.28.0", False), ("2.13.0+cpu", "0.28.0+cpu", True), ("2.13.0", "0.28.0", True)],
)
def test_a_torchvision_for_another_torch_is_an_error(torch, torchvision, fits, problems, engines):
    """Seen with pip's torchvision 0.28.0: `import vllm` fails with "operator torchvision::nms does not exist"."""
    for name, version in (("torch", torch), ("torchvision", torchvision)):
        folder = engines.parent / "site" / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    found = problems()
    if fits:
        assert found == {}
        return
    assert list(found) == ["generation.workers.python"]
    (text,) = found.values()
    assert "torchvision 0.28.0 is not one for torch 2.13.0+cpu" in text
    assert f"`{sys.executable} -m pip uninstall -y torchvision " in text


def test_a_vllm_that_cannot_be_imported_is_not_blamed_on_settings(tmp_path, monkeypatch):
    package = tmp_path / "vllm" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # it sets some for vLLM
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "rlframework_vllm.inside_vllm", raising=False)
    with pytest.raises(PluginError, match=r"vLLM cannot be imported .*torchvision::nms .* uninstall -y torch"):
        Runtime(model="m")


def test_the_default_cache_has_room_for_a_sequence():
    assert checks.default_cache_bytes(LLAMA, "float32", None) == 1 << 30
    long = {**LLAMA, "max_position_embeddings": 1 << 22}
    of_a_token = 2 * 2 * 2 * 32 * 4
    assert checks.default_cache_bytes(long, "float32", None) == of_a_token * ((1 << 22) + 32)
    assert checks.default_cache_bytes(long, "bfloat16", 64) == 1 << 30
    assert checks.default_cache_bytes({"model_type": "other"}, "float32", None) == 1 << 30


def test_the_doctor_shows_the_vllm_of_a_run_that_uses_it(monkeypatch):
    monkeypatch.setattr(plugin, "describe", lambda config: "vLLM 1 in python")
    values = {"algorithm": {"name": "grpo"}, "environment": {"name": "addition"}, "policy": {"model_name": "none"}}
    config = load_config(values)
    [check] = plugin.rlframework_doctor_checks()
    assert check.topic == "run"
    assert [*check.function(None), *check.function(config)] == []
    [finding] = check.function(config.model_copy(update={"generation": VllmGenerationConfig(name="vllm")}))
    assert (finding.level, finding.text) == ("ok", "vLLM 1 in python")
