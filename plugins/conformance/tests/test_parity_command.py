"""`rlframework parity`: its subjects, its report, its exit code, and mistakes in its words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from rlframework.base.errors import ConfigError, PluginError
from rlframework.cli import main
from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import Measurement
from rlframework_conformance.parity.command import KEYS, parity
from rlframework_conformance.parity.compare import open_policy
from rlframework_conformance.parity.outcome import LOGPROBS, LOSS, MEAN, QUANTITIES, Candidate, Outcome
from rlframework_conformance.parity.outcome import TENSOR as TENSOR_QUANTITY
from rlframework_conformance.parity.parity_report import print_outcomes, table
from rlframework_conformance.parity.scenario import random_scenario

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_terminal")]

TENSOR = "model.layers.1.mlp.up_proj.weight"


def test_a_backend_that_breaks_is_told_and_the_others_go_on(model, manager, capsys):
    assert parity(["dies:data=1", "dtensor:data=1"], steps=1, rows=2, precisions=["float32"], manager=manager) == 1
    out = capsys.readouterr().out
    assert "failed: RuntimeError: no engine in here" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("dtensor ")] == ["agrees", "agrees"]


@pytest.mark.thorough
def test_all_that_is_installed_with_one_worker_and_two(tmp_path):
    assert parity(steps=2, rows=4, precisions=["float32"], json_file=str(tmp_path / "parity.json")) == 0
    found = json.loads((tmp_path / "parity.json").read_text())
    assert found["settings"] == {"model": None, "steps": 2, "rows": 4, "lr": 1e-4}
    assert found["machine"]["torch"] == torch.__version__
    rows = {(row["backend"], row["layout"], row["loss"]): row for row in found["outcomes"]}
    installed = {name for name, _, _ in rows}
    for backend in {"dtensor"} | ({"deepspeed", "megatron"} & installed):
        for layout, loss in product(("data=1", "data=2"), ("nll", "pg")):
            row = rows[backend, layout, loss]
            assert row["verdict"] == "agrees"
            assert row["measurements"]["weights"]["error"] <= 1e-5
            assert row["measurements"][LOGPROBS]["tolerance"] == 1e-5


def test_each_way_to_make_microbatches_is_compared_with_and_without_checkpointing(capsys):
    modes = ["packed", "padded"]
    word = "dtensor:data=1"
    assert parity([word], steps=1, rows=4, precisions=["float32"], modes=modes, checkpointing=True) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dtensor")]
    ways = ("packed", "padded", "packed checkpointed", "padded checkpointed")
    assert [re.split(r"\s{2,}", line)[3] for line in lines] == [
        f"{loss} {way}" for way in ways for loss in ("nll", "pg")
    ]
    assert all("agrees" in line for line in lines)


def test_bfloat16_is_held_to_the_mean_of_its_log_probabilities(capsys):
    assert parity(["dtensor:data=1"], steps=1, rows=4, precisions=["bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["agrees", "agrees"]
    assert lines[2].count("(") == 5  # all but the mean
    assert lines[4].startswith("(in brackets): not checked")


@pytest.mark.parametrize("width", [100, 120])
def test_the_report_fits_the_width_of_the_terminal(width, monkeypatch, capsys):
    """With the longest names: keys of a section, a batching mode with checkpointing, the run itself, a long reason."""
    monkeypatch.setenv("COLUMNS", str(width))
    measured = {name: Measurement(name, 8.4e-7, 1e-5, 1.0, 1.0) for name in QUANTITIES}
    beyond = {**measured, TENSOR_QUANTITY: Measurement(TENSOR, 4e-4, 2e-4, 1.0, 1.0)}
    keys = ("zero_optimization.stage=3", "sequence_exchange=ulysses")
    long = Candidate("deepspeed", Layout(data=2, tensor=2), "bfloat16", keys=keys)
    outcomes = [
        Outcome(Candidate("deepspeed"), "nll", measured),
        Outcome(long, "pg packed checkpointed", measured),
        Outcome(Candidate("dtensor", Layout(data=2)), "nll", beyond, is_run=True),
        Outcome(Candidate("megatron"), "nll", reason="cannot be built " * 12, built=False),
    ]
    print_outcomes(outcomes, "compared with the oracle: " + "a model with a long name " * 6)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    heading = next(number for number, line in enumerate(lines) if line.startswith("backend"))
    assert lines[heading + 1].split() == ["deepspeed", "data=1", "float32", "nll", *["8.4e-7"] * 6, "agrees"]
    text = " ".join(" ".join(lines).split())
    assert f"the run, dtensor:data=2 float32, nll: the worst tensor is {TENSOR} (error 0.0004, allowed 0.0002)" in text
    assert "megatron:data=1 float32: not available: cannot be built cannot be built" in text


def test_names_that_do_not_fit_are_wrapped_completely():
    """No character of a wrapped name is lost, and the figures are on the row's first line."""
    names = ("deepspeed", "data=2,tensor=2/zero_optimization.stage=3/a=b", "bfloat16", "pg packed checkpointed")
    lines = list(table([(*names, *["(8.4e-7)"] * 6, "agrees")], 100))
    assert lines[1].endswith("agrees")
    assert len(lines) > 2
    starts = [lines[0].index(heading) for heading in ("backend", "layout", "precision", "case")]
    ends = [*starts[1:], lines[1].index("(")]
    for name, start, end in zip(names, starts, ends, strict=True):
        assert "".join(line[start:end].replace(" ", "") for line in lines[1:]) == name.replace(" ", "")


def test_only_fp32_decides():
    far = Measurement(MEAN, 0.5, 0.03, 0.5, 0.0)
    wrong = {LOGPROBS: Measurement(LOGPROBS, 0.5, 1e-5, 1.0, 2.0), MEAN: far}
    assert Outcome(Candidate("x", precision="bfloat16"), "nll", wrong).beyond == [MEAN]
    assert not Outcome(Candidate("x", precision="bfloat16"), "nll", wrong).fails
    assert Outcome(Candidate("x"), "nll", wrong).fails
    assert Outcome(Candidate("x"), "nll", {LOSS: Measurement(LOSS, math.inf, 1e-5, math.nan, 2.0)}).fails


@pytest.mark.parametrize(
    ("words", "options", "error", "message"),
    [
        (["dtensr"], {}, PluginError, "Did you mean 'dtensor'"),
        (["dtensor:rows=2"], {}, ConfigError, "is not a layout"),
        (["dtensor:"], {}, ConfigError, "has no layout after the colon"),
        (["dtensor/attentoin=eager"], {}, ConfigError, "Did you mean `dtensor.attention`"),
        (["dtensor/attention=4"], {}, ConfigError, "`dtensor.attention`: must be 'auto', 'sdpa', 'eager'"),
        (["dtensor:data=1/compile=false/compile.x=1"], {}, ConfigError, "'compile' has a value already"),
        (["dtensor"], {"precisions": ["float64"]}, ConfigError, "one of float32, bfloat16, float16"),
        (
            ["dtensor"],
            {"modes": ["folded"]},
            ConfigError,
            "--batching is 'folded'; it must be one of padded, dynamic, ",
        ),
        (["dtensor"], {"device": "tpu"}, ConfigError, "cpu or cuda"),
        (["dtensor"], {"steps": 0}, ConfigError, "--steps is 0"),
    ],
)
def test_wrong_input_is_one_error(words, options, error, message, capsys):
    with pytest.raises(error, match=message):
        parity(words, **options)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("word", "reason"),
    [("dtensor:data=3", "must be a multiple of 3"), ("tomorrow:data=1", "comes with a later release")],
)
def test_what_is_named_and_cannot_be_made_is_told_and_the_others_go_on(word, reason, manager, capsys):
    precisions = ["float32", "bfloat16"]
    assert parity([word, "dtensor:data=1"], steps=1, rows=4, precisions=precisions, manager=manager) == 1
    lines = capsys.readouterr().out.splitlines()
    (note,) = [line for line in lines if reason in line]  # once, and not for each loss and precision
    assert note.startswith(f"{word} float32: rejected: ")
    assert [line.split()[-1] for line in lines if line.startswith("dtensor ")][-4:] == ["agrees"] * 4


def test_where_nothing_was_compared_it_says_so_and_fails(manager, monkeypatch, capsys):
    only = {"tomorrow": manager.registered("policy_worker")["tomorrow"]}
    monkeypatch.setattr(type(manager), "registered", lambda self, kind: only)
    assert parity([], steps=1, rows=2, manager=manager) == 1
    out = capsys.readouterr().out
    assert "tomorrow:data=1 float32: not available: " in out
    assert out.splitlines()[-1] == "nothing was compared: no backend produced any figures"


def test_a_subject_is_told_by_backend_layout_keys_and_precision():
    assert str(Candidate("x", Layout(data=2, tensor=2), "bfloat16")) == "x:data=2,tensor=2 bfloat16"
    assert str(Candidate("x", Layout(), keys=("a.b=1", "c=/d"))) == "x:data=1/a.b=1/c=/d float32"


def test_keys_of_a_backend_s_own_section_make_another_subject(tmp_path, capsys):
    words = ["dtensor:data=1", "dtensor:data=1/attention=eager", "dtensor:data=1/attention=eager"]
    written = tmp_path / "parity.json"
    assert parity(words, steps=1, rows=2, precisions=["float32"], json_file=str(written)) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if line.startswith("dtensor")]
    hows = ["data=1", "data=1/attention=eager"]
    assert rows == [["dtensor", how, "float32", loss] for how in hows for loss in ("nll", "pg")]
    outcomes = json.loads(written.read_text())["outcomes"]
    assert [(outcome["layout"], outcome["section"]) for outcome in outcomes[1:3]] == [
        ("data=1", {}),
        ("data=1", {"attention": "eager"}),
    ]


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("x", []),
        ("x:data=2/a.b=1", ["a.b=1"]),
        ("x/a=/disk/b/c.d=/disk", ["a=/disk/b", "c.d=/disk"]),
    ],
)
def test_keys_are_told_from_slashes_in_values(word, keys):
    assert KEYS.split(word)[1:] == keys


def test_keys_of_the_subject_go_over_those_of_the_exam(model, manager):
    scenario = replace(
        random_scenario("nll", model, steps=1, rows=2), sections={"dtensor": {"compile": False, "replicate": 1}}
    )
    with open_policy(scenario, Candidate("dtensor", keys=("attention=eager",)), manager) as policy:
        assert policy.config.policy.dtensor.attention == "eager"
        assert policy.config.policy.dtensor.model_fields_set == {"attention", "compile", "replicate"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "3"], "--replay RUN_DIR and --step N must be given together"),
        (["--replay", "run"], "--replay RUN_DIR and --step N must be given together"),
        (
            ["--replay", "run", "--step", "3", "--rows", "4", "--model", "m"],
            "--model, --rows cannot be combined with --replay",
        ),
        (["--replay", "no_such_run", "--step", "3"], "no_such_run is not the folder of a run"),
        (["dtensor:pipelines=2"], "'pipelines=2' is not a layout"),
    ],
)
def test_the_command_tells_mistakes_and_ends_with_2(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["parity", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_compares(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["parity", "dtensor:data=1", "--steps", "1", "--rows", "3", "--precision", "float32"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compared with the oracle: a tiny model, 1 step of 3 rows, cpu"
    assert [line.split()[:4] for line in lines[2:4]] == [
        ["dtensor", "data=1", "float32", loss] for loss in ("nll", "pg")
    ]
