"""Estimates before a run against sums by hand, their warnings, and that a dry run writes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from probe_runs import call

from rlframework import load_config, run
from rlframework.config.policy import LoraConfig
from rlframework.configure import config_yaml
from rlframework.errors import ConfigError, DataError, NotSupported
from rlframework.observers.host import Gpu
from rlframework.plugins.manager import create_manager
from rlframework.runner.estimate import (
    MemoryUse,
    ModelSize,
    Rows,
    disk,
    estimate,
    gib,
    microbatch_tokens,
    model_size,
    peak,
    print_estimate,
    rows_of,
    worker_memory,
)  # fmt: skip
from rlframework.runner.launch import dry_run
from rlframework.runner.parts import Placeholder, planned_parts

GIB = 1 << 30
SIZE = ModelSize(
    parameters=1000, trained=1000, largest_block=300, layers=2, hidden=4, intermediate=8, key_value=2, vocabulary=10
)
ROWS = Rows(count=32, mean=10.0, longest=20, generated=96)


def bytes_of(parts: list[MemoryUse]) -> dict[str, int]:
    return {part.name: part.bytes for part in parts}


def test_parameters_are_counted_without_loading(tiny_llama: Path, run_config):
    before = torch.get_rng_state()
    size = model_size(run_config("sft").policy)
    vocabulary = size.vocabulary
    # 2 layers of 32: query and output 32x32, key and value 32x16, three of 32x128, two norms; a norm; a tied head
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 128 + 2 * 32
    assert size.parameters == size.trained == vocabulary * 32 + 2 * layer + 32
    assert size.largest_block == layer
    assert (size.layers, size.hidden, size.intermediate, size.key_value) == (2, 32, 128, 16)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_adapters_are_trained_with_lora(run_config):
    lora = LoraConfig(rank=4, target_modules=("q_proj", "k_proj"))
    size = model_size(run_config("sft").policy.model_copy(update={"lora": lora}))
    assert size.trained == 2 * (4 * (32 + 32) + 4 * (32 + 16))


def test_the_parts_of_a_worker_s_memory(run_config):
    config = run_config("grpo", "policy.batching.tokens=64")
    found = bytes_of(worker_memory(config, SIZE, ROWS, "cpu", reference=True))
    # of one token and layer: norms 4*4*4 + 2*4*4, the rest (3*4 + 2*2 + 4*8) * 4
    token = 2 * (64 + 32 + 48 * 4)
    assert found == {
        "program": 400 << 20,
        "weights": 4000,
        "gradients": 4000,
        "optimizer": 8000,
        "reference": 4000,
        "copy of the weights": 4000,
        "activations": 64 * token,
        "logits": 3 * 4 * 64 * 10,
        "gradients of embedding and head": 4 * 10 * 4,
        "keys and values": (2 + 2) * 2 * 32 * 20 * 2 * 4,
        "sampling": 3 * 4 * 32 * 10,
    }


@pytest.mark.parametrize(
    ("algorithm", "options", "size", "expected"),
    [
        (  # adapters alone have gradients and moments, and the base is no second copy
            "grpo",
            {"policy": {"lora": LoraConfig(rank=4, target_modules=("q_proj",))}},
            {"trained": 50},
            {"weights": 4000, "gradients": 200, "optimizer": 400, "reference": None, "copy of the weights": None,
             "gradients of embedding and head": None},
        ),
        (  # workers share states and 32 rows, and generate with a copy
            "grpo",
            {"worker_group": {"num_workers": 4}},
            {},
            {"weights": 1000, "gradients": 1000, "optimizer": 2000, "gathered weights": 2 * 4 * 300,
             "generation model": 4000, "keys and values": (2 + 2) * 2 * 8 * 20 * 2 * 4},
        ),
        # activation checkpointing keeps one layer and the inputs of all
        ("sft", {"policy": {"activation_checkpointing": True}}, {}, {"activations": 64 * (2 * 4 * 4 + 288)}),
        (  # logits are held in chunks: 64 x 200,000 x 4 bytes are 49 MiB
            "sft",
            {},
            {"vocabulary": 200_000},
            {"logits": 3 * (32 << 20), "gradients of embedding and head": 2 * 4 * 200_000 * 4},
        ),
    ],
)  # fmt: skip
def test_memory_by_settings(run_config, algorithm, options, size, expected):
    config = run_config(algorithm, "policy.batching.tokens=64")
    for section, values in options.items():
        changed = getattr(config, section).model_copy(update=values)
        config = config.model_copy(update={section: changed})
    found = bytes_of(worker_memory(config, replace(SIZE, **size), ROWS, "cpu", reference="lora" in str(options)))
    assert {name: found.get(name) for name in expected} == expected


def test_on_a_gpu_the_reference_and_what_is_offloaded_lie_in_host_memory(run_config):
    config = run_config("grpo")
    policy = config.policy.model_copy(update={"offload": type(config.policy.offload)(optimizer=True)})
    parts = worker_memory(config.model_copy(update={"policy": policy}), SIZE, ROWS, "cuda", reference=True)
    on_host = {part.name for part in parts if part.place == "host"}
    assert on_host == {"program", "optimizer", "reference", "copy of the weights"}


def test_the_peak_is_what_is_always_there_and_the_largest_phase():
    parts = [
        MemoryUse("a", 100, "host"),
        MemoryUse("b", 10, "host", "training"),
        MemoryUse("c", 5, "host", "training"),
        MemoryUse("d", 12, "host", "generating"),
        MemoryUse("e", 1000, "device"),
    ]
    assert peak(parts, "host") == 115
    assert peak(parts, "device") == 1000
    assert peak([], "device") == 0


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["policy.batching.tokens=64"], 64),
        (["policy.batching.tokens=null"], 16 * 10 + 20),  # all there is
        (["policy.batching.mode=padded", "policy.train_micro_batch_size=4"], 4 * 20),
        (["policy.batching.mode=padded", "policy.train_micro_batch_size=64"], 16 * 20),
    ],
)
def test_the_largest_microbatch(run_config, overrides, tokens):
    assert microbatch_tokens(run_config("sft", *overrides), Rows(16, 10.0, 20), "cpu") == tokens


def test_disk(run_config):
    config = run_config("sft", "algorithm.num_steps=100")
    assert disk(config, 1000, 1000) == {"trained model": 4000}
    config = load_config(config, ["checkpoints={every: 10, keep_last: 2, keep_best: 1}"])
    assert disk(config, 1000, 1000)["4 checkpoints"] == 4 * 12_000  # three that are kept, one that is written
    assert disk(config, 1000, 50)["4 checkpoints"] == 4 * 12 * 50
    config = load_config(config, ["algorithm.num_steps=20", "recording={steps: [1, 10], every: 5}"])
    found = disk(config, 1000, 1000)
    assert found["2 checkpoints"] == 24_000
    assert found["5 recorded steps"] == 20_000  # 1, 5, 10, 15, 20


def test_tokens_of_a_step(run_config):
    grpo, sft = run_config("grpo"), run_config("sft")
    with _planned(grpo) as parts:
        rows = rows_of(parts)
        assert rows.count == 32
        assert rows.generated == 32 * 3
        lengths = [len(parts.tokenizer(s.messages[-1]["content"])["input_ids"]) for s in
                   parts.environment.samples("train")]  # fmt: skip
        assert rows.longest == max(lengths) + 3
        assert rows.trained == round(32 * (sum(lengths) / len(lengths) + 3))
    with _planned(sft) as parts:
        rows = rows_of(parts)
        assert (rows.count, rows.generated) == (16, 0)
        assert rows.trained <= 16 * rows.longest


def _planned(config):
    return planned_parts(config, create_manager(config.plugins))


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"free_memory": 2 << 20, "free_disk": None}, ["GiB of memory"]),
        ({"free_memory": None, "free_disk": 100}, ["output_dir="]),
        ({"free_memory": None, "free_disk": None}, []),
        ({"free_memory": 64 * GIB, "free_disk": 64 * GIB, "gpus": [Gpu("x", GIB, GIB)]}, []),
    ],
)
def test_what_does_not_fit_is_warned_of(run_config, machine, words):
    with _planned(run_config("grpo")) as parts:
        warnings = replace(estimate(parts, False), **machine).warnings()
    assert len(warnings) == len(words)
    for warning, word in zip(warnings, words, strict=True):
        assert warning.startswith("warning: ")
        assert word in warning


def test_a_gpu_that_is_too_small_is_warned_of(run_config):
    config = run_config("sft")
    with _planned(config) as parts:
        found = replace(estimate(parts, False), free_memory=None, free_disk=None)
    parts_on_gpu = worker_memory(config, SIZE, ROWS, "cuda", reference=False)
    both = [Gpu("x", 8 * GIB, 8 * GIB), Gpu("y", 10, 10)]
    [warning] = replace(found, memory=parts_on_gpu, device="cuda", gpus=both).warnings()
    assert "GiB of its GPU" in warning


def test_a_run_says_it_before_its_first_step_and_warns(run_config, capsys, caplog, monkeypatch):
    monkeypatch.setattr("rlframework.runner.estimate.available_memory", lambda: 1)
    run(run_config("sft", "algorithm.num_steps=1", "observers.console=true"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("estimate: ")
    assert "weights" in lines[0]
    assert "trains on about" in lines[1]
    assert lines[2].startswith("sft: up to 1 steps")
    assert any(message.startswith("warning: the run may need ") for message in caplog.messages)


def test_a_model_that_cannot_be_sized_does_not_end_the_run(run_config, caplog, monkeypatch):
    def fail(*arguments):
        raise KeyError("hidden_size")

    monkeypatch.setattr("rlframework.runner.estimate.model_size", fail)
    with _planned(run_config("sft")) as parts:
        print_estimate(parts, False)
    assert caplog.messages == ["no estimate of memory and disk: KeyError: 'hidden_size'"]


# -- the dry run ------------------------------------------------------------------------------------------------------


def test_a_dry_run_checks_prints_and_writes_nothing(run_config, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    config = run_config("grpo", "algorithm.loss.kl_coef=0.1")
    file.write_text(config_yaml(config))
    assert call("train", file, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "RAM of a worker: reference" in out
    assert out.endswith("dry run complete: nothing was started or written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_dry_run_finds_the_errors_of_a_run(run_config, tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.batching\.tokens=5 is the most"):
        dry_run(run_config("grpo", "policy.batching.tokens=5"))
    with pytest.raises(DataError, match="there is no such directory"):
        dry_run(run_config("sft", "policy.model_name=./nowhere"))


@pytest.mark.parametrize(
    "args", [["--dry-run"], ["--dry-run", "--resume", "x"], ["c.yaml", "--dry-run", "--resume", "x"]]
)
def test_a_dry_run_does_not_resume(args, capsys):
    assert call("train", *args) == 2
    assert "--dry-run checks a run before it starts" in capsys.readouterr().err


def test_placeholders_say_that_no_worker_is_started():
    with pytest.raises(NotSupported, match="no worker is started yet, and 'train' needs one"):
        Placeholder().train()


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.00"), (GIB // 2, "0.50"), (GIB * 3 // 2, "1.5"), (GIB * 1500, "1,500")]
)
def test_sizes(size, text):
    assert gib(size) == text
