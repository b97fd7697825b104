"""A loss under which a worker is lost in the middle of a step: its process is killed, hangs, or raises.

`plan` is a folder. A file `RANK-CALL-ACTION` in it is taken out when that rank computes its loss for the CALL-th time
in its process, and then the action is done: each happens once, whatever is started again.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rlframework.algorithms.losses import NLLLoss

_calls = 0


class Deadly(NLLLoss):
    def __init__(self, plan: str) -> None:
        self.plan = plan

    def __call__(self, *args, **kwargs):
        import torch.distributed as dist

        global _calls
        _calls += 1
        for path in Path(self.plan).glob(f"{dist.get_rank()}-{_calls}-*"):
            path.unlink()
            _act(path.name.rpartition("-")[2])
        return super().__call__(*args, **kwargs)


def _act(action: str) -> None:
    if action.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "node":  # Ray's process on this machine, which ends the worker with it
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if action == "hang":
        time.sleep(600)
    if action == "raise":
        raise ZeroDivisionError("one that would come again")
    raise ValueError(action)
