"""Settings that a run's own config.yaml may not decide, and how the user allows them. Code that ran leaves a marker."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from rlframework.base.errors import ConfigError
from rlframework.cli import main
from rlframework.config.base import ImportsCode, NeedsTrust
from rlframework.config.sections import RunConfig
from rlframework.plugins.configure import load_config
from rlframework.plugins.manager import create_manager

PLUGIN = """
import pathlib
from rlframework.plugins.hookspec import hookimpl
pathlib.Path({marker!r}).touch()

@hookimpl
def rlframework_environments():
    return []
"""
PLAIN = {
    "algorithm": {"name": "grpo"},
    "policy": {"model_name": "model", "train_global_batch_size": 256},
    "environment": {"name": "addition"},
    "device": "cpu",
}
RAY = {"worker_group": {"name": "ray", "num_workers": 1}}
UNTRUSTED = {
    "policy.trust_remote_code": True,
    "worker_group.python": "/tmp/python",
    "worker_group.environment": {"LD_PRELOAD": "/tmp/x.so"},
    "worker_group.address": "198.51.100.7:6379",
    "worker_group.listen": "0.0.0.0",
    "generation.workers": {"group": "ray", "python": "/tmp/python"},
    "algorithm.loss": {"name": "subprocess:call", "args": ["touch", "marker"]},
    "observers.mlflow": {"tracking_uri": "http://198.51.100.7"},
    "observers.trackio": {"space_id": "somebody/else"},
    "checkpoints.upload": "s3://somebody/else",
    "policy.dtensor.custom_parallel_plan": "os:getcwd",
}
"""Values that a run's file may not set, each in the configuration of a Ray run that is otherwise plain."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder `downloaded` in the current directory; imports are undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "downloaded").mkdir()
    yield Path("downloaded")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("downloaded", "evil", "mine"):
            del sys.modules[name]


def nested(values, key, value):
    """A copy of `values` with `value` at the dotted `key`."""
    head, _, rest = key.partition(".")
    return {**values, head: nested(values.get(head, {}), rest, value) if rest else value}


def load(folder, values, *overrides):
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return load_config(folder / "config.yaml", overrides, run=folder)


@pytest.mark.parametrize("key", UNTRUSTED)
def test_a_runs_own_file_may_not_set(folder, key):
    values = nested(PLAIN | RAY, key, UNTRUSTED[key])
    with pytest.raises(ConfigError, match="--trust-run") as error:
        load(folder, values)
    assert key in str(error.value)
    assert "/tmp/x.so" not in str(error.value)  # values of variables may be secrets
    assert not Path("marker").exists()
    problem = {"algorithm.loss": "returned int", "policy.dtensor.custom_parallel_plan": "has no effect"}.get(key)
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        load_config(folder / "config.yaml")  # the same file, named by the user
    assert Path("marker").exists() == (key == "algorithm.loss")


@pytest.mark.slow
def test_a_plain_run_and_its_defaults_need_no_trust(folder):
    values = load_config(PLAIN | RAY).model_dump(mode="json")
    load(folder, values)
    load(folder, nested(values, "worker_group.address", "auto"))


@pytest.mark.slow
def test_an_override_counts_but_only_for_what_it_gives(folder):
    values = nested(PLAIN, "policy.trust_remote_code", True)
    assert load(folder, values, "policy.trust_remote_code=true").policy.trust_remote_code
    assert not load(folder, values, "policy.trust_remote_code=false").policy.trust_remote_code
    values = nested(PLAIN | RAY, "worker_group.environment", {"LD_PRELOAD": "/tmp/x.so"})
    for override in ("worker_group.environment={A: b}", "worker_group.environment.A=b", "worker_group.environment={}"):
        with pytest.raises(ConfigError, match="LD_PRELOAD"):
            load(folder, values, override)
    load(folder, values, "worker_group.environment.LD_PRELOAD=/mine.so")
    load(folder, PLAIN | RAY, "worker_group.environment={A: b}")


def test_the_name_of_a_folder_does_not_pass_for_an_override(folder):
    named = folder / "override `policy.trust_remote_code=true`"
    named.mkdir()
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load(named, nested(PLAIN, "policy.trust_remote_code", True))


@pytest.mark.parametrize("name", ["downloaded.evil", "downloaded.deep.evil", "downloaded", "linked"])
@pytest.mark.parametrize("key", ["plugins", "environment.name", "environment.reward"])
def test_modules_in_the_runs_folder_are_not_imported(folder, tmp_path, key, name):
    marker = tmp_path / "marker"
    code = PLUGIN.format(marker=str(marker))
    (folder / "deep").mkdir()
    for file in ("evil.py", "deep/evil.py", "__init__.py"):
        (folder / file).write_text(code)
    Path("linked.py").symlink_to(folder / "evil.py")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    values = nested(PLAIN, key, [name] if key == "plugins" else f"{name}:score")
    if key == "environment.reward":
        values["environment"] |= {"name": "dataset", "path": str(tmp_path / "rows.jsonl")}
    with pytest.raises(ConfigError, match="in its folder"):
        load(folder, values)
    assert not marker.exists()
    if key == "plugins":
        load_config(folder / "config.yaml")  # what --trust-run does
        assert marker.exists()


@pytest.mark.slow
def test_keys_of_episodes_that_name_code_or_programs(folder, tmp_path):
    """Reward functions and tools by import path, also below a name, and programs that a run's file asks for."""
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(PLUGIN.format(marker=str(marker)))
    rows = {"path": str(tmp_path / "rows.jsonl")}
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    several = {"good": {"function": "os:getcwd"}, "bad": {"function": "downloaded.evil:score"}}
    for environment, problem in (
        ({"name": "dataset", "reward": several, **rows}, r"environment\.reward\.bad\.function imports .*evil\.py"),
        ({"name": "tools", "tools": "downloaded.evil:Tools", "check": "exact", **rows}, r"environment\.tools imports"),
        ({"name": "gymnasium", "id": "downloaded.evil:Game-v0"}, r"environment\.id imports"),
        (
            {"name": "mcp", "command": ["sh", "-c", "touch marker"], "check": "exact", **rows},
            r"environment\.command=.*runs",
        ),
        ({"name": "openenv", "url": "ws://198.51.100.7/ws"}, r"environment\.url=.*sends"),
        ({"name": "verifiers", "python": "/tmp/python", "settings": {}}, r"environment\.python=.*runs"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load(folder, PLAIN | {"environment": environment})
    assert not marker.exists()


def test_modules_of_the_user_are_imported(folder, tmp_path):
    marker = tmp_path / "marker"
    Path("mine.py").write_text(PLUGIN.format(marker=str(marker)))
    load(folder, PLAIN | {"plugins": ["mine"]})
    assert marker.exists()


def test_a_current_directory_in_the_run_may_not_hide_modules(folder, monkeypatch):
    monkeypatch.chdir(folder)
    here = Path()
    (here / "model").mkdir()
    (here / "model" / "modeling_own.py").touch()
    load(here, PLAIN)
    (here / "apex").mkdir()
    (here / "apex" / "core.py").touch()
    with pytest.raises(ConfigError, match="would import apex"):
        load(here, PLAIN)


def test_resuming_does_not_write_through_a_link(folder, tmp_path, capsys):
    from rlframework.runner.launch import resume

    (folder / "config.yaml").write_text(yaml.safe_dump(PLAIN))
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "metrics.jsonl").symlink_to(tmp_path / "profile")
    with pytest.raises(ConfigError, match="is a link to"):
        resume(folder)


def test_the_flag_is_about_a_run(folder, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "config.yaml", "--trust-run"])
    assert end.value.code == 2
    assert "--resume" in capsys.readouterr().err


def keys_of_configurations():
    """The keys of a run and of all its parts, with their pydantic fields."""
    from rlframework.config.hints import key_paths

    manager = create_manager()
    models = [RunConfig]
    for kind in ("environment", "worker_group", "algorithm", "generation_engine", "policy_worker"):
        models += [
            found.record.config_model for found in manager.registered(kind).values() if found.record.config_model
        ]
    return [(keys, info) for model in models for keys, info in key_paths(model).items() if info is not None]


def is_marked(info, *marks):
    return any(isinstance(mark, marks) for mark in info.metadata)


def test_keys_that_name_code_are_marked():
    """A new key whose description speaks of import paths, programs or addresses is looked at here."""
    words = ("import path", "executable", "python of another", "environment variables to set", "modules to load")
    unmarked = {
        ".".join(keys)
        for keys, info in keys_of_configurations()
        if any(word in (info.description or "").lower() for word in words)
        if not is_marked(info, NeedsTrust, ImportsCode)
    }
    known = {"environment.name", "algorithm.name", "name", "loss", "algorithm.loss"}
    assert unmarked <= known  # looked at before, or marked below


def test_the_security_page_lists_the_keys_that_need_trust():
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    names = {keys[-1] for keys, info in keys_of_configurations() if is_marked(info, NeedsTrust)}
    assert {"upload", "allow_addresses", "flops_profiler", "arguments", "command"} <= names
    assert {name for name in names if f".{name}`" not in page} == set()
