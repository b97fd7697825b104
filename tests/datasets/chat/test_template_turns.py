"""How chat templates of known families end a turn and lead to it: each row is written down by hand."""

from __future__ import annotations

import string
from typing import Any

import chat_formats
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from rlframework.base.errors import DataError
from rlframework.datasets.chat.rendering import render_completion, render_conversation, render_prompt, render_steps
from rlframework.datasets.chat.template_checks import end_of_turn_problem, require_contents, start_of_turn_problem
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# the last answer gets an empty thought before it, earlier ones lose theirs
QWEN3 = CHATML.replace(
    "m.content +",
    "('<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' and loop.last else '') "
    "+ m.content.split('</think>')[-1].lstrip('\\n') +",
)
# as QWEN3, and the prompt of generation has it open
OPENED = QWEN3.replace("'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>assistant\\n<think>\\n' }}{% endif")
# as gpt-oss, whose prompt leaves the channel of the answer to the model
HARMONY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ('<|final|>' if m.role == 'assistant' else '\\n') + m.content "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<bos>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' <eos>' }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + (m.content | trim) + '<eos>' }}{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def tokenizer(template: str) -> Any:
    """Its end token is `<eos>`, which ChatML does not use: as a base model's."""
    made: Any = character_tokenizer(string.ascii_letters + string.digits + " \n:<>[]/|_#{}", bos=True)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|final|>"]})
    made.chat_template = template
    return made


def talk(*contents: str) -> tuple[Message, ...]:
    return tuple({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents))


def shown(made: Any, rendered: tuple[list[int], list[bool]]) -> str:
    """The row as text, with braces around what is trained on."""
    text, inside = "", False
    for token, trained in zip(*rendered, strict=True):
        text += {(False, True): "{", (True, False): "}"}.get((inside, trained), "") + made.decode([token])
        inside = trained
    return text + "}" * inside


END = "<|im_end|>"
UNTHOUGHT = "<think>\n\n</think>\n\n"
U, A = "<|im_start|>user\n", "<|im_start|>assistant\n"


H = "<|im_start|>assistant"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, f"{U}hi{END}\n{A}{{one{END}}}\n{U}ok{END}\n{A}{{two{END}}}"),
        (QWEN3, f"{U}hi{END}\n{A}{{one{END}}}\n{U}ok{END}\n{A}{{{UNTHOUGHT}two{END}}}"),
        (HARMONY, f"{U}hi{END}\n{H}{{<|final|>one{END}}}\n{U}ok{END}\n{H}{{<|final|>two{END}}}"),
        (LLAMA2, "<bos>[INST] hi [/INST]{ one <eos>}<bos>[INST] ok [/INST]{ two <eos>}"),
        (MISTRAL, "<bos>[INST] hi [/INST]{ one<eos>}[INST] ok [/INST]{ two<eos>}"),
        (VICUNA, "USER: hi ASSISTANT:{ one<eos>}USER: ok ASSISTANT:{ two<eos>}"),
    ],
    ids=["chatml", "qwen3", "harmony", "llama2", "mistral", "vicuna"],
)
def test_rows_of_known_templates(template: str, text: str) -> None:
    """Trained on all answers as shown, or on the last, which is what generation continues."""
    made, messages = tokenizer(template), talk("hi", "one", "ok", "two")
    assert shown(made, render_conversation(made, messages, "assistant")) == text
    rendered, last = render_conversation(made, messages, "last"), text.replace("{", "", 1).replace("}", "", 1)
    assert shown(made, rendered) == last
    prompt = render_prompt(made, messages[:3])
    assert made.decode(prompt) == last.partition("{")[0]
    assert rendered[0] == prompt + render_completion(made, Sample("s", messages[:3], "", "two"))


@pytest.mark.parametrize(
    ("template", "lead"), [(QWEN3, UNTHOUGHT), (OPENED, "\n</think>\n\n")], ids=["empty thought", "opened thought"]
)
@pytest.mark.parametrize("answer", ["two", "m", "im_end", "<", END, " two\n"])
def test_a_row_has_what_the_template_writes_between_prompt_and_answer(template: str, lead: str, answer: str) -> None:
    """As TRL. Also where the answer is found in the end itself, or among what is put before it."""
    made = tokenizer(template)
    sample = Sample("s", talk("hi"), "", answer)
    assert made.decode(render_completion(made, sample)) == lead + answer + END


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (QWEN3, "<think>\nhm\n</think>\n\ntwo"),
        (OPENED, "hm\n</think>\n\ntwo"),  # as the model continues the prompt
        (OPENED.replace("m.content.split('</think>')[-1]", "m.content"), "hm\n</think>\n\ntwo"),
    ],
)
def test_an_answer_that_has_its_reasoning_gets_no_other(template: str, answer: str) -> None:
    made = tokenizer(template)
    assert made.decode(render_completion(made, Sample("s", talk("hi"), "", answer))) == answer + END


@pytest.mark.parametrize(
    ("name", "lead"),
    [("qwen3", UNTHOUGHT), ("gpt_oss", "<|channel|>final<|message|>"), ("chatml", ""), ("llama3", ""), ("gemma", "")],
)
def test_what_published_templates_write_before_an_answer(name: str, lead: str) -> None:
    """The row is the template's own rendering, up to the end of the turn."""
    made, asked = chat_formats.tokenizer(name), talk("hi")
    text = made.apply_chat_template([*asked, {"role": "assistant", "content": "two"}], tokenize=False)
    whole = made.decode(render_conversation(made, talk("hi", "two"))[0])
    assert text.startswith(whole)
    assert not text.removeprefix(whole).strip()
    prompt = made.decode(render_prompt(made, asked))
    assert whole.removeprefix(prompt).partition("two")[0] == lead


def test_steps_of_an_answer_follow_what_the_template_writes_before_it() -> None:
    made = tokenizer(QWEN3)
    ids, ends = render_steps(made, Sample("s", talk("hi"), "", ""), ["a:", "b:"])
    prompt = made.decode(render_prompt(made, talk("hi")))
    assert made.decode(ids) == f"{prompt}{UNTHOUGHT}a:b:{END}"
    assert [made.decode(ids[:end]).removeprefix(prompt) for end in ends] == [UNTHOUGHT + "a:", UNTHOUGHT + "a:b:"]


def test_a_tokenizer_that_puts_a_space_before_each_text_puts_no_second_one() -> None:
    """As Llama 2's own: in the whole conversation there is one token for a space and `two`."""
    pieces = ["▁", "▁two", "▁ok", "two", *"tworkINSTouse[]/"]
    vocabulary = {name: n for n, name in enumerate(dict.fromkeys(["<pad>", "<eos>", "<bos>", *pieces]))}
    merges = [("t", "w"), ("tw", "o"), ("▁", "two")]
    vocabulary["tw"] = len(vocabulary)
    backend: Any = Tokenizer(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    made.chat_template = MISTRAL
    whole = made("<bos>[INST] ok [/INST] two<eos>", add_special_tokens=False)["input_ids"]
    assert whole[-2:] == [vocabulary["▁two"], vocabulary["<eos>"]]
    assert render_conversation(made, talk("ok", "two"))[0] == whole
    both = render_conversation(made, talk("ok", "two", "ok", "two"), "assistant")[0]
    assert both[: len(whole)] == whole
    assert both[-2:] == whole[-2:]


# calls in JSON between tags, with the tools in front; an answer of a tool is a turn of its own
CALLS = (
    "{% if tools %}{{ '<|im_start|>tools\\n' }}{% for t in tools %}{{ t.function.name + ' ' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.reasoning_content %}{{ '<t>' + m.reasoning_content + '</t>' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ '<c>' + c.function.name + ':' + (c.function.arguments.n | string) + '</c>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "half", "arguments": '{"n": 8}'}}],
}
HALVED: tuple[Message, ...] = (
    {"role": "user", "content": "half of 8"},
    CALL,
    {"role": "tool", "content": "4", "tool_call_id": "a"},
    {"role": "assistant", "content": "it is 4", "reasoning_content": "ok"},
)
HALF: Any = {"type": "function", "function": {"name": "half", "description": "", "parameters": {}}}
TOOLS_AND_QUESTION = (
    "<|im_start|>tools\nhalf <|im_end|>\n<|im_start|>user\nhalf of 8<|im_end|>\n<|im_start|>assistant\n"
)
ANSWERED = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("train_on", "turns", "expected"),
    [
        ("last", 4, "<c>half:8</c><|im_end|>" + ANSWERED + "{<t>ok</t>it is 4<|im_end|>}"),
        ("assistant", 4, "{<c>half:8</c><|im_end|>}" + ANSWERED + "{<t>ok</t>it is 4<|im_end|>}"),
        ("last", 2, "{<c>half:8</c><|im_end|>}"),
    ],
)
def test_calls_and_reasoning_are_trained_on_as_the_template_writes_them(train_on, turns, expected) -> None:
    made = tokenizer(CALLS)
    rendered = render_conversation(made, HALVED[:turns], train_on, [HALF])
    assert shown(made, rendered) == TOOLS_AND_QUESTION + expected


def test_a_call_without_an_end_of_turn_gets_the_end_of_sequence_token() -> None:
    made = tokenizer(CALLS.replace("<|im_end|>", ""))
    assert shown(made, render_conversation(made, HALVED[:2])).endswith("{<c>half:8</c><eos>}")


def test_calls_need_a_chat_template() -> None:
    with pytest.raises(DataError, match="tool calls and reasoning need a chat template"):
        render_conversation(tokenizer(""), HALVED)


@pytest.mark.parametrize(
    ("template", "warned"), [(CHATML, False), (LLAMA2, False), ("", False), (CHATML.replace("<|im_end|>", "##"), True)]
)
def test_a_template_whose_turns_end_with_no_token(template, warned) -> None:
    problem = end_of_turn_problem(tokenizer(template))
    assert (problem is not None) == warned
    assert problem is None or "Set policy.chat_template to one that ends turns with '<eos>'" in problem


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA2, MISTRAL, ""])
def test_templates_whose_prompts_end_where_an_answer_begins(template) -> None:
    assert start_of_turn_problem(tokenizer(template)) is None


def test_a_template_that_ignores_add_generation_prompt() -> None:
    problem = start_of_turn_problem(tokenizer(CHATML.partition("{% if add_generation_prompt")[0]))
    assert problem is not None
    assert "writes '<|im_start|>assistant\\n' before an answer, but not at the end of a prompt" in problem
    assert problem.endswith("{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


PARTS = CHATML.replace(
    "m.content", "(m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)"
)
DOTTED = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
NAMED = (  # as Llama Guard 3's: its own text has common words
    "Is the content of text unsafe: {% for m in messages %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"
)
AFTER_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[1].content }}{% endif %}"
NO_USER = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        *(CHATML, QWEN3, OPENED, LLAMA2, MISTRAL, VICUNA, "", PARTS, DOTTED, NAMED, AFTER_SYSTEM),
        NO_USER + "{{ messages[1].content }}",
        CHATML.replace("m.content", "(m.content | upper | trim)"),
        CHATML.replace("m.content", "(m.content | reverse)"),
        "{{ messages[0].content }}",
        "{{ raise_exception('no conversation is accepted') }}",
        *(chat_formats.tokenizer(name).chat_template for name in chat_formats.TEMPLATES),
    ],
)
def test_a_template_that_writes_the_text_of_a_user_message_or_rejects_it(template: str) -> None:
    require_contents(tokenizer(template))


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("m.content", "(m.text or '')"),
        "{% for m in messages %}{{ m.role + ': ' }}{{ m.text }}{% endfor %}",
        "{{ messages[0].contents }}",
        NO_USER + "{{ messages[1].contents }}",
    ],
)
def test_a_template_that_drops_the_text_of_a_user_message(template: str) -> None:
    with pytest.raises(DataError, match=r"does not write the text of a user message.*`role` and `content`"):
        require_contents(tokenizer(template))
