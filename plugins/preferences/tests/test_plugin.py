"""The distribution as a plugin: its records, and the errors of a run where it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlframework.base.errors import PluginError
from rlframework.plugins.manager import create_manager

ALGORITHMS = ["dpo", "ipo", "simpo", "orpo", "kto", "reward_model", "process_reward_model"]


def test_records() -> None:
    manager = create_manager()
    of = {(kind, name): manager.select(kind, name) for kind, name in [("environment", "preferences")]}
    of |= {("algorithm", name): manager.select("algorithm", name) for name in ALGORITHMS}
    assert {chosen.distribution for chosen in of.values()} == {"rlframework-preferences"}
    for (_, name), chosen in of.items():
        assert chosen.record.config_model is not None
        assert chosen.record.config_model.model_fields["name"].default == name
        assert manager.load(chosen.record).__module__.startswith("rlframework_preferences.")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_the_distribution_the_error_says_how_to_install_it(name: str) -> None:
    with pytest.raises(PluginError) as caught:
        create_manager(disabled=["rlframework-preferences"]).select("algorithm", name)
    assert f"algorithm.name: there is no algorithm '{name}'." in str(caught.value)
    assert "pip install -e" in str(caught.value)
    assert "plugins/preferences" in str(caught.value)


def test_a_name_with_hyphens_is_told_the_one_with_underscores() -> None:
    with pytest.raises(PluginError, match=r"no algorithm 'reward-model'\. Did you mean 'reward_model'\?"):
        create_manager().select("algorithm", "reward-model")


def test_the_entry_point_imports_nothing_heavy() -> None:
    code = (
        "import sys, rlframework_preferences.plugin; print({'torch', 'tensordict', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
