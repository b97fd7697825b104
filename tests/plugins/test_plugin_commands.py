"""Commands that plugins add to the command line, and the lists of `rlframework plugins`."""

from __future__ import annotations

import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from rlframework.base.errors import UserError
from rlframework.cli import main
from rlframework.plugins.discovery import install_command
from rlframework.plugins.listing import PluginTable, named
from rlframework.plugins.manager import create_manager

HELLO = """
    from rlframework.plugins.hookspec import hookimpl

    @hookimpl
    def rlframework_commands(app):
        @app.command()
        def hello(name: str) -> None:
            "Greet somebody."
            print("hello", name)

        @app.command("plugins")
        def takes_a_name_of_core() -> None:
            print("not core's")
"""


def ends_with(code, *words):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_a_command_of_a_plugin_runs_and_those_of_core_keep_their_names(install, capsys, caplog):
    install("acme-tools", "acme", HELLO)
    ends_with(0, "hello", "you")
    assert capsys.readouterr().out == "hello you\n"
    ends_with(0, "--help")
    assert "Greet somebody." in capsys.readouterr().out
    ends_with(0, "plugins")
    assert "not core's" not in capsys.readouterr().out
    assert "the command 'plugins' of acme-tools 1.0 is ignored: core has one of that name" in caplog.text


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("hello", "2 plugins add the command 'hello': other-tools 2.0 and acme-tools 1.0."),
        ("hello", "RLFRAMEWORK_DISABLE_PLUGINS"),
        ("conformance", "there is no command 'conformance'."),
        ("conformance", install_command("conformance")),
        ("conformance", "bad of bad-tools 1.0 is broken: ImportError: libbad.so is missing."),
        ("xyzzy", install_command("all")),
        ("trian", "Did you mean 'train'?"),
    ],
)
def test_a_command_that_cannot_be_run_says_why(install, capsys, command, told):
    install("acme-tools", "acme", HELLO)
    install("other-tools", "other", HELLO, version="2.0")
    install("bad-tools", "bad", "raise ImportError('libbad.so is missing')")
    ends_with(2, command)
    assert told in capsys.readouterr().err


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


@pytest.mark.parametrize("width", [80, 159, 200])
def test_a_table_fits_its_width(install, width):
    """With its capabilities if there is space, or where they are shown."""
    install("acme-engine", "acme", code=ENGINE)
    install("sick-engine", "sick", code="raise ValueError('no [bold] cure')")
    text = io.StringIO()
    Console(file=text, width=width).print(PluginTable(create_manager(disabled=["processes"]).listing()))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    [acme] = [line for line in lines if "acme" in line]
    assert "active" in acme
    assert "an engine" in acme
    assert ("lora, packing" in acme) == (width == 200)
    assert ("Capabilities are shown with --json" in text.getvalue()) == (width < 200)
    assert "policy_worker (policy.backend)" in [line.strip() for line in lines]
    assert width < 200 or any("sick" in line and "broken" in line and "no [bold] cure" in line for line in lines)
    assert any("processes " in line and "disabled" in line for line in lines)


def test_rows_are_selected_by_name_or_kind():
    rows = create_manager().listing()
    assert {row.name for row in named("environment", rows)} >= {"gsm8k", "tools"}
    assert [(row.name, row.kind) for row in named("processes", rows)] == [("processes", "worker_group")]
    with pytest.raises(UserError, match=r"named 'gsm9k'\. Did you mean 'gsm8k'"):
        named("gsm9k", rows)
