"""Conversations of several turns: the mask is on exactly what the assistant says, whatever the template does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlframework.base.errors import DataError
from rlframework.datasets.chat.rendering import render_completion, render_conversation, render_prompt, render_samples
from rlframework.datasets.tokens import pad_rendered, pad_rows
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message

CHATML = (
    "{% for m in messages %}{{ '<start>' + m.role + '\\n' + m.content + '<end>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\\n' }}{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content | trim")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
# as models that reason: earlier answers lose what they thought, and the last keeps it
DROPS_THOUGHTS = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
# as those whose prompt begins the thought
OPENS_THOUGHT = CHATML.replace("'<start>assistant\\n'", "'<start>assistant\\n<think>'")
WITHOUT_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ENDS_WITH_EOS = "{% for m in messages %}{{ m.role + ': ' + m.content + ('<eos>' if m.role == 'assistant' else ' ') }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501


def byte_bpe(pre: Any = None, decoder: Any = None) -> PreTrainedTokenizerFast:
    """A tokenizer with merges, over line ends too: what two texts are cut into depends on where they meet."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if pre is None else []
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=["<pad>", "<eos>", "<bos>"]
    )
    text = "user\n\n\nassistant\nsystem\n hello world, user: ok\n\nassistant: yes"
    tokenizer.train_from_iterator([text] * 3, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    made.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    return made


BPE = byte_bpe()


def bpe(template: str | None) -> Any:
    BPE.chat_template = template
    return BPE


def turns(*contents: str, system: str | None = None) -> tuple[Message, ...]:
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return (*first, *({"role": roles[number % 2], "content": text} for number, text in enumerate(contents)))


def trained(tokenizer: Any, rendered: tuple[list[int], list[bool]]) -> str:
    ids, mask = rendered
    assert len(ids) == len(mask)
    return str(tokenizer.decode([token for token, one in zip(ids, mask, strict=True) if one]))


words = st.text("ab \n", max_size=8)
contents = st.builds(
    lambda left, mark, right: left + mark + right, words, st.sampled_from(["", "<end>", "é", "<"]), words
)
talks = st.lists(contents, min_size=2, max_size=9)
TALK = turns("hi", "hello", "2+2?", "4", system="be brief")


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(talks, st.none() | contents)
def test_each_assistant_turn_and_its_end_are_trained_on_and_nothing_else(talk, system) -> None:
    """Against a formatter in plain Python. What comes after the last assistant turn is left out."""
    tokenizer, messages = bpe(CHATML), turns(*talk, system=system)
    answers = talk[1::2]
    up_to = len(messages) - (len(talk) % 2)
    text = "".join(f"<start>{m['role']}\n{m['content']}<end>\n" for m in messages[:up_to])[: -len("\n")]
    expected = {"last": answers[-1] + "<end>", "assistant": "".join(f"{one}<end>" for one in answers), "all": text}
    for train_on, what in expected.items():
        rendered = render_conversation(tokenizer, messages, train_on)
        assert tokenizer.decode(rendered[0]) == text
        assert trained(tokenizer, rendered) == what


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(talks, st.sampled_from([CHATML, TRIMS, DROPS_THOUGHTS, OPENS_THOUGHT, WITHOUT_END, ENDS_WITH_EOS, None]))
def test_the_last_turn_follows_exactly_what_generation_sees(talk, template) -> None:
    tokenizer, messages = bpe(template), turns(*talk)
    end = len(messages) - (len(talk) % 2)
    if not "".join(talk[: end - 1]) and template is None:
        return  # no prompt at all
    prompt = render_prompt(tokenizer, messages[: end - 1])
    sample = Sample("s", messages[: end - 1], "", messages[end - 1]["content"])
    for train_on in ("last", "all"):
        ids, mask = render_conversation(tokenizer, messages, train_on)
        assert ids[: len(prompt)] == prompt
        assert ids[len(prompt) :] == render_completion(tokenizer, sample)
        assert all(mask[len(prompt) :])
        assert mask[: len(prompt)] == [train_on == "all"] * len(prompt)


@pytest.mark.parametrize("template", [DROPS_THOUGHTS, OPENS_THOUGHT], ids=["drops", "opens"])
def test_a_template_that_writes_earlier_turns_anew_is_refused_for_all_turns(template) -> None:
    tokenizer, messages = bpe(template), turns("hi", "<think>hm</think>hello", "2+2?", "4")
    with pytest.raises(DataError, match=r"rewrites turn 2, of the assistant.*algorithm\.train_on=last.*chat_template"):
        render_conversation(tokenizer, messages, "assistant")
    ids, _ = rendered = render_conversation(tokenizer, messages, "last")
    prompt = render_prompt(tokenizer, messages[:3])
    assert ids[: len(prompt)] == prompt
    assert trained(tokenizer, rendered) == tokenizer.decode(ids[len(prompt) :])
    assert trained(tokenizer, rendered).startswith("4<e")
    alone = render_conversation(tokenizer, messages[:2], "assistant")  # one turn is always the last
    assert trained(tokenizer, alone).startswith("<think>hm</think>hello<e")


def test_turns_without_an_end_are_trained_on_without_one() -> None:
    """Only the last is ended, by the tokenizer's end token; what the user says is no end, even if it looks like one."""
    tokenizer = bpe(WITHOUT_END)
    messages = turns("hi", "hello", "what is <end>?", "4")
    rendered = render_conversation(tokenizer, messages, "assistant")
    assert trained(tokenizer, rendered) == "hello4<eos>"
    text = "user: hi\nassistant: hello\nuser: what is <end>?\nassistant: 4<eos>"
    assert tokenizer.decode(rendered[0]) == text


def test_without_a_template() -> None:
    """Contents one after the other. Generation sees no end token after earlier answers, so none is trained on."""
    tokenizer = bpe(None)
    rendered = render_conversation(tokenizer, TALK, "assistant")
    assert tokenizer.decode(rendered[0]) == "be briefhihello2+2?4<eos>"
    assert trained(tokenizer, rendered) == "hello4<eos>"


def test_a_system_turn_that_the_template_refuses() -> None:
    with pytest.raises(
        DataError, match=r"rejects .* \['system', .*no system role.*environment\.system_prompt.*policy\.chat_temp"
    ):
        render_conversation(bpe(NO_SYSTEM), TALK, "assistant")
    assert trained(BPE, render_conversation(bpe(NO_SYSTEM), TALK[1:], "assistant")) == "hello<end>4<end>"


def test_an_end_that_is_one_token_only_where_no_letter_follows() -> None:
    """Then it is tokenised apart from what follows, and the mask is still on all of it and nothing else."""
    tokenizer = byte_bpe()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("stop", special=True, single_word=True)]})
    tokenizer.chat_template = ENDS_WITH_EOS.replace("<eos>", " stop").replace("' ')", "'')")
    rendered = render_conversation(tokenizer, turns("hi", "hello", "s", "4"), "assistant")
    assert trained(tokenizer, rendered) == "hello stop4 stop"
    assert tokenizer.decode(rendered[0]) == "user: hiassistant: hello stopuser: sassistant: 4 stop"


def test_nothing_to_train_on() -> None:
    for messages in (turns("hi"), turns("hi", "hello")[1:]):
        with pytest.raises(
            DataError, match=rf"no assistant turn after a prompt to train on.*roles are \['{messages[0]['role']}'\]"
        ):
            render_conversation(bpe(CHATML), messages)
    with pytest.raises(DataError, match="needs at least one message"):
        render_prompt(bpe(CHATML), [])


def test_samples_together_are_as_one_by_one() -> None:
    tokenizer = bpe(CHATML)
    samples = [
        Sample("a", turns("hi"), "", "hello"),
        Sample("b", TALK[:4], "", "4"),
        Sample("c", TALK, "", ""),  # the completion is among the messages
        Sample("text", (), "", "hello world"),
    ]
    for train_on in ("last", "assistant", "all"):
        rows = render_samples(tokenizer, samples, train_on)
        assert rows[0] == render_conversation(tokenizer, turns("hi", "hello"), train_on)
        assert rows[1] == rows[2] == render_conversation(tokenizer, TALK, train_on)
        assert tokenizer.decode(rows[3][0]) == trained(tokenizer, rows[3]) == "hello world<eos>"
    assert [(len(ids), len(mask)) for ids, mask in render_samples(tokenizer, samples, max_tokens=3)] == [(3, 3)] * 4
    with pytest.raises(DataError, match="sample 'd': there is no assistant turn"):
        render_samples(tokenizer, [*samples, Sample("d", turns("hi"), "")])


def plain(**options: Any) -> Any:
    return character_tokenizer("0123456789+= \nabcdefghijklmnopqrstuvwxyz", **options)


def test_the_begin_token_is_put_where_the_tokenizer_puts_it() -> None:
    tokenizer = plain(bos=True)
    ids = render_prompt(tokenizer, turns("1+2="))
    assert ids == tokenizer("1+2=")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in render_completion(tokenizer, Sample("s", turns("1+2="), "3", "3"))
    silent = plain()
    silent.bos_token = silent.eos_token  # as GPT-2: there is one, but it is not put before texts
    assert render_prompt(silent, turns("1+2=")) == silent("1+2=")["input_ids"]


def test_masks_go_with_them() -> None:
    rows = pad_rendered([([1, 2, 3], [False, True, True]), ([4], [True])], 0)
    assert rows.input_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert rows.input_lengths.tolist() == [3, 1]
    assert rows.token_mask.tolist() == [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (turns("1+X?"), r"no token for \['\?', 'X'\] in '1\+X\?'"),
        (turns("1+\ud83d"), r"a lone surrogate \(\\ud83d\)"),
        ("1+2=", r'must be a list of messages, such as \[\{"role": "user".*1\+2='),
        (["1+2="], r"must be a list of messages, such as .*1\+2="),
        ({"role": "user", "content": "1+2="}, r"must be a list of messages, such as .*1\+2="),
        (turns(""), "has no token; give at least one message"),
        ([], "has no token"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_is_told(messages: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        render_prompt(plain(), messages)


def test_no_end_token_and_no_rows() -> None:
    tokenizer = plain()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        render_completion(tokenizer, Sample("s", turns("1+2="), "3", "3"))
    with pytest.raises(DataError, match="cannot make a batch of no rows"):
        pad_rows([], 0)
