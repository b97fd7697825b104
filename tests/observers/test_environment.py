"""`environment.json`: its content, what it never contains, and its update by a resumed run."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlframework
from rlframework.observers import host
from rlframework.observers.host import Gpu, available_memory, free_disk, gpus, total_memory
from rlframework.observers.run_environment import clean_command, read_environment, run_id, write_environment
from rlframework.plugins.manager import create_manager


def test_it_records_versions_plugins_and_the_machine(tmp_path):
    written = write_environment(tmp_path / "run", create_manager().listing())
    found = read_environment(tmp_path / "run")
    assert found == written
    assert found["packages"]["rlframework-core"] == rlframework.__version__
    assert {"name": "grpo", "kind": "algorithm", "distribution": "rlframework-core",
            "version": rlframework.__version__} in found["plugins"]  # fmt: skip
    assert found["host"]["cores"] >= 1
    assert found["python"].startswith("CPython 3.")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["environment.json"]


def test_it_contains_no_unlisted_variables_and_no_user_names(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "not-for-anybody")
    monkeypatch.setenv("USER", "ada-of-the-test")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr("sys.argv", ["rlframework", "train", "x.yaml", "hub.password=not-for-anybody"])
    write_environment(tmp_path)
    text = (tmp_path / "environment.json").read_text()
    assert "not-for-anybody" not in text
    assert "ada-of-the-test" not in text
    assert json.loads(text)["variables"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id_and_earlier_environments(tmp_path):
    first, second, third = (write_environment(tmp_path) for _ in range(3))
    assert first["run_id"] == second["run_id"] == third["run_id"] == run_id(tmp_path)
    assert "earlier" not in first
    assert [entry["started"] for entry in third["earlier"]] == [first["started"], second["started"]]
    assert write_environment(tmp_path / "other")["run_id"] != first["run_id"]


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "\0"])
def test_without_a_readable_file_the_id_is_the_name_of_the_directory(tmp_path, text):
    folder = tmp_path / "my_run"
    folder.mkdir()
    if text is not None:
        (folder / "environment.json").write_text(text)
    assert run_id(folder) == "my_run"
    assert read_environment(folder) == {}


@pytest.mark.slow
def test_the_commit_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert write_environment(tmp_path / "a")["git"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert write_environment(tmp_path / "b")["git"] == {"commit": commit, "changed": False}
    (tmp_path / "file").write_text("2")
    assert write_environment(tmp_path / "c")["git"] == {"commit": commit, "changed": True}


def test_only_visible_gpus_are_listed(monkeypatch):
    printed = "NVIDIA A, 1000, 900\nNVIDIA B, 2000, 1500\nNVIDIA MIG, [N/A], [N/A]\n"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(host, "command_output", lambda command: None)
    assert gpus() == []
    monkeypatch.setattr(host, "command_output", lambda command: printed)
    a, b = Gpu("NVIDIA A", 1000 << 20, 900 << 20), Gpu("NVIDIA B", 2000 << 20, 1500 << 20)
    assert gpus() == [a, b]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus() == [b]


def test_a_missing_or_failing_program_has_no_output():
    outputs = [host.command_output(words) for words in (["no-such-program-here"], ["false"], ["echo", "x"])]
    assert outputs == [None, None, "x\n"]


@pytest.mark.parametrize(("limit", "total", "free"), [(None, 1000, 600), ("500\n", 500, 400), ("max\n", 1000, 600)])
def test_the_memory_limit_of_a_container_is_respected(tmp_path, monkeypatch, limit, total, free):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1000, available=600))
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("100\n")
    assert (total_memory(), available_memory()) == (total, free)


def test_free_disk_of_a_missing_folder_is_that_of_its_parent(tmp_path):
    assert abs(free_disk(tmp_path / "a" / "b") - free_disk(tmp_path)) < 1 << 30


def test_a_command_is_recorded_without_secrets_and_home_directory(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    command = [
        "/home/ada/env/bin/rlframework", "train", "/home/ada/run.yaml", "hub.api_key=abc", "--token-file", "x",
        "--api-key", "abc", "seed=1", "environment.path=/home/ada/data", "/home/adam/y",
        "w.env={MY_API_KEY: abc, HOME: /home/ada}", "w.env={MY_API_KEY: abc", "w.env={A: 1}", "w.env=\nMY_API_KEY: abc",
        "w.env=!!map {MY_API_KEY: sixteen-letters}", "a=sixteen-letters", "--set=w.env={A: {MY_TOKEN: abc}}",
        "x.password=eighteen", "path=https://me:pass-of-me@host/x", "name=pass-of-me and eighteen", "\udcff",
    ]  # fmt: skip
    assert clean_command(command) == [
        "rlframework", "train", "~/run.yaml", "hub.api_key=***", "--token-file", "x",
        "--api-key", "***", "seed=1", "environment.path=~/data", "/home/adam/y",
        'w.env={"MY_API_KEY": "***", "HOME": "~"}', "w.env=***", "w.env={A: 1}", 'w.env={"MY_API_KEY": "***"}',
        'w.env={"MY_API_KEY": "***"}', "a=***", "--set=***",
        "x.password=***", "path=https://***@host/x", "name=*** and ***", "\udcff",
    ]  # fmt: skip
    assert clean_command([]) == []
