"""The run of a configuration: whether it loads, its model is there, its workers fit, and what `--dry-run` checks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlframework.doctor.cluster import address, cluster_nodes
from rlframework.doctor.context import Context
from rlframework.doctor.findings import Finding, broken, note, ok, warning
from rlframework.doctor.registry import check
from rlframework.errors import RLFrameworkError
from rlframework.huggingface.hub import is_path
from rlframework.observers import host
from rlframework.workers.machine import cpu_count

_HUB = "https://huggingface.co"
_CONNECT_SECONDS = 5.0
_PYTHON_SECONDS = 60.0
_VERSIONS = (
    "import json, sys, importlib.metadata as m; "
    "print(json.dumps(['.'.join(map(str, sys.version_info[:3])), m.version('ray')]))"
)
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@check("run", "configuration", of_run=True)
def configuration(context: Context) -> Iterator[Finding]:
    """Whether it can be loaded, with its plugins' own checks."""
    error = context.config_error
    if error is None:
        assert context.config is not None
        yield ok(f"{context.source} loads: {context.config.algorithm.name} on {context.config.environment.name}")
    elif isinstance(error, RLFrameworkError):
        yield broken(str(error), "Correct it; nothing else of this run was checked")
    else:
        yield broken(f"{type(error).__name__}: {error}", "Correct it; nothing else of this run was checked")


@check("run", "model", of_run=True)
def model(context: Context) -> Iterator[Finding]:
    """The files of the model: here, in the hub's cache, or on the hub."""
    if context.config is None:
        return
    name = context.config.policy.model_name
    if is_path(name):
        folder = Path(name).expanduser()
        if (folder / "config.json").is_file():  # else the check `estimate` tells
            yield from _weights(folder)
        return
    folder_or_none = _cached(name)
    if folder_or_none is not None:
        yield from _weights(folder_or_none)
    elif (reason := _hub_cannot_be_asked()) is not None:
        yield broken(
            f"policy.model_name={name!r} is not in the hub's cache here, and {reason}",
            "Fetch it where the hub can be reached (hf download NAME), or name a model directory",
        )
    else:
        yield note(
            f"policy.model_name={name!r} will be fetched from {_endpoint()}", "Before a run on a cluster: hf download"
        )


@check("run", "estimate", of_run=True)
def estimate(context: Context) -> Iterator[Finding]:
    """All that `rlframework train --dry-run` checks and reckons."""
    config = context.config
    if config is None:
        return
    name = config.policy.model_name
    if not is_path(name) and _cached(name) is None and _hub_cannot_be_asked() is not None:
        return  # the check `model` tells
    from rlframework.runner.launch import dry_run

    try:
        found = dry_run(config)
    except Exception as error:  # noqa: BLE001 - the run would end with it too
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
    """Whether there are cores, or GPUs, for the workers."""
    config = context.config
    if config is None:
        return
    count, cuda, on_cluster = config.worker_group.num_workers, context.device == "cuda", _on_cluster(context)
    there = cluster_nodes(context) if on_cluster else None
    if on_cluster and there is None:  # the check `nodes` tells
        return
    have, where = _room(there, cuda, getattr(config.worker_group, "workers_per_node", None) or 1)
    unit = "GPU" if cuda else "core"
    text = f"worker_group.num_workers={count}, and {have} {unit}(s) for them {where}"
    remedy = f"Set at most {have}, or take more {unit}s"
    if count <= have:
        yield ok(text, workers=count, there=have)
    elif cuda or context.uses_group("ray"):
        yield broken(text, remedy, workers=count, there=have)
    else:
        yield warning(f"{text}: they take turns", remedy, workers=count, there=have)
    if not cuda and config.device == "auto" and any(node["gpus"] for node in there or ()):
        yield warning("device=auto comes to cpu on this machine, and the cluster has GPUs", "Set device=cuda")


def _on_cluster(context: Context) -> bool:
    return context.uses_group("ray") and address(context) is not None


def _room(there: Sequence[Mapping[str, Any]] | None, cuda: bool, each: int) -> tuple[int, str]:
    """For how many workers there is room, and where; on a cluster `each` of them stay on one machine."""
    if there is None:
        return len(host.gpus()) if cuda else cpu_count(), "on this machine"
    units = [int(node["gpus" if cuda else "cpus"]) for node in there]
    return sum(number - number % each for number in units), f"in {len(there)} node(s) of the cluster"


@check("run", "python of the workers", of_run=True)
def python_of_workers(context: Context) -> Iterator[Finding]:
    """Ray wants the same versions of Python and Ray in a Python that is named for workers."""
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
            f"the workers' Python {named} does not tell its versions: {error}", "Install Ray in it, on each node"
        )
        return
    text = f"the workers' Python {named} has Python {there[0]} and Ray {there[1]}; here {here[0]} and {here[1]}"
    if there == here:
        yield ok(text, python=there[0], ray=there[1])
    else:
        yield broken(text, "Make them equal, to the last digit", python=there[0], ray=there[1])


@check("run", "environment of the workers", of_run=True)
def environment_of_workers(context: Context) -> Iterator[Finding]:
    """Variables that workers are to get and that are not there."""
    names = getattr(context.config.worker_group, "pass_environment", ()) if context.config is not None else ()
    missing = [name for name in names if name not in os.environ]
    if missing:
        text = f"worker_group.pass_environment names {', '.join(missing)}, not set here: workers go without"
        yield warning(text, "Set them where the run is started, or take them out")
    elif names:
        yield ok(f"workers get {', '.join(names)}")


@check("run", "faults", of_run=True)
def faults(context: Context) -> Iterator[Finding]:
    """What is lost with a worker."""
    config = context.config
    if config is None:
        return
    restarts, every = config.fault_tolerance.max_restarts, config.checkpoints.every
    if restarts and every:
        yield ok(f"a lost worker costs at most {every} step(s), up to {restarts} times in a row")
    elif restarts:
        yield warning("a restart begins at the beginning, as checkpoints.every=0", "Set checkpoints.every=N")
    elif config.worker_group.num_workers > 1:
        kept = (
            f"by hand, from a checkpoint every {every} step(s)" if every else "from the beginning, without a checkpoint"
        )
        yield note(
            f"a lost worker ends the run, which can be started again {kept}",
            "Set fault_tolerance.max_restarts=3 and checkpoints.every=N, and it goes on by itself",
        )


@check("run", "services", of_run=True)
def services(context: Context) -> Iterator[Finding]:
    """Weights & Biases asks for a key when a run starts."""
    section = context.config.observers.wandb if context.config is not None else False
    if not section or section.mode != "online" or os.environ.get("WANDB_API_KEY"):
        return
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if not netrc.is_file():
        yield warning(
            "observers.wandb is online, and no key of W&B is here", "wandb login, or set observers.wandb.mode=offline"
        )


def _weights(folder: Path) -> Iterator[Finding]:
    """Whether all files that the model's index names are there."""
    for index in sorted(folder.glob("*.index.json")):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            text = f"{folder}: {len(missing)} of {len(names)} files of weights are missing, such as {missing[0]}"
            yield broken(text, "Fetch the model again")
            return
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not files:
        yield broken(f"{folder} has a config.json and no weights (*.safetensors)", "Fetch the model again")
        return
    size = sum(path.stat().st_size for path in files)
    yield ok(f"the model is in {folder}: {len(files)} file(s) of weights, {size / 1e9:.2f} GB", bytes=size)


def _cached(name: str) -> Path | None:
    """The folder of the hub's cache that has the model."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or _HUB


def _hub_cannot_be_asked() -> str | None:
    """Why not; None where it can, or a proxy would have to be asked."""
    offline = [name for name in _OFFLINE if os.environ.get(name, "").lower() in ("1", "on", "yes", "true")]
    if offline:
        return f"{offline[0]} is set"
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return None
    parts = urlsplit(_endpoint())
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return f"{parts.hostname} cannot be reached ({error})"
    return None
