"""A machine without settings of its own: the variables that checks look at are gone, and home is empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlframework.generation.engine_environment import ProbeError
from rlframework.plugins.hookspec import DoctorFinding
from rlframework_tools.doctor.checks import Context
from rlframework_tools.doctor.examination import CHECKS

CLEARED = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "CUDA_VISIBLE_DEVICES", "NETRC",
           "HF_ENDPOINT", "WANDB_API_KEY", "CXX", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy",
           "ALL_PROXY", "no_proxy", "NO_PROXY", "grpc_proxy", "GRPC_PROXY", "GLOO_SOCKET_IFNAME")  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home directory, which is empty; and no Ray was started here."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def found():
    """`found(topic, name, context)`: the findings of one check."""
    functions = {(one.topic, one.name): one.function for one in CHECKS}

    def look(topic: str, name: str, context: Context | None = None) -> list[DoctorFinding]:
        return list(functions[topic, name](context or Context()))

    return look


class Probed(Context):
    """A context whose child processes answered with `answers`, by name; an exception: that is what they raised."""

    def __init__(self, answers: dict[str, Any], config: Any = None) -> None:
        super().__init__()
        self._given, self.config = answers, config
        self.source = None if config is None else "run.yaml"

    def probe(self, name: str, *arguments: str, seconds: float = 0.0) -> Any:
        if isinstance(self._given[name], ProbeError):
            raise self._given[name]
        return self._given[name]


@pytest.fixture
def probed():
    """`probed(answers, config)`: see `Probed`."""
    return lambda answers, config=None: Probed(answers, config)


@pytest.fixture
def with_config(tiny_llama: Path, tmp_path: Path):
    """`with_config(*overrides)`: the context of a small run."""
    from rlframework import load_config

    def make(*overrides: str) -> Context:
        values = {
            "output_dir": str(tmp_path / "run"),
            "device": "cpu",
            "algorithm": {"name": "sft", "num_steps": 3, "validation": {"samples": 8}},
            "environment": {"name": "addition", "digits": 1},
            "policy": {"model_name": str(tiny_llama), "train_global_batch_size": 24, "batching": {"tokens": 64}},
            "generation": {"max_new_tokens": 3},
        }
        context = Context()
        context.source, context.config = "run.yaml", load_config(values, overrides)
        return context

    return make
