"""The examination as a whole: each check on its own, secrets hidden, what is shown, exit codes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import types

import pytest
from probe_runs import call

from rlframework.base import logs
from rlframework.generation.engine_environment import ProbeError, ask, engine_environment
from rlframework.plugins.configure import load_config
from rlframework.plugins.hookspec import DoctorCheck, DoctorFinding, hookimpl
from rlframework.plugins.manager import create_manager
from rlframework_tools.doctor import examination
from rlframework_tools.doctor.checks import Check, Context, broken, note, ok, unknown, warning
from rlframework_tools.doctor.examination import CHECKS, Examination, checks_of_plugins, examine

pytestmark = pytest.mark.slow


def check_of(*findings, topic="machine", name="a"):
    return Check(topic, name, lambda context: findings)


def raising(context):
    yield ok("before")
    raise ZeroDivisionError("oh")


def test_a_check_that_raises_is_a_finding_and_the_others_go_on():
    checks = [Check("machine", "a", raising), check_of(ok("fine"), name="b")]
    first, second = examine(checks=checks).findings
    assert (first.level, first.name) == ("unknown", "a")
    assert first.text == "could not be checked: ZeroDivisionError: oh"
    assert (second.level, second.text) == ("ok", "fine")


def test_checks_run_side_by_side():
    """Each waits for the other: one after the other they would wait in vain."""
    both = threading.Barrier(2, timeout=60)

    def meet(context):
        both.wait()
        yield ok("met")

    assert [finding.text for finding in examine(checks=[Check("machine", n, meet) for n in "ab"]).findings] == [
        "met"
    ] * 2


@pytest.mark.parametrize(
    ("findings", "code"),
    [([ok("a"), note("b"), unknown("c"), warning("d", "e")], 0), ([ok("a"), broken("b", "c")], 1), ([], 0)],
)
def test_only_what_is_broken_makes_the_exit_code_1(findings, code):
    assert examine(checks=[check_of(*findings)]).exit_code == code


def test_secrets_are_hidden_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "k3y-of-mine")
    monkeypatch.setenv("SHORT_PASSWORD", "a")
    finding = warning(
        "the server said \x1bk3y-of-mine, at https://me:pw@host",
        "unset it: k3y-of-mine",
        {"variables": {"SOME_API_KEY": "other", "list": ["k3y-of-mine", "plain"]}},
    )
    [shown] = examine(checks=[check_of(finding)]).findings
    assert shown.text == "the server said \\u001b***, at https://***@host"  # and no control characters
    assert shown.remedy == "unset it: ***"
    assert shown.facts == {"variables": {"SOME_API_KEY": "***", "list": ["***", "plain"]}}


def test_checks_of_a_run_are_left_out_without_one():
    assert examine(checks=[check_of(ok("a"), topic="run")]).findings == ()


def test_a_problem_is_broken_where_it_is_needed_or_nothing_is_known_of_a_run():
    context = Context()
    assert context.problem("a", "b", needed=False).level == "broken"
    context.source = "run.yaml"
    assert context.problem("a", "b", needed=False).level == "warning"
    assert context.problem("a", "b", needed=True).level == "broken"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "the process ended with signal SIGSEGV: no error output",
        ),
        ("raise SystemExit('no library')", "the process ended with exit code 1: no library"),
        ("print('hm')", "the process gave no readable output: no error output"),
        ("import time; time.sleep(60)", "no answer within 2 s"),
        ('print(\'{"error": "told by itself"}\')', "^told by itself$"),
    ],
)
def test_a_child_process_that_fails_is_told(program, message):
    with pytest.raises(ProbeError, match=message):
        ask([sys.executable, "-c", program], 2.0 if "no answer" in message else 60.0)


def test_a_child_process_is_asked_once_and_the_current_folder_hides_nothing(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    context = Context()
    assert context.probe("torch_devices") is context.probe("torch_devices")
    with pytest.raises(ProbeError, match="KeyError: 'no_such_probe'"):
        context.probe("no_such_probe")


COUNTS = """
import json
from pathlib import Path
runs = Path(__file__).with_name("runs")
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
print("something else first")
print(json.dumps({"runs": len(runs.read_text())}))
"""


def test_a_program_runs_once_in_the_python_of_the_engines(tmp_path):
    def config(workers):
        values = {"algorithm": {"name": "grpo"}, "environment": {"name": "addition"}, "policy": {"model_name": "m"}}
        return load_config(values | {"generation": {"workers": workers}})

    program = tmp_path / "describe.py"
    program.write_text(COUNTS)
    for workers in (None, {"group": "ray", "python": sys.executable}):
        assert engine_environment(config(workers), program) == {"python": sys.executable, "runs": 1}
    found = engine_environment(config({"group": "ray", "python": "/nowhere/python"}), program)
    assert found["python"] == "/nowhere/python"
    assert "No such file" in found["error"]
    failing = tmp_path / "broken.py"
    failing.write_text("raise SystemExit('no such library')")
    assert "no such library" in engine_environment(config(None), failing)["error"]


def test_the_table_and_the_last_line():
    from rich.console import Console

    found = examine(checks=[check_of(ok("good"), broken("bad", "do this")), check_of(note("hm"), name="b")])
    console = Console(width=100, record=True)
    console.print(found.as_table())
    text = console.export_text()
    assert "machine" in text
    assert "-> do this" in text
    assert found.summary() == "something is broken: 1 broken, 1 ok"
    assert Examination((), of_run=True).summary() == "this run can start: "
    assert json.loads(found.as_json())["findings"][1] == {
        "level": "broken", "text": "bad", "remedy": "do this", "facts": {}, "topic": "machine", "name": "a",
    }  # fmt: skip


# -- the command -------------------------------------------------------------------------------------------------------


def test_this_machine_has_nothing_broken(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["topic"] for finding in found} == {one.topic for one in CHECKS} - {"run"}
    assert not [finding for finding in found if finding["level"] in ("broken", "unknown")]
    [torch] = [finding for finding in found if (finding["topic"], finding["name"]) == ("devices", "torch")]
    assert torch["facts"]["torch"].startswith("2.")
    assert list(tmp_path.rglob("*")) == [tmp_path / "home"]  # of `bare`; nothing else is written


@pytest.mark.thorough
def test_a_run_that_cannot_be_is_told_with_exit_code_1(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "run.yaml").write_text("algorithm: {name: sft}\nenvironment: {name: addition}\npolicy: {}\n")
    assert call("doctor", "run.yaml", "seed=2") == 1
    printed = capsys.readouterr().out
    assert "required key is missing" in printed
    assert printed.splitlines()[-1].startswith("this run will fail: 1 broken")


def test_looking_imports_no_torch_and_no_ray_into_this_process():
    code = (
        "import sys\nfrom rlframework_tools.doctor.examination import examine\nexamine()\n"
        "print(sorted({'torch', 'ray', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


DISABLE = "disable it: RLFRAMEWORK_DISABLE_PLUGINS=fake_doctor"


@pytest.fixture
def findings(monkeypatch):
    """`findings(hook, config)`: those of an examination whose only check beside those of the plugin is `machine`."""

    def look(hook, config=None, source=None):
        module = types.ModuleType("fake_doctor")
        module.rlframework_doctor_checks = hookimpl(hook, specname="rlframework_doctor_checks")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        context = Context()
        context.config, context.source = config, source
        context.manager = create_manager([module.__name__])
        monkeypatch.setattr(examination, "Context", lambda *_, **__: context)
        monkeypatch.setattr(examination, "RATES", Check("run", "rates", lambda _: ()))
        own = (Check("machine", "own", lambda _: [ok("fine")]), Check("run", "own", lambda _: [ok("starts")]))
        monkeypatch.setattr(examination, "CHECKS", own)
        return [(one.topic, one.name, str(one.level), one.text, one.remedy) for one in examine(source).findings]

    return look


def told(level="ok", text="there", **more):
    return lambda config: [DoctorFinding(level, text, **more)]


def test_findings_stand_with_those_of_their_topic_and_new_topics_come_last(findings):
    checks = [
        DoctorCheck("licences", "acme", told("broken", "none", remedy="buy one")),
        DoctorCheck("machine", "card", told()),
        DoctorCheck("run", "size", lambda config: [DoctorFinding("note", f"of {config.generation.name}")]),
    ]
    acme = ("licences", "acme (fake_doctor)", "broken", "none", "buy one")
    machine = [("machine", "own", "ok", "fine", ""), ("machine", "card (fake_doctor)", "ok", "there", "")]
    assert findings(lambda: checks) == [*machine, acme]
    run = [("run", "own", "ok", "starts", ""), ("run", "size (fake_doctor)", "note", "of none", "")]
    config = types.SimpleNamespace(generation=types.SimpleNamespace(name="none"))
    assert findings(lambda: checks, config, "run.yaml") == [*machine, *run, acme]
    assert findings(lambda: checks, None, "run.yaml") == [*machine, run[0], acme], "it did not load"


def raises(*_):
    raise LookupError("oh")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises, "could not be checked: LookupError: oh"),
        (lambda config: ["fine"], "could not be checked: TypeError: 'fine' is no DoctorFinding"),
        (told("splendid"), "could not be checked: ValueError: 'splendid' is not a valid Level"),
    ],
)
def test_a_check_that_fails_is_a_finding_that_names_its_plugin(findings, function, text):
    own, finding = findings(lambda: [DoctorCheck("machine", "card", function)])
    assert own[3] == "fine"
    assert finding[:4] == ("machine", "card (fake_doctor)", "unknown", text)
    assert finding[4].startswith("The check is of module fake_doctor unversioned.")
    assert DISABLE in finding[4]


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (raises, "LookupError: oh"),
        (lambda: ["no"], "TypeError: it returned 'no'; it must return a list of"),
    ],
)
def test_a_hook_that_fails_is_a_finding(findings, hook, text):
    own, finding = findings(lambda: hook())
    assert own[3] == "fine"
    assert finding[:3] == ("plugins", "checks", "unknown")
    assert f"rlframework_doctor_checks of module fake_doctor unversioned failed: {text}" in finding[3]
    assert DISABLE in finding[3]


def test_a_check_that_blocks_is_named(findings, caplog, monkeypatch):
    monkeypatch.setattr(logs, "SLOW_SECONDS", 0.05)

    def slow(config):
        time.sleep(0.2)
        return [DoctorFinding("ok", "late")]

    with caplog.at_level(logging.WARNING):
        assert findings(lambda: [DoctorCheck("machine", "card", slow)])[1][3] == "late"
    assert any("waiting for the check card (fake_doctor) of module fake_doctor" in text for text in caplog.messages)


def test_a_manager_that_cannot_be_created_has_no_checks(monkeypatch):
    monkeypatch.setenv("RLFRAMEWORK_DISABLE_PLUGINS", "nobody")
    assert checks_of_plugins(Context()) == []
