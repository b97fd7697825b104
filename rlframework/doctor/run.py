"""Checks of a configured run: that it loads, its model is available, its workers fit, and the checks of `--dry-run`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.doctor.checks import Context, Finding, ProbeError, ask, broken, check, note, ok, warning
from rlframework.doctor.cluster import address, cluster_nodes
from rlframework.errors import RLFrameworkError
from rlframework.huggingface.hub import is_path, probe_hub
from rlframework.observers import host
from rlframework.workers.machine import cpu_count

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig

_PYTHON_SECONDS = 60.0
_VERSIONS = (
    "import json, sys, importlib.metadata as m; "
    "print(json.dumps(['.'.join(map(str, sys.version_info[:3])), m.version('ray')]))"
)
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

RunFunction = Callable[[Context, "RunConfig"], Iterable[Finding]]


def run_check(name: str) -> Callable[[RunFunction], RunFunction]:
    """Return a decorator that registers a check of "run", which finds nothing if the configuration does not load."""

    def register(function: RunFunction) -> RunFunction:
        check("run", name)(lambda context: function(context, context.config) if context.config is not None else ())
        return function

    return register


@check("run", "configuration")
def configuration(context: Context) -> Iterator[Finding]:
    """Whether the configuration loads and passes the checks of its plugins."""
    config, error = context.config, context.config_error
    if config is not None:
        yield ok(f"{context.source} loads: {config.algorithm.name} on {config.environment.name}")
    elif error is not None:
        yield broken(_told(error), "Fix the configuration; nothing else about this run was checked")


@run_check("model")
def model(context: Context, config: RunConfig) -> Iterator[Finding]:
    """The files of the model: local, in the Hub's cache, or on the Hub."""
    name = config.policy.model_name
    folder = Path(name).expanduser() if is_path(name) else _cached(name)
    if folder is not None:
        if (folder / "config.json").is_file():  # otherwise reported by the check `estimate`
            yield _weights(folder)
    elif (reason := _hub_cannot_be_asked()) is not None:
        yield broken(
            f"policy.model_name={name!r} is not in the local Hub cache, and {reason}",
            "Download it on a machine with access to the Hub (hf download NAME), or set a model directory",
        )
    else:
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        text = f"policy.model_name={name!r} will be downloaded from {endpoint}"
        yield note(text, "Before a run on a cluster: hf download")


@run_check("estimate")
def estimate(context: Context, config: RunConfig) -> Iterator[Finding]:
    """The checks and estimates of `rlframework train --dry-run`."""
    name = config.policy.model_name
    if not is_path(name) and _cached(name) is None and _hub_cannot_be_asked() is not None:
        return  # reported by the check `model`
    from rlframework.runner.launch import dry_run

    try:
        found = dry_run(config)
    except Exception as error:  # noqa: BLE001 - the run would fail with it too
        yield broken(_told(error), "See `rlframework train --dry-run --debug`")
        return
    for line in found.lines():
        yield ok(line.removeprefix("estimate: "))
    for line in found.warnings():
        text, _, remedy = line.removeprefix("warning: ").partition(". ")
        yield warning(text, remedy)


@run_check("workers")
def workers(context: Context, config: RunConfig) -> Iterator[Finding]:
    """Whether there are enough cores or GPUs for the workers; on a cluster, each node holds `workers_per_node`."""
    cuda, nodes, where = context.device == "cuda", None, "on this machine"
    have = len(host.gpus()) if cuda else cpu_count()
    if context.uses_group("ray") and address(context) is not None:
        nodes = cluster_nodes(context)
        if nodes is None:  # reported by the check `nodes`
            return
        each = getattr(config.worker_group, "workers_per_node", None) or 1
        have = sum(int(node["gpus" if cuda else "cpus"]) // each * each for node in nodes)
        where = f"in {len(nodes)} node(s) of the cluster"
    count, unit = config.worker_group.num_workers, "GPU" if cuda else "core"
    text = f"worker_group.num_workers={count}, with {have} {unit}(s) available {where}"
    remedy, facts = f"Set it to at most {have}, or provide more {unit}s", {"workers": count, "there": have}
    if count <= have:
        yield ok(text, facts=facts)
    elif cuda or context.uses_group("ray"):
        yield broken(text, remedy, facts)
    else:
        yield warning(f"{text}: workers share cores", remedy, facts)
    if not cuda and config.device == "auto" and any(node["gpus"] for node in nodes or ()):
        yield warning("device=auto resolves to cpu on this machine, but the cluster has GPUs", "Set device=cuda")


@run_check("python of the workers")
def python_of_workers(context: Context, config: RunConfig) -> Iterator[Finding]:
    """Whether a Python set for the workers has the same versions of Python and Ray, as Ray requires."""
    backend = context.manager.select("policy_worker", config.policy.backend).record
    named = getattr(config.worker_group, "python", None) or backend.py_executable
    if named is None:
        return
    here = [".".join(map(str, sys.version_info[:3])), metadata.version("ray")]
    try:
        there: list[str] = ask([named, "-c", _VERSIONS], _PYTHON_SECONDS)
    except ProbeError as error:
        text = f"cannot read the versions of the workers' Python {named}: {error}"
        yield broken(text, "Install Ray in it, on each node")
        return
    text = f"the workers' Python {named} has Python {there[0]} and Ray {there[1]}"
    facts = {"python": there[0], "ray": there[1]}
    if there == here:
        yield ok(f"{text}, as the driver has", facts=facts)
    else:
        yield broken(f"{text}; the driver has {here[0]} and {here[1]}", "Install exactly the same versions", facts)


@run_check("environment of the workers")
def environment_of_workers(context: Context, config: RunConfig) -> Iterator[Finding]:
    """Whether the environment variables to pass on to workers are set."""
    names = getattr(config.worker_group, "pass_environment", ())
    missing = ", ".join(name for name in names if name not in os.environ)
    if missing:
        text = f"worker_group.pass_environment lists {missing}, which is not set: workers will not get it"
        yield warning(text, "Set it in the environment of the run, or remove it from the list")
    elif names:
        yield ok(f"workers get {', '.join(names)}")


@run_check("faults")
def faults(context: Context, config: RunConfig) -> Iterator[Finding]:
    """The cost of losing a worker."""
    restarts, every = config.fault_tolerance.max_restarts, config.checkpoints.every
    if restarts and every:
        yield ok(f"losing a worker costs at most {every} step(s), up to {restarts} times in a row")
    elif restarts:
        yield warning("a restart begins from step 0, because checkpoints.every=0", "Set checkpoints.every=N")
    elif config.worker_group.num_workers > 1:
        kept = f"by hand, from a checkpoint every {every} step(s)" if every else "from step 0, without a checkpoint"
        text = f"losing a worker ends the run, which can be restarted {kept}"
        yield note(text, "For automatic restarts, set fault_tolerance.max_restarts=3 and checkpoints.every=N")


@run_check("services")
def services(context: Context, config: RunConfig) -> Iterator[Finding]:
    """Whether Weights & Biases has the API key that it needs when a run starts."""
    section, netrc = config.observers.wandb, Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if section and section.mode == "online" and not os.environ.get("WANDB_API_KEY") and not netrc.is_file():
        text = "observers.wandb is online, but no W&B API key is set"
        yield warning(text, "Run `wandb login`, or set observers.wandb.mode=offline")


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, RLFrameworkError) else f"{type(error).__name__}: {error}"


def _weights(folder: Path) -> Finding:
    """Whether all files in the index of the model exist."""
    for index in sorted(folder.glob("*.index.json")):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            text = f"{folder}: {len(missing)} of {len(names)} weight files are missing, such as {missing[0]}"
            return broken(text, "Download the model again")
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not files:
        return broken(f"{folder} has a config.json but no weights (*.safetensors)", "Download the model again")
    size = sum(path.stat().st_size for path in files)
    return ok(f"the model is in {folder}: {len(files)} weight file(s), {size / 1e9:.2f} GB", facts={"bytes": size})


def _cached(name: str) -> Path | None:
    """The folder of the model in the Hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _hub_cannot_be_asked() -> str | None:
    """Return why the hub cannot be reached; None if it can."""
    offline = [name for name in _OFFLINE if os.environ.get(name, "").lower() in ("1", "on", "yes", "true")]
    return f"{offline[0]} is set" if offline else probe_hub()
