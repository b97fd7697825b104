"""Programs of this folder: gloo ranks, forked from a process that has imported all, that say what is not right."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from probe_forked import SECONDS, run_program

MOST = 5


def complaints(program: Path, *words: str, warnings: tuple[str, ...] = (), seconds: float = SECONDS) -> dict[str, Any]:
    """Return the output of `program`, which must exit with 0. `warnings`: exceptions to warnings being errors."""
    done = run_program(program, *words, warnings=["error", *warnings], seconds=seconds)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def tell(world: int, folder: Path, words: list[str], check: Callable[[str, int], list[str]]) -> None:
    """Print `{word: {rank: complaints}}` as JSON, of the ranks that have any: `check(word, rank)`, collective."""
    store = f"file://{folder}/store-{os.getpid()}"
    rank = next((rank for rank in range(1, world) if not os.fork()), 0)
    dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        own = [check(word, rank)[:MOST] for word in words]
        found: list[Any] = [None] * world
        dist.all_gather_object(found, own)
        if rank == 0:
            print(
                json.dumps(
                    {word: {r: found[r][n] for r in range(world) if found[r][n]} for n, word in enumerate(words)}
                )
            )
        dist.barrier()
    except BaseException:  # noqa: BLE001 - told, and the process ends: the others wait for it
        traceback.print_exc()
        os._exit(1)
    dist.destroy_process_group()
    if rank:
        os._exit(0)
