"""`rlframework new-backend`: what it writes, what it refuses, and that it writes whole or not at all.

That a backend installs, is listed, and fails the suite with what to write next: `tests/docs/test_write_a_backend.py`;
that an engine passes its suite: the same.
"""

from __future__ import annotations

import ast
import errno
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from probe_runs import call

from rlframework.base.errors import ConfigError, WriteError
from rlframework.policy.engine import Engine
from rlframework_tools.new_backend import BACKEND, ENGINE, LONGEST, core_range, plugin_files, write_plugin

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples" / "ddp_backend"
LONG = "an_engine_of_long_name_x"
PORTABLE = {"load_weights", "gather_moments", "load_moments"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def methods(text):
    """The methods of the only class in `text`, with their bodies as text, in order."""
    [of] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {node.name: ast.get_source_segment(text, node) for node in of.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_a_whole_distribution_is_written(folder, capsys):
    assert call("new-backend", "my_engine") == 0
    made = folder / "rlframework-my-engine"
    assert [path.name for path in folder.iterdir()] == [made.name]
    found = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert found == set(plugin_files("my_engine"))
    assert found >= {".gitignore", ".github/workflows/ci.yml", "rlframework_my_engine/py.typed", "pyproject.toml"}
    table = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    assert table["name"] == "rlframework-my-engine"
    assert table["entry-points"] == {"rlframework": {"my_engine": "rlframework_my_engine.plugin"}}
    assert table["dependencies"] == ["rlframework-core>=0.2.0,<0.3"]
    assert "class MyEnginePolicyWorker(PolicyWorkerBase):" in (made / "rlframework_my_engine/worker.py").read_text()
    assert 'backend = "my_engine"' in (made / "tests/test_conformance.py").read_text()
    commands = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert commands == [
        "cd rlframework-my-engine",
        'pip install -e ".[dev]"',
        "rlframework plugins",
        "rlframework conformance my_engine --layout data=1",
    ]
    assert call("new-backend", "mine", "--kind", "environment") == 2
    wanted = "error: --kind environment: it must be one of policy_worker, generation_engine"
    assert capsys.readouterr().err.strip() == wanted
    assert [path.name for path in folder.iterdir()] == [made.name]


@pytest.mark.slow
def test_a_whole_distribution_of_a_generation_engine_is_written(folder, capsys):
    assert call("new-backend", "my_engine", "--kind", "generation_engine") == 0
    made = folder / "rlframework-my-engine"
    found = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert found == set(plugin_files("my_engine", ENGINE))
    assert found == set(plugin_files("my_engine")) - {"rlframework_my_engine/worker.py"}  # the others of a backend
    project = (made / "pyproject.toml").read_text()
    assert tomllib.loads(project)["project"]["description"] == "The generation engine `my_engine` for rlframework"
    assert "# Registers `generation.name: my_engine` wherever" in project
    printed = capsys.readouterr().out
    assert "\n  rlframework conformance my_engine\n" in printed
    assert "following docs/write_an_engine.md" in printed


@pytest.mark.parametrize("kind", [BACKEND, ENGINE])
def test_nothing_of_the_template_is_left_to_fill_in(kind):
    for path, text in plugin_files("mine", kind).items():
        left = re.findall(r"\$\{?\w+", text.replace("${{ matrix.python }}", ""))
        assert not left, (path, left)


def test_every_primitive_is_there_and_says_what_to_write_and_where_the_page_tells_it():
    written = methods(plugin_files("mine")["rlframework_mine/engine.py"])
    assert set(Engine.__abstractmethods__) | PORTABLE <= set(written)
    assert all(hasattr(Engine, name) for name in written)
    chapters = re.findall(r"^#+ (.*)$", (ROOT / "docs/write_a_backend.md").read_text(), re.MULTILINE)
    told = {}
    for name, body in written.items():
        if "NotImplementedError" in body:
            assert f'f"{name}: ' in body
            told[name] = re.search(r"\{PAGE\} '([^']+)'", body)[1]
    assert set(Engine.__abstractmethods__) | PORTABLE <= set(told)
    for name, chapter in told.items():
        assert any(chapter in heading for heading in chapters), (name, chapter)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BACKEND, ENGINE])
@pytest.mark.parametrize("name", ["x", LONG])
def test_linter_and_formatter_of_the_project_are_content_with_it(name, kind, folder):
    assert len(LONG) == LONGEST
    write_plugin(name, folder / "made", kind)
    for words in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", "."]
        done = subprocess.run(command, cwd=folder / "made", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "lowercase letters"),
        ("my-engine", "lowercase letters"),
        ("a" * 25, "it has 25 characters, but at most 24"),
        ("class", "Python keyword or standard module"),
        ("optimizer", "`policy.optimizer` is already a configuration key"),
        ("dtensor", "used by rlframework-dtensor 0.2.0"),
        ("vllm", "the name of one of rlframework's own distributions"),
    ],
)
def test_a_name_that_cannot_be_is_one_error_and_nothing_is_written(folder, capsys, name, told):
    assert call("new-backend", name) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {name!r} cannot be the name of a training backend: ")
    assert told in error
    assert not list(folder.iterdir())


def test_the_name_of_a_python_package_that_is_there_is_taken(folder, monkeypatch):
    (folder / "rlframework_taken").mkdir()
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError, match="the Python module rlframework_taken already exists"):
        write_plugin("taken", folder / "new")
    assert not (folder / "new").exists()


def test_a_folder_that_is_not_empty_is_left_as_it_is(folder):
    with pytest.raises(ConfigError, match="it is the current directory"):
        write_plugin("mine", ".")
    (folder / "full").mkdir()
    (folder / "full" / "note").write_text("mine")
    (folder / "file").write_text("mine")
    (folder / "link").symlink_to(folder / "nowhere")
    for place, told in (("full", "it is not empty"), ("file", "is not a folder"), ("link", "is not a folder")):
        with pytest.raises(ConfigError, match=told):
            write_plugin("mine", place)
    assert sorted(path.name for path in folder.iterdir()) == ["file", "full", "link"]
    assert [path.name for path in (folder / "full").iterdir()] == ["note"]


def test_a_disk_that_fills_up_leaves_nothing(folder, monkeypatch):
    ordinary, written = Path.write_text, []

    def write_text(path, *args, **kwargs):
        if len(written) == 4:
            raise OSError(errno.ENOSPC, "full")
        written.append(path)
        return ordinary(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(WriteError, match="no space left"):
        write_plugin("mine")
    assert len(written) == 4
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.1.0", ">=0.1.0,<0.2"), ("0.9.3", ">=0.9.3,<0.10"), ("1.0.0", ">=1.0.0,<2"), ("2.5.1", ">=2.5.1,<3")],
)
def test_the_core_that_it_asks_for_ends_before_what_may_break_it(version, expected):
    assert core_range(version) == expected


def test_the_example_was_made_with_it():
    """The parts that the example did not fill in equal the current template, and its methods are in the same order."""
    template = plugin_files("ddp")
    filled = {"README.md", "pyproject.toml", *(f"rlframework_ddp/{name}.py" for name in ("plugin", "config", "engine"))}
    for path, text in template.items():
        if path not in filled:
            assert (EXAMPLE / path).read_text() == text, path
    ours = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    blank = tomllib.loads(template["pyproject.toml"])
    assert ours["project"].pop("description") != blank["project"].pop("description")
    assert ours == blank
    names = list(methods((EXAMPLE / "rlframework_ddp/engine.py").read_text()))
    shown = [name for name in methods(template["rlframework_ddp/engine.py"]) if name in names]
    assert [name for name in names if name in shown] == shown
