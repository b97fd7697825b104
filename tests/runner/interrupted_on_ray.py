"""Runs on a Ray of their own that are interrupted at different points: a program, because signals go to a process.

Called with the configuration's file and a folder for the runs. Prints for each run a line of JSON: its exit code, what
it wrote to standard error from the signal on, the seconds until it had returned, and what was left of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import ray

from rlframework.cli import main
from rlframework_ray import runtime

ACQUIRE = runtime.acquire


def children():
    return psutil.Process().children(recursive=True)


def before(out, fire):
    def acquire(*args, **kwargs):
        runtime.acquire = ACQUIRE
        fire()
        ACQUIRE(*args, **kwargs)

    runtime.acquire = acquire


def when(condition):
    """A point of the run: as soon as `condition` holds."""

    def arrange(out, fire):
        def wait():
            while not condition(out):
                time.sleep(0.1)
            fire()

        threading.Thread(target=wait, daemon=True).start()

    return arrange


def runs(name):
    with contextlib.suppress(psutil.Error):
        return any(name in " ".join([child.name(), *child.cmdline()]) for child in children())
    return False


during = when(lambda out: runs("gcs_server"))
workers_start = when(lambda out: ray.is_initialized() and runs("ray::"))
training = when(lambda out: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") > 1)

RUNS = {
    "before Ray": (before, signal.SIGTERM, True),
    "while Ray starts": (during, signal.SIGTERM, True),
    "while Ray starts, Ctrl-C": (during, signal.SIGINT, True),
    "while workers start": (workers_start, signal.SIGTERM, True),
    "in training": (training, signal.SIGTERM, False),
    "in training, saving": (training, signal.SIGTERM, True),
}


def interrupted(config, out, point, number, saves):
    fired, errors, folders = [], io.StringIO(), []

    def fire():
        folders.extend(private.folder for private in runtime._PRIVATE)
        errors.truncate(0)
        fired.append(time.monotonic())
        os.killpg(0, number)  # as a terminal and some schedulers do: to all processes of the group

    point(out, fire)
    with contextlib.redirect_stderr(errors):
        try:
            main(["train", config, f"output_dir={out}", f"checkpoints.on_interrupt={str(saves).lower()}"])
        except SystemExit as error:
            code = error.code
    return {
        "code": code,
        "stderr": errors.getvalue().strip("\0\n"),
        "seconds": time.monotonic() - fired[0],
        "processes": [child.name() for child in children() if child.status() != psutil.STATUS_ZOMBIE],
        "folders": [str(folder) for folder in folders if folder.exists()],
        "checkpoints": len(list((out / "checkpoints").glob("step-*"))),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has programs in the background ignore Ctrl-C
    for index, (name, (point, number, saves)) in enumerate(RUNS.items()):
        seen = interrupted(sys.argv[1], Path(sys.argv[2]) / str(index), point, number, saves)
        print(json.dumps({"name": name, **seen}), flush=True)
