"""docs/write_a_backend.md and write_an_engine.md: their code is that of the example and of the template, and works.

The first is done as its reader would: in an empty folder, with the template, up to the last method. Its code is that of
`examples/ddp_backend`, which conforms (`tests/examples/test_ddp_backend.py`). Here it has another name, because the
example is installed in this environment under its own.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from probe_shell import run_shell
from ruff import find_ruff_bin

from rlframework.interfaces.generation import GenerationEngine
from rlframework.plugins.types import Capability
from rlframework.policy.engine import Engine
from rlframework_conformance import PolicyWorkerSuite
from rlframework_tools.new_backend import ENGINE as KIND
from rlframework_tools.new_backend import plugin_files

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ddp_backend"
PAGE = (ROOT / "docs" / "write_a_backend.md").read_text(encoding="utf-8")
ENGINE_PAGE = (ROOT / "docs" / "write_an_engine.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
BLOCKS, OF_ENGINE = BLOCK.findall(PAGE), BLOCK.findall(ENGINE_PAGE)
ENGINE = "rlframework_ddp/engine.py"


def renamed(text: str) -> str:
    """`text` under a name that is free here."""
    return text.replace("ddp", "zzp").replace("Ddp", "Zzp")


def methods(text: str) -> dict[str, str]:
    """The methods of the last class in `text`, with their decorators, by name."""
    lines = text.splitlines()
    of = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)][-1]
    found = {}
    for node in of.body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def engine_so_far(shown: str, template: str) -> str:
    """The reader's file: the methods that the page has `shown` so far, and the template's for the rest."""
    left = [text for name, text in methods(template).items() if name not in methods(shown)]
    page = next(line for line in template.splitlines() if line.startswith("PAGE = "))
    return "\n\n".join([shown.rstrip("\n"), *left]) + f"\n\n\n{page}\n"


class Reader:
    """Somebody with the page, an empty folder, and an environment in which core is installed, but not the example."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.project = folder, folder / "rlframework-zzp"
        self.bin = make_environment(folder / "env")
        self.template = self.shown = self.printed = ""

    def take(self, language: str, title: str, text: str) -> None:
        if title == ENGINE:
            path = self.project / renamed(title)
            self.template = self.template or path.read_text()
            self.shown = f"{self.shown}\n{text}" if self.shown else text
            path.write_text(engine_so_far(renamed(self.shown), self.template))
        elif title:
            (self.project / renamed(title)).write_text(renamed(text))
        elif language == "shell":
            self.printed = self.run(renamed(text))
        elif language == "text":
            for line in renamed(text).splitlines():
                assert line in self.printed, f"{line!r} is not in what was printed:\n{self.printed}"

    def run(self, commands: str) -> str:
        # nothing is fetched: what pip needs is there
        own = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        own |= {"PATH": os.pathsep.join([str(self.bin), os.environ["PATH"]]), "COLUMNS": "200"}
        folder = self.project if self.project.exists() else self.folder
        return run_shell(commands, folder, "docs/write_a_backend.md", own, packages_of(self.bin.parent))


def packages_of(home: Path) -> str:
    """Where the environment at `home` has its packages."""
    return sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})["purelib"]


def make_environment(home: Path) -> Path:
    """The `bin` of a new environment that finds this one's packages below its own, and installs into itself."""
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    below = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    (Path(packages_of(home)) / "below.pth").write_text(below)
    for command, module in (("rlframework", "rlframework.cli"), ("pip", "pip"), ("pytest", "pytest")):
        script = home / "bin" / command
        script.write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n')
        script.chmod(0o755)
    (home / "bin" / "ruff").symlink_to(find_ruff_bin())
    return home / "bin"


@pytest.mark.thorough
def test_the_page_leads_from_nothing_to_a_backend(tmp_path):
    reader = Reader(tmp_path)
    for language, title, text in BLOCKS:
        reader.take(language, title, text)
    assert not [name for name, body in methods(reader.shown).items() if "NotImplementedError" in body]
    reader.run("pytest -q tests/test_plugin.py && ruff check . && ruff format --check rlframework_zzp/[cp]*.py")


@pytest.mark.parametrize("path", ["plugin.py", "config.py", "engine.py"])
def test_the_code_of_a_page_is_that_of_the_example_and_of_the_template(path):
    name = f"rlframework_ddp/{path}"
    assert "\n".join(text for _, title, text in BLOCKS if title == name) == (EXAMPLE / name).read_text()
    name = f"rlframework_plain/{path}"
    assert "\n".join(text for _, title, text in OF_ENGINE if title == name) == plugin_files("plain", KIND)[name]


def test_every_primitive_capability_and_test_that_is_named_is_there():
    words, named = names_of(PAGE)
    assert set(Engine.__abstractmethods__) <= words
    assert named == set(Capability.__members__) - {"IN_FLIGHT_UPDATE", "LORA_REFIT", "EPISODES"}  # of other parts
    tests = set(re.findall(r"\btest_[a-z_]+\b", PAGE)) - {"test_conformance"}
    assert tests <= set(PolicyWorkerSuite.tests())
    words, named = names_of(ENGINE_PAGE)
    optional = {"pause", "resume", "attach", "release", "restore", "close"}
    assert set(GenerationEngine.__abstractmethods__) - {"__init__"} | optional <= words
    assert named == {"IPC_REFIT", "COLLECTIVE_REFIT", "LORA_REFIT", "IN_FLIGHT_UPDATE", "EMBEDDED_GENERATION"}


def names_of(page):
    """The words of a page, and the capabilities in the rows of its tables."""
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {word for line in rows for word in re.findall(r"`([A-Z_0-9]{4,})`", line)}
    return set(re.findall(r"\b[a-z_]+\b", page)), named


@pytest.mark.thorough
def test_the_engine_conforms(tmp_path):
    """As an installed distribution: its metadata are on the path of a process of its own."""
    for path, text in plugin_files("plain", KIND).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    metadata = tmp_path / "rlframework_plain-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rlframework-plain\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[rlframework]\nplain = rlframework_plain.plugin\n")
    found = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "rlframework.cli", "conformance", "plain"]
    own = os.environ | {"PYTHONPATH": found, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "CONFORMANT" in done.stdout.replace("NOT CONFORMANT", "")
    assert "NOT CONFORMANT" not in done.stdout


def test_the_runner_of_the_page_can_fail(tmp_path):
    reader = Reader.__new__(Reader)
    reader.folder, reader.project, reader.bin, reader.printed = tmp_path, tmp_path / "none", tmp_path, ""
    reader.take("shell", "", "echo one\n")
    reader.take("text", "", "one\n")
    for language, text in (("shell", "false\n"), ("shell", "! true\n"), ("text", "two\n")):
        with pytest.raises(AssertionError):
            reader.take(language, "", text)
