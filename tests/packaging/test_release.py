"""`make release`: wheels of what was committed, which others can check; refused where parts disagree."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(ROOT / "tools" / "release.py"))
release, notes, checksums, sign = (RELEASE[name] for name in ("release", "notes", "checksums", "sign"))
ReleaseError: type[Exception] = RELEASE["ReleaseError"]
PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
dynamic = ["version"]
[tool.hatch.version]
path = "{package}/__init__.py"
[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""


def shell(folder: Path, *command: str, **options: Any) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, **options).stdout


def project(folder: Path, name: str, package: str, version: str) -> None:
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, package=package))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with our layout and empty packages of version 1.2.0."""
    root = tmp_path / "tree"
    project(root, "rlframework-core", "rlframework", "1.2.0")
    for name in ("dtensor", "deepspeed", "megatron", "vllm"):
        project(root / "plugins" / name, f"rlframework-{name}", f"rlframework_{name}", "1.2.0")
    (root / "CHANGELOG.md").write_text("# Changes\n\n## 1.2.0\n\n- New.\n\n## 1.1.0\n\n- Old.\n")
    (root / "mkdocs.yml").write_text("site_name: tree\n")
    (root / "docs").mkdir()
    (root / "docs" / "index.md").write_text("# The first page\n")
    (root / "examples").mkdir()
    (root / "examples" / "run.yaml").write_text("seed: 1\n")
    shell(root, "git", "init", "-q")
    commit(root)
    return root


def commit(root: Path) -> None:
    shell(root, "git", "add", "-A")
    shell(root, "git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "change")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen, which signs, is not installed")
def test_a_release_is_what_was_committed_and_others_can_check_it(tree: Path, tmp_path: Path) -> None:
    shell(tmp_path, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "us@example.org", "-f", "key")
    folder = release(tree, tmp_path / "out", tmp_path / "key")
    wheels = {path.name.split("-")[0] for path in folder.glob("*-1.2.0-*.whl")}
    assert wheels == {"rlframework_core", *(f"rlframework_{n}" for n in ("dtensor", "deepspeed", "megatron", "vllm"))}
    assert (folder / "NOTES.md").read_text() == "- New.\n"
    assert shell(folder, "sha256sum", "--check", "SHA256SUMS").count(": OK") == 6
    with zipfile.ZipFile(folder / "rlframework-docs-1.2.0.zip") as archive:
        assert "The first page" in archive.read("rlframework-docs-1.2.0/index.html").decode()
        assert archive.read("rlframework-docs-1.2.0/examples/run.yaml") == b"seed: 1\n"
    (folder / "allowed_signers").write_text("us@example.org " + (tmp_path / "key.pub").read_text())
    verify, _ = RELEASE["VERIFY"].splitlines()[1].split(" < ")
    command = verify.format(namespace=RELEASE["NAMESPACE"]).replace("SIGNER", "us@example.org").split()
    sums = (folder / "SHA256SUMS").read_text()
    assert "Good" in shell(folder, *command, input=sums)
    with pytest.raises(subprocess.CalledProcessError):
        shell(folder, *command, input=sums.replace("core", "cure"))
    with pytest.raises(ReleaseError, match="exists: remove it"):
        release(tree, folder)


@pytest.mark.parametrize(
    ("path", "text", "committed", "problem"),
    [
        pytest.param(
            *("plugins/vllm/rlframework_vllm/__init__.py", '__version__ = "1.1.0"\n', True),
            r"core's is 1\.2\.0: rlframework_vllm-1\.1\.0",
            marks=pytest.mark.slow,
        ),
        ("CHANGELOG.md", "more", False, r"CHANGELOG\.md"),
        ("changes/speed.added.md", "Faster.\n", True, r"not in CHANGELOG\.md: speed\.added\.md; run `make changelog`"),
    ],
    ids=["another version", "not committed", "not in the changelog"],
)
def test_a_tree_whose_parts_disagree_is_refused(tree: Path, tmp_path: Path, path, text, committed, problem) -> None:
    (tree / "changes").mkdir()
    (tree / "changes" / "README.md").write_text("How to write them\n")
    commit(tree)
    (tree / path).write_text(text)
    if committed:
        commit(tree)
    with pytest.raises(ReleaseError, match=problem):
        release(tree, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_notes_are_the_newest_section_of_the_changelog() -> None:
    text = "# Changes\n\nAll.\n\n## 0.2.0 (soon)\n\n### A\n\n- b\n\n## 0.1.0\n\nc\n"
    assert notes(text, "0.2.0") == "### A\n\n- b\n"
    with pytest.raises(ReleaseError, match=r"`## 0\.3\.0`"):
        notes(text, "0.3.0")
    with pytest.raises(ReleaseError, match="'Unreleased'"):
        notes("## Unreleased\n\n- a\n\n## 0.2.0\n", "0.2.0")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen, which signs, is not installed")
def test_a_key_that_cannot_sign_is_named(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text("")
    with pytest.raises(ReleaseError, match="nothing_here cannot sign"):
        sign(tmp_path / "SHA256SUMS", tmp_path / "nothing_here")
