"""Commands that plugins add to the command line: they run, and a plugin that is broken does not disturb the others."""

from __future__ import annotations

import pytest

from rlframework.cli import main
from rlframework.plugins.discovery import install_command

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


def test_a_command_of_a_plugin_runs_and_is_listed(install, capsys):
    install("acme-tools", "acme", HELLO)
    ends_with(0, "hello", "you")
    assert capsys.readouterr().out == "hello you\n"
    ends_with(0, "--help")
    assert "Greet somebody." in capsys.readouterr().out


def test_a_command_of_core_keeps_its_name(install, capsys, caplog):
    install("acme-tools", "acme", HELLO)
    ends_with(0, "plugins")
    assert "not core's" not in capsys.readouterr().out
    ends_with(0, "hello", "you")
    assert "the command 'plugins' of acme-tools 1.0 is ignored: core has one of that name" in caplog.text


def test_a_name_that_two_plugins_use_blames_both(install, capsys):
    install("acme-tools", "acme", HELLO)
    install("other-tools", "other", HELLO, version="2.0")
    ends_with(2, "hello", "you")
    message = capsys.readouterr().err
    assert "2 plugins add the command 'hello': other-tools 2.0 and acme-tools 1.0." in message
    assert "RLFRAMEWORK_DISABLE_PLUGINS" in message


def test_a_plugin_whose_hook_raises_is_named_and_the_others_work(install, capsys, caplog):
    raising = HELLO.replace("@app.command()", "raise LookupError('no greeting')\n        @app.command()")
    install("acme-tools", "acme", HELLO)
    install("bad-tools", "bad", raising)
    ends_with(0, "hello", "you")
    assert capsys.readouterr().out == "hello you\n"
    assert "rlframework_commands of bad-tools 1.0 failed: LookupError: no greeting." in caplog.text
    assert "Reinstall or update bad-tools, or disable it: RLFRAMEWORK_DISABLE_PLUGINS=bad." in caplog.text


def test_an_unknown_command_says_what_to_install_and_what_is_broken(install, capsys):
    install("bad-tools", "bad", "raise ImportError('libbad.so is missing')")
    ends_with(2, "conformance")
    message = capsys.readouterr().err
    assert "there is no command 'conformance'." in message
    assert install_command("conformance") in message
    assert "bad of bad-tools 1.0 is broken: ImportError: libbad.so is missing." in message


def test_a_command_without_an_extra_of_its_name_points_to_all_of_them(capsys):
    ends_with(2, "xyzzy")
    assert install_command("all") in capsys.readouterr().err


def test_a_misspelled_command_is_corrected(capsys):
    ends_with(2, "trian")
    assert "Did you mean 'train'?" in capsys.readouterr().err
