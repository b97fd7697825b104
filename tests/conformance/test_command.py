"""`rlframework conformance`: what it runs, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from rlframework.cli import main
from rlframework.conformance import command
from rlframework.conformance.command import Request, find_parts, module_text, parse_section
from rlframework.errors import ConfigError, UserError
from rlframework.plugins.manager import create_manager

TEST = "test_each_sample_has_an_id_of_its_own"
WORTH = "test_a_right_answer_is_worth_more_than_a_wrong_one"
GENEROUS = """
    from dataclasses import replace

    from rlframework.config.environments import AdditionConfig
    from rlframework.environments.addition import AdditionEnvironment
    from rlframework.plugins.hookspec import hookimpl
    from rlframework.plugins.types import EnvironmentRecord

    @hookimpl
    def rlframework_environments():
        return [EnvironmentRecord("generous", "tiny_plugin:Generous", 1, config_model=AdditionConfig)]

    class Generous(AdditionEnvironment):
        def step(self, samples, conversations):
            return [replace(outcome, reward=1.0) for outcome in super().step(samples, conversations)]
"""


def called(*args):
    """The exit code of the command in this process; nothing of pytest runs where it refuses."""
    with pytest.raises(SystemExit) as ended:
        main(["conformance", *args])
    return ended.value.code


def run(*args, cwd):
    """In a process of its own, as a user would."""
    line = [sys.executable, "-m", "rlframework.cli", "conformance", *args]
    variables = {**os.environ, "PYTHONPATH": str(cwd)}
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=variables, timeout=300, check=False)


def test_a_part_that_conforms(tmp_path):
    """The caller's own pytest configuration, conftest and plugins of the environment have no say."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('not mine')\n")
    done = run("addition", "digits=1", "--json", "out/a.json", "--markdown", "out/a.md", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "addition  EnvironmentSuite  CONFORMANT  16 passed" in done.stdout
    assert "written to out/a.json\nwritten to out/a.md" in done.stdout
    assert json.loads((tmp_path / "out/a.json").read_text())["verdicts"][0]["verdict"] == "CONFORMANT"
    assert "| addition | " in (tmp_path / "out/a.md").read_text()


def test_a_part_that_does_not_conform(tmp_path):
    """Of an installed plugin, whose rewards are all alike. A chosen test alone has its own exit code."""
    info = tmp_path / "tiny-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[rlframework]\ntiny = tiny_plugin\n")
    (tmp_path / "tiny_plugin.py").write_text(textwrap.dedent(GENEROUS))
    done = run("generous", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "generous  EnvironmentSuite  NOT CONFORMANT  15 passed, 1 failed" in done.stdout
    assert f"repeat    rlframework conformance generous --test {WORTH}" in done.stdout
    done = run("generous", "--test", TEST, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generous  EnvironmentSuite  INCOMPLETE (15 of 16 tests did not run)  1 passed" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["additon"], "there is no part 'additon' with a conformance suite. Did you mean 'addition'?"),
        (["grpo"], "'grpo' is an algorithm"),
        (["gsm8k"], "give either train_path"),
        (["addition", "digit=2"], "digit"),
        (["addition", "digits"], "'digits' is no key of the part's own section: write key=value"),
        (["addition", "--device", "tpu"], "--device is cpu or cuda, not 'tpu'"),
        (["addition", "--test", "test_each_sample"], "have no test 'test_each_sample'"),
        (["addition", "--test", TEST + "s"], f"Did you mean {TEST}?"),
        (["dtensor", "--workers", "5"], "'dtensor' has no layout of 5 workers; its layouts are 'data=1'"),
        (["dtensor", "--workers", "2", "--layout", "data=2"], "give either --workers or --layout"),
        (["dtensor", "--layout", "expert=2"], "'dtensor' does not declare expert_parallel"),
        (["dtensor", "--layout", "tensr=2"], "'tensr=2' is no layout"),
    ],
)
def test_what_cannot_be_run_is_refused(args, says, capsys):
    assert called(*args) == 2
    assert says in capsys.readouterr().err


def test_without_pytest_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "pytest_timeout" else object())
    with pytest.raises(UserError, match=r"need pytest-timeout: pip install 'rlframework-core\[conformance\]'"):
        command.run(Request("addition"))


def test_the_list_runs_nothing(capsys):
    assert called("addition", "--list") == 0
    assert TEST in capsys.readouterr().out


def test_workers_choose_among_the_declared_layouts():
    (part,) = find_parts(Request("dtensor", workers=2), create_manager())
    assert {layout.workers for layout in part.layouts} == {2}
    (part,) = find_parts(Request("dtensor"), create_manager())
    assert str(part.layouts[0]) == "data=1"
    assert len(part.layouts) > 1


def test_the_module_is_three_lines():
    parts = find_parts(Request("addition"), create_manager())
    assert module_text(parts, {}) == (
        "from rlframework.conformance import EnvironmentSuite\n\n\n"
        "class TestEnvironment(EnvironmentSuite):\n    backend = 'addition'\n"
    )
    assert module_text(parts, {"digits": 1}, mutants=True) == (
        "from rlframework.conformance.mutants.proof import MutantProof\n\n\n"
        "class TestEnvironment(MutantProof):\n    backend = 'addition'\n    kind = 'environment'\n"
        "    section = {'digits': 1}\n"
    )


def test_keys_of_the_section():
    words = ["path=a=b.jsonl", "columns.answer=gold", "columns.prompt=q", "max_samples=3", "split=null"]
    assert parse_section(words) == {
        "path": "a=b.jsonl",
        "columns": {"answer": "gold", "prompt": "q"},
        "max_samples": 3,
        "split": None,
    }
    for wrong in ("a", "=1", "a..b=1"):
        with pytest.raises(ConfigError, match="write key=value"):
            parse_section([wrong])
    with pytest.raises(ConfigError, match="'a' has a value already"):
        parse_section(["a=1", "a.b=2"])


def test_help_is_light():
    code = (
        "import sys\nfrom rlframework.cli import main\ntry:\n    main(['conformance', '--help'])\n"
        "except SystemExit:\n    pass\nprint([name for name in ('torch', 'pytest', 'ray') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("[]\n")
