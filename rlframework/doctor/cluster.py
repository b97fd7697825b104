"""Ray: the version here, its token, and the cluster that a run would attach to. Ray is imported by a child process."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlframework.doctor.context import Context, ProbeError
from rlframework.doctor.findings import Finding, note, ok, warning
from rlframework.doctor.machine import gib
from rlframework.doctor.registry import check
from rlframework.observers.host import package_version

ATTACH_SECONDS = 60.0
CONNECT_SECONDS = 3.0
HEAD_PORTS = {6379: "the head (--port)", 8265: "the dashboard and jobs (--dashboard-port)"}
"""What `ray start --head` listens on unless it is told otherwise."""

_START = "Start one (`ray start --head`), correct RAY_ADDRESS or worker_group.address, or leave both out"


def address(context: Context) -> str | None:
    """The cluster that a run attaches to; None: it starts a Ray of its own on this machine."""
    named = getattr(context.config.worker_group, "address", None) if context.config is not None else None
    found = named or os.environ.get("RAY_ADDRESS")
    return None if found in (None, "", "local") else found


def cluster_nodes(context: Context) -> Sequence[Mapping[str, Any]] | None:
    """The living nodes of the cluster that the run attaches to; None where it attaches to none, or cannot."""
    where = address(context)
    if where is None or _cannot_reach(where):
        return None
    try:
        found = context.probe("ray_cluster", where, seconds=ATTACH_SECONDS)
    except ProbeError:
        return None
    return None if found["error"] else [node for node in found["nodes"] if node["alive"]]


@check("cluster", "ray")
def ray(context: Context) -> Iterator[Finding]:
    """Which Ray is here, and where a run would find one."""
    version, where = package_version("ray"), address(context)
    if where is not None:
        yield ok(f"ray {version}; runs attach to the cluster at {where}", version=version, address=where)
        return
    text = f"ray {version}; a run starts one of its own on this machine, on 127.0.0.1, and ends it"
    running = _address_of_running()
    if running is None:
        yield ok(text, version=version, address=None)
    else:
        text += f". A Ray is running here, at {running}, and is left alone"
        yield note(text, "To run on it: RAY_ADDRESS=auto", version=version, address=None, running=running)


@check("cluster", "token")
def token(context: Context) -> Iterator[Finding]:
    """Ray's token authentication: without it, whoever reaches Ray's ports runs programs as this user."""
    mode, source = os.environ.get("RAY_AUTH_MODE", "").lower(), token_source()
    facts = {"mode": mode or "not set", "source": source}
    if mode == "disabled":
        text = "RAY_AUTH_MODE=disabled: whoever reaches Ray's ports runs programs here"
        yield warning(text, "Unset RAY_AUTH_MODE; `ray get-auth-token --generate` makes a token", **facts)
    elif source is not None:
        yield _with_token(context, mode, source, facts)
        yield from _readable_token(source)
    elif address(context) is None:
        text = "there is no token yet: the Ray that a run starts makes one, and `ray start` starts without"
        yield note(text, "Before `ray start`: ray get-auth-token --generate > /dev/null", **facts)
    else:
        yield warning(
            "no token is here: a cluster with token authentication refuses this machine, and one without is open to "
            "all who reach it",
            "Copy the head's ~/.ray/auth_token here (mode 600), or name it in RAY_AUTH_TOKEN_PATH",
            **facts,
        )


@check("cluster", "nodes")
def nodes(context: Context) -> Iterator[Finding]:
    """The cluster, attached to as a run does: machines, resources, versions on both sides."""
    where = address(context)
    if where is None:
        return
    needed = context.uses_group("ray")
    if where.startswith("ray://"):
        remedy = "Run on a machine of the cluster: ray job submit -- rlframework train ..."
        yield context.problem(f"{where}: a Ray client cannot hold workers", remedy, needed=needed)
        return
    if (reason := _cannot_reach(where)) is not None:
        yield context.problem(f"nothing answers at {where}: {reason}", _START, needed=needed)
        return
    try:
        found = context.probe("ray_cluster", where, seconds=ATTACH_SECONDS)
    except ProbeError as error:
        yield context.problem(f"attaching to {where}: {error}", _START, needed=needed)
        return
    if found["error"]:
        yield context.problem(f"attaching to {where}: {found['error'].strip()}", _remedy(found["error"]), needed=needed)
        return
    yield from _what_is_there(found)


@check("cluster", "ports")
def ports(context: Context) -> Iterator[Finding]:
    """Whether a head could be started here."""
    if address(context) is not None or _address_of_running() is not None:
        return
    taken = [port for port in HEAD_PORTS if not _is_free(port)]
    if taken:
        text = "; ".join(f"port {port} is taken, which {HEAD_PORTS[port]} of a Ray head would use" for port in taken)
        yield note(text, "Only for `ray start --head` here: give it another port")
    else:
        yield ok(f"the ports of a Ray head are free: {', '.join(map(str, HEAD_PORTS))}")


def token_source() -> str | None:
    """Where Ray finds its token, in its own order: a variable, the file that one names, the home directory."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return named if Path(named).is_file() else None
    home = Path.home() / ".ray" / "auth_token"
    return str(home) if home.is_file() else None


def _with_token(context: Context, mode: str, source: str, facts: Mapping[str, Any]) -> Finding:
    where = address(context)
    if not mode and where not in (None, "auto"):
        text = f"Ray does not show the token in {source} to a cluster that is named by its address, unless told to"
        return warning(text, "export RAY_AUTH_MODE=token, here and on all nodes", **facts)
    return ok(f"Ray's token authentication is on; the token is in {source}", **facts)


def _readable_token(source: str) -> Iterator[Finding]:
    path = Path(source)
    if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield warning(f"others can read {path}, which has Ray's token", f"chmod 600 {path}")


def _what_is_there(found: Mapping[str, Any]) -> Iterator[Finding]:
    living = [node for node in found["nodes"] if node["alive"]]
    for node in living:
        text = f"node {node['address']}: {node['cpus']:g} CPU, {node['gpus']:g} GPU, memory {gib(node['memory_bytes'])}"
        yield ok(f"{text}, objects {gib(node['object_store_bytes'])}", **node)
    free = ", ".join(f"{found['free'].get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    text = f"{len(living)} node(s); free now: {free}; ray {found['ray']} and Python {found['python']} on both sides"
    yield ok(text, free=found["free"], ray=found["ray"], python=found["python"])
    gone = [str(node["address"]) for node in found["nodes"] if not node["alive"]]
    if gone:
        yield note(f"left the cluster: {', '.join(gone)}")


def _remedy(error: str) -> str:
    if "ersion mismatch" in error:
        return "Install the cluster's versions of Ray and Python here, to the last digit, or ours there"
    if "oken" in error or "nauthenticated" in error:
        return "Set RAY_AUTH_MODE=token, and copy the head's ~/.ray/auth_token here (mode 600)"
    return (
        f"{_START}. A run attaches from a machine of the cluster: `ray start --address=HEAD:6379` makes this one such"
    )


def _cannot_reach(where: str) -> str | None:
    """Why no connection can be made to `host:port`; None where it can, or there is no such thing to try."""
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdigit():
        return None if where == "auto" else "it is no host:port"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return str(error)
    return None


def _address_of_running() -> str | None:
    """What `ray start` wrote down here; it stays behind when that Ray was killed."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        found = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return found if found and _cannot_reach(found) is None else None


def _is_free(port: int) -> bool:
    with socket.socket() as listening:
        try:
            listening.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
