"""Whole runs with losses, algorithms and advantages that are given by import path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlframework import config_yaml, load_config, run
from rlframework.base.errors import ConfigError, PluginError
from rlframework.runner.launch import resume

pytestmark = pytest.mark.slow

OWN = "probe_own_losses"
OWN_LOSS = f"{OWN}:Weighted"


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (OWN_LOSS, 1.0),
        (f"{OWN}:made", 3.0),
        (f"{{name: '{OWN_LOSS}', weight: 2.5}}", 2.5),
        (f"{{name: '{OWN}:make', weight: 4.0}}", 4.0),
    ],
)
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_an_own_loss(run_config, tmp_path: Path, algorithm: str, loss: str, weight: float) -> None:
    config = run_config(algorithm, f"algorithm.loss={loss}", "algorithm.num_steps=1")
    (tmp_path / "printed.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "printed.yaml") == config
    row = run(config).history[1]
    assert row["train/global_valid_toks"] > 0
    if algorithm == "grpo":  # the mean of the metric over the tokens is the weight itself
        assert row["train/weight_seen"] == pytest.approx(weight, rel=1e-5)
    else:  # a random model of 51 tokens: -log p is some ln(51) = 3.93
        assert row["train/loss"] == pytest.approx(3.93 * weight, rel=0.2)


def test_an_own_loss_gets_the_log_probabilities_that_it_reads(run_config) -> None:
    """Also with one optimizer step per rollout, where the built-in losses do not need them."""
    one_step = ["algorithm.num_steps=1", "policy.train_global_batch_size=32"]
    config = run_config("grpo", f"algorithm.loss={OWN}:Ratio", *one_step)
    assert run(config).metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_an_own_loss_in_other_processes_with_a_reference(run_config) -> None:
    keys = f"{{name: '{OWN_LOSS}', weight: 2.0, kl_coef: 0.5}}"
    config = run_config("grpo", f"algorithm.loss={keys}", "algorithm.num_steps=1", "worker_group.name=processes")
    assert run(config).metrics["train/weight_seen"] == pytest.approx(2.0, rel=1e-5)


NOTEBOOK = """
import sys
from pydantic import Field
from probe_own_losses import Weighted
from rlframework import load_config, run
from rlframework.algorithms.sft import SFT

FACTOR = 2.0

class Doubled(Weighted):
    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        loss, metrics = super().__call__(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        return FACTOR * loss, {"weight_seen": FACTOR * metrics["weight_seen"], "half": halved(self.weight)}

class Settings(SFT.config_model):
    weight: float = Field(description="of the loss")

class Own(SFT):
    config_model = Settings

    def __init__(self, parts):
        super().__init__(parts)
        self.loss = Doubled(parts.config.algorithm.weight)

def halved(value):
    return value / 2

source = sys.argv[1]
given = run(load_config(source, ["algorithm.loss={name: '__main__:Doubled', weight: 1.5}"])).history[1]
made = run(load_config(source, ["algorithm.name=__main__:Own", "algorithm.weight=1.5", "output_dir=own"])).history[1]
print([round(given["train/loss"] / made["train/loss"], 5), 3.6 < given["train/loss"] / 3 < 4.3])
"""


def test_a_loss_and_an_algorithm_of_a_notebook(run_config, tmp_path: Path) -> None:
    """A `__main__` without a file, which no worker can import; a random model of 51 tokens: -log p is some ln(51)."""
    config = run_config("sft", "algorithm.num_steps=1", "worker_group.name=processes", f"output_dir={tmp_path / 'run'}")
    (tmp_path / "run.yaml").write_text(config_yaml(config))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, "run.yaml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.splitlines()[-1:] == ["[1.0, True]"], done.stderr


def test_a_run_of_own_parts_goes_on_with_the_numbers_of_one_that_was_not_stopped(run_config, tmp_path: Path) -> None:
    keys = [
        "~environment",
        "environment={name: 'probe_own_environments:Tiring'}",
        f"algorithm.loss={{name: '{OWN_LOSS}', weight: 2.0}}",
    ]
    keys += ["checkpoints.every=2", "algorithm.validation.every=0"]
    whole = run(run_config("grpo", *keys, f"output_dir={tmp_path / 'whole'}", "algorithm.num_steps=4")).history
    shutil.copytree(tmp_path / "whole", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-000004")
    shutil.rmtree(tmp_path / "two" / "model")
    assert load_config(tmp_path / "two" / "config.yaml").resume_command.endswith(f"{tmp_path / 'whole'} --trust-run")
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.name='.*', which calls this function.*--trust-run"):
        resume(tmp_path / "two")
    two = resume(tmp_path / "two", trust_run=True).history
    rewards = [row["train/reward"] for row in whole if "train/reward" in row]
    assert rewards[2:] == [row["train/reward"] for row in two if "train/reward" in row][-2:]
    assert rewards[2] < rewards[0] / 2  # tired, and not fresh again
    left, right = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "two"))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (f"{OWN}:Missing", r"`algorithm\.loss`: .*has no 'Missing'"),
        (f"{OWN}:number", r"`algorithm\.loss`: .* is not a loss or callable, but int"),
        (f"{OWN}:makes_nothing", "returned NoneType, which is not a loss"),
        (f"{OWN}:raises", r"\.py, line \d+\) raised ValueError when called with \{\}: not today"),
        (f"{{name: '{OWN}:make', wieght: 2}}", r"raised TypeError .*'wieght'"),
        (
            f"{{name: '{OWN}:made', weight: 2}}",
            r"is a loss instance and takes no keys, but \['weight'\] are given",
        ),
        ("clipped", r"`algorithm\.loss`: must be a mapping of the loss's settings, or an import path such as"),
        ("{kl_cof: 0.1}", "Did you mean `algorithm.loss.kl_coef`"),
    ],
)
def test_losses_that_cannot_be_used_are_told(run_config, tmp_path: Path, loss: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config("grpo", f"algorithm.loss={loss}")
    assert not (tmp_path / "run").exists()


def test_the_schema_takes_own_parts() -> None:
    import jsonschema

    from rlframework import config_schema, create_manager

    schema = jsonschema.Draft202012Validator(config_schema(create_manager()))
    for loss in (OWN_LOSS, {"name": OWN_LOSS, "weight": 2}, {"kl_coef": 0.1}):
        algorithm = {"name": "grpo", "loss": loss}
        schema.validate({"algorithm": algorithm, "environment": {"name": "a.b:C", "upto": 3}})
    with pytest.raises(jsonschema.ValidationError):
        schema.validate({"algorithm": {"name": "grpo", "loss": "clipped"}})


def test_a_loss_gets_the_columns_that_the_page_lists(run_config) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own_parts.md").read_text(encoding="utf-8")
    listed = dict[str, float]()
    for names, shapes in re.findall(r"^\| (`[a-z_`, ]+`) \| (`\[B[^|]*) \|", page, re.MULTILINE):
        dimensions = [float(shape.count(",") + 1) for shape in re.findall(r"\[.*?\]", shapes)]
        listed |= zip(re.findall(r"\w+", names), dimensions, strict=True)
    keys = f"{{name: '{OWN}:Columns', kl_coef: 0.5}}"
    metrics = run(run_config("grpo", f"algorithm.loss={keys}", "algorithm.num_steps=1")).metrics
    assert listed == {name[6:-4]: value for name, value in metrics.items() if re.fullmatch(r"train/\w+_max", name)}


ALGORITHMS = "probe_own_algorithms"
DIGITS = ["~environment", "environment={name: 'probe_own_environments:Counting'}"]


def test_an_algorithm_by_its_import_path(run_config, tmp_path: Path) -> None:
    config = run_config("grpo", "~algorithm", f"algorithm={{name: '{ALGORITHMS}:Counting', upto: 7}}")
    (tmp_path / "printed_algorithm.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "printed_algorithm.yaml") == config
    assert run(config).metrics["counted"] == 7.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Counting, upo: 3", "Did you mean `algorithm.upto`"),
        ("Missing", r"algorithm\.name: .*\.py\) has no 'Missing'"),
        (
            "not_a_class",
            r"algorithm\.name: .* must be a class derived from rlframework\.algorithms\.algorithm\.Algorithm",
        ),
        ("CountingConfig", "must be a class derived"),
        ("Half", "does not implement run"),
    ],
)
def test_algorithms_that_cannot_be_used_are_rejected(run_config, name: str, message: str) -> None:
    name, _, rest = name.partition(",")
    section = f"{{name: '{ALGORITHMS}:{name}'{',' * bool(rest)}{rest}}}"
    with pytest.raises((ConfigError, PluginError), match=message):
        run_config("grpo", "~algorithm", f"algorithm={section}")


def test_a_subclass_of_a_built_in_algorithm_has_its_keys_and_more(run_config) -> None:
    section = f"{{name: '{ALGORITHMS}:Capped', cap: 0.25, num_steps: 1, prompts_per_step: 4, samples_per_prompt: 4}}"
    config = run_config("grpo", *DIGITS, "~algorithm", f"algorithm={section}")
    assert run(config).history[1]["train/largest_advantage"] == 0.25


@pytest.mark.parametrize("name", ["Bare", "Capped"])
@pytest.mark.parametrize("preset", ["verl", "paper"])
def test_a_subclass_of_grpo_has_its_section_and_its_presets(run_config, name: str, preset: str) -> None:
    own, built_in = (
        run_config("grpo", f"algorithm.name={given}", f"algorithm.preset={preset}").algorithm.model_dump()
        for given in (f"{ALGORITHMS}:{name}", "grpo")
    )
    assert own.pop("name") == f"{ALGORITHMS}:{name}"
    del built_in["name"]
    assert {key: own[key] for key in built_in} == built_in


def test_an_own_advantage_takes_the_place_of_the_comparison(run_config, tmp_path: Path) -> None:
    """The differences from the mean by a function are those of the built-in baseline without a standard deviation."""
    same = [*DIGITS, "algorithm.num_steps=2"]
    own = [f"algorithm.advantage={ALGORITHMS}:from_the_mean", f"output_dir={tmp_path / 'own'}"]
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
def test_own_advantages_that_cannot_be_used_are_rejected(run_config, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config("grpo", f"algorithm.advantage={ALGORITHMS}:{path}")
