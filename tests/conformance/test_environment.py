"""Core's environments conform, and the suite catches broken ones."""

from __future__ import annotations

from pathlib import Path

from rlframework.conformance import EnvironmentSuite
from rlframework.conformance.mutants.proof import MutantProof

FIXTURES = Path(__file__).parents[1] / "fixtures"
PATHS = {"train_path": str(FIXTURES / "gsm8k_train.jsonl"), "validation_path": str(FIXTURES / "gsm8k_test.jsonl")}


class TestAddition(EnvironmentSuite):
    backend = "addition"


class TestGsm8k(EnvironmentSuite):
    backend = "gsm8k"
    section = PATHS


class TestDataset(EnvironmentSuite):
    backend = "dataset"
    section = {"path": PATHS["train_path"], "check": "math"}  # noqa: RUF012


class TestUnscoredDataset(EnvironmentSuite):
    backend = "dataset"
    section = {"path": PATHS["train_path"], "validation_path": PATHS["validation_path"]}  # noqa: RUF012


class TestMutants(MutantProof):
    kind = "environment"
    backend = "gsm8k"
    section = PATHS
