"""`.ci/run` records the tree that has passed, and only if all steps passed on exactly the files of a commit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """\
#!/bin/sh
echo "$2" >>"$STEPS"
[ "$2" != "$FAILING" ] || exit 1
[ "$2" != test ] || eval "$DURING"
"""


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the script and one other file, beside a folder with a `make` that does nothing."""
    root = tmp_path / "tree"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(SCRIPT, root / ".ci" / "run")
    (root / "code.py").write_text("x = 1\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "make").write_text(MAKE)
    (tmp_path / "bin" / "make").chmod(0o755)
    return root


def run(root: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the `make` and the home of the test."""
    home = root.parent
    environment = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "STEPS": str(home / "steps")}
    command = ["bash", str(root / ".ci" / "run")]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True)


def test_what_has_passed_is_recorded(tree: Path, tmp_path: Path) -> None:
    assert run(tree).returncode == 0
    assert (tmp_path / "steps").read_text().split() == ["lint", "types", "imports", "docs", "test"]
    first = git(tree, "rev-parse", "HEAD^{tree}")
    record = tmp_path / ".cache" / "rlframework" / "ci-passed"
    assert record.read_text() == first
    (tree / "code.py").write_text("x = 2\n")
    git(tree, "commit", "-qam", "second")
    assert run(tree).returncode == 0
    assert record.read_text() == first + git(tree, "rev-parse", "HEAD^{tree}")  # appended


def test_the_cache_may_be_elsewhere(tree: Path, tmp_path: Path) -> None:
    run(tree, XDG_CACHE_HOME=str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "rlframework" / "ci-passed").is_file()
    assert not (tmp_path / ".cache").exists()


COMMIT = "git -c user.name=t -c user.email=t@e commit -q --allow-empty -am n"


@pytest.mark.parametrize(
    ("during", "recorded"),
    [("echo x >code.py", False), ("echo x >new.py", False), (f"echo x >code.py && {COMMIT}", False), (COMMIT, True)],
    ids=["changed", "new", "another tree", "same tree"],
)
def test_only_the_files_of_a_commit_are_recorded(tree: Path, tmp_path: Path, during: str, recorded: bool) -> None:
    done = run(tree, DURING=f"cd {tree} && {during}")
    assert done.returncode == 0
    assert (tmp_path / ".cache" / "rlframework" / "ci-passed").exists() == recorded
    assert ("not recorded" in done.stdout) != recorded


@pytest.mark.parametrize("step", ["lint", "test"])
def test_nothing_is_recorded_where_a_step_fails(tree: Path, tmp_path: Path, step: str) -> None:
    assert run(tree, FAILING=step).returncode != 0
    assert (tmp_path / "steps").read_text().split()[-1] == step
    assert not (tmp_path / ".cache").exists()
