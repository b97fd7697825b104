"""Recorded steps: they do not change the run, and a replay gives the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlframework import run
from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.algorithms.recording import describe_loss
from rlframework.base.errors import DataError, NotSupported
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.interfaces.loss import LossInput, LossType
from rlframework.policy.client import Policy
from rlframework_conformance.parity.command import replay
from rlframework_conformance.parity.recorded_step import read_step
from rlframework_conformance.policies import read_weights

pytestmark = pytest.mark.slow

ONE_CANDIDATE = ["dtensor"]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """The tests read whole lines of reports."""
    monkeypatch.setenv("COLUMNS", "400")


def recorded(config, step: int = 2) -> Path:
    return config.output_dir / "recorded" / f"step-{step:06d}"


def report(path: Path) -> list[dict]:
    return json.loads(path.read_text())["outcomes"]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        pytest.param(
            "sft", ["policy.optimizer.lr=3e-4", "policy.scheduler={name: linear}"], marks=pytest.mark.thorough
        ),
        ("grpo", ["algorithm.loss.kl_coef=0.05", "generation.temperature=0.7", "algorithm.epochs_per_batch=2"]),
    ],
)
def test_a_recorded_step_is_computed_again_with_the_same_figures(run_config, tmp_path, capsys, algorithm, options):
    """Recording changes nothing: the same run without it ends with bit-equal weights."""
    config = run_config(algorithm, *options, "recording.steps=[2]")
    run(config)
    plain = run_config(algorithm, *options, f"output_dir={tmp_path}/plain")
    run(plain)
    ours, theirs = read_weights(config.output_dir / "model"), read_weights(plain.output_dir / "model")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    assert not (plain.output_dir / "recorded").exists()
    assert [path.name for path in (config.output_dir / "recorded").iterdir()] == ["step-000002"]

    assert replay(str(config.output_dir), 2, json_file=str(tmp_path / "replay.json")) == 0
    own, first = report(tmp_path / "replay.json")[:2]
    assert (own["is_run"], own["backend"], own["verdict"]) == (True, "dtensor", "agrees")
    assert (first["is_run"], first["backend"], first["verdict"]) == (False, "dtensor", "agrees")
    assert set(first["measurements"]) > set(own["measurements"])
    assert first["against_run"].keys() == own["measurements"].keys()
    assert all(found["error"] <= 1e-5 for found in first["against_run"].values())
    steps = 1 if algorithm == "sft" else 2
    assert f"in {steps} optimizer step{'s' * (steps > 1)}, with a fresh optimizer" in capsys.readouterr().out


def test_what_is_recorded_is_what_the_step_was_given(run_config):
    config = run_config("sft", "recording.every=2", "policy.scheduler={name: linear}")
    result = run(config)
    step = read_step(config.output_dir, 2)
    assert step.result["lr"] == pytest.approx(1e-3 * 2 / 3)  # of the second of three calls
    assert step.result["global_loss"] == [pytest.approx(result.history[2]["train/loss"])]
    assert step.data["input_ids"].shape == step.logprobs.shape
    assert step.data.size == 16
    assert isinstance(step.loss, NLLLoss)
    assert step.failure == ""
    assert not (config.output_dir / "recorded" / "step-000003").exists()
    start, end = read_weights(step.model), read_weights(config.output_dir / "model")
    assert all(not torch.equal(weight, end[name]) for name, weight in start.items() if weight.dim() > 1)


def test_a_step_that_fails_is_recorded_with_its_error(run_config, monkeypatch, capsys):
    train = Policy.train

    def failing(self, data, loss_fn, eval_mode=False, **sizes):
        if not eval_mode and (calls := calls_seen.append(1) or len(calls_seen)) == 2:
            raise RuntimeError(f"call {calls} went wrong")
        return train(self, data, loss_fn, eval_mode, **sizes)

    calls_seen: list[int] = []
    monkeypatch.setattr(Policy, "train", failing)
    config = run_config("sft", "recording.steps=[2]")
    with pytest.raises(RuntimeError, match="call 2 went wrong"):
        run(config)
    monkeypatch.setattr(Policy, "train", train)
    assert read_step(config.output_dir, 2).failure == "RuntimeError: call 2 went wrong"
    assert replay(str(config.output_dir), 2, ONE_CANDIDATE) == 0
    assert "the step failed in the run: RuntimeError: call 2 went wrong" in capsys.readouterr().out


@pytest.fixture
def one_step(run_config):
    """The configuration of a run that recorded its only step."""
    config = run_config(
        "sft",
        "algorithm.num_steps=1",
        "algorithm.validation={at_start: false, at_end: false, every: 0}",
        "recording.steps=[1]",
    )
    run(config)
    return config


def test_what_is_damaged_or_missing_is_one_error(one_step, tmp_path):
    run_dir, path = one_step.output_dir, recorded(one_step, 1)
    whole = {name: (path / name).read_bytes() for name in ("batch.safetensors", "step.json", "model/model.safetensors")}

    def damage(name: str, content: bytes | None, message: str) -> None:
        (path / name).unlink() if content is None else (path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            replay(str(run_dir), 1, ONE_CANDIDATE)
        (path / name).write_bytes(whole[name])

    batch = whole["batch.safetensors"]
    damage("batch.safetensors", batch[:-1], f"has {len(batch) - 1} bytes instead of {len(batch)}")
    damage("batch.safetensors", batch[:-1] + bytes([batch[-1] ^ 1]), "batch.safetensors has another checksum")
    damage("batch.safetensors", None, "batch.safetensors is missing")
    damage("model/model.safetensors", b"", "model/model.safetensors has 0 bytes")
    damage("step.json", whole["step.json"][:100], "is damaged .JSONDecodeError")
    damage("step.json", b"[]", "is damaged .TypeError")
    damage("step.json", b'{"format": 99}', "has format 99; this version of rlframework reads format 1")
    damage("step.json", None, "is damaged .FileNotFoundError")
    with pytest.raises(DataError, match=r"step 7 of the run in .* is not recorded; recorded steps: 1"):
        replay(str(run_dir), 7)
    with pytest.raises(DataError, match=r"is not the folder of a run: it contains no config.yaml"):
        replay(str(tmp_path), 1)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(DataError, match=r"no step is recorded; set recording.steps="):
        replay(str(tmp_path), 1)


def test_a_loss_of_somebody_elses_is_told_at_replay(one_step):
    path = recorded(one_step, 1) / "step.json"
    description = json.loads(path.read_text())
    description["loss"] = {"not_replayable": "mine:Loss has state besides its `config`"}
    description["not_recorded"] = {"pixels": "a PackedTensor"}
    path.write_text(json.dumps(description))
    with pytest.raises(NotSupported, match="'pixels' of its batch is a PackedTensor; its loss mine:Loss has state"):
        replay(str(one_step.output_dir), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "subprocess:getoutput"}, "names subprocess:getoutput as its loss, which is not a loss class"),
        ({"target": "subprocess:Popen"}, "names subprocess:Popen as its loss, which is not a loss class"),
        ({"target": "probe_loss:Loss", "model": "subprocess:getoutput"}, "names subprocess:getoutput for its loss"),
        ({"target": "probe_loss:Loss", "model": "subprocess:Popen"}, "which is not a pydantic model; it is not called"),
    ],
)
def test_nothing_but_losses_and_their_settings_is_called(one_step, tmp_path, monkeypatch, changes, message):
    """A run's folder may come from anyone."""
    called = tmp_path / "called"
    (tmp_path / "probe_loss.py").write_text(f"""
class Loss:
    loss_type, input_type = "token_level", "logprobs"

    def __init__(self, *config):
        open({str(called)!r}, "w").close()

    def __call__(self):
        pass
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = recorded(one_step, 1) / "step.json"
    description = json.loads(path.read_text())
    command = f"touch {called}"
    keys = {"cmd": command} if "getoutput" in str(changes) else {"args": command, "shell": True}
    description["loss"] = {"target": "", "config": keys, "model": "subprocess:getoutput"} | changes
    path.write_text(json.dumps(description))
    with pytest.raises(DataError, match=message):
        replay(str(one_step.output_dir), 1, ONE_CANDIDATE)
    assert not called.exists()


class Unsaid:
    """A loss whose `input_type` only its instances have."""

    def __init__(self):
        self.loss_type, self.input_type = LossType.TOKEN_LEVEL, LossInput.LOGPROBS

    def __call__(self, *_):
        raise NotImplementedError


def test_losses_are_described_so_that_they_can_be_made_again():
    class Local(NLLLoss):
        pass

    odd = NLLLoss()
    odd.scale = 2.0
    assert describe_loss(NLLLoss())["target"] == "rlframework.algorithms.losses.targets:NLLLoss"
    described = describe_loss(ClippedPGLoss(ClippedPGLossConfig(kl_coef=0.1)))
    assert described["config"]["kl_coef"] == 0.1
    assert described["model"] == "rlframework.config.algorithms:ClippedPGLossConfig"
    assert "cannot be imported" in describe_loss(Local())["not_replayable"]
    assert "has state" in describe_loss(odd)["not_replayable"]
    assert "it needs input_type as a class attribute" in describe_loss(Unsaid())["not_replayable"]


def test_what_cannot_be_written_of_a_batch_is_said(tmp_path):
    from rlframework.algorithms.recording import _write_batch

    batch = {"names": ["a", "b"], "objects": [object()], "pixels": PackedTensor(torch.ones(1, 2), dim_to_pack=0)}
    missing = _write_batch(tmp_path, batch)
    assert set(missing) == {"objects", "pixels"}
    assert json.loads((tmp_path / "batch.json").read_text()) == {"names": ["a", "b"]}


def test_an_algorithm_that_does_not_train_through_the_loop_is_told(run_config, monkeypatch, caplog):
    from rlframework.algorithms.sft import SFT

    monkeypatch.setattr(SFT, "train", lambda self, step, data, loss: self.parts.policy.train(data, loss))
    run(run_config("sft", "algorithm.num_steps=1", "recording.every=1"))
    assert "step 1 is not recorded: the algorithm 'sft' did not call" in caplog.text
