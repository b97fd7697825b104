"""Whole runs with user classes given by import path: a reward function, an environment, a loss."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframework import config_yaml, load_config, run
from rlframework.errors import ConfigError, PluginError, UserError
from rlframework.runner.launch import resume

pytestmark = pytest.mark.slow

PARTS = """
from rlframework.config.sections import EnvironmentConfig
from rlframework.interfaces.environment import Environment, Sample, StepOutcome


def digits(completion):
    share = sum(letter.isdigit() for letter in completion) / max(1, len(completion))
    return {"reward": share, "length": len(completion)}


def fails_for_some(completion, answer):
    if int(answer) % 4 == 0:
        raise ValueError("a multiple of four")
    return float(len(completion))


class CountingConfig(EnvironmentConfig):
    upto: int = 20


class Counting(Environment):
    config_model = CountingConfig

    def __init__(self, config, *, seed):
        self.config = config

    def samples(self, split):
        numbers = range(self.config.upto) if split == "train" else range(self.config.upto, self.config.upto + 5)
        return [Sample(str(n), ({"role": "user", "content": f"{n}?"},), "", completion=str(n)) for n in numbers]

    def step(self, samples, conversations):
        return [StepOutcome(digits(talk[-1]["content"])["reward"]) for talk in conversations]


class Plain(Counting):
    config_model = None

    def __init__(self, config, *, seed):
        self.config = CountingConfig(name="x")


class Tiring(Counting):
    # its rewards depend on what it judged before, so a run that goes on needs its state

    def __init__(self, config, *, seed):
        self.config, self.judged = config, 0

    def step(self, samples, conversations):
        outcomes = []
        for talk in conversations:
            self.judged += 1
            outcomes.append(StepOutcome(digits(talk[-1]["content"])["reward"] / self.judged))
        return outcomes

    def state_dict(self):
        return {"judged": self.judged}

    def load_state_dict(self, state):
        self.judged = state["judged"]


class Half(Environment):
    def samples(self, split):
        return []


class Mistyped(Counting):
    config_model = dict


class Unscored(Environment):
    def __init__(self, config, *, seed):
        pass

    def samples(self, split):
        return []


not_a_class = 3
"""
OWN = "own_parts_of_a_test"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the parts and twenty rows."""
    (tmp_path / f"{OWN}.py").write_text(PARTS)
    rows = [{"prompt": f"{n}+1=", "answer": n} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, OWN, raising=False)
    return tmp_path


def with_reward(name: str, **keys: Any) -> list[str]:
    section = json.dumps({"name": "dataset", "path": "rows.jsonl", "reward": f"{OWN}:{name}", **keys})
    return ["~environment", f"environment={section}"]


def with_environment(name: str, **keys: Any) -> list[str]:
    return ["~environment", f"environment={json.dumps({'name': f'{OWN}:{name}', **keys})}"]


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "process"])
def test_grpo_on_an_own_reward(run_config, folder: Path, timeout: float | None) -> None:
    result = run(run_config("grpo", *with_reward("digits", reward_timeout=timeout)))
    for row in result.history:
        kind = "validation" if row["step"] == 0 else "train"
        assert 0.0 <= row[f"{kind}/reward"] <= 1.0
        assert row[f"{kind}/reward_failures"] == 0.0
        assert row[f"{kind}/reward/length"] <= 3 * 2  # tokens are characters, or the names of special tokens
    assert (folder / "run" / "model").is_dir()


def test_failures_are_metrics_of_the_step(run_config) -> None:
    """Each step has every row (16 of 20 train, about 4 are held out): rows 0, 4, ... fail."""
    keys = {"max_reward_failures": 1.0, "failed_reward": -1.0}
    result = run(run_config("grpo", *with_reward("fails_for_some", **keys), "algorithm.validation.at_start=false"))
    counts = [row["train/reward_failures"] for row in result.history]
    assert all(count % 8 == 0 for count in counts)  # all eight answers of a prompt fail, or none
    assert sum(counts) > 0


def test_too_many_failures_end_the_run_without_a_model(run_config, folder: Path) -> None:
    config = run_config("grpo", *with_reward("fails_for_some", max_reward_failures=0.01))
    with pytest.raises(UserError, match=rf"{OWN}\.py, line \d+\) failed for 1 of the first \d+ of \d+ answers"):
        run(config)
    assert not (folder / "run" / "model").exists()


def test_a_path_that_does_not_work_is_a_mistake_in_the_configuration(run_config, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"`environment\.reward`: .*own_parts_of_a_test\.py\) has no 'none'"):
        run_config("grpo", *with_reward("none"))
    assert not (folder / "run").exists()


def test_sft_judges_what_it_validates_by_the_own_reward(run_config) -> None:
    result = run(run_config("sft", *with_reward("digits")))
    assert result.metrics["validation/reward_failures"] == 0.0
    assert result.metrics["validation/reward/length"] > 0.0


@pytest.mark.parametrize("group", ["inline", "processes"])
def test_an_environment_by_its_import_path(run_config, folder: Path, group: str) -> None:
    config = run_config("grpo", *with_environment("Counting", upto=7), f"worker_group.name={group}")
    assert config.environment.upto == 7
    (folder / "printed.yaml").write_text(config_yaml(config))
    assert load_config(folder / "printed.yaml") == config
    assert run(config).metrics["train/reward"] >= 0.0


def test_an_environment_without_keys_of_its_own(run_config) -> None:
    config = run_config("grpo", *with_environment("Plain"), "algorithm.num_steps=1")
    assert run(config).metrics["step"] == 1.0


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("Counting", {"upo": 3}, "Did you mean `environment.upto`"),
        ("Plain", {"upto": 3}, "`environment.upto`: unknown key"),
        ("Missing", {}, r"environment\.name: .*\.py\) has no 'Missing'"),
        ("not_a_class", {}, r"must be a class derived from rlframework\.interfaces\.environment\.Environment"),
        ("digits", {}, "must be a class derived"),
        ("Half", {}, "does not implement __init__"),
        ("Mistyped", {}, r"config_model of the environment '.*Mistyped' must be a class derived from"),
    ],
)
def test_environments_that_cannot_be_used_are_told(run_config, name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        run_config("grpo", *with_environment(name, **keys))


def test_an_environment_that_cannot_score_is_told_before_anything_starts(run_config) -> None:
    with pytest.raises(PluginError, match=r"Unscored' implements neither `step` nor `episode`"):
        run(run_config("grpo", *with_environment("Unscored")))


ALGORITHMS = """
from pydantic import Field
from rlframework.algorithm import Algorithm, RunResult
from rlframework.algorithms.grpo import GRPO
from rlframework.config.algorithms import GRPOConfig
from rlframework.config.sections import AlgorithmConfig


class CountingConfig(AlgorithmConfig):
    upto: int = Field(3, gt=0)


class Counting(Algorithm):
    config_model = CountingConfig

    def __init__(self, parts):
        self.upto = parts.config.algorithm.upto

    def run(self):
        return RunResult({"step": 0.0, "counted": float(self.upto)})


class Half(Counting):
    run = Algorithm.run


not_a_class = Counting.__init__


class CappedConfig(GRPOConfig):
    cap: float = 1.0


class Bare(GRPO):
    pass


class Capped(GRPO):
    config_model = CappedConfig

    def add_advantages(self, result, timer):
        metrics = super().add_advantages(result, timer)
        result.data["advantages"] = result.data["advantages"].clamp(max=self.config.cap)
        return metrics | {"train/largest_advantage": float(result.data["advantages"].max())}


def from_the_mean(rewards, rollout):
    return rewards - rewards.mean(1, keepdim=True)


def of_one(rewards):
    return rewards
"""


@pytest.fixture
def algorithms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delitem(sys.modules, "algorithms_of_a_test", raising=False)
    (folder / "algorithms_of_a_test.py").write_text(ALGORITHMS)
    return "algorithms_of_a_test"


def test_an_algorithm_by_its_import_path(run_config, folder: Path, algorithms: str) -> None:
    config = run_config("grpo", "~algorithm", f"algorithm={{name: '{algorithms}:Counting', upto: 7}}")
    (folder / "printed_algorithm.yaml").write_text(config_yaml(config))
    assert load_config(folder / "printed_algorithm.yaml") == config
    assert run(config).metrics["counted"] == 7.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Counting, upo: 3", "Did you mean `algorithm.upto`"),
        ("Missing", r"algorithm\.name: .*\.py\) has no 'Missing'"),
        ("not_a_class", r"algorithm\.name: .* must be a class derived from rlframework\.algorithm\.Algorithm"),
        ("CountingConfig", "must be a class derived"),
        ("Half", "does not implement run"),
    ],
)
def test_algorithms_that_cannot_be_used_are_rejected(run_config, algorithms: str, name: str, message: str) -> None:
    name, _, rest = name.partition(",")
    section = f"{{name: '{algorithms}:{name}'{',' * bool(rest)}{rest}}}"
    with pytest.raises((ConfigError, PluginError), match=message):
        run_config("grpo", "~algorithm", f"algorithm={section}")


def test_a_subclass_of_a_built_in_algorithm_has_its_keys_and_more(run_config, algorithms: str) -> None:
    section = f"{{name: '{algorithms}:Capped', cap: 0.25, num_steps: 1, prompts_per_step: 4, samples_per_prompt: 4}}"
    config = run_config("grpo", *with_reward("digits"), "~algorithm", f"algorithm={section}")
    assert run(config).history[1]["train/largest_advantage"] == 0.25


@pytest.mark.parametrize("name", ["Bare", "Capped"])
@pytest.mark.parametrize("preset", ["verl", "trl", "paper", "nemo_rl"])
def test_a_subclass_of_grpo_has_its_section_and_its_presets(
    run_config, algorithms: str, name: str, preset: str
) -> None:
    own, built_in = (
        run_config("grpo", f"algorithm.name={given}", f"algorithm.preset={preset}").algorithm.model_dump()
        for given in (f"{algorithms}:{name}", "grpo")
    )
    assert own.pop("name") == f"{algorithms}:{name}"
    del built_in["name"]
    assert {key: own[key] for key in built_in} == built_in


def test_an_own_advantage_takes_the_place_of_the_comparison(run_config, algorithms: str, tmp_path: Path) -> None:
    """The differences from the mean by a function are those of the built-in baseline without a standard deviation."""
    same = [*with_reward("digits"), "algorithm.num_steps=2"]
    own = [f"algorithm.advantage={algorithms}:from_the_mean", f"output_dir={tmp_path / 'own'}"]
    built_in = ["algorithm.normalize_std=false", f"output_dir={tmp_path / 'built_in'}"]
    runs = [run(run_config("grpo", *same, *keys)).history for keys in (own, built_in)]
    assert runs[0][1]["train/grad_norm"] > 0
    for name in ("train/loss", "train/grad_norm", "train/zero_variance_groups"):
        assert [row[name] for row in runs[0][1:3]] == pytest.approx([row[name] for row in runs[1][1:3]], rel=1e-4)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Missing", r"`algorithm\.advantage`: .*has no 'Missing'"),
        ("Counting", "is not a function; define `def compare"),
        ("of_one", r"cannot be called with rewards and a rollout: its parameters are \(rewards\)"),
    ],
)
def test_own_advantages_that_cannot_be_used_are_rejected(run_config, algorithms: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config("grpo", f"algorithm.advantage={algorithms}:{path}")


LOSSES = '''
import torch
from rlframework.interfaces.loss import LossColumn, LossInput, LossType


class Weighted:
    """Minus log-probabilities times advantages, if present, times `weight`."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInput.LOGPROBS
    wants_entropy, at_sampling_temperature = False, False

    def __init__(self, weight=1.0, kl_coef=0.0):
        self.weight, self.kl_coef = weight, kl_coef

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        values = data["advantages"][:, 1:] if "advantages" in data else 1.0
        loss = -self.weight * (next_token_logprobs * values * mask).sum() / global_valid_toks
        return loss, {"weight_seen": self.weight * float(mask.sum() / global_valid_toks)}


class Ratio(Weighted):
    """The mean ratio of the log-probabilities now and at the rollout."""

    reads = {"prev_logprobs": LossColumn()}

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        ratio = (torch.exp(next_token_logprobs - data["prev_logprobs"][:, 1:]) * mask).sum() / global_valid_toks
        return -ratio, {"ratio": float(ratio.detach())}


made = Weighted(3.0)


def make(weight):
    return Weighted(weight)


def makes_nothing():
    return None


def raises():
    raise ValueError("not today")


number = 3
'''
OWN_LOSSES = "own_losses_of_a_test"
OWN_LOSS = f"{OWN_LOSSES}:Weighted"


@pytest.fixture
def losses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{OWN_LOSSES}.py").write_text(LOSSES)
    monkeypatch.delitem(sys.modules, OWN_LOSSES, raising=False)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (OWN_LOSS, 1.0),
        (f"{OWN_LOSSES}:made", 3.0),
        (f"{{name: '{OWN_LOSS}', weight: 2.5}}", 2.5),
        (f"{{name: '{OWN_LOSSES}:make', weight: 4.0}}", 4.0),
    ],
)
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.usefixtures("losses")
def test_an_own_loss(run_config, folder: Path, algorithm: str, loss: str, weight: float) -> None:
    config = run_config(algorithm, f"algorithm.loss={loss}", "algorithm.num_steps=1")
    (folder / "printed.yaml").write_text(config_yaml(config))
    assert load_config(folder / "printed.yaml") == config
    row = run(config).history[1]
    assert row["train/global_valid_toks"] > 0
    if algorithm == "grpo":  # the mean of the metric over the tokens is the weight itself
        assert row["train/weight_seen"] == pytest.approx(weight, rel=1e-5)
    else:  # a random model of 51 tokens: -log p is some ln(51) = 3.93
        assert row["train/loss"] == pytest.approx(3.93 * weight, rel=0.2)


@pytest.mark.usefixtures("losses")
def test_an_own_loss_gets_the_log_probabilities_that_it_reads(run_config) -> None:
    """Also with one optimizer step per rollout, where the built-in losses do not need them."""
    one_step = ["algorithm.num_steps=1", "policy.train_global_batch_size=32"]
    config = run_config("grpo", f"algorithm.loss={OWN_LOSSES}:Ratio", *one_step)
    assert run(config).metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.usefixtures("losses")
def test_an_own_loss_in_other_processes_with_a_reference(run_config) -> None:
    keys = f"{{name: '{OWN_LOSS}', weight: 2.0, kl_coef: 0.5}}"
    config = run_config("grpo", f"algorithm.loss={keys}", "algorithm.num_steps=1", "worker_group.name=processes")
    assert run(config).metrics["train/weight_seen"] == pytest.approx(2.0, rel=1e-5)


@pytest.mark.usefixtures("losses")
def test_a_run_of_own_parts_goes_on_with_the_numbers_of_one_that_was_not_stopped(run_config, folder: Path) -> None:
    keys = [*with_environment("Tiring"), f"algorithm.loss={{name: '{OWN_LOSS}', weight: 2.0}}"]
    keys += ["checkpoints.every=2", "algorithm.validation.every=0"]
    whole = run(run_config("grpo", *keys, f"output_dir={folder / 'whole'}", "algorithm.num_steps=4")).history
    shutil.copytree(folder / "whole", folder / "two")
    shutil.rmtree(folder / "two" / "checkpoints" / "step-000004")
    shutil.rmtree(folder / "two" / "model")
    assert load_config(folder / "two" / "config.yaml").resume_command.endswith(f"{folder / 'whole'} --trust-run")
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.name='.*', which calls this function.*--trust-run"):
        resume(folder / "two")
    two = resume(folder / "two", trust_run=True).history
    rewards = [row["train/reward"] for row in whole if "train/reward" in row]
    assert rewards[2:] == [row["train/reward"] for row in two if "train/reward" in row][-2:]
    assert rewards[2] < rewards[0] / 2  # tired, and not fresh again
    left, right = (load_file(folder / name / "model" / "model.safetensors") for name in ("whole", "two"))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (f"{OWN_LOSSES}:Missing", r"`algorithm\.loss`: .*has no 'Missing'"),
        (f"{OWN_LOSSES}:number", r"`algorithm\.loss`: .* is not a loss or callable, but int"),
        (f"{OWN_LOSSES}:makes_nothing", "returned NoneType, which is not a loss"),
        (f"{OWN_LOSSES}:raises", r"\.py, line \d+\) raised ValueError when called with \{\}: not today"),
        (f"{{name: '{OWN_LOSSES}:make', wieght: 2}}", r"raised TypeError .*'wieght'"),
        (
            f"{{name: '{OWN_LOSSES}:made', weight: 2}}",
            r"is a loss instance and takes no keys, but \['weight'\] are given",
        ),
        ("clipped", r"`algorithm\.loss`: must be a mapping of the loss's settings, or an import path such as"),
        ("{kl_cof: 0.1}", "Did you mean `algorithm.loss.kl_coef`"),
    ],
)
@pytest.mark.usefixtures("losses")
def test_losses_that_cannot_be_used_are_told(run_config, folder: Path, loss: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config("grpo", f"algorithm.loss={loss}")
    assert not (folder / "run").exists()


@pytest.mark.usefixtures("losses")
def test_the_schema_takes_own_parts() -> None:
    import jsonschema

    from rlframework import config_schema, create_manager

    schema = jsonschema.Draft202012Validator(config_schema(create_manager()))
    for loss in (OWN_LOSS, {"name": OWN_LOSS, "weight": 2}, {"kl_coef": 0.1}):
        algorithm = {"name": "grpo", "loss": loss}
        schema.validate({"algorithm": algorithm, "environment": {"name": "a.b:C", "upto": 3}})
    with pytest.raises(jsonschema.ValidationError):
        schema.validate({"algorithm": {"name": "grpo", "loss": "clipped"}})
