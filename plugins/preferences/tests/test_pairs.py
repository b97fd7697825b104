"""Preference pairs: from text, to and from batches, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError, BatchTypeError, DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.messages import Message
from rlframework_preferences.gsm8k_preferences import pair_solutions, read_graded_solutions
from rlframework_preferences.pairs import PreferencePairs, PreferenceRow
from rlframework_preferences.reward_data import RewardData

SOLUTIONS = Path(__file__).parents[3] / "tests/fixtures" / "gsm8k_model_solutions.jsonl"
TEMPLATE = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' + m['content'] + '<end>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)


def asks(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def tokenizer() -> Any:
    """Ids: <pad> 0, <eos> 1, a 2, b 3, c 4, d 5."""
    return character_tokenizer("abcd")


ROWS = [
    PreferenceRow(asks("ab"), "c", "dd", "first", (1.0, 0.25)),
    PreferenceRow(asks("a"), "bcd", "", "second", (2.0, -1.0)),
]


def make() -> PreferencePairs:
    return PreferencePairs.from_rows(ROWS, tokenizer())


def test_pairs_from_text() -> None:
    pairs = make()
    assert pairs.batch_size == torch.Size([2])
    assert pairs.chosen.input_ids.tolist() == [[2, 3, 4, 1, 0], [2, 3, 4, 5, 1]]
    assert pairs.rejected.input_ids.tolist() == [[2, 3, 5, 5, 1], [2, 1, 0, 0, 0]]
    assert pairs.chosen.attention_mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert pairs.rejected.input_lengths.tolist() == [5, 2]
    assert pairs.prompt_lengths.tolist() == [2, 1]
    assert pairs.chosen.end_scores.tolist() == [1.0, 2.0]
    assert pairs.rejected.end_scores.tolist() == [0.25, -1.0]
    assert pairs.chosen.rewards is None
    assert pairs.check() is pairs


def test_pairs_with_a_chat_template() -> None:
    chat = tokenizer()
    chat.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    chat.add_tokens(["user", "assistant", "\n"])
    chat.chat_template = TEMPLATE
    pairs = PreferencePairs.from_rows([PreferenceRow(asks("ab"), "c", "dd")], chat)
    prompt = chat("<start>user\nab<end>\n<start>assistant\n")["input_ids"]
    end = chat.convert_tokens_to_ids("<end>")
    assert pairs.chosen.input_ids[0].tolist() == [*prompt, 4, end, 0]
    assert pairs.rejected.input_ids[0].tolist() == [*prompt, 5, 5, end]
    assert pairs.prompt_lengths.tolist() == [len(prompt)]
    assert pairs.chosen.end_scores is None


def test_pairs_that_are_too_long() -> None:
    assert make()[:1].rejected.input_lengths.tolist() == [5]
    with pytest.raises(DataError, match=r"pair 0 \(first\) has 5 tokens, more than max_length 4, and so have 1 others"):
        PreferencePairs.from_rows(ROWS, tokenizer(), max_length=4)
    long = PreferenceRow(asks("a"), "bcdabcd", "d", scores=(1.0, 0.0))
    kept = PreferencePairs.from_rows([long, *ROWS], tokenizer(), max_length=5, too_long="drop")
    assert kept.prompt_lengths.tolist() == [2, 1]
    assert kept.chosen.input_ids.shape == (2, 5)
    with pytest.raises(DataError, match="none of the 2 given pairs is left: all have more than 1 tokens"):
        PreferencePairs.from_rows(ROWS, tokenizer(), max_length=1, too_long="drop")
    with pytest.raises(DataError, match=r"none of the 0 given pairs is left$"):
        PreferencePairs.from_rows([], tokenizer())
    with pytest.raises(DataError, match="too_long is 'cut'"):
        PreferencePairs.from_rows(ROWS, tokenizer(), too_long="cut")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="2 of 3 pairs have scores"):
        PreferencePairs.from_rows([*ROWS, PreferenceRow(asks("a"), "b", "c")], tokenizer())


def test_the_rows_of_a_batch() -> None:
    fields = make().to_fields()
    assert fields["input_ids"].tolist() == [[2, 3, 4, 1, 0], [2, 3, 5, 5, 1], [2, 3, 4, 5, 1], [2, 1, 0, 0, 0]]
    assert fields["input_lengths"].tolist() == [4, 5, 5, 2]
    assert fields["token_mask"].tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert fields["token_mask"].dtype == torch.float32
    assert fields["sample_mask"].tolist() == [1, 1, 1, 1]
    assert fields["prompt_lengths"].tolist() == [2, 2, 1, 1]
    assert fields["group_ids"].tolist() == [0, 0, 1, 1]
    assert fields["chosen"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert fields["end_scores"].tolist() == [1.0, 0.25, 2.0, -1.0]
    assert "rewards" not in fields


def test_no_pairs_and_no_tokens() -> None:
    fields = make()[:0].to_fields()
    assert {name: len(value) for name, value in fields.items()} == dict.fromkeys(fields, 0)


def test_shards_keep_pairs_together() -> None:
    batch: BatchedDataDict[Any] = BatchedDataDict(PreferencePairs.from_rows(ROWS * 2, tokenizer()).to_fields())
    for number, shard in enumerate(batch.shard_by_batch_size(2)):
        for name, field in make().to_fields().items():
            assert torch.equal(shard[name], field + 2 * number if name == "group_ids" else field)


@pytest.mark.slow
@given(st.data())
@settings(deadline=None, max_examples=60)
def test_there_and_back(data: st.DataObject) -> None:
    """Pairs of any widths, of one tensor or several, mapped or not, come back as they were, padding apart."""
    texts = st.text("abcd", max_size=5)
    rows = data.draw(st.lists(st.builds(PreferenceRow, texts.map(lambda t: asks(f"a{t}")), texts, texts), min_size=1))
    pairs = PreferencePairs.from_rows(rows, tokenizer())
    if data.draw(st.booleans()):
        wide = int(pairs.chosen.input_lengths.max())
        narrow = RewardData(
            pairs.chosen.input_ids[:, :wide], pairs.chosen.attention_mask[:, :wide], batch_size=[len(rows)]
        )
        pairs = PreferencePairs(narrow, pairs.rejected.clone(), pairs.prompt_lengths, batch_size=[len(rows)])
    first = data.draw(st.integers(0, len(rows) - 1))
    fields = pairs[first:].to_fields()
    for index, row in enumerate(rows[first:]):
        for place, answer in enumerate((row.chosen, row.rejected)):
            ids = [*tokenizer()(row.messages[0]["content"] + answer)["input_ids"], 1]
            at = 2 * index + place
            assert fields["input_ids"][at, : len(ids)].tolist() == ids
            assert fields["input_lengths"][at] == len(ids)
            assert fields["token_mask"][at].sum() == len(answer) + 1
            assert fields["token_mask"][at, len(ids) - 1] == 1


def test_sides_that_differ_in_what_they_have() -> None:
    pairs = make()
    pairs.rejected.end_scores = None
    pairs.chosen.rewards = torch.ones(2, 5)
    pairs.rejected.rewards = torch.zeros(2, 5)
    fields = pairs.to_fields()
    assert "end_scores" not in fields
    assert fields["rewards"].tolist() == [[1.0] * 5, [0.0] * 5] * 2
    pairs.rejected.rewards = torch.zeros(2)
    with pytest.raises(BatchError, match=r"rewards is torch.float32 of shape \[2, 5\] on cpu in chosen, and"):
        pairs.to_fields()


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (lambda p: p.set("prompt_lengths", torch.tensor([2, 3])), BatchError, "pair 1: the prompt has 3 tokens, ch"),
        (lambda p: p.set("prompt_lengths", torch.tensor([-1, 1])), BatchError, "pair 0: the prompt has -1 tokens"),
        (lambda p: p.set("prompt_lengths", torch.tensor([2.0, 1.0])), BatchError, "prompt_lengths is torch.float32"),
        (lambda p: p.set("prompt_lengths", torch.zeros(2, 2).int()), BatchError, r"prompt_lengths is .* \[2, 2\]"),
        (lambda p: p.set("prompt_lengths", None), BatchTypeError, "prompt_lengths is a NoneType"),
        (lambda p: p.chosen.input_ids.fill_(3), BatchError, "pair 0: chosen and rejected differ at position 0"),
        (lambda p: p.chosen.input_ids[1].fill_(3), BatchError, "pair 1: chosen and rejected differ at position 0"),
        (lambda p: p.rejected.attention_mask.logical_not_(), BatchError, "padding before a token"),
        (lambda p: p.set("chosen", p.chosen.to_tensordict()), BatchTypeError, "chosen is a TensorDict"),
        (lambda p: setattr(p, "batch_size", []), BatchError, r"chosen has input_ids .*\[2, 5\] and batch_size is \[\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(change: Callable[[Any], Any], kind: type[Exception], told: str) -> None:
    pairs = make().clone()
    change(pairs)
    for use in (pairs.check, pairs.to_fields):
        with pytest.raises(kind, match=told):
            use()


@pytest.mark.slow
def test_pairs_are_saved_and_mapped(tmp_path: Path) -> None:
    pairs = make()
    pairs.save(tmp_path / "a")
    loaded = PreferencePairs.load(tmp_path / "a")
    assert (loaded == pairs).all()
    assert type(loaded.chosen) is RewardData
    assert loaded.to_fields()["input_ids"].tolist() == pairs.to_fields()["input_ids"].tolist()
    shell = PreferencePairs.load(tmp_path / "a", device="meta")
    assert shell.check().rejected.input_ids.shape == (2, 5)


def test_judged_solutions() -> None:
    questions = read_graded_solutions(SOLUTIONS)
    raw = [json.loads(line) for line in SOLUTIONS.read_text().splitlines()]
    assert len(questions) == 11
    for question, row in zip(questions, raw, strict=True):
        marks = [value for value in row.values() if isinstance(value, dict)]
        assert question.question == row["question"]
        assert set(question.right) == {mark["solution"] for mark in marks if mark["is_correct"]}
        assert set(question.wrong) == {mark["solution"] for mark in marks if not mark["is_correct"]}
    assert [(len(q.right), len(q.wrong)) for q in questions] == [
        (1, 3), (3, 1), (0, 4), (3, 1), (1, 3), (0, 4), (3, 1), (1, 3), (0, 4), (0, 4), (3, 0),
    ]  # fmt: skip
    assert questions[0].id == "gsm8k_model_solutions-1"


def test_pairing() -> None:
    questions = read_graded_solutions(SOLUTIONS)
    rows = pair_solutions(questions)
    assert len(rows) == 6 * 3
    assert len({row.id for row in rows}) == 18
    for row in rows:
        question = next(q for q in questions if q.question == row.messages[0]["content"])
        assert row.chosen in question.right
        assert row.rejected in question.wrong
        assert row.scores == (1.0, 0.0)
    drawn = pair_solutions(questions, pairs="one", seed=3)
    assert [row.messages for row in drawn] == [row.messages for row in rows[::3]]


def test_drawing_depends_on_the_seed_only() -> None:
    questions = read_graded_solutions(SOLUTIONS)
    assert pair_solutions(questions, pairs="one", seed=3) == pair_solutions(questions, pairs="one", seed=3)
    assert {row.id for draw in range(200) for row in pair_solutions(questions, pairs="one", seed=draw)} == {
        row.id for row in pair_solutions(questions)
    }
    with pytest.raises(DataError, match="pairs is 'two'"):
        pair_solutions(questions, pairs="two")  # type: ignore[arg-type]


GOOD = {"question": "q", "ground_truth": "1", "m": {"is_correct": True, "solution": "x"}}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({**GOOD, "m": "x"}, "line 2: the field 'm' must be .*is_correct"),
        ({**GOOD, "m": {"is_correct": 1, "solution": "x"}}, "line 2: the field 'm' must be"),
        ({**GOOD, "m": {"is_correct": True}}, "line 2: the field 'm' must be"),
        ({**GOOD, "n": {"is_correct": False, "solution": "x"}}, "line 2: the solution of 'n' is marked both right and"),
        ({"question": "q", "ground_truth": "1"}, "line 2: no solution found"),
        ({"question": "q"}, "line 2: the field 'ground_truth' is missing"),
        (["x"], "line 2: must be a JSON object"),
    ],
)
def test_bad_lines_are_told(tmp_path: Path, line: Any, told: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(line)}\n")
    with pytest.raises(DataError, match=rf"s\.jsonl, {told}"):
        read_graded_solutions(path)
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read"):
        read_graded_solutions(tmp_path / "missing.jsonl")


def test_the_same_solution_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({**GOOD, "n": GOOD["m"], "o": {"is_correct": False, "solution": "y"}}))
    [question] = read_graded_solutions(path)
    assert (question.right, question.wrong) == (("x",), ("y",))


def scored(*scores: Any) -> PreferencePairs:
    rows = [PreferenceRow(asks("a"), "b", "c", id=f"r{n}", scores=one) for n, one in enumerate(scores)]
    return PreferencePairs.from_rows(rows, tokenizer())


def test_scores_are_fp32_whatever_numbers_they_are() -> None:
    for pairs in (scored((1, 0), (2, -1)), scored((1.0, 0), (2, -1.0)), scored((True, False), [2, -1])):
        assert pairs.chosen.end_scores.tolist() == [1.0, 2.0]
        assert pairs.rejected.end_scores.tolist() == [0.0, -1.0]
        assert pairs.chosen.end_scores.dtype == pairs.rejected.end_scores.dtype == torch.float32


@pytest.mark.parametrize(
    "bad",
    [(None, 1), (float("nan"), 1.0), (1.0, float("inf")), (1e39, 0.0), (10**400, 0), ("1", 0), (1.0,), (1, 2, 3), 5],
)
def test_scores_that_are_none(bad: Any) -> None:
    with pytest.raises(DataError, match=r"pair 1 \(r1\) has scores .*give two finite numbers"):
        scored((1.0, 0.0), bad)
