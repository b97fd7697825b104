"""Checks of Ray: version, token, and the cluster that a run would attach to. Only a child process imports Ray."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlframework.doctor.checks import Check, Context, Finding, ProbeError, note, ok, warning
from rlframework.doctor.machine import gib
from rlframework.doctor.probes import RayCluster, RayNode
from rlframework.observers.host import package_version

ATTACH_SECONDS, CONNECT_SECONDS = 60.0, 3.0


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


def ray(context: Context) -> Iterator[Finding]:
    """The installed Ray, and the cluster that a run would use."""
    version, where = package_version("ray"), address(context)
    facts = {"version": version, "address": where}
    text = f"ray {version}; a run starts a local instance on 127.0.0.1 and stops it at the end"
    if where is not None:
        yield ok(f"ray {version}; runs attach to the cluster at {where}", facts=facts)
    elif (running := _address_of_running()) is None:
        yield ok(text, facts=facts)
    else:
        text += f". Ray is already running at {running}; runs do not use it"
        yield note(text, "To use it, set RAY_ADDRESS=auto", {**facts, "running": running})


def token(context: Context) -> Iterator[Finding]:
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
            yield warning(f"other users can read Ray's token in {path}", f"chmod 600 {path}")
    elif where is None:
        text = "no token yet: the local Ray instance of a run creates one, but `ray start` runs without"
        yield note(text, "Before `ray start`, run: ray get-auth-token --generate > /dev/null")
    else:
        yield warning(
            "no token found: a cluster with token authentication rejects this machine, and one without is open to "
            "anyone who can reach it",
            "Copy ~/.ray/auth_token from the head node (mode 600), or set RAY_AUTH_TOKEN_PATH",
        )


def nodes(context: Context) -> Iterator[Finding]:
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
    if where.startswith("ray://"):
        raise ProbeError(f"{where}: Ray Client connections are not supported")
    if (reason := _cannot_reach(where)) is not None:
        raise ProbeError(f"nothing answers at {where}: {reason}")
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


def _cannot_reach(where: str) -> str | None:
    """Return why connecting to `host:port` fails; None if it works or cannot be tried."""
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdigit():
        return None if where == "auto" else "it is not a host:port address"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return str(error)
    return None


def _address_of_running() -> str | None:
    """The address that `ray start` recorded on this machine, if it still answers."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        found = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return found if found and _cannot_reach(found) is None else None


CHECKS = (Check("cluster", "ray", ray), Check("cluster", "token", token), Check("cluster", "nodes", nodes))
