"""`environment.json` in a run's directory: its software, its machine, and the run's id.

Contains no user names, and no environment variables except `VARIABLES`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rlframework.base.errors import ConfigError
from rlframework.base.files import write_atomically
from rlframework.base.logs import printable
from rlframework.base.secrets import HIDDEN, hide_in_text, hide_secrets, is_secret_name, named_secrets
from rlframework.config.yaml_text import parse_value
from rlframework.observers import host
from rlframework.workers.machine import cpu_count

if TYPE_CHECKING:
    from rlframework.plugins.listing import PluginListing

ENVIRONMENT_FILE = "environment.json"
LONGEST_SETTING = 200
"""Maximum number of characters of a setting in a sentence."""

PACKAGES = (
    "rlframework-core", "torch", "transformers", "tokenizers", "datasets", "numpy", "pyarrow", "ray", "safetensors",
    "tensordict", "deepspeed", "megatron-core", "transformer-engine", "flash-attn", "peft", "math-verify", "wandb",
    "mlflow-skinny", "trackio",
)  # fmt: skip
"""Distributions whose versions are recorded if they are installed, besides those of plugins."""

VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "RLFRAMEWORK_DISABLE_PLUGINS", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE",
)  # fmt: skip
"""The only environment variables that are recorded."""


class Resumed(BaseModel):
    """The step after which a run was resumed, and the settings that this changed: old and new value by name."""

    after_step: int
    changed: dict[str, tuple[Any, Any]] = {}

    def __str__(self) -> str:
        settings = [f"{name} {setting_text(old)} -> {setting_text(new)}" for name, (old, new) in self.changed.items()]
        return f"resumed after step {self.after_step}" + (f" with {', '.join(settings)}" if settings else "")


def setting_text(value: Any, longest: int = LONGEST_SETTING) -> str:
    """Return the value of a setting as text of at most `longest` characters; JSON if it is not a text."""
    text = value if isinstance(value, str) and value.strip() else json.dumps(value, default=str)
    return text if len(text) <= longest else f"{text[:longest]}…"


def write_environment(
    output_dir: Path, plugins: Iterable[PluginListing] = (), *, resumed: Resumed | None = None
) -> dict[str, Any]:
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
    if resumed is not None:
        found["resumed"] = resumed.model_dump()
    if before:
        found["earlier"] = [*earlier, before]
    text = printable(json.dumps(found, indent=2, ensure_ascii=False))
    write_atomically(output_dir / ENVIRONMENT_FILE, f"{text}\n")
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


def clean_command(arguments: Sequence[str]) -> list[str]:
    """A command line fit for recording: the program's name without its path, no secrets, `~` for the home directory."""
    cleaned, secrets = [Path(argument).name for argument in arguments[:1]], list[str]()
    hide_next = False
    for argument in arguments[1:]:
        name, equals, text = argument.partition("=")
        values = _parsed(text) if equals else argument
        secret = is_secret_name(name)
        if hide_next or (equals and secret):
            secrets.append(argument if hide_next else text)
            cleaned.append(HIDDEN if hide_next else f"{name}={HIDDEN}")
        else:
            secrets += named_secrets(values)
            cleaned.append(f"{name}={_hidden(text, values)}" if equals else argument)
        hide_next = not hide_next and not equals and secret and name.startswith("--")
    return [_without_home(hide_in_text(argument, secrets)) for argument in cleaned]


def _parsed(text: str) -> Any:
    """The YAML value `text`; itself if it is none."""
    try:
        return parse_value(text, "argument")
    except ConfigError:
        return text


def _hidden(text: str, values: Any) -> str:
    """The YAML `text` of `values` without secrets; all of it is hidden if it looks like a collection but is none."""
    if isinstance(values, str):
        return HIDDEN if values == text and re.search(r"[{\[\n]|: ", text) else text
    hidden = hide_secrets(values)
    return text if hidden == values else json.dumps(hidden, ensure_ascii=False)


def _without_home(text: str) -> str:
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?![^/\"' ,}}\]])", "~", text) if len(home) > 1 else text


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        found |= flatten(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return found
