"""The output of `rlframework plugins`, which does not import torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from rich.console import Console

from rlframework.base.errors import UserError
from rlframework.plugins.listing import PluginTable, named
from rlframework.plugins.manager import create_manager

ENGINE = """
    from rlframework.plugins.hookspec import hookimpl
    from rlframework.plugins.types import Capability, PolicyWorkerRecord

    @hookimpl
    def rlframework_policy_workers():
        capabilities = frozenset({Capability.PACKING, Capability.LORA, "acme:sparse_attention"})
        return [PolicyWorkerRecord("acme", "m:C", summary="an engine", api_version=1, capabilities=capabilities)]
"""


def test_json_has_a_row_with_all_fields(install):
    install("acme-engine", "acme", code=ENGINE, version="2.0")
    found = [row for row in create_manager().listing() if row.name == "acme"]
    assert json.loads(json.dumps([asdict(row) for row in found])) == [
        {
            "name": "acme",
            "kind": "policy_worker",
            "distribution": "acme-engine",
            "version": "2.0",
            "api_version": 1,
            "capabilities": ["acme:sparse_attention", "lora", "packing"],
            "status": "active",
            "reason": "",
            "summary": "an engine",
        }
    ]


def test_the_table_shows_names_states_and_reasons(install):
    install("acme-engine", "acme", code=ENGINE)
    install("sick-engine", "sick", code="raise ValueError('no [bold] cure')")
    text = io.StringIO()
    Console(file=text, width=200).print(PluginTable(create_manager(disabled=["processes"]).listing()))
    lines = text.getvalue().splitlines()
    assert any("acme" in line and "active" in line and "lora, packing" in line for line in lines)
    assert any("sick" in line and "broken" in line and "ValueError: no [bold] cure" in line for line in lines)
    assert any(" processes " in line and "disabled" in line and "RLFRAMEWORK_DISABLE_PLUGINS" in line for line in lines)


@pytest.mark.parametrize("width", [80, 100, 159])
def test_a_narrow_table_fits_and_says_where_the_rest_is(install, width):
    install("acme-engine", "acme", code=ENGINE)
    text = io.StringIO()
    Console(file=text, width=width).print(PluginTable(create_manager().listing()))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any("acme" in line and "active" in line and "an engine" in line for line in lines)
    assert "policy_worker (policy.backend)" in [line.strip() for line in lines]
    assert "packing" not in [word.strip(",") for line in lines if "acme" in line for word in line.split()]
    assert "Capabilities are shown with --json" in text.getvalue()


@pytest.mark.slow
def test_listing_imports_nothing_heavy():
    code = (
        "import json, sys\n"
        "from rlframework.plugins.listing import PluginTable\n"
        "from rlframework.plugins.manager import create_manager\n"
        "rows = create_manager(['rlframework_dtensor.plugin']).listing()\n"
        "PluginTable(rows)\n"
        "heavy = {'torch', 'ray', 'transformers', 'datasets', 'matplotlib', 'math_verify', 'numpy'}\n"
        "print(json.dumps([[row.name for row in rows], sorted(heavy & set(sys.modules))]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names, heavy = json.loads(done.stdout)
    assert "dtensor" in names
    assert heavy == []


def test_rows_are_selected_by_name_or_kind():
    rows = create_manager().listing()
    assert {row.name for row in named("environment", rows)} >= {"gsm8k", "tools"}
    assert [(row.name, row.kind) for row in named("processes", rows)] == [("processes", "worker_group")]
    with pytest.raises(UserError, match=r"named 'gsm9k'\. Did you mean 'gsm8k'"):
        named("gsm9k", rows)
