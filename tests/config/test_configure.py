"""`load_config`: typing by the chosen parts, and one error that lists all that is wrong. The parts are fakes."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlframework.plugins.configure as configure
from rlframework.algorithms.losses.targets import NLLLoss
from rlframework.base.errors import ConfigError, PluginError, UserError
from rlframework.plugins.configure import config_yaml, dump_config, load_config, resolve_device, restore_config


def refused(source: Any, overrides: Any = (), *, manager: Any) -> str:
    with pytest.raises(UserError) as error:
        load_config(source, overrides, manager=manager)
    return str(error.value)


def test_sections_are_typed_by_the_chosen_parts(manager: Any, minimal: Any) -> None:
    config = load_config(minimal, ["algorithm.group_size=3", "environment.sides=20", "seed=5"], manager=manager)
    assert type(config.algorithm).__name__ == "ClimbConfig"
    assert config.algorithm.group_size == 3  # type: ignore[attr-defined]
    assert config.algorithm.num_steps == 100
    assert config.environment.sides == 20  # type: ignore[attr-defined]
    assert config.seed == 5
    assert config.output_dir == Path("runs/run")


def test_backends_with_a_model_have_a_section_which_is_required_only_of_the_chosen_one(
    manager: Any, minimal: Any
) -> None:
    policy: Any = load_config(minimal, ["policy.dtensor.lr_scale=2"], manager=manager).policy
    assert (policy.dtensor.lr_scale, policy.needy, hasattr(policy, "plain")) == (2.0, None, False)
    message = refused(minimal, ["policy.backend=needy"], manager=manager)
    assert message.startswith("`policy.needy`: required key is missing")
    policy = load_config(minimal, ["policy.needy.license=abc"], manager=manager).policy
    assert policy.needy.license == "abc"


def test_the_section_of_a_backend_that_is_switched_off_is_left_alone(manager: Any, minimal: Any) -> None:
    config = load_config(minimal, ["policy.off.anything=1"], manager=manager)
    assert "off" not in dump_config(config)["policy"]
    manager.rows = []
    assert "`policy.off`: unknown key" in refused(minimal, ["policy.off.anything=1"], manager=manager)


def test_null_leaves_out_a_key_of_another_part(tmp_path: Path, manager: Any, minimal: Any) -> None:
    (tmp_path / "base.yaml").write_text(config_yaml(load_config(minimal, ["environment.path=a.txt"], manager=manager)))
    path = tmp_path / "run.yaml"
    path.write_text("defaults: base.yaml\nenvironment: {name: cards, suits: 4, sides: null, path: null}\n")
    config = load_config(path, manager=manager)
    assert config == load_config({**minimal, "environment": {"name": "cards", "suits": 4}}, manager=manager)
    path.write_text("defaults: base.yaml\nenvironment: {name: cards, suits: 4, ~sides: , ~path: }\n")
    assert load_config(path, manager=manager) == config
    path.write_text("defaults: base.yaml\nenvironment: {name: cards, suits: 4, sides: 4, path: null, none: null}\n")
    message = refused(path, manager=manager)
    assert "2 problems" in message
    assert "`environment.sides`: unknown key (given 4 in " in message
    assert "`environment.none`: unknown key (given null in " in message


def test_a_file_tells_where_each_mistake_is(tmp_path: Path, manager: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "policy:\n  model_name: m\n  lr: 0.1\n  batching: {mode: fast}\n"
        "algorithm:\n  name: climb\n  num_steps: many\n  loss:\n    clipp: 1\n"
        "environment: {name: dice, suits: 4}\n"
        "generation: 3\n"
    )
    message = refused(path, ["observers.console=5", "policy.train_micro_batch_size=-1"], manager=manager)
    suits = (
        "It is a key of `cards`, but environment.name is `dice`. Remove it; the override "
        "`~environment.suits` does that, too."
    )
    rows, example = "policy.train_micro_batch_size", "For example, write `generation: {max_new_tokens: 3}`."
    assert sorted(message.splitlines()[1:]) == sorted(
        [
            f"- `policy.lr`: unknown key (given 0.1 in {path}:3). Did you mean `policy.optimizer.lr`?",
            f"- `policy.batching.mode`: must be 'auto', 'padded', 'dynamic' or 'packed' (given \"fast\" in {path}:4)",
            f'- `algorithm.num_steps`: must be an integer (given "many" in {path}:7)',
            f"- `algorithm.loss.clipp`: unknown key (given 1 in {path}:9). Did you mean `algorithm.loss.clip`?",
            f"- `environment.suits`: unknown key (given 4 in {path}:10). {suits}",
            f"- `generation`: must be a section (a mapping of keys) (given 3 in {path}:11). {example}",
            "- `observers.console`: must be true or false (given 5 in override `observers.console=5`)",
            f"- `{rows}`: must be greater than 0 (given -1 in override `{rows}=-1`)",
        ]
    )
    assert message.startswith("8 problems in the configuration:\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.optimizer.lr=-1", "`policy.optimizer.lr`: must be greater than or equal to 0 (given -1 in"),
        ("policy.optimizer.betas=0.9", "`policy.optimizer.betas`: must be a list (given 0.9 in"),
        (
            "policy.lora.target_modules=all_linear",
            "`policy.lora.target_modules`: must be all-linear, or a list such as",
        ),
        ("policy.optimizer.betas=[1, 0.9]", "`policy.optimizer.betas.0`: must be less than 1 (given 1 in"),
        ("policy.optimizer.betas=[0.9, -0.1]", "`policy.optimizer.betas.1`: must be greater than or equal to 0 (given"),
        ("policy.optimizer.eps=0", "`policy.optimizer.eps`: must be greater than or equal to 1e-30 (given 0 in"),
        ("policy.model_name=3", "`policy.model_name`: must be a string (quote values"),
        ("policy.max_grad_norm=true", "`policy.max_grad_norm`: must be a number (given true in"),
        ("policy.offload.optimizer=1", "`policy.offload.optimizer`: must be true or false (given 1 in"),
        (
            "policy.activation_checkpointing=1",
            "`policy.activation_checkpointing`: must be false, 'selective' or 'full'",
        ),
        ("policy.dtensor.shards=[1, true]", "`policy.dtensor.shards.1`: must be a number (given true in"),
        ("observers=null", "`observers`: must be a section (a mapping of keys) (given null in"),
        ("device=gpu", "`device`: must be 'auto', 'cpu' or 'cuda' (given \"gpu\" in"),
        ("algorithm.num_steps=2", "`algorithm`: num_steps must not be less than group_size"),
        ("algorithm.name=3", "`algorithm.name`: must be one of: climb, copy (given 3 in"),
        ("~algorithm.name", "`algorithm.name`: required key is missing; must be one of: climb, copy"),
        ("~environment", "`environment.name`: required key is missing; must be one of: cards, dice"),
        ("~policy", "`policy`: required key is missing"),
        ("~policy.model_name", "`policy.model_name`: required key is missing (Hugging Face model directory"),
        ("policy.scheduler={warmup_steps: 9, total_steps: 8}", "`policy.scheduler.warmup_steps`: must not exceed"),
        ("plugins=x", '`plugins`: must be a list (given "x" in'),
    ],
)
def test_each_mistake_has_its_message(manager: Any, minimal: Any, override: str, message: str) -> None:
    text = refused(minimal, [override], manager=manager)
    assert text.startswith(message)
    assert "override" in text or override.startswith("~") or "num_steps" in text


@pytest.mark.slow
def test_many_and_long_mistakes_are_one_short_error(manager: Any, minimal: Any) -> None:
    many = {f"key{number}": 1 for number in range(3000)}
    text = refused(minimal | many | {"x" * 100_000: 1}, [], manager=manager)
    assert text.startswith("3001 problems in the configuration:\n- `key0`: unknown key (given 1)\n- `key1`: ")
    assert text.endswith("\nand 2961 more")
    assert len(refused(minimal | {"x" * 100_000: 1}, [], manager=manager)) < 1_000
    assert len(refused(minimal, [f"environment.name={'x' * 100_000}"], manager=manager)) < 3_000


def test_the_members_of_a_union_are_told_as_alternatives(manager: Any, minimal: Any) -> None:
    cards = ["environment={name: cards, suits: 4}"]
    assert load_config(minimal, [*cards, "environment.limit=3"], manager=manager).environment.limit == 3  # type: ignore[attr-defined]
    message = refused(minimal, [*cards, "environment.limit=some"], manager=manager)
    assert message.startswith("`environment.limit`: must be an integer, or must be 'all' (given \"some\" in")
    message = refused(minimal, [*cards, "environment.mix={a: x}"], manager=manager)
    assert message.startswith('`environment.mix.a`: must be a number (given "x" in')


def test_an_unknown_part_is_a_plugin_error_unless_there_are_other_mistakes(manager: Any, minimal: Any) -> None:
    with pytest.raises(PluginError) as error:
        load_config(minimal, ["policy.backend=dtenser"], manager=manager)
    assert "there is no policy_worker 'dtenser'" in str(error.value)
    assert "(in override `policy.backend=dtenser`)" in str(error.value)
    assert isinstance(error.value.__cause__, PluginError)
    with pytest.raises(ConfigError) as several:
        load_config(minimal, ["environment.name=dise", "environment.x=1", "policy.lr=1"], manager=manager)
    first, *others = str(several.value).splitlines()
    assert first == "2 problems in the configuration:"
    assert "there is no environment 'dise'" in others[0]
    assert "`policy.lr`" in others[1]


@pytest.mark.parametrize(("rows", "near"), [(10, "Try 8 or 12"), (3, "Try 4"), (13, "Try 12 or 16")])
def test_a_batch_that_does_not_divide_comes_with_sizes_that_do(
    manager: Any, minimal: Any, rows: int, near: str
) -> None:
    overrides = ["worker_group.num_workers=4", f"policy.train_global_batch_size={rows}"]
    text = refused(minimal, overrides, manager=manager)
    assert "`policy.train_global_batch_size`: must be a multiple of 4, the number of data-parallel workers" in text
    assert f"(given {rows} in override `policy.train_global_batch_size={rows}`). {near}, or change" in text
    load_config(minimal, ["worker_group.num_workers=4", "policy.train_global_batch_size=12"], manager=manager)


def test_checks_get_the_device_that_auto_comes_to(manager: Any, minimal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configure, "resolve_device", lambda device: {"auto": "cuda"}.get(device, device))
    load_config(minimal, ["policy.backend=plain"], manager=manager)
    assert "`device`: is cpu" in refused(minimal, ["policy.backend=plain", "device=cpu"], manager=manager)


def test_torch_is_asked_for_the_device_only_where_a_gpu_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(configure.shutil, "which", lambda name: None)
    monkeypatch.setattr(configure.Path, "glob", lambda self, pattern: iter(()))
    assert (resolve_device("auto"), resolve_device("cuda")) == ("cpu", "cuda")
    assert "torch" not in sys.modules
    for available, device in ((True, "cuda"), (False, "cpu")):
        torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda available=available: available))
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert resolve_device("auto") == device


def test_a_resolved_configuration_is_a_source_too(manager: Any, minimal: Any) -> None:
    config = load_config({**minimal, "seed": 3}, manager=manager)
    changed = load_config(config, ["policy.optimizer.lr=0.5"], manager=manager)
    assert changed.seed == 3
    assert changed.policy.optimizer.lr == 0.5
    assert load_config(changed, ["policy.optimizer.lr=1e-6"], manager=manager) == config


@pytest.mark.parametrize("text", [r"\${x}", "${not.a.key", "yes", "1e-3", "null", "a: {b}", "#", " '\"é\n", "~", "[1"])
def test_a_configuration_is_the_same_in_another_process_and_in_a_file(
    manager: Any, minimal: Any, tmp_path: Path, text: str
) -> None:
    values = {**minimal, "environment": {"name": "cards", "suits": 4, "system_prompt": text}}
    values["policy"] = {"model_name": "m", "tokenizer_name": text, "dtensor": {"shards": [3], "lr_scale": 1e-30}}
    config = restore_config(values, manager=manager)
    assert config.environment.system_prompt == text
    dumped = json.loads(json.dumps(dump_config(config)))
    restored = restore_config(copy.deepcopy(dumped), manager=manager)
    assert dump_config(restored) == dumped
    assert type(restored.algorithm) is type(config.algorithm)
    (tmp_path / "resolved.yaml").write_text(config_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "resolved.yaml", manager=manager) == config


def test_the_command_that_resumes_a_run_can_be_pasted(run_config: Any) -> None:
    assert run_config("sft", "output_dir=runs/a b").resume_command == "rlframework train --resume 'runs/a b'"


def test_a_run_of_a_notebook_is_resumed_from_python(run_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell's `__main__` has neither its parts nor its rows."""
    monkeypatch.setattr(sys.modules["__main__"], "Loss", NLLLoss, raising=False)
    config = run_config("sft", "output_dir=runs/a b", "~environment", "environment={name: dataset, data_digest: a1}")
    assert config.resume_command == "from rlframework import resume; resume('runs/a b', data=rows)"
    config = run_config("sft", "output_dir=a", "algorithm.loss=__main__:Loss")
    assert config.resume_with("seed=1") == "from rlframework import resume; resume('a', ['seed=1'], trust_run=True)"


def test_the_section_of_an_engine_that_is_not_installed_gets_no_hint(manager, minimal):
    """It may be right; the keys beside it are those of no engine that is known."""
    generation = {"name": "vllm", "vllm": {"gpu_memory_utilization": 0.5}}
    with pytest.raises(PluginError) as error:
        load_config({**minimal, "generation": generation}, manager=manager)
    assert "gpu_memory_utilization" not in str(error.value)
    with pytest.raises(PluginError, match=r"`enforce_eager`: With vLLM it is generation\.vllm\.enforce_eager"):
        load_config({**minimal, "generation": {**generation, "enforce_eager": True}}, manager=manager)
