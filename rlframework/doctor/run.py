"""Checks of a configured run: that it loads, its model is available, its workers fit, and the checks of `--dry-run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rlframework.doctor.cluster import address, cluster_nodes
from rlframework.doctor.context import Context
from rlframework.doctor.findings import Finding, broken, note, ok, warning
from rlframework.doctor.registry import check
from rlframework.errors import RLFrameworkError
from rlframework.huggingface.hub import is_path, probe_hub
from rlframework.observers import host
from rlframework.workers.machine import cpu_count

_HUB = "https://huggingface.co"
_PYTHON_SECONDS = 60.0
_VERSIONS = (
    "import json, sys, importlib.metadata as m; "
    "print(json.dumps(['.'.join(map(str, sys.version_info[:3])), m.version('ray')]))"
)
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@check("run", "configuration", of_run=True)
def configuration(context: Context) -> Iterator[Finding]:
    """Whether the configuration loads and passes the checks of its plugins."""
    error = context.config_error
    if error is None:
        assert context.config is not None
        yield ok(f"{context.source} loads: {context.config.algorithm.name} on {context.config.environment.name}")
    elif isinstance(error, RLFrameworkError):
        yield broken(str(error), "Fix the configuration; nothing else about this run was checked")
    else:
        yield broken(
            f"{type(error).__name__}: {error}", "Fix the configuration; nothing else about this run was checked"
        )


@check("run", "model", of_run=True)
def model(context: Context) -> Iterator[Finding]:
    """The files of the model: local, in the Hub's cache, or on the Hub."""
    if context.config is None:
        return
    name = context.config.policy.model_name
    if is_path(name):
        folder = Path(name).expanduser()
        if (folder / "config.json").is_file():  # otherwise reported by the check `estimate`
            yield from _weights(folder)
        return
    folder_or_none = _cached(name)
    if folder_or_none is not None:
        yield from _weights(folder_or_none)
    elif (reason := _hub_cannot_be_asked()) is not None:
        yield broken(
            f"policy.model_name={name!r} is not in the local Hub cache, and {reason}",
            "Download it on a machine with access to the Hub (hf download NAME), or set a model directory",
        )
    else:
        yield note(
            f"policy.model_name={name!r} will be downloaded from {_endpoint()}",
            "Before a run on a cluster: hf download",
        )


@check("run", "estimate", of_run=True)
def estimate(context: Context) -> Iterator[Finding]:
    """The checks and estimates of `rlframework train --dry-run`."""
    config = context.config
    if config is None:
        return
    name = config.policy.model_name
    if not is_path(name) and _cached(name) is None and _hub_cannot_be_asked() is not None:
        return  # reported by the check `model`
    from rlframework.runner.launch import dry_run

    try:
        found = dry_run(config)
    except Exception as error:  # noqa: BLE001 - the run would fail with it too
        text = str(error) if isinstance(error, RLFrameworkError) else f"{type(error).__name__}: {error}"
        yield broken(text, "See `rlframework train --dry-run --debug`")
        return
    for line in found.lines():
        yield ok(line.removeprefix("estimate: "))
    for line in found.warnings():
        text, _, remedy = line.removeprefix("warning: ").partition(". ")
        yield warning(text, remedy)


@check("run", "workers", of_run=True)
def workers(context: Context) -> Iterator[Finding]:
    """Whether there are enough cores or GPUs for the workers."""
    config = context.config
    if config is None:
        return
    count, cuda, on_cluster = config.worker_group.num_workers, context.device == "cuda", _on_cluster(context)
    there = cluster_nodes(context) if on_cluster else None
    if on_cluster and there is None:  # reported by the check `nodes`
        return
    have, where = _room(there, cuda, getattr(config.worker_group, "workers_per_node", None) or 1)
    unit = "GPU" if cuda else "core"
    text = f"worker_group.num_workers={count}, with {have} {unit}(s) available {where}"
    remedy = f"Set it to at most {have}, or provide more {unit}s"
    if count <= have:
        yield ok(text, workers=count, there=have)
    elif cuda or context.uses_group("ray"):
        yield broken(text, remedy, workers=count, there=have)
    else:
        yield warning(f"{text}: workers share cores", remedy, workers=count, there=have)
    if not cuda and config.device == "auto" and any(node["gpus"] for node in there or ()):
        yield warning("device=auto resolves to cpu on this machine, but the cluster has GPUs", "Set device=cuda")


def _on_cluster(context: Context) -> bool:
    return context.uses_group("ray") and address(context) is not None


def _room(there: Sequence[Mapping[str, Any]] | None, cuda: bool, each: int) -> tuple[int, str]:
    """The number of workers that fit, and where; on a cluster, each node holds a multiple of `each`."""
    if there is None:
        return len(host.gpus()) if cuda else cpu_count(), "on this machine"
    units = [int(node["gpus" if cuda else "cpus"]) for node in there]
    return sum(number - number % each for number in units), f"in {len(there)} node(s) of the cluster"


@check("run", "python of the workers", of_run=True)
def python_of_workers(context: Context) -> Iterator[Finding]:
    """Whether a Python set for the workers has the same versions of Python and Ray, as Ray requires."""
    config = context.config
    if config is None:
        return
    backend = context.manager.select("policy_worker", config.policy.backend).record
    named = getattr(config.worker_group, "python", None) or backend.py_executable
    if named is None:
        return
    here = [".".join(map(str, sys.version_info[:3])), metadata.version("ray")]
    try:
        done = subprocess.run(
            [named, "-c", _VERSIONS], capture_output=True, text=True, timeout=_PYTHON_SECONDS, check=True
        )
        there = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        yield broken(
            f"cannot read the versions of the workers' Python {named}: {error}", "Install Ray in it, on each node"
        )
        return
    text = (
        f"the workers' Python {named} has Python {there[0]} and Ray {there[1]}; the driver has {here[0]} and {here[1]}"
    )
    if there == here:
        yield ok(text, python=there[0], ray=there[1])
    else:
        yield broken(text, "Install exactly the same versions", python=there[0], ray=there[1])


@check("run", "environment of the workers", of_run=True)
def environment_of_workers(context: Context) -> Iterator[Finding]:
    """Whether the environment variables to pass on to workers are set."""
    names = getattr(context.config.worker_group, "pass_environment", ()) if context.config is not None else ()
    missing = [name for name in names if name not in os.environ]
    if missing:
        text = f"worker_group.pass_environment lists {', '.join(missing)}, which is not set: workers will not get it"
        yield warning(text, "Set it in the environment of the run, or remove it from the list")
    elif names:
        yield ok(f"workers get {', '.join(names)}")


@check("run", "faults", of_run=True)
def faults(context: Context) -> Iterator[Finding]:
    """The cost of losing a worker."""
    config = context.config
    if config is None:
        return
    restarts, every = config.fault_tolerance.max_restarts, config.checkpoints.every
    if restarts and every:
        yield ok(f"losing a worker costs at most {every} step(s), up to {restarts} times in a row")
    elif restarts:
        yield warning("a restart begins from step 0, because checkpoints.every=0", "Set checkpoints.every=N")
    elif config.worker_group.num_workers > 1:
        kept = f"by hand, from a checkpoint every {every} step(s)" if every else "from step 0, without a checkpoint"
        yield note(
            f"losing a worker ends the run, which can be restarted {kept}",
            "For automatic restarts, set fault_tolerance.max_restarts=3 and checkpoints.every=N",
        )


@check("run", "services", of_run=True)
def services(context: Context) -> Iterator[Finding]:
    """Whether Weights & Biases has the API key that it needs when a run starts."""
    section = context.config.observers.wandb if context.config is not None else False
    if not section or section.mode != "online" or os.environ.get("WANDB_API_KEY"):
        return
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if not netrc.is_file():
        yield warning(
            "observers.wandb is online, but no W&B API key is set",
            "Run `wandb login`, or set observers.wandb.mode=offline",
        )


def _weights(folder: Path) -> Iterator[Finding]:
    """Whether all files in the index of the model exist."""
    for index in sorted(folder.glob("*.index.json")):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            text = f"{folder}: {len(missing)} of {len(names)} weight files are missing, such as {missing[0]}"
            yield broken(text, "Download the model again")
            return
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not files:
        yield broken(f"{folder} has a config.json but no weights (*.safetensors)", "Download the model again")
        return
    size = sum(path.stat().st_size for path in files)
    yield ok(f"the model is in {folder}: {len(files)} weight file(s), {size / 1e9:.2f} GB", bytes=size)


def _cached(name: str) -> Path | None:
    """The folder of the model in the Hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or _HUB


def _hub_cannot_be_asked() -> str | None:
    """Return why the hub cannot be reached; None if it can."""
    offline = [name for name in _OFFLINE if os.environ.get(name, "").lower() in ("1", "on", "yes", "true")]
    if offline:
        return f"{offline[0]} is set"
    return probe_hub()
