"""Invalid input is one clear error before anything is written, not a failure in the first step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import published_templates
import pytest
import torch
from probe_runs import refused

from rlframework import run
from rlframework.algorithms import input_checks
from rlframework.base.errors import ConfigError, DataError
from rlframework.environments.tool_environment import ToolDataEnvironment
from rlframework.huggingface.model_directories import model_positions
from rlframework.interfaces.environment import Sample
from rlframework.runner.launch import dry_run

POSITIONS = 128  # of the model that run_config takes
ONE_STEP = ["algorithm.num_steps=1", "algorithm.validation={at_start: false, at_end: false}"]


def addition(letters: int) -> list[str]:
    """One-digit sums whose prompt is `letters` letters and the four characters of `3+4=`."""
    return ["~environment", f"environment={{name: addition, digits: 1, prompt: '{'a' * letters}{{a}}+{{b}}='}}"]


def gsm8k(folder: Path, train: str, validation: str) -> list[str]:
    """One question to train on and one to validate on."""
    for split, question in (("train", train), ("test", validation)):
        (folder / f"{split}.jsonl").write_text(json.dumps({"question": question, "answer": "x\n#### 2"}) + "\n")
    paths = f"train_path: {folder}/train.jsonl, validation_path: {folder}/test.jsonl"
    return ["~environment", f"environment={{name: gsm8k, instruction: '', {paths}}}"]


@pytest.mark.slow
def test_a_run_that_validates_needs_samples_to_validate_on(run_config, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))
    rows = f"environment={{name: dataset, path: {tmp_path}/rows.jsonl, check: exact, validation_fraction: 0}}"
    told = refused(run_config("grpo", "~environment", rows))
    assert told.startswith("environment 'dataset' has no validation samples; give it more data")
    assert told.endswith("switch validation off: algorithm.validation={every: 0, at_start: false, at_end: false}")
    stopping = ["algorithm.early_stopping.patience=1", "algorithm.num_steps=9", "algorithm.validation.every=1"]
    assert refused(run_config("grpo", "~environment", rows, *stopping)) == (
        f"{told}. Without validation, algorithm.early_stopping.metric=validation/accuracy does not go: set "
        "algorithm.early_stopping.metric=train/reward, or remove it: ~algorithm.early_stopping"
    )
    off = told.rpartition(": algorithm")[2]
    result = run(run_config("grpo", "~environment", rows, "algorithm.num_steps=1", f"algorithm{off}"))
    assert "train/reward" in result.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "train", "validation", "told"),
    [
        ("grpo", "cost 3€?", "1?", "train sample 'train-1': the tokenizer has no token for ['€']"),
        ("grpo", "1?", "3€?", "validation sample 'test-1': the tokenizer has no token for ['€']"),
        ("sft", "1?", "1+1?", "train sample 'train-1': the tokenizer has no token for ['#']"),  # of the completion
    ],
)
def test_a_character_that_the_tokenizer_lacks_is_found_before_the_first_step(
    run_config, tmp_path, algorithm, train, validation, told
):
    assert refused(run_config(algorithm, *gsm8k(tmp_path, train, validation))).startswith(told)


@pytest.mark.slow
def test_a_rollout_that_may_outgrow_a_microbatch_of_scoring(run_config, tmp_path):
    rows = [
        "policy.train_global_batch_size=32",
        "policy.batching={tokens: 64, logprob_tokens: 30}",
        "generation.max_new_tokens=7",
    ]
    assert run(run_config("grpo", *addition(20), *rows, *ONE_STEP)).metrics["step"] == 1  # it is not scored
    again = ["algorithm.loss.kl_coef=0.1", f"output_dir={tmp_path}/again"]
    message = refused(run_config("grpo", *addition(20), *rows, *again), ConfigError)
    assert "policy.batching.logprob_tokens=30" in message
    assert "at least 31" in message


NO_ROOM = ("has a prompt of 128 tokens, which leaves no room for an answer", "takes 128 tokens in total", "model_name")
LONG_ANSWER = ("has a prompt of 127 tokens; with an answer the row may have up to 128", "tokens=127", "at least 128")
LONG_ROW = ("has 129 tokens with its completion", "takes 128 tokens in total")  # a prompt of 126, a sum of 2, the end
SMALL_BATCH = ("has 65 tokens with its completion", "policy.batching.tokens=64", "at least 65")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "letters", "options", "kind", "words"),
    [
        ("grpo", POSITIONS - 4, [], DataError, NO_ROOM),
        ("sft", POSITIONS - 4, [], DataError, NO_ROOM),
        (
            "grpo",
            POSITIONS - 5,
            ["policy.batching.tokens=127", "generation.max_new_tokens=50"],
            ConfigError,
            LONG_ANSWER,
        ),
        ("sft", POSITIONS - 6, ["policy.batching.tokens=null", *ONE_STEP], DataError, LONG_ROW),
        ("sft", 58, ["policy.batching.mode=auto"], ConfigError, SMALL_BATCH),
        ("sft", 58, ["policy.batching.mode=dynamic"], ConfigError, SMALL_BATCH),
        ("sft", 58, ["policy.batching.mode=packed"], ConfigError, SMALL_BATCH),
    ],
)
def test_a_row_that_is_too_long_is_refused(run_config, algorithm, letters, options, kind, words):
    message = refused(run_config(algorithm, *addition(letters), *options), kind)
    for word in words:
        assert word in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("letters", "batching"),
    [
        (58, "{mode: padded, tokens: 64}"),
        (58, "{mode: packed}"),
        (58, "{mode: packed, tokens: 65}"),
        (POSITIONS - 7, "{tokens: null}"),  # exactly the length that the model takes
    ],
)
def test_a_row_that_fits_is_trained_on(run_config, tmp_path, letters, batching):
    (tmp_path / "run").mkdir()  # an empty output_dir may exist
    options = [*addition(letters), "~policy.batching", f"policy.batching={batching}", *ONE_STEP]
    assert run(run_config("sft", *options)).metrics["step"] == 1


def test_of_a_very_large_set_the_longest_texts_are_rendered(monkeypatch):
    samples = [
        Sample(str(n), ({"role": "user", "content": "a" * n},), "", completion="b" * (40 - 4 * n)) for n in range(8)
    ]
    monkeypatch.setattr(input_checks, "RENDERED", 8)
    assert input_checks.worth_rendering(samples) == samples
    monkeypatch.setattr(input_checks, "RENDERED", 7)
    monkeypatch.setattr(input_checks, "LONGEST", 2)
    assert [sample.id for sample in input_checks.worth_rendering(samples)] == ["0", "1"]  # 40 and 37 characters


@pytest.mark.slow
def test_prompts_that_have_an_answer_are_warned_of(run_config, tmp_path, caplog, monkeypatch):
    (tmp_path / "flat_reward.py").write_text("def score(completion): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    question, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    rows = [
        {"prompt": prompt} for prompt in ([question], [question, answer], [{**question, "content": "1+2="}, answer])
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "2+2="}))
    environment = f"environment={{name: dataset, path: {path}, validation_path: {other}, reward: 'flat_reward:score'}}"
    dry_run(run_config("grpo", "~environment", environment, *ONE_STEP))
    assert "2 of 3 checked train prompts end with an assistant turn, 'rows-2' first; the model does not" in caplog.text
    episode = Sample("s", (question, answer), "2")
    input_checks._warn_of_answered([episode], None)
    assert "1 of 1 checked train prompts end with an assistant turn, 's' first; the model writes another" in caplog.text


def test_limits_of_episodes_for_single_turns_are_warned_of(run_config, caplog):
    dry_run(run_config("grpo", "environment.max_turns=3"))
    assert (
        caplog.text.count("environment.max_turns=3 has no effect: answers to the samples of environment 'digits'") == 1
    )


def test_positions_of_a_model(tmp_path, tiny_llama):
    from transformers import GPT2Config, MambaConfig

    assert model_positions(str(tiny_llama)) == POSITIONS
    GPT2Config(n_positions=77, n_embd=8, n_head=2, n_layer=1).save_pretrained(tmp_path / "gpt2")
    assert model_positions(str(tmp_path / "gpt2")) == 77
    MambaConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path / "mamba")
    assert model_positions(str(tmp_path / "mamba")) is None
    with pytest.raises(DataError, match=r"no model configuration can be read from policy\.model_name=.*nothing"):
        model_positions(str(tmp_path / "nothing"))


def test_a_gpu_that_is_not_there(run_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused(run_config("sft", "device=cuda"), ConfigError)
    assert message.startswith("device=cuda, but PyTorch finds no GPU on this machine")
    assert "device=cpu or device=auto" in message


@pytest.mark.parametrize(
    ("output_dir", "reason"),
    [
        ("/proc/nope/run", "cannot be created"),
        ("file/run", "a component of the path is a file, not a directory"),
        ("link/run", "cannot be created"),
        ("file", "a component of the path is a file, not a directory"),
        pytest.param(
            "locked/deep/run",
            "permission denied",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere"),
        ),
    ],
)
def test_an_output_directory_that_cannot_be_made_is_found_before_the_model_is(
    run_config, tmp_path, monkeypatch, output_dir, reason
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    before = sorted(tmp_path.rglob("*"))
    config = run_config("sft", f"output_dir={output_dir}", "policy.model_name=/no/such/model")
    with pytest.raises(ConfigError) as error:
        run(config)
    assert reason in str(error.value)
    assert output_dir.partition("/run")[0] in str(error.value)
    assert str(error.value).startswith("output_dir")
    assert sorted(tmp_path.rglob("*")) == before


def test_tools_are_refused_with_a_chat_template_whose_calls_are_not_read():
    template = published_templates.with_template("LiquidAI-LFM2-1.2B")
    parts = SimpleNamespace(
        tokenizer=template, config=None, images=None, environment=object.__new__(ToolDataEnvironment)
    )
    with pytest.raises(DataError, match="tools cannot be used with the chat template"):
        input_checks.InputCheck(parts)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["profiler={steps: [1, 4]}"], r"profiler.steps.*must be steps of the run, 1 to 3"),
        (["profiler={start: 4}"], r"profiler.start.*must be steps of the run"),
        (["profiler={start: 2, stop: 1}"], r"profiler.stop.*must not be before profiler.start=2"),
        (["profiler={stop: 2}"], r"profiler.stop.*must not be before profiler.start, which is not set"),
        (
            ["profiler={steps: [1], ranks: [1]}"],
            r"profiler.ranks.*must list at least one worker rank, each from 0 to 0",
        ),
        (["profiler={steps: [1], ranks: []}"], r"profiler.ranks.*must list at least one worker rank"),
        (["recording.steps=[2,4]"], r"recording.steps.*must be steps of the run, 1 to 3"),
        (["recording.steps=[0]"], r"recording\.steps"),
        (["checkpoints.asynchronous=true"], r"asynchronous.*must be false when checkpoints\.format is port"),
        (["checkpoints.format=sharded", "policy.lora={rank: 2}"], r"format.*must be portable with policy\.lora"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(run_config, overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_config("sft", *overrides)
