"""Checks of a configured run: that it loads, its model is available, its workers fit, and the checks of `--dry-run`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

from rlframework.config.sections import RunConfig
from rlframework.doctor.checks import Check, Context, Finding, ProbeError, ask, broken, note, ok, warning
from rlframework.doctor.cluster import address, cluster_nodes
from rlframework.errors import RLFrameworkError
from rlframework.huggingface.hub import is_path, probe_hub
from rlframework.observers import host
from rlframework.workers.machine import cpu_count

_PYTHON_SECONDS = 60.0
_VERSIONS = (
    "import json, sys, importlib.metadata as m; "
    "print(json.dumps(['.'.join(map(str, sys.version_info[:3])), m.version('ray')]))"
)
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def configuration(context: Context) -> Iterator[Finding]:
    """Whether the configuration loads and passes the checks of its plugins."""
    config, error = context.config, context.config_error
    if config is not None:
        yield ok(f"{context.source} loads: {config.algorithm.name} on {config.environment.name}")
    elif error is not None:
        yield broken(_told(error), "Fix the configuration; nothing else about this run was checked")


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


def estimate(context: Context, config: RunConfig) -> Iterator[Finding]:
    """The checks and estimates of `rlframework train --dry-run`."""
    name = config.policy.model_name
    if not is_path(name) and _cached(name) is None and _hub_cannot_be_asked() is not None:
        return  # reported by the check `model`
    from rlframework.runner.launch import dry_run  # imports much that other checks do not need

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


def _if_loaded(check: Callable[[Context, RunConfig], Iterable[Finding]]) -> Callable[[Context], Iterable[Finding]]:
    """`check`, without findings if the configuration does not load."""
    return lambda context: check(context, context.config) if context.config is not None else ()


CHECKS = (
    Check("run", "configuration", configuration),
    Check("run", "model", _if_loaded(model)),
    Check("run", "estimate", _if_loaded(estimate)),
    Check("run", "workers", _if_loaded(workers)),
    Check("run", "python of the workers", _if_loaded(python_of_workers)),
)
