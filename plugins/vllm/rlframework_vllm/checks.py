"""Checks that find errors before vLLM starts. Imports neither torch nor vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlframework.config.sections import RunConfig
from rlframework.doctor.checks import ProbeError, ask
from rlframework.plugins.types import Problem
from rlframework.workers.machine import python_path
from rlframework_vllm.config import VllmGenerationConfig

TEMPERATURES = 0.01, 2.0
"""The temperatures that vLLM takes, besides 0."""

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The sizes of an attention head that vLLM's kernels for CPUs have."""

INSTALL = "{python} -m pip install -e . -e 'plugins/vllm[{extra}]'"
_PATIENCE = 60.0
_CACHE, _WIDTHS = 1 << 30, {"float32": 4, "bfloat16": 2, "float16": 2}


def check(config: RunConfig, device: str) -> list[Problem]:
    """Return what keeps vLLM from serving this run, from the files of the model and of the engine's environment."""
    section, workers = config.generation, config.generation.workers
    if not isinstance(section, VllmGenerationConfig):
        return []
    if workers is None or workers.group == "inline":
        message = "vLLM changes the process that it runs in, so it needs one of its own."
        key = "generation.workers is not set" if workers is None else "generation.workers.group is inline"
        hint = "Set generation.workers.group to processes or ray."
        return [Problem("generation.workers", f"{key}. {message}", hint)]
    found, (low, high) = environment(python_path(workers.python) or sys.executable), TEMPERATURES
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
    workers = config.generation.workers
    found = environment(python_path(workers.python if workers else None) or sys.executable)
    return f"vLLM {found['version'] or 'is not installed'} in {found['python']}"


@lru_cache(8)
def environment(python: str) -> Mapping[str, Any]:
    """Return what `probe` finds out in the environment of `python`; `error`: why it could not."""
    try:
        return dict(ask([python, "-P", str(Path(__file__).with_name("probe.py"))], _PATIENCE))
    except ProbeError as error:
        return {"python": python, "version": "", "missing": [], "error": str(error)}


def _environment_problems(found: Mapping[str, Any], section: VllmGenerationConfig, device: str) -> Iterator[Problem]:
    python, keys = found["python"], section.vllm.given()
    if "error" in found:
        hint = "Give the Python of an environment with vLLM (docs/vllm.md)."
        yield Problem("generation.workers.python", f"{python} does not answer: {found['error']}.", hint)
    elif found["missing"]:
        command = INSTALL.format(python=python, extra="cpu" if device == "cpu" else "gpu")
        message = f"vllm needs {', '.join(found['missing'])}, not installed in the engines' environment ({python})."
        hint = (
            "Run `make vllm` and set generation.workers.group=ray and generation.workers.python=.venv-vllm/bin/python, "
            f"or install them there: `{command}` (docs/vllm.md)."
        )
        yield Problem("generation.name", message, hint)
    for key in sorted(keys.keys() - set(found.get("arguments") or keys)):
        yield Problem(f"generation.vllm.{key}", f"vLLM {found['version']} has no such argument.", "Remove the key.")


def _model(
    config: RunConfig, section: VllmGenerationConfig, found: Mapping[str, Any], device: str
) -> Iterator[Problem]:
    file, keys = Path(config.policy.model_name) / "config.json", section.vllm
    if not file.is_file():  # on the Hub: vLLM itself says so when it starts
        return
    model = json.loads(file.read_text(encoding="utf-8"))
    names, known = model.get("architectures") or ["of no name"], set(found.get("architectures") or ())
    model |= model.get("text_config") or {}
    other = "Set generation.name=transformers, or {}."
    if known and not known & set(names):
        message = f"vLLM {found['version']} does not know the architecture {', '.join(names)}."
        yield Problem("policy.model_name", message, other.format("install a vLLM that has it"))
    size = _head_size(model)
    if device == "cpu" and size and size not in HEAD_SIZES:
        message = f"its attention heads have size {size}; for a CPU, vLLM has {', '.join(map(str, HEAD_SIZES))}."
        yield Problem("policy.model_name", message, other.format("use a GPU"))
    dtype = config.generation.refit.dtype
    precision = config.policy.precision if dtype == "auto" else dtype
    needed = _sequence_bytes(model, precision, keys.max_model_len) // keys.tensor_parallel_size
    if keys.kv_cache_memory_bytes is not None and keys.kv_cache_memory_bytes < needed:
        message = f"{keys.kv_cache_memory_bytes} bytes have no room for one sequence, which takes {needed}."
        hint = "Raise it, or lower generation.vllm.max_model_len."
        yield Problem("generation.vllm.kv_cache_memory_bytes", message, hint)


def default_cache_bytes(model: Mapping[str, Any], precision: str, max_model_len: int | None) -> int:
    """Return the bytes of the cache on a CPU: 1 GiB, or those of one sequence; `model`: its configuration."""
    return max(_CACHE, _sequence_bytes(model, precision, max_model_len))


def _sequence_bytes(model: Mapping[str, Any], precision: str, max_model_len: int | None) -> int:
    """Return the bytes of the cache of one sequence; 0 if the configuration has other keys than most."""
    heads = model.get("num_key_value_heads") or model.get("num_attention_heads") or 0
    tokens = (max_model_len or model.get("max_position_embeddings") or 0) + 32  # a block more
    return int(2 * (model.get("num_hidden_layers") or 0) * heads * _head_size(model) * tokens * _WIDTHS[precision])


def _head_size(model: Mapping[str, Any]) -> int:
    return int(model.get("head_dim") or (model.get("hidden_size") or 0) // (model.get("num_attention_heads") or 1))
