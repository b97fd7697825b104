"""Calls of a user's own reward function: what they get and may return, and how failures are handled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_reward_runs import REWARDS, rewards, scored

from rlframework.base.errors import ConfigError, UserError
from rlframework.environments import reward_calls
from rlframework.interfaces.environment import LARGEST_REWARD, StepOutcome

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]
here_and_in_a_process = pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "process"])


@pytest.mark.parametrize(
    ("function", "expected", "timeout"),
    [
        ("lengths", [0, 1, 2], None),
        ("with_default", [0, 2, 4], None),
        ("partial", [0, 3, 6], 60.0),
        ("scorer", [0.5, 0.5, 0.5], 60.0),
        ("scorer.method", [0.25, 0.25, 0.25], 60.0),
        ("together", [0, 1, 2], 60.0),
        ("tensor", [0, 1, 2], None),
        ("generator", [1, 1, 1], None),
        ("scalars", [0.5, 1.0, 2.0], 60.0),
    ],
)
def test_accepted_functions(make, function: str, expected: list[float], timeout: float | None) -> None:
    environment = make(function, reward_timeout=timeout)
    for _ in range(2):
        assert rewards(environment, ["", "x", "xy"]) == expected
    assert environment.scores


@pytest.mark.parametrize(("function", "timeout"), [("everything", None), ("one", 60.0)])
def test_each_answer_comes_with_its_own_prompt_and_row(make, function: str, timeout: float | None) -> None:
    environment = make(function, reward_timeout=timeout)
    right = [f"{sample.answer}!" for sample in environment.samples("train")[:3]]
    assert rewards(environment, [*right, "no!"]) == [1, 1, 1, 0]


def test_async_calls_are_awaited_together_and_keep_their_order(make) -> None:
    """Each waits until eight are there: fewer at a time would never end."""
    environment = make("meets_seven_others", reward_concurrency=8)
    samples = list(environment.samples("train"))[:32]
    assert rewards(environment, ["x"] * 32) == [float(sample.answer) for sample in samples]


@here_and_in_a_process
def test_failures_are_counted_printed_once_and_get_their_reward(make, caplog, timeout: float | None) -> None:
    environment = make("act", max_reward_failures=0.8, failed_reward=-1.0, reward_timeout=timeout)
    kinds = ["ok", "raise", "nan", "text", "none", "raise", "huge", "exit", "dict", "ok"]
    outcomes = scored(environment, kinds)
    assert [outcome.reward for outcome in outcomes] == [1.0 if kind == "ok" else -1.0 for kind in kinds]
    passed, failed = {"length": 2.0, "reward_failures": 0.0}, {"accuracy": 0.0, "reward_failures": 1.0}
    assert [outcome.metrics for outcome in outcomes] == [passed if kind == "ok" else failed for kind in kinds]
    printed = caplog.text
    assert printed.count("ValueError: bad") == 1
    assert printed.count("own_rewards:act") == 6  # nan and huge are both not finite
    assert "own_rewards.py" in printed
    assert "reward_calls.py" not in printed
    assert "it returned None, which is not a number" in printed
    assert "reward is not finite" in printed
    assert "it returned a dict without 'reward' or 'score': {'accuracy': 1.0}" in printed
    caplog.clear()
    scored(environment, kinds)
    assert not caplog.messages


def test_a_call_that_hangs_or_dies_is_one_failure_and_the_others_are_scored(make, caplog) -> None:
    environment = make("act", reward_timeout=4.0, max_reward_failures=0.5)
    assert rewards(environment, ["ok", "regex", "die", "ok", "ok"]) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert "ended with exit code 3" in caplog.text
    assert "took more than environment.reward_timeout, which is 4 s" in caplog.text
    line = 1 + next(number for number, text in enumerate(REWARDS.splitlines()) if "re.match" in text)
    assert f'own_rewards.py", line {line} in act' in caplog.text


def test_a_process_that_dies_while_it_starts_again_is_started_once_more(make, folder: Path) -> None:
    """It is killed at its second start; the first import is this process's."""
    (folder / "fragile.py").write_text(
        "import os, pathlib, signal\n"
        "starts = pathlib.Path('starts')\n"
        "count = len(starts.read_text()) if starts.exists() else 0\n"
        "starts.write_text('x' * (count + 1))\n"
        "if count == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def act(completion):\n    return os._exit(3) if completion == 'die' else 1.0\n"
    )
    environment = make("fragile:act", max_reward_failures=0.5)
    assert rewards(environment, ["ok", "die", "ok"]) == [1.0, 0.0, 1.0]
    assert (folder / "starts").read_text() == "xxxx"


def test_async_calls_time_out_alone_but_one_that_blocks_takes_its_neighbours_with_it(make) -> None:
    environment = make("act_async", reward_timeout=2.0, max_reward_failures=0.9, reward_concurrency=2)
    assert rewards(environment, ["ok", "sleep", "raise", "ok", "ok"]) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert rewards(environment, ["ok", "block", "sleep", "ok", "ok", "ok"]) == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_a_batched_function_that_times_out_fails_for_all(make) -> None:
    environment = make("act_all", reward_timeout=2.0, max_reward_failures=1.0)
    assert rewards(environment, ["ok", "sleep"]) == [0.0, 0.0]
    assert rewards(environment, ["ok", "ok"]) == [1.0, 1.0]


def test_too_many_failures_end_the_run_and_name_the_place(make, folder: Path) -> None:
    environment = make("act")
    assert rewards(environment, ["raise", *["ok"] * 9])[0] == 0.0  # a tenth is allowed
    with pytest.raises(UserError) as error:
        scored(environment, ["ok", "raise", "nan", *["ok"] * 7])
    line = 1 + REWARDS.splitlines().index("def act(completion, answer):")
    text = str(error.value)
    assert (
        f"environment.reward='own_rewards:act' ({folder / 'own_rewards.py'}, line {line}) failed for 2 of the" in text
    )
    assert "of 10 answers, which is more than environment.max_reward_failures=0.1 allows" in text
    assert "ValueError: bad" in text


@here_and_in_a_process
def test_a_wrong_number_of_values_is_an_error_at_once(make, timeout: float | None) -> None:
    environment = make("too_few", max_reward_failures=1.0, reward_timeout=timeout)
    with pytest.raises(UserError, match=r"own_rewards:too_few.* returned 2 values for 3 answers"):
        scored(environment, ["", "", ""])


def test_a_coroutine_that_is_never_awaited_is_reported(make, caplog) -> None:
    assert rewards(make("forgot", max_reward_failures=1.0, reward_timeout=None), ["x"]) == [0.0]
    assert "write `async def`" in caplog.text


def test_no_process_outlives_the_environment(make) -> None:
    environment = make("process_id")
    [pid] = rewards(environment, ["x"])
    assert pid != os.getpid()
    environment.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_no_process_outlives_a_killed_driver(folder: Path) -> None:
    """The driver gets SIGKILL while the function holds Python's lock."""
    (folder / "driver.py").write_text(
        "from rlframework.environments.own_reward import RewardProcess\n"
        "from rlframework.environments.reward_calls import TextColumns\n"
        "from rlframework.interfaces.environment import Sample\n"
        "process = RewardProcess('own_rewards:act', TextColumns(), timeout=600.0, concurrency=1, is_async=False)\n"
        "sample = Sample('a', (), 'A')\n"
        "process.score([sample], ['ok'], lambda *_: None)\n"
        "print(process._process.pid, flush=True)\n"
        "process.score([sample], ['regex'], lambda numbers, results: print('started', flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "driver.py"], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        assert driver.stdout.readline() == "started\n"
        driver.kill()
    until = time.monotonic() + 60
    while (
        Path(f"/proc/{pid}/stat").exists()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def rows(folder: Path):
    """`rows(row, ...)`: the rows of the environment that is made."""

    def write(*rows: dict[str, Any], name: str = "rows.jsonl") -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


@here_and_in_a_process
def test_functions_of_trl(make, rows, timeout: float | None) -> None:
    """They get prompts, completions and every other column of the rows as lists, by name; the answer by two names."""
    assert rewards(make("trl", reward_timeout=timeout), ["0", "x", "2"]) == [1.0, 0.0, 1.0]
    assert rewards(make("trl_async", reward_timeout=timeout), ["x", "xy"]) == [1.0, 2.0]
    rows(*({"prompt": f"{n}?", "solution": str(n)} for n in range(4)))
    made = make("trl_answers", reward_timeout=timeout, columns={"answer": "solution"})
    assert rewards(made, [made.samples("train")[0].answer, "x"]) == [1.0, 0.0]


@pytest.mark.parametrize("column", ["prompt", "asked"])
def test_functions_of_trl_get_messages_where_the_prompt_is_messages(make, rows, column: str) -> None:
    rows(*({column: [{"role": "user", "content": f"{n}?"}], "level": str(n)} for n in range(4)))
    made = make("trl_messages", reward_timeout=None, columns={"prompt": column})
    assert rewards(made, ["same", "other"]) == [1.0, 0.0]


def test_an_error_of_a_call_with_all_answers_names_no_sample(make) -> None:
    with pytest.raises(UserError, match="takes all answers in one call, so its error fails all") as error:
        rewards(make("all_raise", reward_timeout=None), ["x", "y"])
    assert "for sample" not in str(error.value)
    assert "ValueError: no reward for anything" in str(error.value)


@pytest.mark.parametrize(("function", "timeout"), [("compute_score", None), ("compute_score_async", 60.0)])
def test_functions_of_verl(make, rows, function: str, timeout: float | None) -> None:
    """They get values of the row by name; of a dict with `score`, numbers become metrics and texts are left out."""
    for name, sum_ in (("held.jsonl", "2+2?"), ("rows.jsonl", "3+1?")):
        asked = {"data_source": "sums", "prompt": [{"role": "user", "content": sum_}], "extra_info": {"index": 7}}
        asked |= {"reward_model": {"style": "rule", "ground_truth": "4"}}
        rows(*(asked | {"n": n} for n in range(2)), name=name)
    outcomes = scored(make(function, reward_timeout=timeout, validation_path="held.jsonl"), ["4", "5"])
    assert [outcome.reward for outcome in outcomes] == [1.0, -1.0]
    assert outcomes[0].metrics == {"acc": 1.0, "reward_failures": 0.0}


def test_functions_of_verl_get_the_answer_of_rows_in_other_layouts(make, rows) -> None:
    """Without the parameters that have a default; columns without which the function cannot be called are errors."""
    rows(*({"prompt": f"{n}+1?", "solution": {"text": str(n + 1)}} for n in range(3)))
    made = make("short_score", reward_timeout=None, columns={"answer": "solution.text"})
    assert rewards(made, [made.samples("train")[0].answer, "x"]) == [1.0, 0.0]
    with pytest.raises(
        ConfigError, match=r"asks for 'ground_truth', .* are none\. 'ground_truth' is .*columns\.answer"
    ):
        make("short_score")
    with pytest.raises(
        ConfigError, match=r"asks for 'data_source', which no row of rows\.jsonl has; .* 'ground_truth'"
    ):
        make("compute_score", columns={"answer": "solution.text"})


class Spiteful:
    """A value that raises on every access."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError("repr")


NUMBERS = (st.integers(), st.floats(), st.complex_numbers())
VALUES = st.one_of(st.none(), st.booleans(), st.text(), st.binary(), st.builds(Spiteful), *NUMBERS)


@given(st.one_of(VALUES, st.lists(VALUES), st.dictionaries(st.sampled_from(["reward", "accuracy", 3]), VALUES)))
def test_any_returned_value_is_a_result_of_finite_numbers_or_a_failure(value: Any) -> None:
    read = reward_calls.read_result(value)
    if isinstance(read, StepOutcome):
        given_ = value if isinstance(value, dict) else {"reward": value}
        expected = {name: float(number) for name, number in given_.items()}
        assert {**read.metrics, "reward": read.reward} == {**expected, "reward_failures": 0.0}
        assert all(abs(number) <= LARGEST_REWARD for number in (read.reward, *read.metrics.values()))
    else:
        assert read.text
        assert read.cause
