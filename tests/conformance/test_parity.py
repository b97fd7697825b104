"""Parity: a correct backend agrees with the oracle, a broken one is reported with the place where it diverges."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from causal_kinds import KINDS, tiny_model

from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.cli import main
from rlframework.conformance import cases
from rlframework.conformance.layouts import Layout
from rlframework.conformance.measure import Measurement
from rlframework.conformance.parity import scenario as scenarios
from rlframework.conformance.parity.command import KEYS, parity
from rlframework.conformance.parity.compare import compare_with_oracle, farthest, loss_measured, open_policy
from rlframework.conformance.parity.outcome import (
    LOADED,
    LOGPROBS,
    LOSS,
    MEAN,
    NORM,
    QUANTITIES,
    UPDATE,
    WEIGHTS,
    Candidate,
    Outcome,
)
from rlframework.conformance.parity.outcome import TENSOR as TENSOR_QUANTITY
from rlframework.conformance.parity.report import notes, print_outcomes, table
from rlframework.conformance.parity.scenario import Scenario, oracle_step_with, random_scenario
from rlframework.conformance.parity.update import Start, is_informative
from rlframework.errors import ConfigError, PluginError
from rlframework.plugins.manager import create_manager

pytestmark = pytest.mark.slow

TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Most tests read whole lines of the output."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.model("untied", tmp_path_factory.mktemp("models"))


@pytest.fixture
def manager():
    return create_manager(["probe_parity_backends"])


def outcome_of(backend: str, scenario: Scenario, manager, folder: Path) -> Outcome:
    return compare_with_oracle(scenario, Candidate(backend), manager=manager, folder=folder, named=True)


@pytest.mark.parametrize("kind", ["nll", "pg"])
def test_a_sound_backend_agrees(kind, model, manager, tmp_path):
    outcome = outcome_of("dtensor", random_scenario(kind, model, steps=3, rows=5), manager, tmp_path)
    assert outcome.verdict == "agrees"
    assert outcome.divergence is None
    assert set(outcome.measurements) == set(outcome.checked)


def test_the_tensor_whose_update_is_wrong_is_named_with_its_step(model, manager, tmp_path):
    outcome = outcome_of("small_update", random_scenario("nll", model, steps=3, rows=8), manager, tmp_path)
    assert outcome.fails
    assert "weights" in outcome.beyond
    divergence = outcome.divergence
    assert (divergence.quantity, divergence.step) == (WEIGHTS, 2)
    assert (divergence.tensor, divergence.tensor_step, divergence.tensors, divergence.of) == (TENSOR, 2, 1, 21)
    # half of the second of two steps of similar size is missing
    assert divergence.tensor_error == pytest.approx(0.25, abs=0.05)
    worst, note = notes([outcome])
    assert worst.startswith(f"small_update:data=1 float32, nll: the worst tensor is {TENSOR} (error ")
    assert note.startswith("small_update:data=1 float32, nll: first divergence: weights, " + TENSOR + " in step 2")


RATES = (1e-6, 1e-4, 1e-2)


def at_rate(model: Path, lr: float, steps: int = 20, kind: str = "nll") -> Scenario:
    return replace(random_scenario(kind, model, steps=steps, rows=8), lr=lr)


@pytest.mark.parametrize("kind", ["nll", "pg"])
@pytest.mark.parametrize("lr", RATES)
def test_a_sound_backend_agrees_at_any_learning_rate(kind, lr, model, manager, tmp_path):
    outcome = outcome_of("dtensor", at_rate(model, lr, kind=kind), manager, tmp_path)
    assert outcome.verdict == "agrees"
    update = outcome.measurements[UPDATE]
    assert update.error < 2e-4  # far below 5e-3, the tolerance for engines that compute differently


@pytest.mark.parametrize("name", ["tied", "learned_positions"])
def test_a_sound_backend_agrees_where_gradients_are_rounding(name, manager, tmp_path):
    """The bias of attention keys has only rounding as gradient, yet AdamW moves it by the learning rate."""
    outcome = outcome_of("dtensor", at_rate(cases.model(name, tmp_path), 1e-4, 2), manager, tmp_path)
    assert outcome.measurements[UPDATE].error < 2e-4


@pytest.mark.parametrize(
    ("mutant", "lr", "error"),
    [
        ("update_sign", 1e-6, 2.0),
        ("update_sign", 1e-2, 2.0),
        ("update_too_small", 1e-5, 0.02),
        ("update_too_small", 1e-2, 0.02),
    ],
)
def test_a_wrong_update_is_told_at_any_learning_rate(mutant, lr, error, model, manager, tmp_path):
    candidate = Candidate("dtensor", mutant=mutant)
    outcome = compare_with_oracle(at_rate(model, lr, 1), candidate, manager=manager, folder=tmp_path, named=True)
    assert outcome.fails
    assert UPDATE in outcome.beyond
    assert outcome.measurements[UPDATE].error == pytest.approx(error, rel=0.2)
    assert (outcome.divergence.quantity, outcome.divergence.step) == (WEIGHTS, 1)
    assert outcome.divergence.tensor_error == pytest.approx(error, rel=0.2)


def test_an_update_that_rounding_hides_is_said_not_to_be_known(model, manager, tmp_path):
    outcome = outcome_of("dtensor", at_rate(model, 1e-9, 1), manager, tmp_path)
    assert UPDATE not in outcome.measurements
    (note,) = list(notes([outcome]))
    assert note.endswith("so the update could not be checked")


def started(gradient: list[float], weights: list[float]) -> Start:
    return Start.of({"w": torch.tensor(weights)}, {"w": torch.tensor(gradient)})


def test_elements_whose_gradient_is_rounding_are_not_compared():
    start = started([1.0, 1e-4, -1.0, 0.0], [0.0] * 4)
    (found,) = start.tensors({"w": torch.tensor([0.9, 5.0, 1.0, 5.0])}, {"w": torch.tensor([1.0, -1.0, 1.0, 0.0])}, 1)
    assert found.error == pytest.approx(0.1 / math.sqrt(2), rel=1e-5)
    assert not found.holds


def test_a_tensor_whose_whole_gradient_is_rounding_is_not_compared():
    weights = {"w": torch.zeros(2), "bias": torch.zeros(2)}
    start = Start.of(weights, {"w": torch.ones(2), "bias": torch.tensor([1e-8, -2e-8])})
    assert [found.quantity for found in start.tensors(weights, weights, 1)] == ["w"]


@pytest.mark.parametrize("gradients", [{}, {"w": torch.zeros(2)}])
def test_where_nothing_should_move_whatever_moves_is_told(gradients):
    start = Start.of({"w": torch.tensor([1.0, 2.0])}, gradients)
    assert start.whole(start.weights, start.weights, 1).holds
    moved = start.whole({"w": torch.tensor([1.0, 2.00001])}, start.weights, 1)
    assert not moved.holds
    assert is_informative(moved)


def test_rounding_of_the_weights_is_allowed_beside_the_limit():
    """One unit in the last place of a weight of 1 is 12% of a step of 1e-6."""
    start, step = started([1.0], [1.0]), 1e-6
    right, next_to_it = torch.tensor([1.0]) + step, torch.tensor([1.0]) + step + 2**-23
    (found,) = start.tensors({"w": next_to_it}, {"w": right}, 1)
    assert found.error > 0.1
    assert found.holds
    assert not start.tensors({"w": torch.tensor([1.0]) - step}, {"w": right}, 1)[0].holds


def test_a_tensor_that_was_loaded_wrongly_is_named_before_the_first_step(model, manager, tmp_path):
    divergence = outcome_of("misloaded", random_scenario("nll", model, steps=1, rows=8), manager, tmp_path).divergence
    assert (divergence.quantity, divergence.step, divergence.tensor, divergence.tensors) == (LOADED, 0, TENSOR, 1)
    assert "(error of the loaded weight" in str(divergence)


def test_a_norm_that_clipping_hides_from_the_weights_is_told(model, manager, tmp_path):
    outcome = outcome_of("double_gradient", random_scenario("nll", model, steps=2, rows=8), manager, tmp_path)
    assert outcome.beyond == [NORM]
    divergence = outcome.divergence
    assert (divergence.quantity, divergence.step, divergence.tensor) == (NORM, 1, "")
    assert divergence.measurement.got == pytest.approx(2 * divergence.measurement.expected, rel=1e-5)


def test_a_backend_that_breaks_is_told_and_the_others_go_on(model, manager, capsys):
    assert parity(["dies:data=1", "dtensor:data=1"], steps=1, rows=2, precisions=["float32"], manager=manager) == 1
    out = capsys.readouterr().out
    assert "failed: RuntimeError: no engine in here" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("dtensor ")] == ["agrees", "agrees"]


def test_a_mixture_whose_experts_are_stored_together_is_compared(manager, tmp_path):
    tiny_model(KINDS["gpt_oss"]).save_pretrained(tmp_path / "model")
    cases.tokenizer().save_pretrained(tmp_path / "model")
    outcome = outcome_of("dtensor", random_scenario("nll", tmp_path / "model", steps=1, rows=4), manager, tmp_path)
    assert (outcome.verdict, outcome.reason) == ("agrees", "")


def test_a_backend_that_can_be_made_must_work(model, manager, tmp_path):
    """An error after the backend was built is a failure, also for backends that were not named."""
    scenario = random_scenario("nll", model, steps=1, rows=2)
    outcome = compare_with_oracle(scenario, Candidate("refuses"), manager=manager, folder=tmp_path, named=False)
    assert (outcome.verdict, outcome.reason, outcome.fails) == ("failed", "I like none of it", True)


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


def test_losses_near_nothing_are_compared_to_the_floor(model):
    scenario = Scenario("x", model, [], NLLLoss(), oracle_step_with(NLLLoss()), floor=1.0)
    assert loss_measured(scenario, 1, 3e-6, 1e-6).error == pytest.approx(2e-6)
    assert loss_measured(scenario, 1, 4.4, 4.0).error == pytest.approx(0.1)
    assert loss_measured(scenario, 1, math.nan, 1.0).error == math.inf
    assert [loss_measured(scenario, step, 1.0, 1.0).tolerance for step in (1, 2)] == [1e-5, 1e-4]


def test_of_several_steps_one_that_is_beyond_its_tolerance_is_told():
    first, later = Measurement(LOSS, 5e-5, 1e-5, 1.0, 1.0, "step 1"), Measurement(LOSS, 9e-5, 1e-4, 1.0, 1.0, "step 2")
    assert farthest([first, later]) is first
    assert farthest([replace(first, error=5e-6), later]) is later


def test_the_oracle_takes_the_step_of_a_loss_function_in_parts(model, monkeypatch):
    """A loss function applied to some rows at a time must give what the oracle's own formula gives on all rows."""
    batch = cases.batch(8)
    whole, parts = (scenarios.new_oracle(model, 1e-4, 1.0, 1.0, {}) for _ in range(2))
    monkeypatch.setattr(scenarios, "ELEMENTS", 3 * cases.WIDTH * parts.model.config.vocab_size)  # three rows at a time
    expected = whole.step(batch, "nll")
    assert oracle_step_with(NLLLoss())(parts, batch) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-6)
    for name, weight in whole.weights().items():
        torch.testing.assert_close(parts.weights()[name], weight, rtol=1e-6, atol=1e-7)
    assert torch.allclose(scenarios.scores(parts, batch), parts.logprobs(batch), atol=1e-6)


def test_a_batch_without_valid_tokens_is_no_step(model):
    oracle = scenarios.new_oracle(model, 1e-4, 1.0, 1.0, {})
    before = oracle.weights()
    batch = BatchedDataDict({**cases.batch(4), "sample_mask": torch.zeros(4)})
    assert oracle_step_with(NLLLoss())(oracle, batch) == (0.0, 0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in oracle.weights().items())


def test_a_batch_without_valid_tokens_moves_nothing_on_either_side(model, manager, tmp_path):
    """The gradient that selects the compared elements is then that of the next batch."""
    empty = BatchedDataDict({**cases.batch(8), "sample_mask": torch.zeros(8)})
    scenario = Scenario("x", model, [empty, cases.batch(8)], NLLLoss(), oracle_step_with(NLLLoss()), floor=1.0)
    assert not scenario.answers.start.compared["model.embed_tokens.weight"].all()
    assert outcome_of("dtensor", scenario, manager, tmp_path).verdict == "agrees"
    nothing = Scenario("x", model, [empty], NLLLoss(), oracle_step_with(NLLLoss()), floor=1.0)
    assert outcome_of("dtensor", nothing, manager, tmp_path).verdict == "agrees"


def test_more_steps_and_a_larger_rate_leave_more_room(model):
    scenario = random_scenario("nll", model, steps=1, rows=2)
    assert scenario.slack == 1.0
    batches = list(scenario.batches) * 40
    assert Scenario("x", model, batches, scenario.loss, scenario.oracle_step, lr=3e-4).slack == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("words", "options", "error", "message"),
    [
        (["dtensr"], {}, PluginError, "Did you mean 'dtensor'"),
        (["dtensor:rows=2"], {}, ConfigError, "is no layout"),
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
        (["dtensor:pipelines=2"], "'pipelines=2' is no layout"),
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
