"""A real MCP server over stdio (`mcp_test_server.py`): calls, deadlines, and the end of its process."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import episode_play
import psutil
import pytest
from episode_play import calls, play, says, texts

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.environments.user_tracebacks import place_of
from rlframework_environments.config import McpConfig
from rlframework_environments.mcp import McpEnvironment

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("mcp_test_server.py")
COMMAND = (sys.executable, str(SERVER))


@pytest.fixture
def make(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(20)))
    made = []

    def make(command=COMMAND, **keys):
        config = McpConfig(command=command, path=str(tmp_path / "rows.jsonl"), check="exact", **keys)
        made.append(McpEnvironment(config, seed=0))
        return made[-1]

    yield make
    for environment in made:
        environment.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "MCP server"]


def gone(pid, seconds=60.0):
    """Whether the process ends within a minute; a zombie has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_an_episode(make, monkeypatch):
    monkeypatch.setenv("NOTES_TOKEN", "given")
    monkeypatch.setenv("NOTES_SECRET", "kept")
    environment = make(variables=("NOTES_TOKEN",), max_result_characters=100)
    sample = environment.samples("train")[0]
    wrong = calls(("add_note", {}), ("fail", {"reason": "no reason"}), ("nothing", {}), ("add_note", "{"), start=10)
    turns = [
        calls(("add_note", {"text": "a"}), ("add_note", {"text": "b"})),
        wrong,
        calls(("variable", {"name": "NOTES_TOKEN"}), ("variable", {"name": "NOTES_SECRET"}), ("process", {})),
        says(sample.answer),
    ]
    tools, first, outcomes = play(environment, sample, turns)
    assert tools[0]["function"]["name"] == "add_note"
    assert tools[0]["function"]["description"] == "Keep a note."
    assert tools[0]["function"]["parameters"]["properties"]["text"]["type"] == "string"
    assert first == sample.messages
    assert texts(outcomes[0]) == ["1 notes", "2 notes"]
    assert [message["tool_call_id"] for message in outcomes[1].observations] == [f"call_{n}" for n in range(10, 14)]
    assert all(text.startswith("error: ") for text in texts(outcomes[1]))
    assert "Error executing tool fail" in texts(outcomes[1])[1]
    assert "\n[cut: the first 100 of " in texts(outcomes[1])[0]
    assert texts(outcomes[1])[2].startswith("error: there is no tool 'nothing'; the tools are: add_note, ")
    given, kept, process = texts(outcomes[2])
    assert (given, kept) == ("given", "unset")
    assert outcomes[3].reward == 1.0
    assert gone(int(process))
    other = play(environment, sample, [calls(("add_note", {"text": "c"}))])[2]
    assert texts(other[0]) == ["1 notes"]  # a server of its own


@pytest.fixture
def impatient(monkeypatch):
    """A server that does not end by itself is killed soon."""
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.2)


def test_calls_of_a_shared_server_that_ends(make):
    """Those under way and those made later fail, each with the server's end; new episodes get another server."""
    environment = make(server_per="run")
    sample = environment.samples("train")[0]
    ended = r"mcp_test_server\.py' \(environment.command\) ended during a call of '(stop|wait|add_note)'"
    for count in ("1 notes", "2 notes"):  # of one server
        assert texts(play(environment, sample, [calls(("add_note", {"text": "a"}))])[2][0]) == [count]

    async def run():
        first, second, later = episodes = [environment.episode(sample, 0) for _ in range(3)]
        for episode in episodes:
            await episode.reset()
        thread = environment._shared._thread
        turns = calls(("stop", {})), calls(("wait", {"seconds": 60.0}))
        steps = [episode.step(turn) for episode, turn in zip((first, second), turns, strict=True)]
        found = await asyncio.gather(*steps, return_exceptions=True)
        await asyncio.to_thread(thread.join)
        return [*found, *await asyncio.gather(later.step(calls(("add_note", {}))), return_exceptions=True)]

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert [type(error) for error in found] == [RLFrameworkError] * 3
    assert all(re.search(ended, str(error)) for error in found)
    assert [place_of(error) for error in found] == [""] * 3  # no place in the package `mcp`
    assert texts(play(environment, sample, [calls(("add_note", {"text": "c"}))])[2][0]) == ["1 notes"]


def test_a_server_that_resets_itself_is_kept_for_later_episodes(make, caplog):
    """Which do not see the notes of others. It is replaced when it dies, hangs in a call, or does not reset itself."""
    environment = make(reset_tool="forget", call_timeout=5.0)
    sample = environment.samples("train")[0]

    def notes(*more):
        tools, _, outcomes = play(environment, sample, [calls(("add_note", {"text": "a"}), ("process", {}), *more)])
        assert "forget" not in [tool["function"]["name"] for tool in tools]
        count, process, *rest = texts(outcomes[0])
        assert count == "1 notes"
        return int(process), rest

    first, refused = notes(("forget", {}))
    assert refused[0].startswith("error: there is no tool 'forget'")
    assert notes()[0] == first
    os.kill(first, signal.SIGKILL)
    second = notes(("add_note", {"text": "keep"}))[0]
    assert second != first
    assert "environment.reset_tool failed" in caplog.text
    third = notes()[0]
    assert third != second
    assert gone(second)
    environment.shutdown()
    assert gone(third)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_has_not_ended_a_call_is_not_kept(make):
    environment = make(reset_tool="forget", call_timeout=0.5)
    sample = environment.samples("train")[0]
    turn = [calls(("process", {}), ("wait", {"seconds": 60.0}))]
    processes, waits = zip(*(texts(play(environment, sample, turn)[2][0]) for _ in range(2)), strict=True)
    assert set(waits) == {"error: 'wait' took more than 0.5 s"}
    assert len(set(processes)) == 2
    assert all(gone(int(process)) for process in processes)


def test_a_tool_that_resets_must_be_one_of_the_servers_and_not_of_a_shared_one(make):
    environment = make(reset_tool="nothing")
    with pytest.raises(
        ConfigError, match=r"environment\.reset_tool 'nothing' is no tool of the server.*add_note, forget"
    ):
        play(environment, environment.samples("train")[0], [])
    with pytest.raises(ValueError, match="would take the state of other episodes"):
        make(reset_tool="forget", server_per="run")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ((sys.executable, "-c", "import sys; sys.exit('bad key')"), r"(?s)did not start.*bad key"),
        (
            (sys.executable, "-c", "import time; time.sleep(60)"),
            r"did not answer within 2 s \(environment.start_timeout\)",
        ),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_server_that_does_not_start(make, command, problem):
    environment = make(command, start_timeout=2.0 if "did not answer" in problem else 60.0)
    with pytest.raises(ConfigError, match=problem):
        play(environment, environment.samples("train")[0], [])


def test_a_program_that_is_missing_is_told_before_the_run(make):
    with pytest.raises(ConfigError, match=r"environment.command=\['no-such-program', 'x'\]: there is no program"):
        make(("no-such-program", "x"))


def test_a_server_that_prints_is_warned_of_once(make, caplog):
    print_and_serve = f"print('hello', flush=True); import runpy; runpy.run_path({str(SERVER)!r}, run_name='__main__')"
    environment = make((sys.executable, "-c", print_and_serve))
    for sample in environment.samples("train")[:2]:
        assert texts(play(environment, sample, [calls(("add_note", {"text": "a"}))])[2][0]) == ["1 notes"]
    (record,) = caplog.records
    assert re.search(r"the MCP server .* prints to its .* left out: 'hello'. Print to standard", record.getMessage())
    assert record.exc_info is None


@pytest.mark.usefixtures("impatient")
def test_an_episode_that_is_cancelled_while_its_server_starts(make):
    """The cancellation says what it waited for, and the start, which fails later, is no error that nobody saw."""
    environment = make((sys.executable, "-c", "import sys, time; print('hello', flush=True); time.sleep(60)"))
    unseen = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context["message"]))
        episode = environment.episode(environment.samples("train")[0], 0)
        reset = asyncio.ensure_future(episode.reset())
        await asyncio.sleep(0)
        reset.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await reset
        await episode.close()
        await asyncio.sleep(0)
        assert "(environment.command) has not answered its initialization" in cancelled.value.__notes__[0]

    asyncio.run(run())
    gc.collect()
    assert unseen == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["shutdown", "return", "SIGTERM", "SIGKILL"])
def test_the_server_ends_with_the_run(tmp_path, end):
    """A server that ignores the end of its input and SIGTERM, with a child of its own, ends with the driver.

    The driver shuts its environment down, or returns without, or is killed.
    """
    (tmp_path / "stubborn.py").write_text(
        textwrap.dedent(f"""
        import signal, subprocess, sys, threading, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        open("child", "w").write(str(child.pid))
        threading.Thread(target=time.sleep, args=(300,)).start()
        sys.path.insert(0, {str(SERVER.parent)!r})
        from mcp_test_server import server
        server.run("stdio")
        """)
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(20)))
    (tmp_path / "driver.py").write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(episode_play.__file__).parent)!r})
        from episode_play import calls, play, texts
        from rlframework_environments.config import McpConfig
        from rlframework_environments.mcp import McpEnvironment
        config = McpConfig(command=[sys.executable, "stubborn.py"], path="rows.jsonl", check="exact", server_per="run")
        environment = McpEnvironment(config, seed=0)
        sample = environment.samples("train")[0]
        print(texts(play(environment, sample, [calls(("process", {{}}))])[2][0])[0], flush=True)
        if sys.argv[1] == "shutdown":
            environment.shutdown()
        if sys.argv[1] not in ("shutdown", "return"):
            time.sleep(300)
        """)
    )
    driver = subprocess.Popen([sys.executable, "driver.py", end], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        server = int(driver.stdout.readline())
        child = int((tmp_path / "child").read_text())
        if end.startswith("SIG"):
            assert psutil.pid_exists(server)
            assert psutil.pid_exists(child)
            os.kill(driver.pid, signal.Signals[end])
        assert driver.wait(60) == (-signal.Signals[end] if end.startswith("SIG") else 0)
        assert gone(server)
        assert gone(child)
    finally:
        driver.kill()
        driver.stdout.close()
        driver.wait()
