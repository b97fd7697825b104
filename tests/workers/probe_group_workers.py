"""Workers for the tests of `RayWorkerGroup`: plain classes, classes decorated with `ray.remote`, and invalid ones."""

from __future__ import annotations

import builtins
import os
import signal
import sys
import time
from typing import ClassVar

import ray

BLOCK = 600.0


class Plain:
    """Returns its rank and its arguments; fails, dies or hangs on request."""

    def __init__(self, *words, fail_rank=None, **named):
        self.words, self.named = words, named
        self.rank = int(os.environ["RANK"])
        if fail_rank == self.rank:
            raise ValueError(f"cannot build rank {self.rank}")

    def __repr__(self):
        return f"Plain[rank={self.rank}]"

    def who(self):
        names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return {
            **{name: os.environ[name] for name in names},
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "gpus": ray.get_gpu_ids(),
            "torch": "torch" in sys.modules,
            "words": self.words,
            "named": self.named,
        }

    def variables(self, names):
        return {name: os.environ.get(name) for name in names}

    def python(self):
        return sys.executable

    def echo(self, **kwargs):
        return self.rank, kwargs

    def first(self, value):
        """The first element as a number, and its address."""
        return float(value[0]), value.__array_interface__["data"][0]

    def bind_master(self):
        import socket

        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            held.listen()
        return True

    def count(self, to):
        for each in range(to):
            yield (self.rank, each)
        if to > 3:
            raise KeyError("one too many")

    def block(self, only=None):
        if only is None or only == self.rank:
            time.sleep(BLOCK)
        return self.rank

    def fail(self, kind="ValueError", only=0):
        if only != self.rank:
            time.sleep(BLOCK)
            return
        if kind == "OfThisModule":
            raise OfThisModule(1, 2)
        if kind == "BatchError":
            from rlframework.base.errors import BatchError

            raise BatchError("rows differ")
        raise getattr(builtins, kind)("bad thing")

    def die(self, only=0):
        if only == self.rank:
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(BLOCK)

    def unsendable(self):
        import threading

        return threading.Lock()

    def tidy(self, path=None, seconds=0.0):
        time.sleep(seconds)
        if path is not None:
            open(f"{path}/{self.rank}", "w").close()

    def _private(self):
        return "private"


class OfThisModule(RuntimeError):
    """An error unknown to the driver that cannot be constructed from its message alone."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.one = one


@ray.remote(max_concurrency=1, runtime_env={"env_vars": {"FROM_CLASS": "class", "FROM_BOTH": "class"}})
class Decorated:
    """Has its own options."""

    def variables(self, names):
        return {name: os.environ.get(name) for name in names}

    @ray.method(num_returns=2)
    def two(self):
        return 1, 2


class Configured:
    """Requests a variable, a constructor argument and another GPU fraction for the leader of its tied group."""

    seen: ClassVar[dict[str, str | None]] = {"at_import": os.environ.get("OF_CONFIGURE")}

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        leader = bundle_indices is not None
        resources = {"num_cpus": 1 if leader else 0}
        variables = {"OF_CONFIGURE": str(bundle_indices), "FROM_CALLER": "configured" if leader else "led"}
        return resources, variables, {"seed": 7} if leader else {}

    def tell(self):
        names = ("OF_CONFIGURE", "FROM_CALLER", "RANK")
        return {**{name: os.environ.get(name) for name in names}, **self.kwargs, **self.seen}


class WithRuntime:
    """Gets the number of GPUs of a node, and returns a runtime environment."""

    @classmethod
    def configure_worker(cls, num_gpus, bundle_indices, num_gpus_per_node):
        return {}, {}, {"per_node": num_gpus_per_node}, {"env_vars": {"OF_RUNTIME": "yes"}}

    def __init__(self, per_node=None):
        self.per_node = per_node

    def tell(self):
        return self.per_node, os.environ.get("OF_RUNTIME")


class Coroutines:
    """Its calls run concurrently: one waits for another."""

    def __init__(self):
        import asyncio

        self.brought = asyncio.Event()

    async def wait(self):
        await self.brought.wait()
        return "came"

    async def bring(self):
        self.brought.set()

    async def count(self, to):
        for each in range(to):
            yield each

    def plain(self):
        return "plain"


not_a_class = 3
