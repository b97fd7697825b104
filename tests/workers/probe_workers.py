"""Worker classes for the tests of worker groups. Workers import this module by name; torch only where it is needed."""

from __future__ import annotations

import os
import signal
import sys
import time


def node_id():
    """Ray's id of this node; None if this process is not a Ray worker."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else None


class Probe:
    """Returns its context and its arguments; fails, dies or hangs on request."""

    def __init__(self, context, word="", die_rank=None):
        self.context = context
        self.word = word
        self.tidied = False
        if context.rank == die_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def who(self):
        return {
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "address": self.context.master_addr,
            "device": self.context.device,
            "threads": self.context.threads,
            "word": self.word,
            "pid": os.getpid(),
            "environment": dict(os.environ),
            "torch_imported": "torch" in sys.modules,
            "node_rank": self.context.node_rank,
            "local_rank": self.context.local_rank,
            "node": self.context.node,
            "node_id": node_id(),
        }

    def echo(self, **kwargs):
        return self.context.rank, kwargs

    def sleep(self, seconds, only=None):
        if only is None or self.context.rank == only:
            time.sleep(seconds)
        return self.context.rank

    def fail(self, kind, only=None):
        if only is not None and self.context.rank != only:
            time.sleep(600)
        import probe_errors

        raise getattr(probe_errors, kind)(f"bad thing on {self.context.rank}")

    def die(self, only):
        if self.context.rank == only:
            print("last words of the dying", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def shutdown(self):
        self.tidied = True

    def all_reduce(self, value):
        """The sum over all ranks, in a gloo group formed at the context's address."""
        import datetime as dt

        import torch
        import torch.distributed as dist

        from rlframework.workers.process_groups import process_store

        dist.init_process_group(
            "gloo",
            store=process_store(self.context),
            rank=self.context.rank,
            world_size=self.context.world_size,
            timeout=dt.timedelta(seconds=self.context.deadline),
        )
        tensor = torch.tensor([float(value)])
        dist.all_reduce(tensor)
        return tensor.item()

    def gather_batch(self, batch):
        """`batch` of all ranks joined; the group must have been formed."""
        return batch.all_gather(None)

    def wait_for_peer(self, only):
        """Rank `only` dies; the others wait for it in a collective and see its connection close."""
        import torch
        import torch.distributed as dist

        if self.context.rank == only:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))

    def touch(self, path):
        open(path, "w").close()

    def hold_the_interpreter(self, seconds):
        """Block all other threads of the process meanwhile."""
        import ctypes

        ctypes.PyDLL(None).sleep(seconds)

    def leave(self, code):
        sys.exit(code)

    def die_forked(self, path):
        """Rank 0 dies; a process that it forked keeps its open files for two minutes; `path` gets its id."""
        if self.context.rank == 0:
            if (child := os.fork()) == 0:
                os.setpgid(0, 0)
                time.sleep(120)
                os._exit(0)
            with open(path, "w") as file:
                file.write(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def answer_of_a_class_that_is_only_there(self):
        import types

        module = sys.modules["only_there"] = types.ModuleType("only_there")
        module.Thing = type("Thing", (), {"__module__": "only_there"})
        return module.Thing()


class Process:
    """Describes its process."""

    def __init__(self, context):
        self.child = None

    def folder(self):
        return os.getcwd()

    def start_a_process(self):
        import multiprocessing

        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        self.child.start()
        return self.child.pid
