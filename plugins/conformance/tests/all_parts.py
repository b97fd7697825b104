"""The suites of all plugins in this repository, for `make conformance`; `make test` runs them with their own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframework_conformance import (
    DataProcessorSuite,
    EnvironmentSuite,
    GenerationEngineSuite,
    PolicyWorkerSuite,
    WorkerGroupSuite,
)

FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures"
TRAIN, VALIDATION = str(FIXTURES / "gsm8k_train.jsonl"), str(FIXTURES / "gsm8k_test.jsonl")


class TestDTensor(PolicyWorkerSuite):
    backend = "dtensor"


class TestDeepSpeedStage0(PolicyWorkerSuite):
    backend = "deepspeed"
    section = {"zero_optimization": {"stage": 0}}  # noqa: RUF012
    every = ("data=1", "data=2")


class TestDeepSpeedStage1(PolicyWorkerSuite):
    backend = "deepspeed"
    section = {"zero_optimization": {"stage": 1}}  # noqa: RUF012
    every = ("data=1", "data=2")


class TestDeepSpeedStage2(PolicyWorkerSuite):
    backend = "deepspeed"
    section = {"zero_optimization": {"stage": 2}}  # noqa: RUF012
    every = ("data=1", "data=2", "tensor=2", "context=2")


class TestDeepSpeedStage3(PolicyWorkerSuite):
    backend = "deepspeed"
    section = {"zero_optimization": {"stage": 3}}  # noqa: RUF012
    every = ("data=1", "data=2", "tensor=2")


class TestDeepSpeedUlysses(PolicyWorkerSuite):
    backend = "deepspeed"
    section = {"zero_optimization": {"stage": 2}, "sequence_exchange": "ulysses"}  # noqa: RUF012
    every = ("context=2",)


class TestDeepSpeedOverlapped(PolicyWorkerSuite):
    """The defaults of several GPUs, in buckets smaller than some parameters."""

    backend = "deepspeed"
    section = {  # noqa: RUF012
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    every = ("data=2",)


class TestMegatron(PolicyWorkerSuite):
    backend = "megatron"
    # each axis, and one pair of model axes; all pairs take an hour on two cores
    every = (
        "data=1",
        "data=2",
        "tensor=2",
        "tensor=2,sequence",
        "pipeline=2",
        "context=2",
        "tensor=2,pipeline=2",
        "data=2,expert=2",
    )


class TestMegatronDistributedOptimizer(PolicyWorkerSuite):
    backend = "megatron"
    section = {"distributed_optimizer": True}  # noqa: RUF012
    every = ("data=1", "data=2", "data=2,tensor=2")


class TestMegatronOverlapped(PolicyWorkerSuite):
    """The defaults of several GPUs."""

    backend = "megatron"
    section = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}  # noqa: RUF012
    every = ("data=2",)


class TestExampleDdp(PolicyWorkerSuite):
    backend = "ddp"


class TestMegatronInterleaved(PolicyWorkerSuite):
    backend = "megatron"
    section = {"virtual_pipeline": 2}  # noqa: RUF012
    every = ("pipeline=2",)


class TestMicrobatches(DataProcessorSuite):
    backend = "microbatches"


class TestInline(WorkerGroupSuite):
    backend = "inline"


class TestProcesses(WorkerGroupSuite):
    backend = "processes"


@pytest.mark.usefixtures("ray_session")
class TestRay(WorkerGroupSuite):
    backend = "ray"


class TestTransformers(GenerationEngineSuite):
    backend = "transformers"


class TestAddition(EnvironmentSuite):
    backend = "addition"


class TestGsm8k(EnvironmentSuite):
    backend = "gsm8k"
    section = {"train_path": TRAIN, "validation_path": VALIDATION}  # noqa: RUF012


class TestDataset(EnvironmentSuite):
    backend = "dataset"
    section = {"path": TRAIN, "validation_path": VALIDATION, "check": "math"}  # noqa: RUF012


class TestToolGame(EnvironmentSuite):
    backend = "probe_tool_game:ToolGame"


class TestGymnasium(EnvironmentSuite):
    backend = "gymnasium"
    section = {"id": "FrozenLake-v1", "actions": ("left", "down", "right", "up"), "train_samples": 8}  # noqa: RUF012


class TestReasoningGym(EnvironmentSuite):
    backend = "reasoning_gym"
    section = {"task": "basic_arithmetic", "train_samples": 20, "validation_samples": 4}  # noqa: RUF012
