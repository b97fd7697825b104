"""Fixtures for worker groups that import `probe_workers` by name."""

import pytest

from rlframework.config.sections import DeadlinesConfig, WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec


@pytest.fixture
def line():
    """`line(n)`: n workers on one axis."""
    return lambda workers: NamedSharding(list(range(workers)), ["data_parallel"])


@pytest.fixture
def probe_spec():
    """`probe_spec(**kwargs)`: a `Probe` worker with these constructor arguments."""
    return lambda **kwargs: WorkerSpec("probe_workers:Probe", kwargs)


@pytest.fixture
def group_config():
    """`group_config(name, workers, **deadlines)`."""
    return lambda name, workers, **deadlines: WorkerGroupConfig(
        name=name, num_workers=workers, deadlines=DeadlinesConfig(**deadlines)
    )
