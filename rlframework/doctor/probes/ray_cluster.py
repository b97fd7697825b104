"""Attaches to the Ray cluster at a given address, as a run does, and describes it. Does not import rlframework."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


def main() -> None:
    """Print the description; `error` is set if attaching failed."""
    print(json.dumps(look(sys.argv[1])))


def look(address: str) -> dict[str, Any]:
    """Return nodes with their resources, free resources, and the versions that Ray compares on attaching."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        nodes = [_node(node) for node in ray.nodes()]  # type: ignore[no-untyped-call]
        free = ray.available_resources()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - the error is the result
        return {"error": _with_causes(error)}
    finally:
        ray.shutdown()
    return {
        "error": None,
        "ray": ray.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "nodes": nodes,
        "free": {name: amount for name, amount in free.items() if not name.startswith("node:")},
    }


def _with_causes(error: BaseException) -> str:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return "; because of ".join(f"{type(one).__name__}: {_short(str(one))}" for one in causes)


def _short(text: str) -> str:
    """`text` with an embedded traceback reduced to its last line."""
    before, traceback, inside = text.strip().partition("Traceback (most recent call last):")
    return f"{before}{inside.splitlines()[-1]}" if traceback and inside else before


def _node(node: dict[str, Any]) -> dict[str, Any]:
    resources = node.get("Resources", {})
    return {
        "address": node.get("NodeManagerAddress"),
        "alive": bool(node.get("Alive")),
        "cpus": resources.get("CPU", 0),
        "gpus": resources.get("GPU", 0),
        "memory_bytes": resources.get("memory", 0),
        "object_store_bytes": resources.get("object_store_memory", 0),
    }


if __name__ == "__main__":
    main()
