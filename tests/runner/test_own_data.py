"""Runs on user data: conversations, texts, questions; rendered during training or read from token data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from probe_runs import refused

from rlframework import load_config, run
from rlframework.algorithms import input_checks, sft
from rlframework.base.errors import ConfigError, DataError
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer, load_tokenizer
from rlframework_tools.tokenize import tokenize

pytestmark = pytest.mark.slow

ONE_STEP = ["algorithm.num_steps=1", "policy.train_global_batch_size=4"]
NO_VALIDATION = "algorithm.validation={at_start: false, at_end: false, every: 0}"


def talk(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


TALKS = [talk(f"hi {n}", "hello", f"{n}+1?", str(n + 1)) for n in range(20)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def own(path: Path, **keys: Any) -> list[str]:
    section = json.dumps({"name": "dataset", "path": str(path), **keys})
    return ["~environment", f"environment={section}"]


def expected_loss(model: Path, rows: list[dict[str, Any]]) -> float:
    """Mean over the tokens of each last turn and its end of -log p, row by row, by transformers alone."""
    from transformers import AutoModelForCausalLM

    tokenizer, total, count = load_tokenizer(str(model)), 0.0, 0
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    for row in rows:
        prompt = tokenizer("".join(turn["content"] for turn in row["messages"][:-1]))["input_ids"]
        answer = [*tokenizer(row["messages"][-1]["content"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = network(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        total -= sum(logprobs[len(prompt) + n - 1, token].item() for n, token in enumerate(answer))
        count += len(answer)
    return total / count


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_conversations_are_learnt_and_validated_by_loss(run_config, tmp_path, tiny_llama, suffix):
    path = write(tmp_path / f"a.{suffix}", TALKS)
    held_out = write(tmp_path / "v.jsonl", [talk("seven?", "7"), talk("one?", "1", "two and three?", "23")])
    options = ["algorithm.num_steps=12", "algorithm.validation.every=6", "policy.optimizer.lr=1e-2"]
    result = run(run_config("sft", *own(path, validation_path=str(held_out)), *options))
    losses = [entry["validation/loss"] for entry in result.history if "validation/loss" in entry]
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    assert losses[0] == pytest.approx(expected_loss(tiny_llama, rows), rel=1e-5)
    assert len(losses) == 3
    assert result.history[-1]["train/loss"] < result.history[1]["train/loss"]
    assert result.metrics["validation/samples"] == 2
    assert "validation/accuracy" not in result.metrics
    assert losses[0] != losses[1]


@pytest.mark.parametrize(("train_on", "tokens"), [("last", 4 * 2), ("assistant", 4 * (5 + 2)), ("all", 4 * 14)])
def test_what_is_trained_on(run_config, tmp_path, train_on, tokens):
    """In `hi 1hello1+1?2<eos>`: the last answer and its end; both answers; everything after the first token."""
    path = write(tmp_path / "a.jsonl", [talk("hi 1", "hello", "1+1?", "2")] * 4 + [talk("hi 2", "b")])
    options = [*own(path, validation_path=str(path), max_validation_samples=5), NO_VALIDATION, *ONE_STEP]
    with pytest.raises(DataError, match="every prompt is also in validation"):
        run(run_config("sft", *options))
    other = write(tmp_path / "v.jsonl", [talk("hi 2", "b")])
    options = [*own(path, validation_path=str(other)), NO_VALIDATION, *ONE_STEP, f"algorithm.train_on={train_on}"]
    assert run(run_config("sft", *options)).metrics["train/global_valid_toks"] == tokens


def test_texts_are_learnt_whole(run_config, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": f"once {'x' * n}"} for n in range(5)])
    result = run(run_config("sft", *own(path, max_validation_samples=1), *ONE_STEP))
    lengths = [5 + n for n in range(5)]  # characters and the end token, but for the first, which nothing predicts
    possible = {sum(lengths) - one for one in lengths}
    assert result.metrics["train/global_valid_toks"] in possible
    assert result.metrics["validation/loss"] > 0


def test_rewards_need_a_check(run_config, tmp_path):
    path = write(tmp_path / "a.jsonl", TALKS)
    with pytest.raises(ConfigError, match=r"`environment\.check`: completions are not scored, so GRPO has no rewards"):
        run_config("grpo", *own(path))
    with pytest.raises(ConfigError, match=r"function that returns 0\.0, and reward_model\.environment_weight to 0"):
        run_config("grpo", *own(path), "reward_model={model_name: somewhere}")
    with pytest.raises(ConfigError, match=r"no accuracy for algorithm\.stop_at_accuracy"):
        run_config("sft", *own(path), "algorithm.stop_at_accuracy=0.5")
    message = refused(run_config("grpo", *own(path, check="exact")))
    assert "a.jsonl, line 1: the column 'answer' has no value" in message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*TALKS, {"a": 1}], "line 21: no conversation in the columns ['a']"),
        ([*TALKS, talk("hi €", "b")], "the tokenizer has no token for ['€']"),
        ([*TALKS, talk("hi")], "train sample 'a-21': there is no assistant turn after a prompt to train on"),
        ([*TALKS, talk("hi", "b" * 130)], "train sample 'a-21' has 133 tokens with its completion: the model"),
    ],
)
def test_data_that_does_not_fit_is_told_before_any_work(run_config, tmp_path, rows, message):
    other = write(tmp_path / "v.jsonl", TALKS[:1])
    options = [*own(write(tmp_path / "a.jsonl", rows), validation_path=str(other)), "policy.batching.tokens=null"]
    assert message in refused(run_config("sft", *options))


def test_rows_that_are_cut(run_config, tmp_path):
    """The second answer of 130 letters is cut at 100 tokens; 98 of them are letters after `hi`."""
    path = write(tmp_path / "a.jsonl", [talk("hi", "b" * 130)] * 4 + [talk("ho", "b")])
    other = write(tmp_path / "v.jsonl", [talk("ho", "b")])
    options = [*own(path, validation_path=str(other)), *ONE_STEP, "algorithm.max_tokens=100"]
    result = run(run_config("sft", *options, "policy.batching.tokens=null"))
    assert result.metrics["train/global_valid_toks"] == 4 * 98
    assert result.metrics["train/tokens"] == 4 * 100


def test_a_cut_that_leaves_nothing_to_learn_is_refused(run_config, tmp_path, caplog, monkeypatch):
    """A prompt of two letters, cut at two tokens. Four rows have a prompt of one letter: `a` and its answer remain."""
    long, short = [talk(f"h{n}", "b") for n in range(8)], [talk(name, "b") for name in "alou"]
    other = write(tmp_path / "v.jsonl", [talk("s", "b")])
    path = write(tmp_path / "a.jsonl", long)
    options = [NO_VALIDATION, *ONE_STEP, "algorithm.max_tokens=2"]
    config = run_config("sft", *own(path, validation_path=str(other)), *options)
    message = "8 of 8 checked train rows have no token to train on, because algorithm.max_tokens=2 cuts"
    assert message in refused(config)
    with pytest.raises(DataError, match="no row has a token to train on after its first token"):
        tokenize(config, tmp_path / "tokens")

    path = write(tmp_path / "b.jsonl", [*long, *short])
    run(run_config("sft", *own(path, validation_path=str(other)), *options))
    message = "8 of 12 checked train rows have no token to train on, because algorithm.max_tokens=2 cuts"
    assert message in caplog.text

    monkeypatch.setattr(input_checks, "RENDERED", 4)  # the longest three have nothing, and others of twelve have
    monkeypatch.setattr(input_checks, "LONGEST", 3)
    run(run_config("sft", *own(path, validation_path=str(other)), *options, f"output_dir={tmp_path}/more"))
    assert "5 of 6 checked train rows have no token" in caplog.text


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_of_many_rows_those_without_an_answer_are_found_too(run_config, tmp_path, monkeypatch, suffix):
    """Three of thirty rows are rendered; the seventh and the ninth are short and have no answer."""
    rows: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "completion": "x" * 9} for n in range(30)]
    rows[6] = rows[8] = {"prompt": "6+", "completion": None}
    monkeypatch.setattr(input_checks, "RENDERED", 8)
    monkeypatch.setattr(input_checks, "LONGEST", 3)
    path = write(tmp_path / f"a.{suffix}", rows)
    other = write(tmp_path / "v.jsonl", [talk("s", "b")])
    message = refused(run_config("sft", *own(path, validation_path=str(other))))
    name = "a-7" if suffix == "jsonl" else "a-6"
    assert f"train sample {name!r}: there is no assistant turn after a prompt to train on" in message
    few = run_config("sft", *own(path, validation_path=str(other), max_samples=6), *ONE_STEP, "algorithm.max_tokens=9")
    assert run(few).metrics["train/loss"] > 0  # the rows in use are fine


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("InputCheck.rows", lambda *arguments: None, r"validation sample 'v-1' has 133 tokens"),
        ("worth_rendering", lambda samples: samples[:1], r"train sample 'a-10' has 135 tokens"),
    ],
)
def test_a_row_that_was_not_looked_at_is_named_when_it_is_due(
    run_config, tmp_path, monkeypatch, name, replacement, message
):
    long = "v" if message.startswith("validation") else "a"
    rows = [talk(f"hi {n}", "b" * (130 if n == 9 and long == "a" else 1)) for n in range(10)]
    other = write(tmp_path / "v.jsonl", [talk("hi", "b" * (130 if long == "v" else 1))])
    monkeypatch.setattr(f"rlframework.algorithms.input_checks.{name}", replacement)
    options = [*own(write(tmp_path / "a.jsonl", rows), validation_path=str(other)), "policy.batching.tokens=null"]
    with pytest.raises(DataError, match=message):
        run(run_config("sft", *options))


def test_of_a_large_lazy_set_the_longest_rows_are_looked_at(run_config, tmp_path, monkeypatch):
    """At most three of ten rows are created, including the long one."""
    rows = [talk(f"hi {n}", "b" * (130 if n == 6 else 1)) for n in range(10)]
    monkeypatch.setattr(input_checks, "RENDERED", 8)
    monkeypatch.setattr(input_checks, "LONGEST", 3)
    for path in (write(tmp_path / "a.jsonl", rows), write(tmp_path / "a.parquet", rows)):
        other = write(tmp_path / "v.jsonl", TALKS[:1])
        message = refused(run_config("sft", *own(path, validation_path=str(other)), "policy.batching.tokens=null"))
        assert "has 135 tokens" in message


def test_a_sequence_that_cannot_tell_its_sizes_is_looked_at_here_and_there(monkeypatch):
    monkeypatch.setattr(input_checks, "RENDERED", 5)
    monkeypatch.setattr(input_checks, "LONGEST", 3)
    assert input_checks.worth_rendering(range(9)) == [0, 4, 8]


TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501


def test_a_chat_template_of_your_own(run_config, tmp_path):
    """Training uses it, and it is saved with the model."""
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    path = write(tmp_path / "a.jsonl", [talk("hi", "b")] * 4 + [talk("ho", "b")])
    options = [*own(path, validation_path=str(write(tmp_path / "v.jsonl", [talk("ho", "b")]))), *ONE_STEP]
    result = run(run_config("sft", *options, f"policy.chat_template={tmp_path}/own.jinja"))
    assert result.metrics["train/tokens"] == 4 * len("user: hi\nassistant: b.")  # the point stands for the end token
    assert load_tokenizer(str(tmp_path / "run" / "model")).chat_template == TEMPLATE
    again = run_config("sft", *options, "policy.chat_template=nothing.jinja", f"output_dir={tmp_path}/again")
    assert "policy.chat_template: 'nothing.jinja' cannot be read" in refused(again)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_chat_template_that_drops_the_texts_is_refused(run_config, tmp_path, algorithm):
    path = write(tmp_path / "a.jsonl", [{"question": f"{n}+1?", "answer": n + 1} for n in range(30)])
    template = "{% for m in messages %}user: {{ m.text }}{% endfor %}"
    config = run_config(algorithm, *own(path, check="math"), f"policy.chat_template={json.dumps(template)}")
    assert refused(config).startswith("the chat template does not write the text of a user message")


# token data


@pytest.fixture
def tokens(run_config, tmp_path):
    """`tokens(*options)`: a configuration of a run on `TALKS`, and the folder with its rows."""

    def make(*options: str) -> tuple[Any, Path]:
        path = write(tmp_path / "a.jsonl", TALKS)
        config = run_config("sft", *own(path), "policy.train_global_batch_size=4", *options)
        tokenize(config, tmp_path / "tokens")
        return config, tmp_path / "tokens"

    return make


def test_token_data_gives_the_same_run_and_renders_nothing(tokens, tmp_path, monkeypatch):
    config, folder = tokens("algorithm.num_steps=7", "algorithm.train_on=assistant", NO_VALIDATION)
    rendered = run(config)

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a sample was rendered")

    monkeypatch.setattr(sft, "render_samples", never)
    read = run(load_config(config, [f"algorithm.token_data={folder}", f"output_dir={tmp_path}/read"]))

    def losses(result) -> list[float]:
        return [entry["train/loss"] for entry in result.history]

    assert len(losses(read)) == 7
    assert losses(read) == losses(rendered)


def test_token_data_of_another_tokenizer(tokens, tmp_path):
    config, folder = tokens(NO_VALIDATION)
    other = make_llama(tmp_path / "m", character_tokenizer("0123456789+ ?hielo"), hidden=16, layers=1, heads=2)
    changed = load_config(config, [f"algorithm.token_data={folder}", f"policy.model_name={other}"])
    message = refused(changed, ConfigError)
    assert f"algorithm.token_data={str(folder)!r} was made with another tokenizer" in message
    template = load_config(config, [f"algorithm.token_data={folder}", f"policy.chat_template={json.dumps(TEMPLATE)}"])
    assert "another tokenizer or chat template" in refused(template, ConfigError)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=4", "was made with seed=3, but this run has 4: rows that this run holds out may be in it"),
        ("environment.validation_fraction=0.5", "with environment.validation_fraction=0.05, but this run has 0.5"),
        ("environment.max_samples=3", "with environment.max_samples=None, but this run has 3"),
        ("environment.instruction=x", "with environment.instruction='', but this run has 'x'"),
        ("environment.system_prompt=be", "with environment.system_prompt=None, but this run has 'be'"),
        ("algorithm.train_on=all", "was made with algorithm.train_on=last, but this run has all; set it to last"),
        ("algorithm.max_tokens=9", "was made with algorithm.max_tokens=None, but this run has 9"),
        ("policy.batching.tokens=8", " has 18 tokens, but policy.batching.tokens=8 is the most"),
        ("algorithm.token_data=nothing", "nothing: not token data"),
    ],
)
def test_token_data_that_does_not_fit(tokens, override, message):
    config, folder = tokens(NO_VALIDATION)
    changed = load_config(config, [f"algorithm.token_data={folder}", override])
    assert message in refused(changed, (ConfigError, DataError))


def test_token_data_where_nothing_is_drawn_is_for_any_seed(run_config, tmp_path):
    """With validation data of its own, training rows do not depend on the seed or on how answers are checked."""
    rows = [{"question": f"{n}+1?", "answer": n + 1, "gold": n + 1} for n in range(20)]
    path, other = write(tmp_path / "a.jsonl", rows), write(tmp_path / "v.jsonl", rows[1:2])
    config = run_config("sft", *own(path, validation_path=str(other)), *ONE_STEP)
    tokenize(config, tmp_path / "tokens")
    keys = [f"algorithm.token_data={tmp_path}/tokens", "seed=4", "environment.check=exact"]
    assert "validation/accuracy" in run(load_config(config, keys)).metrics
    told = refused(load_config(config, [*keys, f"environment.path={other}", f"output_dir={tmp_path}/n"]), DataError)
    assert "every prompt is also in validation" in told
    another = write(tmp_path / "b.jsonl", rows)
    told = refused(load_config(config, [*keys, f"environment.path={another}", f"output_dir={tmp_path}/n"]), ConfigError)
    assert f"with environment.path={str(path)!r}, but this run has {str(another)!r}" in told
    gold = load_config(config, [*keys, "environment.columns.answer=gold", f"output_dir={tmp_path}/n"])
    assert "with environment.columns.answer='answer', but this run has 'gold'" in refused(gold, ConfigError)


def test_token_data_of_unknown_rows_is_taken_on_trust(tokens, tmp_path):
    config, folder = tokens(NO_VALIDATION, *ONE_STEP)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "source": {}}))
    assert run(load_config(config, [f"algorithm.token_data={folder}", "seed=4"])).metrics["train/loss"] > 0


@pytest.mark.thorough
@pytest.mark.xdist_group("ray")
def test_validation_by_loss_does_not_depend_on_the_number_of_workers(run_config, tmp_path, ray_session):
    """Three rows on two workers: one row is duplicated, and counts once."""
    held_out = write(tmp_path / "v.jsonl", [talk("seven?", "7"), talk("one?", "one"), talk("two?", "it is two")])
    options = own(write(tmp_path / "a.jsonl", TALKS), validation_path=str(held_out))
    one = run(run_config("sft", *options, "algorithm.num_steps=1"))
    workers = ["worker_group.name=ray", "worker_group.num_workers=2", f"output_dir={tmp_path}/two"]
    two = run(run_config("sft", *options, "algorithm.num_steps=1", *workers))
    assert two.history[0]["validation/loss"] == pytest.approx(one.history[0]["validation/loss"], rel=1e-5)
    assert two.metrics["validation/samples"] == 3
