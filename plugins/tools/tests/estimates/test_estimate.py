"""The estimate of a run: its rows, disk and warnings, and that a dry run writes nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from probe_runs import call
from rich.console import Console

from rlframework import load_config, run
from rlframework.base.errors import ConfigError, DataError
from rlframework.config.yaml_text import to_yaml
from rlframework.observers.host import Gpu
from rlframework.plugins.configure import config_yaml, dump_config
from rlframework.plugins.manager import create_manager
from rlframework.runner.parts import planned_parts
from rlframework_tools.estimates.disk import disk, gib
from rlframework_tools.estimates.estimate import estimate, estimate_rows
from rlframework_tools.estimates.plan import PlannedGpus
from rlframework_tools.estimates.printing import estimate_run, print_brief
from rlframework_tools.estimates.row_sizes import Rows, microbatch_tokens, optimizer_steps, rows_of
from rlframework_tools.estimates.worker_memory import peak

GIB = 1 << 30


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
    config = load_config(config, ["algorithm.num_steps=21"])
    assert disk(config, 1000, 1000)["3 checkpoints"] == 36_000  # after steps 10, 20, and 21, the last


@pytest.mark.parametrize(
    ("overrides", "longest", "generated", "limit"),
    [
        ((), 3 + 4 * 3, 4 * 3, 128),
        (("environment.max_turns=100",), 128, 128 - 3, 128),
        (("generation.max_new_tokens=2000",), 128, 128 - 3, 128),
        (("environment.max_episode_tokens=40",), 40, 4 * 3, 40),  # the rest are observations
        (("environment.max_episode_tokens=10",), 10, 10 - 3, 10),
    ],
)
def test_an_episode_is_a_row_of_all_its_turns(run_config, overrides, longest, generated, limit):
    keys = "~environment", "environment={name: probe_games:TwoTurns, max_turns: 4}", *overrides
    with _planned(run_config("grpo", *keys)) as parts:
        rows = rows_of(parts)
    assert rows == Rows(32, longest, longest, 32 * generated, rows.turns, limit)
    assert rows.trained == 32 * limit
    printed = Console(file=StringIO(), width=160)
    printed.print(estimate_rows(parts.config, create_manager(()), rows, reference=False).table())
    told = re.search(
        r"tokens trained on per step, at most, if an episode is one row .* ([\d,]+) ", printed.file.getvalue()
    )
    assert told[1] == f"{32 * limit:,}"


def test_an_answer_ends_at_the_positions(run_config):
    with _planned(run_config("grpo", "generation.max_new_tokens=2000")) as parts:
        rows = rows_of(parts)
    assert rows.generated < 32 * 128 == rows.trained


@pytest.mark.parametrize(("size", "epochs", "steps"), [(32, 1, 1), (8, 2, 8)])
def test_the_optimizer_steps_of_a_step(run_config, size, epochs, steps):
    config = run_config("grpo", f"policy.train_global_batch_size={size}", f"algorithm.epochs_per_batch={epochs}")
    assert optimizer_steps(config) == steps


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
    config = run_config("grpo")
    with _planned(config) as parts:
        warnings = replace(estimate(parts, create_manager(config.plugins)), **machine).warnings()
    assert len(warnings) == len(words)
    for warning, word in zip(warnings, words, strict=True):
        assert warning.startswith("warning: ")
        assert word in warning


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["policy.batching.tokens=65536"], "Set policy.activation_checkpointing=full, or reduce the tokens"),
        (
            ["policy.batching.tokens=65536", "policy.activation_checkpointing=full"],
            "Reduce the tokens of a microbatch (policy.batching.tokens)",
        ),
    ],
)
def test_a_gpu_that_is_too_small_is_warned_of_with_what_saves_most(run_config, overrides, advice):
    config = run_config("sft", *overrides, "device=cuda", "policy.train_global_batch_size=512")
    rows = Rows(512, 128.0, 128)
    found = estimate_rows(
        config, create_manager(config.plugins), rows, reference=False, planned=PlannedGpus(1, "x", 600 << 20)
    )
    [warning] = found.warnings()
    assert "GiB of its GPU" in warning
    assert advice in warning


def test_a_backend_that_declares_no_layout_is_assumed_to_shard_everything_and_the_estimate_says_so(run_config):
    config = run_config("sft")
    found = estimate_rows(config, create_manager((), disabled=["dtensor"]), Rows(16, 8.0, 8), reference=False)
    [note] = found.notes
    assert "'dtensor' does not say what it keeps on a worker" in note
    assert f"estimate: {note}" in found.lines()
    assert {use.name: use.bytes for use in found.memory}["moments"] == 8 * found.parameters


@pytest.mark.slow
def test_a_run_says_it_before_its_first_step_and_warns(run_config, capsys, caplog, monkeypatch):
    monkeypatch.setattr("rlframework_tools.estimates.estimate.available_memory", lambda: 1)
    run(run_config("sft", "algorithm.num_steps=1", "observers.console=true"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("estimate: ")
    assert "weights" in lines[0]
    assert "trains on about" in lines[1]
    assert lines[2].startswith("sft: up to 1 step")
    assert any(message.startswith("warning: the run may need ") for message in caplog.messages)


def test_a_run_prints_of_memory_and_disk_what_is_not_little(run_config):
    config = run_config("sft")
    found = estimate_rows(config, create_manager(config.plugins), Rows(16, 8.0, 8), reference=False)
    memory, disk = found.host_bytes, sum(found.disk.values())
    for free, words in (
        ((11 * memory, 11 * disk), ["a step"]),
        ((10 * memory, 11 * disk), [f"{found.parameters:,} parameters", "a step"]),
        ((11 * memory, 10 * disk), ["disk in GiB"]),
        ((None, None), [f"{found.parameters:,} parameters", "disk in GiB"]),
    ):
        lines = replace(found, free_memory=free[0], free_disk=free[1]).lines(brief=True)
        assert [line.startswith(f"estimate: {word}") for line, word in zip(lines, words, strict=True)] == [True] * len(
            words
        )


def test_a_model_that_cannot_be_sized_does_not_end_the_run(run_config, caplog, monkeypatch):
    def fail(*arguments):
        raise KeyError("hidden_size")

    monkeypatch.setattr("rlframework_tools.estimates.estimate.model_size", fail)
    config = run_config("sft")
    with _planned(config) as parts:
        print_brief(parts)
    assert caplog.messages == ["no estimate of memory and disk: KeyError: 'hidden_size'"]


# -- the dry run ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
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
        estimate_run(run_config("grpo", "policy.batching.tokens=5"))
    with pytest.raises(DataError, match="there is no such directory"):
        estimate_run(run_config("sft", "policy.model_name=./nowhere"))


# -- planning for GPUs that are not here ------------------------------------------------------------------------------


@pytest.fixture
def planned(run_config, tmp_path, capsys):
    """`planned(on, *overrides, **worker_group)`: what the dry run of a GRPO file with this section prints for `on`."""

    def run(on, *overrides, **worker_group):
        values = dump_config(run_config("grpo", "policy.train_global_batch_size=32"))
        values["worker_group"] = worker_group
        (tmp_path / "config.yaml").write_text(to_yaml(values))
        code = call("train", tmp_path / "config.yaml", "--dry-run", "--on", on, *overrides)
        out = capsys.readouterr().out
        assert code == ("does not fit" in out)
        return out

    return run


@pytest.mark.slow
def test_a_run_on_eight_gpus_is_planned_on_a_machine_without_any(planned):
    out = planned("8xH100")
    assert "planned for 8 x H100 with device=cuda worker_group.num_workers=8 worker_group.name=processes" in out
    assert "fits on 8 x H100" in out
    assert "GPU of a worker: moments" in out


def test_a_shape_without_tokenizer_or_weights_is_planned(run_config, tiny_llama, tmp_path):
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(
        json.dumps(json.loads((tiny_llama / "config.json").read_text()) | {"hidden_size": 64})
    )
    config = run_config("sft", f"policy.model_name={shape}", "device=cuda", "policy.batching.tokens=128")
    found = estimate_run(config, planned=PlannedGpus.parse("1xH100"))
    assert found.rows == Rows(16, 128.0, 128)
    assert "no tokenizer was found" in found.notes[0]
    assert 0 < peak(found.memory, "device") < GIB
    assert "fits on 1 x H100" in found.verdict()
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        estimate_run(config.model_copy(update={"device": "cpu"}))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (2**10, "<0.001"),
        (5 * 2**20, "0.0049"),
        (GIB // 2, "0.5"),
        (GIB * 3 // 2, "1.5"),
        (GIB * 1500, "1,500"),
    ],
)
def test_sizes(size, text):
    assert gib(size) == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--dry-run", "--dry-run checks a run before it starts"),
        ("--dry-run --resume x", "--dry-run checks a run before it starts"),
        ("c.yaml --dry-run --resume x", "--dry-run checks a run before it starts"),
        ("config.yaml --on 8xH100", "give it together with --dry-run"),
    ],
)
def test_options_of_a_dry_run_that_do_not_fit(run_config, tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(config_yaml(run_config("sft")))
    assert call("train", *words.split()) == 2
    assert told in capsys.readouterr().err
