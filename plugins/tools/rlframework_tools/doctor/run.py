"""Checks of a run and of the Ray cluster that it would attach to: `--dry-run`, the model's files, workers that fit."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rlframework.base.errors import RLFrameworkError
from rlframework.config.sections import RunConfig
from rlframework.generation.engine_environment import ProbeError, ask
from rlframework.huggingface.hub import hub_problem, is_path
from rlframework.observers import host
from rlframework.plugins.discovery import install_command
from rlframework.plugins.hookspec import DoctorFinding
from rlframework.workers.machine import cpu_count, python_path
from rlframework_tools.doctor.checks import Context, broken, note, ok, warning
from rlframework_tools.doctor.machine import gib
from rlframework_tools.doctor.probes import RayCluster, RayNode

ATTACH_SECONDS, CONNECT_SECONDS, PYTHON_SECONDS = 60.0, 3.0, 60.0
_VERSIONS = (
    "import json, sys, importlib.metadata as m; "
    "print(json.dumps(['.'.join(map(str, sys.version_info[:3])), m.version('ray')]))"
)


def address(context: Context) -> str | None:
    """Return the address of the cluster that a run attaches to; None if it starts a local Ray instance."""
    named = getattr(context.config.worker_group, "address", None) if context.config is not None else None
    found = named or os.environ.get("RAY_ADDRESS")
    return None if found in (None, "", "local") else found


def cluster_nodes(context: Context) -> list[RayNode] | None:
    """Return the live nodes of the cluster that the run attaches to; None if there is none or it is unreachable."""
    where = address(context)
    with suppress(ProbeError):
        return None if where is None else [node for node in _attach(context, where)["nodes"] if node["alive"]]
    return None


def ray(context: Context) -> Iterator[DoctorFinding]:
    """The installed Ray, and the cluster that a run would use."""
    version, where = host.package_version("ray"), address(context)
    if find_spec("ray") is None:
        remedy = install_command("ray")
        if context.uses_group("ray"):
            yield context.problem("Ray is not installed, and worker_group.name=ray needs it", remedy, needed=True)
        else:
            yield note(f"Ray is not installed; runs on several machines need it: {remedy}")
        return
    how = "a run starts a local instance on 127.0.0.1 and stops it at the end"
    if where is not None:
        how = f"runs attach to the cluster at {where}"
    yield ok(f"ray {version}; {how}", facts={"version": version, "address": where})


def token(context: Context) -> Iterator[DoctorFinding]:
    """Ray's token authentication: without it, anyone who can reach Ray's ports can run programs as this user."""
    mode, source, where = os.environ.get("RAY_AUTH_MODE", "").lower(), token_source(), address(context)
    if mode == "disabled":
        text = "RAY_AUTH_MODE=disabled: anyone who can reach Ray's ports can run programs here"
        yield warning(text, "Unset RAY_AUTH_MODE; `ray get-auth-token --generate` creates a token")
    elif source is not None:
        if not mode and where not in (None, "auto"):
            text = f"Ray sends the token in {source} to a cluster given by address only if RAY_AUTH_MODE=token is set"
            yield warning(text, "Export RAY_AUTH_MODE=token on this machine and on all nodes")
        else:
            yield ok(f"Ray's token authentication is on; the token is in {source}")
        path = Path(source)
        if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            # Ray itself writes the one in the home directory so: without a cluster that is no mistake of the user's
            concern = note if where is None and not os.environ.get("RAY_AUTH_TOKEN_PATH") else warning
            yield concern(f"other users can read Ray's token in {path}", f"chmod 600 {path}")
    elif where is None:
        text = "no token yet: the local Ray instance of a run creates one, but `ray start` runs without"
        yield note(text, "Before `ray start`, run: ray get-auth-token --generate > /dev/null")
    else:
        yield warning(
            "no token found: a cluster with token authentication rejects this machine, and one without is open to "
            "anyone who can reach it",
            "Copy ~/.ray/auth_token from the head node (mode 600), or set RAY_AUTH_TOKEN_PATH",
        )


def nodes(context: Context) -> Iterator[DoctorFinding]:
    """Attach to the cluster as a run does: nodes, resources, versions on both sides."""
    where = address(context)
    if where is None:
        return
    try:
        found = _attach(context, where)
    except ProbeError as error:
        yield context.problem(str(error), _remedy(str(error)), needed=context.uses_group("ray"))
        return
    living = [node for node in found["nodes"] if node["alive"]]
    for node in living:
        memory = f"memory {gib(node['memory_bytes'])}, objects {gib(node['object_store_bytes'])}"
        yield ok(f"node {node['address']}: {node['cpus']:g} CPU, {node['gpus']:g} GPU, {memory}", facts=node)
    free = ", ".join(f"{found['free'].get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    text = f"{len(living)} node(s); free now: {free}; ray {found['ray']} and Python {found['python']} on both sides"
    yield ok(text, facts={"free": found["free"], "ray": found["ray"], "python": found["python"]})
    if gone := ", ".join(node["address"] for node in found["nodes"] if not node["alive"]):
        yield note(f"nodes that left the cluster: {gone}")


def token_source() -> str | None:
    """Return where Ray finds its token, in Ray's order: a variable, the file named by one, the home directory."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return str(path) if path.is_file() else None


def _attach(context: Context, where: str) -> RayCluster:
    """Describe the cluster at `where`. Raises `ProbeError` if it cannot be attached to."""
    name, _, port = where.rpartition(":")
    if where.startswith("ray://"):
        raise ProbeError(f"{where}: Ray Client connections are not supported")
    if where != "auto":
        try:
            socket.create_connection((name.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, OSError) else "it is not a host:port address"
            raise ProbeError(f"nothing answers at {where}: {reason}") from error
    try:
        found: RayCluster = context.probe("ray_cluster", where, seconds=ATTACH_SECONDS)
    except ProbeError as error:
        raise ProbeError(f"cannot attach to {where}: {str(error).strip()}") from error
    return found


def _remedy(error: str) -> str:
    if error.startswith("ray://"):
        return "Run on a node of the cluster: ray job submit -- rlframework train ..."
    if "ersion mismatch" in error:
        return "Install exactly the same versions of Ray and Python on this machine and on the cluster"
    if "oken" in error or "nauthenticated" in error:
        return "Set RAY_AUTH_MODE=token, and copy ~/.ray/auth_token from the head node (mode 600)"
    return (
        "Start a cluster (`ray start --head`), correct RAY_ADDRESS or worker_group.address, or unset both. A run "
        "attaches from a node of the cluster: `ray start --address=HEAD:6379` makes this machine one"
    )


def configuration(context: Context) -> Iterator[DoctorFinding]:
    """Whether the configuration loads and passes the checks of its plugins."""
    config, error = context.config, context.config_error
    if config is not None:
        yield ok(f"{context.source} loads: {config.algorithm.name} on {config.environment.name}")
    elif error is not None:
        yield broken(_told(error), "Fix the configuration; nothing else about this run was checked")


def model(context: Context, config: RunConfig) -> Iterator[DoctorFinding]:
    """The files of each model: local, in the Hub's cache, or on the Hub."""
    sections = {"policy": config.policy, **config.further_policies}
    for name in dict.fromkeys(section.model_name for section in sections.values()):
        yield from _model(next(each for each, section in sections.items() if section.model_name == name), name)


def _model(section: str, name: str) -> Iterator[DoctorFinding]:
    """The files of the model `name`, which is that of `section`."""
    from huggingface_hub import constants

    folder = Path(name).expanduser() if is_path(name) else _cached(name)
    if folder is not None:
        if (folder / "config.json").is_file():  # otherwise reported by the check `estimate`
            yield _weights(folder)
    elif not constants.HF_HUB_OFFLINE and hub_problem() is None:  # otherwise reported by the check `estimate`
        endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        text = f"{section}.model_name={name!r} will be downloaded from {endpoint}"
        yield note(text, "Before a run on a cluster: hf download")


def estimate(context: Context, config: RunConfig) -> Iterator[DoctorFinding]:
    """The checks and estimates of `rlframework train --dry-run`."""
    from rlframework_tools.estimates.printing import estimate_run  # imports much that other checks do not need

    try:
        found = estimate_run(config)
    except Exception as error:  # noqa: BLE001 - the run would fail with it too
        yield broken(_told(error), "See `rlframework train --dry-run --debug`")
        return
    for line in found.lines():
        yield ok(line.removeprefix("estimate: "))
    for line in found.warnings():
        text, _, remedy = line.removeprefix("warning: ").partition(". ")
        yield warning(text, remedy)


def workers(context: Context, config: RunConfig) -> Iterator[DoctorFinding]:
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
    unit, groups = "GPU" if cuda else "core", {"": config.worker_group}
    groups |= {f"{name}.": section.worker_group for name, section in config.further_policies.items()}
    for section, group in groups.items():
        count = group.num_workers
        text = f"{section}worker_group.num_workers={count}, with {have} {unit}(s) available {where}"
        lower = f"Set it to at most {have}" if have else "Set device=cpu" if cuda else "Join a node"
        remedy, facts = f"{lower}, or provide more {unit}s", {"workers": count, "there": have}
        if count <= have:
            yield ok(text, facts=facts)
        elif cuda or context.uses_group("ray"):
            yield broken(text, remedy, facts)
        else:
            yield warning(f"{text}: workers share cores", remedy, facts)
    if not cuda and config.device == "auto" and any(node["gpus"] for node in nodes or ()):
        yield warning("device=auto resolves to cpu on this machine, but the cluster has GPUs", "Set device=cuda")


def python_of_workers(context: Context, config: RunConfig) -> Iterator[DoctorFinding]:
    """Whether a Python set for workers or engines has the same versions of Python and Ray, as Ray requires."""
    named_by = {"generation engines": config.generation.workers.python if config.generation.workers else None}
    for name in ("", *config.further_policies):
        view = config.of(name) if name else config
        backend = context.manager.select("policy_worker", view.policy.backend).record
        whose = f"workers of {name}" if name else "workers"
        named_by[whose] = getattr(view.worker_group, "python", None) or backend.py_executable
    for whose, named in named_by.items():
        if (python := python_path(named)) is not None:
            yield _same_versions(whose, python)


def _same_versions(whose: str, named: str) -> DoctorFinding:
    here = [".".join(map(str, sys.version_info[:3])), metadata.version("ray")]
    try:
        there: list[str] = ask([named, "-c", _VERSIONS], PYTHON_SECONDS)
    except ProbeError as error:
        return broken(
            f"cannot read the versions of the {whose}' Python {named}: {error}", "Install Ray in it, on each node"
        )
    text = (
        f"the {whose}' Python {named} has Python {there[0]} and Ray {there[1]}; the driver has {here[0]} and {here[1]}"
    )
    facts = {"python": there[0], "ray": there[1]}
    return ok(text, facts=facts) if there == here else broken(text, "Install exactly the same versions", facts)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, RLFrameworkError) else f"{type(error).__name__}: {error}"


def _weights(folder: Path) -> DoctorFinding:
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
