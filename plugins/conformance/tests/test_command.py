"""`rlframework conformance`: the tests it runs, the requests it rejects, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlframework.base.errors import ConfigError, UserError
from rlframework.cli import main
from rlframework.plugins.manager import create_manager
from rlframework_conformance import command
from rlframework_conformance.command import Request, find_parts, module_text
from rlframework_conformance.mutants.matrix import noted, stored
from rlframework_conformance.mutants.proof import MutantProof
from rlframework_conformance.report import write_json
from rlframework_conformance.sections import parse_section, section_words

pytestmark = pytest.mark.slow

TEST = "test_each_sample_has_an_id_of_its_own"
FILE = "test_a_missing_file_is_an_error_that_names_it"
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
    """Return the exit code of the command in this process; pytest does not start for a rejected request."""
    with pytest.raises(SystemExit) as ended:
        main(["conformance", *args])
    return ended.value.code


def run(*args, cwd):
    """Run the command in a separate process, as a user would."""
    line = [sys.executable, "-m", "rlframework.cli", "conformance", *args]
    variables = {**os.environ, "PYTHONPATH": str(cwd)}
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=variables, timeout=300, check=False)


def test_a_part_that_conforms(tmp_path):
    """The caller's own pytest configuration, conftest and pytest plugins have no effect."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('not mine')\n")
    (tmp_path / "out").mkdir()
    done = run("addition", "digits=1", "--json", "out/a.json", "--markdown", "out/a.md", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "addition  EnvironmentSuite  CONFORMANT  16 passed" in done.stdout
    assert "written to out/a.json\nwritten to out/a.md" in done.stdout
    assert json.loads((tmp_path / "out/a.json").read_text())["verdicts"][0]["verdict"] == "CONFORMANT"
    assert "| addition | " in (tmp_path / "out/a.md").read_text()


def test_a_part_that_does_not_conform(tmp_path):
    """An installed plugin whose rewards are all equal."""
    info = tmp_path / "tiny-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[rlframework]\ntiny = tiny_plugin\n")
    (tmp_path / "tiny_plugin.py").write_text(textwrap.dedent(GENEROUS))
    done = run("generous", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "generous  EnvironmentSuite  NOT CONFORMANT  15 passed, 1 failed" in done.stdout
    assert f"repeat    rlframework conformance generous --test {WORTH}" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["additon"], "there is no part 'additon' with a conformance suite. Did you mean 'addition'?"),
        (["grpo"], "'grpo' is an algorithm"),
        (["gsm8k"], "set either train_path"),
        (["addition", "digit=2"], "digit"),
        (["addition", "digits"], "'digits' is not a key of the plugin's own section: write key=value"),
        (["addition", "--device", "tpu"], "--device is 'tpu'; it must be cpu or cuda"),
        (["addition", "--test", "test_each_sample"], "have no test 'test_each_sample'"),
        (["addition", "--test", TEST + "s"], f"Did you mean {TEST}?"),
        (["dtensor", "--workers", "5"], "'dtensor' has no layout of 5 workers; its layouts are 'data=1'"),
        (["dtensor", "--workers", "2", "--layout", "data=2"], "give either --workers or --layout"),
        (["dtensor", "--layout", "pipeline=2"], "'dtensor' does not declare pipeline_parallel"),
        (["dtensor", "--layout", " "], "the layout ' ' is empty; write its dimensions, such as data=2"),
        (["dtensor", "--layout", "tensr=2"], "'tensr=2' is not a layout"),
        (["dtensor", "--layout", "data=16"], "data can be 1, 2, 4 or 8: the suite's batches have 8 rows"),
        (["ray", "--layout", "data=4"], "data can be 1 or 2: "),
        (["addition", "--workers", "2", "--layout", "data=2"], "give either --workers or --layout"),
        (["addition", "--workers", "2"], "--workers and --layout have no effect on the environment 'addition'"),
        (["addition", "--layout", "data=2"], "--workers and --layout have no effect on the environment 'addition'"),
        (["dtensor", "no_such=1"], "no_such"),
        (["microbatches", "no_such=1"], "no_such: the data processor 'microbatches' has no section of its own"),
        (["transformers", "no_such=1"], "no_such"),
        (["transformers", "batch_size=many"], "batch_size"),
        (["ray", "no_such=1"], "no_such"),
        (["ray", "num_workers=2"], "num_workers: the suite sets this for the worker group 'ray'"),
        (["addition", "name=gsm8k"], "name: the suite sets this for the environment 'addition'"),
        (["addition", "--json", "not_there/a.json"], "does not exist; create it first"),
        (["addition", "--markdown", "not_there/a.md"], "does not exist; create it first"),
        (["addition", "--json", "."], "this is a folder"),
        (["addition", "--mutants", "--json", "a.json"], "--json cannot be combined with --mutants"),
        (["dtensor", "--mutants", "--layout", "data=2"], "--layout cannot be combined with --mutants"),
        (
            ["dtensor", "--mutants", "--workers", "1", "--markdown", "a.md"],
            "--workers and --markdown cannot be combined",
        ),
        (["addition", "--mutants", "--test", FILE], f"no mutant that applies to 'addition' is caught by {FILE}"),
    ],
)
def test_what_cannot_be_run_is_refused(args, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert called(*args) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Record the arguments of a replaced pytest that only calls `started.does(report)`."""
    calls = []

    def pytest_(arguments):
        calls.append(list(arguments))
        does.pop(0)(Path(arguments[arguments.index("--conformance-json") + 1])) if does else None
        return 1

    does = []
    monkeypatch.setattr(command, "_pytest", pytest_)
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(calls=calls, does=does.append)


def test_a_report_of_before_is_not_passed_off_as_new(started, tmp_path, capsys):
    """If pytest cannot start, the files are unchanged and the command says so."""
    for name in ("a.json", "a.md"):
        (tmp_path / name).write_text("old")
    assert called("addition", "--json", "a.json", "--markdown", "a.md") == 1
    told = capsys.readouterr()
    assert "written to" not in told.out
    assert "a.json was not written: there are no verdicts\na.md was not written" in told.err
    assert [(tmp_path / name).read_text() for name in ("a.json", "a.md")] == ["old", "old"]


def test_a_new_report_takes_the_place_of_the_old_one(started, tmp_path, capsys):
    (tmp_path / "a.json").write_text("old")
    started.does(lambda report: write_json(report, []))
    assert called("addition", "--json", "a.json", "--markdown", "a.md") == 1
    assert capsys.readouterr().out == "written to a.json\nwritten to a.md\n"
    assert json.loads((tmp_path / "a.json").read_text())["verdicts"] == []
    assert (tmp_path / "a.md").read_text().startswith("# Conformance")


def test_mutants_of_one_test(started):
    assert called("addition", "--mutants", "--test", WORTH) == 1
    chosen = [word.partition("::")[2] for word in started.calls[0] if "::" in word]
    assert chosen == ["TestEnvironment::test_mutant_is_caught"]


@pytest.mark.slow
def test_a_kill_matrix_goes_on_where_it_was(tmp_path):
    """All pairs that the file lacks are tried; the rows of the end are those of `kill_matrix.yaml`, and more."""
    path = tmp_path / "matrix.jsonl"
    done = run("addition", "--kill-matrix", "matrix.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pairs = noted(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:5])
    again = run("addition", "--kill-matrix", "matrix.jsonl", cwd=tmp_path)
    assert "2 passed" in again.stdout  # the pair that was cut, and that the matrix is of this suite
    assert noted(path) == pairs
    proof = type("Proof", (MutantProof,), {"kind": "environment", "matrix": "none"})
    record = create_manager().select("environment", "addition").record
    assert {(mutant.name, test) for mutant, test in proof.cases(record, "cpu")} == pairs.keys()
    stored_pairs = {(mutant, test) for mutant, tests in stored("environment").items() for test in tests}
    assert {pair for pair in pairs.keys() & stored_pairs if pairs[pair] == "passed"} == set()
    assert "stored, but not caught" not in done.stdout


@pytest.mark.thorough
def test_mutants_of_one_test_run(tmp_path):
    done = run("addition", "--mutants", "--test", WORTH, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2] == "mutants: 3 of 3 caught"


def test_without_pytest_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "pytest_timeout" else object())
    with pytest.raises(UserError, match=r"need pytest-timeout: pip install 'rlframework-core\[conformance\]'"):
        command.run(Request("addition"))


def test_the_list_runs_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # wide enough for the longest name
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
    assert module_text(parts, {}, Request("addition")) == (
        "from rlframework_conformance import EnvironmentSuite\n\n\n"
        "class TestEnvironment(EnvironmentSuite):\n    backend = 'addition'\n"
    )
    proof = Request("addition", tests=(WORTH,), mutants=True)
    assert module_text(parts, {"digits": 1}, proof) == (
        "from rlframework_conformance.mutants.proof import MutantProof\n\n\n"
        "class TestEnvironment(MutantProof):\n    backend = 'addition'\n    kind = 'environment'\n"
        f"    section = {{'digits': 1}}\n    only = ({WORTH!r},)\n"
    )


def test_keys_of_the_section():
    words = ["path=a=b.jsonl", "columns.answer=gold", "columns.prompt=q", "max_samples=3", "split=null"]
    assert parse_section(words) == {
        "path": "a=b.jsonl",
        "columns": {"answer": "gold", "prompt": "q"},
        "max_samples": 3,
        "split": None,
    }
    assert parse_section(section_words(parse_section(words))) == parse_section(words)
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


def test_layouts_with_more_workers_than_gpus_are_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    manager = create_manager()
    (part,) = find_parts(Request("dtensor", device="cuda"), manager)
    assert [str(layout) for layout in part.layouts] == ["data=1"]
    assert "there are not enough GPUs: data=2; tensor=2; " in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not enough GPUs for tensor=2: "):
        find_parts(Request("dtensor", layouts=["tensor=2"], device="cuda"), manager)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    (part,) = find_parts(Request("dtensor", device="cuda"), manager)
    assert [str(layout) for layout in part.layouts if layout.workers > 1][:2] == ["data=2", "tensor=2"]
