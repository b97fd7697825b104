"""Shared by all tests: one thread, one Ray per session, one tiny model."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests download nothing

import signal
import string
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from left_out_cases import SAMPLED
from left_out_suites import SUITES
from short_runs import short_run

from rlframework.workers import processes

# A shell starts background jobs with SIGINT ignored, and the processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imported once in the process that worker processes are forked from, as hundreds of tests start such workers. Engines
# look for GPUs when they are imported, and CUDA cannot be used in a process forked from one that did.
if not Path("/dev/nvidia0").exists():
    processes.PRELOADED = (
        "rlframework_conformance.inspected_worker",
        "rlframework_conformance.mutants",
        "rlframework_conformance.probe_worker",
        "rlframework.plugins.builtin",
        "rlframework_transformers.engine",
        "rlframework_dtensor.worker",
        "rlframework_deepspeed.worker",
        "rlframework_megatron.worker",
        "rlframework_ddp.worker",
        *processes.PRELOADED,
    )

ALPHABET = string.digits + string.ascii_lowercase + " +-*=?.,:\n"

_imported = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--thorough`."""
    parser.addoption(
        "--thorough", action="store_true", help="run also what `make test` leaves out: tests/fixtures/left_out_*.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Try the same examples in each `make test` of a commit; `--thorough` tries new ones."""
    if config.pluginmanager.hasplugin("hypothesispytest") and not config.getoption("thorough"):
        from hypothesis import settings

        settings.register_profile("repeatable", derandomize=True)
        settings.load_profile(config.getoption("--hypothesis-profile") or "repeatable")


def _keep_imports() -> None:
    """Exempt imported modules from garbage collection, which would otherwise scan them in thousands of tests."""
    global _imported
    if len(sys.modules) >= _imported + 50:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for `--thorough`, and allow for the compilation of kernels on a GPU."""
    if not config.getoption("thorough"):
        _sample(config, items)
    # kernels are compiled first, which takes minutes, and compilers and NCCL warn; show it, and go on
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(600))


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases, tests marked `thorough`, and tests of suites.

    The latter only with `-m`, as in `make test`: a session whose suites are incomplete fails unless its command line
    selects tests. So a file of a suite that is run by itself is run whole.
    """
    suites = SUITES if config.getoption("markexpr") else {}
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        file, _, name = test.partition("::")
        suite, _, of_suite = test.rpartition("::")
        out = seen[test] % SAMPLED.get(file, {}).get(name, 1) or item.get_closest_marker("thorough")
        (left_out if out or of_suite in suites.get(suite, ()) else kept).append(item)
        seen[test] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Most modules are imported after collection."""
    _keep_imports()


def pytest_runtest_logfinish() -> None:
    """Some engines are imported by the first test with a worker."""
    _keep_imports()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """The session's Ray. Mark tests that use it `@pytest.mark.xdist_group("ray")`, so that one process runs them."""
    from rlframework_ray import runtime

    runtime.acquire(0)
    yield
    runtime.release(0)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only directory of a random Llama (2 layers, hidden size 32, fp32, tied) with a character tokenizer."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("models") / "tiny_llama"
    return make_llama(path, character_tokenizer(ALPHABET), hidden=32, layers=2, heads=4, kv_heads=2, max_positions=128)


@pytest.fixture(scope="session")
def make_config(tiny_llama: Path):
    """`make_config(folder, algorithm, *overrides)`: like `run_config`, in `folder`, for fixtures of wider scope."""
    return partial(short_run, tiny_llama)


@pytest.fixture
def run_config(make_config: Any, tmp_path: Path):
    """`run_config(algorithm, *overrides)`: the configuration of a short run in `tmp_path`."""
    return partial(make_config, tmp_path)
