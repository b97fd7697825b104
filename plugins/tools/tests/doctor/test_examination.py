"""The examination as a whole: each check on its own, secrets hidden, what is shown, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from itertools import groupby

import pytest

from rlframework.cli import main
from rlframework.generation.engine_environment import ProbeError, ask
from rlframework_tools.doctor.checks import Context, broken, note, ok, unknown, warning
from rlframework_tools.doctor.examination import CHECKS, Check, Examination, examine

pytestmark = pytest.mark.slow


def check_of(*findings, topic="machine", name="a"):
    return Check(topic, name, lambda context: findings)


def raising(context):
    yield ok("before")
    raise ZeroDivisionError("oh")


def test_topics_are_shown_together_and_no_name_twice():
    names = [(one.topic, one.name) for one in CHECKS]
    assert len(names) == len(set(names))
    topics = [topic for topic, _ in groupby(names, lambda pair: pair[0])]
    assert topics == ["machine", "devices", "packages", "plugins", "cluster", "run"]


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


def test_the_table_and_the_last_line(capsys):
    from rich.console import Console

    found = examine(checks=[check_of(ok("good"), broken("bad", "do this")), check_of(note("hm"), name="b")])
    console = Console(width=100, record=True)
    console.print(found.as_table())
    text = console.export_text()
    assert "machine" in text
    assert "-> do this" in text
    assert found.summary() == "something is broken: 1 broken, 1 ok"
    assert Examination((), of_run=True).summary() == "this run can start: "


def test_the_json_has_every_field():
    found = json.loads(examine(checks=[check_of(warning("hm", "do", {"bytes": 3}))]).as_json())
    assert found["exit_code"] == 0
    assert found["findings"] == [
        {"level": "warning", "text": "hm", "remedy": "do", "facts": {"bytes": 3}, "topic": "machine", "name": "a"}
    ]


# -- the command -------------------------------------------------------------------------------------------------------


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


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
