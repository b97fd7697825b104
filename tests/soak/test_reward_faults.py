"""Runs whose reward function hangs, dies, lies or starts processes: the documented end, and nothing outlives it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from functools import partial

import pytest
from probe_faults import NOTHING
from probe_programs import Program, Programs, command_of, wait_for
from probe_runs import rows_of

from rlframework.plugins.configure import config_yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = r"environment\.reward='attacks:{0}' \(\S*attacks\.py, line \d+\)"
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x00\ud800\r\n\u202e"
ATTACKS = f"""
import asyncio, os, resource, signal, subprocess, sys, threading, time

HOSTILE = {HOSTILE!r}


def raises(completion):
    raise ValueError(HOSTILE)


def spiteful(completion):
    class Spiteful(Exception):
        def __str__(self):
            raise RuntimeError("no text")
        __repr__ = __str__
    raise Spiteful


def interrupts(completion):
    raise KeyboardInterrupt


def too_many(completions):
    return [1.0] * (len(completions) + 1)


def text(completion):
    return HOSTILE


def not_finite(completion):
    return float("nan")


def hangs(completion):
    time.sleep(600)


def hangs_without_the_lock_of_python(completion):
    import re
    re.match("(a+)+$", "a" * 60 + "b")


def blocks_signals(completion):
    for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def stops(completion):
    os.kill(os.getpid(), signal.SIGSTOP)


async def hangs_async(completion):
    await asyncio.sleep(600)


def exits(completion):
    os._exit(7)


def exits_with_success(completion):
    os._exit(0)


def is_killed(completion):
    os.kill(os.getpid(), signal.SIGKILL)


def closes_everything(completion):
    os.closerange(3, 1000)
    return 1.0


def prints(completion):
    os.write(1, HOSTILE.encode("utf-8", "surrogatepass") * 1000)
    os.write(2, bytes(range(256)) * 1000)
    return 1.0


def allocates(completion):
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    return len(bytearray(1 << 40))


def recurses(completion):
    return recurses(completion)


def forks(completion):
    if os.fork() == 0:
        time.sleep(600)
    subprocess.Popen(["sleep", "600"])
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return 1.0


def forks_and_exits(completion):
    forks(completion)
    os._exit(7)


def hangs_with_children(completion):
    forks(completion)
    time.sleep(600)
"""
FAILS = {
    "raises": "ValueError: ",
    "spiteful": "Spiteful",
    "interrupts": "",
    "text": "which is not a number",
    "not_finite": "reward is not finite",
    "hangs": "took more than environment.reward_timeout, which is 1 s",
    "hangs_without_the_lock_of_python": "took more than environment.reward_timeout, which is 1 s",
    "blocks_signals": "took more than environment.reward_timeout, which is 1 s",
    "stops": "took more than environment.reward_timeout, which is 1 s",
    "hangs_async": "took more than environment.reward_timeout, which is 1 s",
    "exits": "ended with exit code 7",
    "exits_with_success": "ended with exit code 0",
    "is_killed": "was killed by signal 9",
    "closes_everything": "the process that it ran in ",
    "allocates": "MemoryError",
    "recurses": "RecursionError",
    "forks_and_exits": "ended with exit code 7",
}
"""Return the part of the message about the first failure."""
WORKS = ("prints", "forks")


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    found = Programs()
    yield found
    found.close()


@pytest.fixture
def begin(programs, run_config, tmp_path):
    """`begin(reward, *keys)`: a started run with that function, of three steps and four answers each."""
    (tmp_path / "attacks.py").write_text(ATTACKS)
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(reward: str, *keys: str) -> Program:
        data = f"environment={{name: dataset, path: rows.jsonl, reward: 'attacks:{reward}', reward_timeout: 1.0}}"
        return programs.start("train", path, "~environment", data, f"output_dir={reward}", *keys, folder=tmp_path)

    off = "algorithm.validation={at_start: false, at_end: false, every: 0}"
    common = ["plugins=[]", off, "environment={name: addition, digits: 1}", "policy.train_global_batch_size=4"]
    common += ["algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2"]
    path = tmp_path / "run.yaml"
    path.write_text(config_yaml(run_config("grpo", *common)))
    return start


def problems(program: Program, code: int, told: str) -> list[str]:
    """Return the complaints about how a program ended."""
    found = []
    if program.wait() != code or not re.search(told, program.output):
        found.append(
            f"it ended with {program.code()}, not {code}, or does not say {told!r}:\n{program.output[-3000:]!r}"
        )
    if left := program.left(60.0):
        found.append(f"left behind: {left}")
    return found


def test_a_failing_reward_function_ends_the_run_with_its_name_and_the_cause(soak, begin):
    chosen = FAILS if soak.full else {name: FAILS[name] for name in ("blocks_signals",)}
    wrong = {}
    for name, cause in chosen.items():
        why = rf"{NAME.format(name)} failed for \d of (the first \d of )?4 answers, which is more than (?s:.*){cause}"
        wrong[name] = problems(begin(name), 2, rf"error: {why}")
    wrong["too_many"] = problems(begin("too_many"), 2, NAME.format("too_many") + " returned 5 values for 4 answers")
    soak.figures["inputs"] = len(wrong)
    assert not {name: found for name, found in wrong.items() if found}


@pytest.mark.thorough
def test_failures_that_are_allowed_are_counted_and_the_run_goes_on(soak, begin, tmp_path):
    chosen = FAILS if soak.full else ("is_killed",)
    wrong = {}
    for name in chosen:
        quick = ("environment.max_reward_failures=1.0", "environment.reward_timeout=0.1", "algorithm.num_steps=1")
        wrong[name] = problems(begin(name, *quick), 0, r"\bdone: ")
        if not wrong[name]:
            counts = [row["train/reward_failures"] for row in rows_of(tmp_path / name)]
            wrong[name] = [] if counts == [4.0] else [f"it counts {counts}"]
    for name in WORKS:
        wrong[name] = problems(begin(name), 0, r"\bdone: ")
    soak.figures["inputs"] = len(wrong)
    assert not {name: found for name, found in wrong.items() if found}


def test_nothing_outlives_a_run_that_ends_while_its_reward_function_hangs(soak, begin):
    """The function has started processes of its own by then."""
    ends = {
        signal.SIGKILL: (-9, NOTHING),
        signal.SIGTERM: (143, r"\bterminated\n"),
        signal.SIGINT: (130, "interrupted"),
    }
    wrong = {}
    for number in ends if soak.full else [signal.SIGKILL]:
        program = begin("hangs_with_children", "environment.reward_timeout=600", "checkpoints.on_interrupt=false")
        children = partial(lambda program: "sleep 600" in map(command_of, program.processes()), program)
        wait_for(children, "a child of the function")
        program.signal(number)
        wrong[number.name] = problems(program, *ends[number])
    soak.figures["inputs"] = len(wrong)
    assert not {name: found for name, found in wrong.items() if found}
