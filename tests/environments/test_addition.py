"""Addition: held-out sums, prompts, and how answers are read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlframework.base.errors import BatchError, DataError
from rlframework.config.environments import AdditionConfig
from rlframework.environments.addition import AdditionEnvironment, read_answer


def make(seed: int = 0, **config: Any) -> AdditionEnvironment:
    return AdditionEnvironment(AdditionConfig(**config), seed=seed)


def unordered(samples: Any) -> list[tuple[int, ...]]:
    return [tuple(sorted(sample.metadata["terms"])) for sample in samples]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 20), st.integers(1, 30), st.integers(2, 3), st.integers(1, 60))
def test_nothing_held_out_is_trained_on(seed: int, low: int, width: int, terms: int, held_out: int) -> None:
    environment = make(
        seed, operands=(low, low + width), terms=terms, validation_samples=min(held_out, width), train_samples=500
    )
    train, validation = environment.samples("train"), environment.samples("validation")
    held = unordered(validation)
    assert len(set(held)) == len(held) == min(held_out, width)
    assert not set(held) & set(unordered(train))
    assert len({s.id for s in train}) == len(train) > 0
    assert all(low <= t <= low + width for s in [*train, *validation] for t in s.metadata["terms"])


def test_a_small_space_is_used_up() -> None:
    """0 to 2: nine ordered sums, six unordered ones. Two are held out; the other orders of the rest are trained on."""
    environment = make(operands=(0, 2), validation_samples=2)
    held = set(unordered(environment.samples("validation")))
    every = {(a, b) for a in range(3) for b in range(3)}
    expected = {pair for pair in every if tuple(sorted(pair)) not in held}
    assert {s.metadata["terms"] for s in environment.samples("train")} == expected
    with pytest.raises(DataError, match=r"validation_samples is 6, but there are only 6 .* hold out at most 5"):
        make(operands=(0, 2), validation_samples=6)


@pytest.mark.slow
def test_the_seed_decides_in_every_process() -> None:
    code = (
        "from rlframework.config.environments import AdditionConfig as C\n"
        "from rlframework.environments.addition import AdditionEnvironment as E\n"
        "print([s.id for s in E(C(train_samples=5, validation_samples=3), seed=4).samples('validation')])"
    )
    here = [s.id for s in make(4, train_samples=5, validation_samples=3).samples("validation")]
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == str(here)
    assert here != [s.id for s in make(5, train_samples=5, validation_samples=3).samples("validation")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prompt": "{a}+{x}="}, r"must contain \{expression\} or all of \['a', 'b'\].*it contains \['x'\]"),
        ({"prompt": "{a}="}, r"must contain \{expression\} or all of \['a', 'b'\]"),
        ({"prompt": "{a}+{b}={"}, r"is not a valid template.*write \{\{ for a literal brace"),
        ({"operands": (5, 3)}, r"smallest <= largest, not \[5, 3\]"),
        ({"operands": (-1, 3)}, r"operands.0\n.*greater than or equal to 0"),
        ({"didgits": 3}, "didgits"),
    ],
)
def test_bad_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AdditionConfig(**config)


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        (" 7\n", "exact", "7"),
        ("7.", "exact", "7."),
        ("07", "exact", "07"),
        ("The answer is 7.", "first_integer", "7"),
        ("3 + 4 = 7", "first_integer", "3"),
        ("3 + 4 = 7", "last_integer", "7"),
        ("007", "first_integer", "7"),
        ("-0", "last_integer", "0"),
        ("minus -12", "last_integer", "-12"),
        ("seven", "last_integer", None),
        ("", "first_integer", None),
    ],
)
def test_reading_answers(text: str, how: str, answer: str | None) -> None:
    assert read_answer(text, how) == answer


def test_step_scores_the_last_turn_of_each() -> None:
    environment = make(answer="last_integer", terms=3, prompt="What is {a} plus {b} plus {c}?", system_prompt="Add.")
    samples = environment.samples("train")[:3]
    a, b, c = samples[0].metadata["terms"]
    asked = ({"role": "system", "content": "Add."}, {"role": "user", "content": f"What is {a} plus {b} plus {c}?"})
    assert (samples[0].messages, samples[0].answer) == (asked, str(a + b + c))
    texts = [f"it is {samples[0].answer}", f"{int(samples[1].answer) + 1}", ""]
    turns = [[*s.messages, {"role": "assistant", "content": t}] for s, t in zip(samples, texts, strict=True)]
    outcomes = environment.step(samples, turns)  # type: ignore[arg-type]
    assert [o.reward for o in outcomes] == [1.0, 0.0, 0.0]
    assert [o.metrics for o in outcomes] == [{"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 0.0}]
    assert all(o.done and o.observations == () for o in outcomes)
    with pytest.raises(BatchError, match="must end with an assistant message"):
        environment.step(samples[:1], [list(samples[0].messages)])
