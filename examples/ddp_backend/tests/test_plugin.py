"""The plugin is active and lightweight, and its section rejects unknown keys."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rlframework.plugins.manager import create_manager

from rlframework_ddp.config import DdpConfig


def test_the_backend_is_listed() -> None:
    [row] = [row for row in create_manager().listing() if row.name == "ddp"]
    assert row.status == "active"
    assert row.distribution == "rlframework-ddp"


def test_the_record_imports_no_torch() -> None:
    use = "import rlframework_ddp.plugin as plugin; plugin.rlframework_policy_workers()"
    look = "import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{use}; {look}"], check=True)


def test_an_unknown_key_of_the_section_is_an_error() -> None:
    with pytest.raises(ValueError, match="no_such_key"):
        DdpConfig.model_validate({"no_such_key": 1})
