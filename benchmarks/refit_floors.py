"""Floors of `refit.py`: two processes that copy, write or broadcast as many bytes as a refit, controlled over pipes.

One has the bytes of the weights, rank 0; the other gets them, rank 1. Orders are the names of the contenders.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlframework.weight_sync import buffers, ipc

BARE, MEMCPY = "bare copy", "bare copy, memcpy"
OVERLAPPED, MEMCPY_OVERLAPPED = "bare copy, overlapped", "bare memcpy, overlapped"
COPIES = BARE, MEMCPY, OVERLAPPED, MEMCPY_OVERLAPPED
WRITE, CHECKED, BROADCAST = "bare write", "bare write, checksums", "bare broadcast"
CHUNK, GROUP = 32 << 20, ipc.OFFERED_GROUP


def copying(rank: int, name: str, size: int, driver: Any, other: Any) -> None:
    """Rank 0 copies its bytes into the shared memory, rank 1 copies them out."""
    torch.set_num_threads(1)
    shared = shared_memory.SharedMemory(name)
    memory: Any = np.frombuffer(shared.buf, dtype=np.uint8)
    place: Any = None
    own = bytes_of_rank(rank, size)
    driver.send("ready")
    while (order := driver.recv()) != "end":
        if order == "sum":
            driver.send(digest(own))
            continue
        if order in (WRITE, CHECKED):
            write(rank, own, memory, order, other)
            driver.send("done")
            continue
        whole = order in (BARE, MEMCPY)
        chunks = [(0, size)] if whole else [(at, min(at + CHUNK, size)) for at in range(0, size, CHUNK)]
        for number, (start, end) in enumerate(chunks):
            place = memory[:end] if whole else memory[number % 2 * CHUNK :][: end - start]
            if rank == 0:
                if number > 1:
                    other.recv_bytes()  # the previous contents have been read
                copy(place, own[start:end], order)
                other.send_bytes(b"in")
            else:
                other.recv_bytes()
                copy(own[start:end], place, order)
                if number + 2 < len(chunks):
                    other.send_bytes(b"out")
        driver.send("done")
    place = memory = None  # otherwise the shared memory cannot be closed


def write(rank: int, own: Any, memory: Any, order: str, other: Any) -> None:
    """Rank 0 writes its bytes into the shared memory; with checksums, rank 1 verifies them there."""
    size = len(own)
    for start in range(0, size, size if order == WRITE else GROUP):
        chunk = slice(start, min(start + GROUP, size) if order == CHECKED else size)
        if rank:
            sent = other.recv()
            assert order == WRITE or buffers.checksum(torch.from_numpy(memory[chunk])) == sent
        elif order == WRITE:
            copy(memory[chunk], own[chunk], order)
            other.send(None)
        else:
            target, source = torch.from_numpy(memory[chunk]), torch.from_numpy(own[chunk])
            other.send(buffers.copy_bytes(target, source, of_source=True))


def copy(target: Any, source: Any, order: str) -> None:
    """Copy with torch's `copy_`, or with numpy."""
    if order in (MEMCPY, MEMCPY_OVERLAPPED):
        target[:] = source
    else:
        torch.from_numpy(target).copy_(torch.from_numpy(source))


def broadcasting(rank: int, address: str, size: int, driver: Any, other: Any) -> None:
    """Both ranks of a gloo group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    own = bytes_of_rank(rank, size)
    tensor = torch.from_numpy(own)
    driver.send("ready")
    while (order := driver.recv()) != "end":
        if order == "sum":
            driver.send(digest(own))
            continue
        dist.broadcast(tensor, 0)
        driver.send("done")
    dist.destroy_process_group()


def bytes_of_rank(rank: int, size: int) -> Any:
    """The source of rank 0, in a tensor's memory like weights; ones for rank 1."""
    if rank:
        return torch.zeros(size, dtype=torch.uint8).fill_(1).numpy()  # touch its pages
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()


def digest(values: Any) -> int:
    return buffers.checksum(torch.from_numpy(values))


class Floor:
    """Two processes that run `target`, with the driver's ends of their pipes."""

    def __init__(self, target: Any, argument: str, size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._links = []
        left, right = spawn.Pipe()
        for rank, other in enumerate((left, right)):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=target, args=(rank, argument, size, theirs, other), daemon=True)
            process.start()
            self._links.append((mine, process))
        self._answers()

    def ask(self, order: str) -> list[Any]:
        """Send an order to both processes, and return their answers."""
        for link, _ in self._links:
            link.send(order)
        return self._answers()

    def _answers(self) -> list[Any]:
        return [link.recv() for link, _ in self._links]

    def end(self) -> None:
        for link, process in self._links:
            link.send("end")
            process.join(20)
