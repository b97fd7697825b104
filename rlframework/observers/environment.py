"""`environment.json` in a run's directory: its software, its machine, and the run's id.

Contains no user names, and no environment variables except `VARIABLES`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlframework.files import write_atomically
from rlframework.observers import host
from rlframework.plugins.listing import PluginListing
from rlframework.secrets import clean_command
from rlframework.workers.machine import cpu_count

ENVIRONMENT_FILE = "environment.json"

PACKAGES = (
    "rlframework-core", "torch", "transformers", "tokenizers", "datasets", "numpy", "pyarrow", "ray", "safetensors",
    "tensordict", "deepspeed", "megatron-core", "transformer-engine", "flash-attn", "peft", "math-verify", "wandb",
    "mlflow-skinny",
)  # fmt: skip
"""Distributions whose versions are recorded if they are installed, besides those of plugins."""

VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "RLFRAMEWORK_DISABLE_PLUGINS", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE",
)  # fmt: skip
"""The only environment variables that are recorded."""


def write_environment(output_dir: Path, plugins: Iterable[PluginListing] = ()) -> dict[str, Any]:
    """Describe this process and its machine in `environment.json`, and return the content.

    A resumed run keeps its `run_id`; its previous environments are stored under `earlier`.
    """
    before = read_environment(output_dir)
    earlier = before.pop("earlier", [])
    versions = {name: host.package_version(name) for name in PACKAGES}
    found = {
        "run_id": before.get("run_id", uuid.uuid4().hex[:12]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": clean_command(sys.argv),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: version for name, version in versions.items() if version != "not installed"},
        "plugins": [
            {"name": row.name, "kind": row.kind, "distribution": row.distribution, "version": row.version}
            for row in plugins
            if row.kind is not None and row.status == "active"
        ],
        "git": _git(),
        "host": {
            "processor": host.cpu_name(),
            "cores": cpu_count(),
            "memory_bytes": host.total_memory(),
            "devices": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in host.gpus()],
        },
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if before:
        found["earlier"] = [*earlier, before]
    write_atomically(output_dir / ENVIRONMENT_FILE, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return found


def read_environment(output_dir: Path) -> dict[str, Any]:
    """The content of `environment.json`; empty if the file is missing or not written by `write_environment`."""
    try:
        found = json.loads((output_dir / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def run_id(output_dir: Path) -> str:
    """The run's id, which a resume preserves; without `environment.json`, the name of the directory."""
    return str(read_environment(output_dir).get("run_id") or output_dir.name)


def _git() -> dict[str, Any] | None:
    """The commit of the working directory, and whether tracked files have uncommitted changes."""
    commit = host.command_output(["git", "rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = host.command_output(["git", "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit.strip(), "changed": bool(changed)}
