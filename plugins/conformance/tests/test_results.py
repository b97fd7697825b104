"""Passed tests of sound implementations are recorded by plugin, section, layout and test."""

from __future__ import annotations

import pytest

from rlframework_conformance.layouts import Layout
from rlframework_conformance.results import PassedTests

OF = ("policy_worker", "mine", {"stage": 1}, Layout(data=2), "test_this")


def test_a_pass_is_visible_to_all_that_share_the_folder(tmp_path):
    PassedTests(tmp_path / "sound").path(*OF).touch()
    assert PassedTests(tmp_path / "sound").path(*OF).exists()


@pytest.mark.parametrize(
    ("place", "other"), [(0, "environment"), (1, "yours"), (2, {}), (3, Layout()), (4, "test_that")]
)
def test_it_is_a_pass_of_nothing_else(tmp_path, place, other):
    passes = PassedTests(tmp_path)
    passes.path(*OF).touch()
    of = list(OF)
    of[place] = other
    assert not passes.path(*of).exists()
