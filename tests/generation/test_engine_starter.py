"""The configuration that engine workers are started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframework.configure import load_config
from rlframework.generation.engine_starter import EngineStarter
from rlframework.plugins.manager import create_manager


@pytest.mark.parametrize("given", ["env/bin/python", "/env/bin/python", "python3"])
def test_the_python_of_engines_is_the_same_in_every_folder(given, tmp_path, monkeypatch):
    """A bare name stays one, for each node to find."""
    values = {
        "algorithm": {"name": "grpo"},
        "environment": {"name": "addition"},
        "policy": {"model_name": "none"},
        "generation": {"workers": {"group": "ray", "python": given}},
    }
    config = load_config(values)
    monkeypatch.chdir(tmp_path)
    starter = EngineStarter("none:None", config, None, create_manager([]), "cpu")
    expected = {"env/bin/python": str(Path.cwd() / "env/bin/python")}
    assert starter._python == expected.get(given, given)
