"""What all tests share: one thread, one Ray a session, one tiny model."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test fetches anything

import signal
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlframework.workers import processes

# A shell starts what runs in its background with Ctrl-C ignored, and all that is started here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What hundreds of tests start in worker processes is imported once, where these are forked from.
processes.PRELOADED = (
    "rlframework.conformance.inspected_worker",
    "rlframework.conformance.mutants.policy_worker",
    "rlframework.conformance.probe_worker",
    "rlframework.plugins.builtin",
    "rlframework_dtensor.worker",
    "rlframework_deepspeed.worker",
    "rlframework_megatron.worker",
    "rlframework_ddp.worker",
    *processes.PRELOADED,
)

ALPHABET = string.digits + string.ascii_lowercase + " +-*=?.,:\n"

_imported = 0


def _keep_imports() -> None:
    """What has been imported stays: thousands of tests need not search it for garbage again."""
    global _imported
    if len(sys.modules) >= _imported + 50:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


def pytest_collection_finish() -> None:
    """Collecting has imported most."""
    _keep_imports()


def pytest_runtest_logfinish() -> None:
    """Some engines are imported by the first test that has a worker."""
    _keep_imports()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray for all tests that need one; mark them `@pytest.mark.xdist_group("ray")`, so that one process has them."""
    from rlframework.workers.ray import runtime

    runtime.acquire(0)
    yield
    runtime.release(0)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama, 2 layers of 32, fp32, tied, with a character tokenizer. Do not write to it."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("models") / "tiny_llama"
    return make_llama(path, character_tokenizer(ALPHABET), hidden=32, layers=2, heads=4, kv_heads=2, max_positions=128)
